//! Counting a routing: what an update does before and after it has talked to the peers.

mod common;

use std::hint::black_box;
use std::time::Duration;

use common::{Buffer, Rng, random_ids};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use ep_core::config::{Layout, PlanConfig};
use ep_core::plan::{PlanLayout, PlanShape, PlanState, Routing, count};
use ep_core::tensor::{Dtype, RawTensor};

const TOKENS: usize = 4096;
const TOPK: usize = 8;
const EXPERTS: usize = 256;
/// Routings that take turns.
const ROUTINGS: usize = 16;

fn counting(criterion: &mut Criterion) {
    let mut rng = Rng(3);
    let routings: Vec<Vec<i32>> =
        (0..ROUTINGS).map(|_| random_ids(&mut rng, TOKENS, TOPK, EXPERTS)).collect();
    let mut group = criterion.benchmark_group("plan: count 4096 x 8 over 256 experts");
    group.throughput(Throughput::Elements((TOKENS * TOPK) as u64)).sample_size(30);
    group.warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(2));
    for (layout, layout_name) in [(Layout::Flat, "flat"), (Layout::ExpertMajor, "expert-major")] {
        for ranks in [4, 8, 64] {
            let config = PlanConfig {
                topk: TOPK as u32,
                num_experts: EXPERTS as u32,
                max_tokens: TOKENS as u64,
                layout,
                ..PlanConfig::default()
            };
            let shape = PlanShape::new(&config, 0, ranks, 1, 256).expect("the config is valid");
            let plan_layout = PlanLayout::new(&shape);
            let memory = Buffer::new(plan_layout.bytes());
            // SAFETY: the block is as large as the layout says, and used by this thread only.
            let mut state = unsafe { PlanState::borrow(memory.address(), &plan_layout) };
            let routing = |ids: &Vec<i32>| {
                let ids = ids.as_ptr().cast::<u8>().cast_mut();
                let tensor = RawTensor::contiguous(ids, Dtype::I32, TOKENS, TOPK).check("ids");
                Routing::new(tensor.expect("the tensor is valid"), &shape).expect("the routing fits")
            };
            let routings: Vec<Routing> = routings.iter().map(routing).collect();
            let mut next = 0;
            group.bench_function(format!("{layout_name}, {ranks} ranks"), |bencher| {
                bencher.iter(|| {
                    next = (next + 1) % ROUTINGS;
                    // SAFETY: the ids are there and in range.
                    unsafe { count(black_box(&routings[next]), &shape, &mut state) };
                });
            });
        }
    }
}

criterion_group!(benches, counting);
criterion_main!(benches);
