//! Whole calls of the host backend, among ranks that are threads of one process.

mod common;

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use common::{Buffer, Compared, Rng, random_ids};
use criterion::{Criterion, criterion_group, criterion_main};
use ep_core::bootstrap::LocalBootstrap;
use ep_core::config::{
    CombineInputs, CombineOutputs, DispatchInputs, DispatchOutputs, GroupConfig, Options, PlanConfig,
};
use ep_core::engine::{Group, Plan, Window};
use ep_core::tensor::{Dtype, RawTensor};

const RANKS: usize = 2;
const TOKENS: usize = 256;
const HIDDEN: usize = 7168;
const TOPK: usize = 8;
const EXPERTS: usize = 64;
const ROW_BYTES: usize = 2 * HIDDEN;

/// What the threads of the ranks do, each so many times.
#[derive(Clone, Copy)]
enum Work {
    Update,
    Dispatch { window: bool },
    Combine { window: bool },
    Copy,
}

struct Rank {
    plan: Plan,
    ids: Vec<i32>,
    num_rows: usize,
    input: Buffer,
    window: Window,
    own: Buffer,
    combined: Buffer,
}

impl Rank {
    fn new(bootstrap: LocalBootstrap, rank: usize) -> Rank {
        let deadline = Instant::now() + Duration::from_secs(30);
        let group = Group::create(&GroupConfig::default(), Box::new(bootstrap), deadline).expect("a group");
        let config = PlanConfig {
            topk: TOPK as u32,
            num_experts: EXPERTS as u32,
            max_tokens: TOKENS as u64,
            ..PlanConfig::default()
        };
        // SAFETY: the plan has memory of its own.
        let plan = unsafe { Plan::create(&group, &config, None) }.expect("a plan");
        let most = RANKS * TOKENS * ROW_BYTES;
        let mut rank = Rank {
            plan,
            ids: random_ids(&mut Rng(rank as u64), TOKENS, TOPK, EXPERTS),
            num_rows: 0,
            input: Buffer::new(most),
            window: Window::allocate(&group, most).expect("a window"),
            own: Buffer::new(most),
            combined: Buffer::new(TOKENS * ROW_BYTES),
        };
        rank.update();
        rank.num_rows = rank.plan.counts(None).expect("counts").num_rows as usize;
        rank
    }

    fn update(&self) {
        let ids = self.ids.as_ptr().cast::<u8>().cast_mut();
        let idx = RawTensor::contiguous(ids, Dtype::I32, TOKENS, TOPK);
        // SAFETY: the ids outlive the call.
        unsafe { self.plan.update(&idx, &Options::default(), None) }.expect("an update");
    }

    fn rows(&self, window: bool) -> RawTensor {
        let data = if window { self.window.data() } else { self.own.address() };
        RawTensor::contiguous(data, Dtype::Bf16, self.num_rows, HIDDEN)
    }

    fn work(&self, work: Work) {
        match work {
            Work::Update => self.update(),
            Work::Dispatch { window } => {
                let mut inputs = DispatchInputs { num_payloads: 1, ..DispatchInputs::default() };
                let mut outputs = DispatchOutputs { num_payloads: 1, ..DispatchOutputs::default() };
                inputs.payloads[0] = RawTensor::contiguous(self.input.address(), Dtype::Bf16, TOKENS, HIDDEN);
                outputs.payloads[0] = self.rows(window);
                // SAFETY: all buffers have room for all rows and outlive the call.
                unsafe { self.plan.dispatch(&inputs, &outputs, &Options::default(), None) }
                    .expect("a dispatch");
            }
            Work::Combine { window } => {
                let inputs = CombineInputs { rows: self.rows(window), ..CombineInputs::default() };
                let combined = RawTensor::contiguous(self.combined.address(), Dtype::Bf16, TOKENS, HIDDEN);
                let outputs = CombineOutputs { combined, ..CombineOutputs::default() };
                // SAFETY: as above.
                unsafe { self.plan.combine(&inputs, &outputs, &Options::default(), None) }
                    .expect("a combine");
            }
            Work::Copy => {
                for row in 0..self.num_rows {
                    let at = row * ROW_BYTES;
                    // SAFETY: both buffers have room for all rows.
                    unsafe {
                        let (from, to) = (self.input.address().add(at), self.own.address().add(at));
                        std::ptr::copy_nonoverlapping(from, to, ROW_BYTES);
                    }
                }
            }
        }
    }
}

/// The threads of the ranks; they end with it.
struct Ranks {
    commands: Vec<Sender<(Work, u64)>>,
    done: Receiver<usize>,
}

impl Ranks {
    fn start() -> (Ranks, usize) {
        let (done_in, done) = channel();
        let barrier = Arc::new(Barrier::new(RANKS));
        let mut commands = Vec::new();
        for (number, bootstrap) in LocalBootstrap::group(RANKS).into_iter().enumerate() {
            let (command, next) = channel::<(Work, u64)>();
            let (done, barrier) = (done_in.clone(), barrier.clone());
            commands.push(command);
            std::thread::spawn(move || {
                let rank = Rank::new(bootstrap, number);
                done.send(rank.num_rows).expect("the bench listens");
                while let Ok((work, calls)) = next.recv() {
                    barrier.wait();
                    (0..calls).for_each(|_| rank.work(work));
                    done.send(0).expect("the bench listens");
                }
            });
        }
        let ranks = Ranks { commands, done };
        let num_rows = ranks.wait();
        (ranks, num_rows)
    }

    fn wait(&self) -> usize {
        (0..RANKS).map(|_| self.done.recv().expect("no rank has failed")).sum()
    }

    fn run(&self, work: Work, calls: u64) {
        for command in &self.commands {
            command.send((work, calls)).expect("no rank has failed");
        }
        self.wait();
    }
}

fn calls(criterion: &mut Criterion) {
    let (ranks, num_rows) = Ranks::start();
    let mut group = Compared::new(criterion, "host, 2 ranks, 256 x 7168 bf16", num_rows * ROW_BYTES);
    let cases = [
        ("limit: memcpy of the rows, a thread per rank", Work::Copy),
        ("dispatch to windows", Work::Dispatch { window: true }),
        ("dispatch through rings", Work::Dispatch { window: false }),
        ("combine from windows", Work::Combine { window: true }),
        ("combine through rings", Work::Combine { window: false }),
    ];
    for (name, work) in cases {
        group.bench_many(name, |calls| ranks.run(work, calls));
    }
    drop(group);
    criterion.bench_function("host, 2 ranks, plan update of 256 x 8 over 64 experts", |bencher| {
        bencher.iter_custom(|calls| {
            let start = Instant::now();
            ranks.run(Work::Update, calls);
            start.elapsed()
        });
    });
}

criterion_group!(benches, calls);
criterion_main!(benches);
