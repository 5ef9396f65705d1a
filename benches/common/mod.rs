//! What the benches share: memory that starts on cache lines, numbers, and the comparison with a limit.

#![allow(dead_code, unreachable_pub, reason = "each bench is a program of its own and uses a part")]

use std::cell::Cell;
use std::time::Instant;

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion, Throughput};

/// A cache line, for its alignment.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// Touched memory that starts at a multiple of 64.
pub struct Buffer {
    lines: Vec<Line>,
}

impl Buffer {
    /// Room for `bytes`.
    pub fn new(bytes: usize) -> Buffer {
        Buffer { lines: vec![Line([1; 64]); bytes.div_ceil(64)] }
    }

    /// The first byte.
    pub fn address(&self) -> *mut u8 {
        self.lines.as_ptr().cast::<u8>().cast_mut()
    }
}

/// Numbers without a pattern that a processor would learn.
pub struct Rng(pub u64);

impl Rng {
    /// A number in `0..bound`.
    pub fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % bound
    }
}

/// `tokens * topk` ids, distinct within a token.
pub fn random_ids(rng: &mut Rng, tokens: usize, topk: usize, experts: usize) -> Vec<i32> {
    let mut ids = Vec::with_capacity(tokens * topk);
    for _ in 0..tokens {
        let start = ids.len();
        while ids.len() < start + topk {
            let id = rng.below(experts) as i32;
            if !ids[start..].contains(&id) {
                ids.push(id);
            }
        }
    }
    ids
}

/// Benches of the same bytes, the first of which is the limit that the others are compared with.
pub struct Compared<'a> {
    group: BenchmarkGroup<'a, WallTime>,
    name: String,
    limit_ns: Option<f64>,
}

impl<'a> Compared<'a> {
    /// A group of benches that move `bytes` bytes each.
    pub fn new(criterion: &'a mut Criterion, name: &str, bytes: usize) -> Compared<'a> {
        let mut group = criterion.benchmark_group(name);
        group.throughput(Throughput::Bytes(bytes as u64)).sample_size(30);
        group.warm_up_time(std::time::Duration::from_millis(500));
        group.measurement_time(std::time::Duration::from_secs(2));
        Compared { group, name: name.to_string(), limit_ns: None }
    }

    /// Benches one call of `run`.
    pub fn bench(&mut self, what: &str, mut run: impl FnMut()) {
        self.bench_many(what, |calls| (0..calls).for_each(|_| run()));
    }

    /// Benches `run`, which makes as many calls as it is told.
    pub fn bench_many(&mut self, what: &str, mut run: impl FnMut(u64)) {
        let best = Cell::new(f64::INFINITY);
        self.group.bench_function(what, |bencher| {
            bencher.iter_custom(|calls| {
                let start = Instant::now();
                run(calls);
                let time = start.elapsed();
                best.set(best.get().min(time.as_nanos() as f64 / calls as f64));
                time
            });
        });
        match self.limit_ns {
            // Nothing ran: cargo asked for a list, or for other benches.
            _ if best.get().is_infinite() => {}
            None => self.limit_ns = Some(best.get()),
            Some(limit) => {
                println!("{}/{what}: {:.0} % of the limit\n", self.name, 100.0 * limit / best.get());
            }
        }
    }
}
