//! What a command costs besides the network: pushed, taken, posted, completed and, where it comes back, landed.

#[path = "common/null_nic.rs"]
mod null_nic;

use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use ep_core::net::command::{Command, OP_SEND, Ring};
use null_nic::{rank_0, round};

fn commands(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("proxy");
    group.warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(2)).sample_size(30);
    for num_links in [8, 256] {
        for (what, echo) in [("send", false), ("send and receive", true)] {
            let (mut proxy, port) = rank_0(num_links, echo);
            let mut seq = 0;
            group.throughput(Throughput::Elements(num_links as u64));
            group.bench_function(BenchmarkId::new(what, format!("{num_links} peers")), |bencher| {
                bencher.iter(|| {
                    round(&mut proxy, &port, num_links, seq);
                    seq += 1;
                });
            });
        }
    }
    let (mut proxy, _port) = rank_0(256, false);
    group.throughput(Throughput::Elements(1));
    group.bench_function("a turn without work, 256 peers", |bencher| bencher.iter(|| proxy.turn(0)));
}

fn ring(criterion: &mut Criterion) {
    let words: Vec<[AtomicU64; 2]> = (0..1024).map(|_| Default::default()).collect();
    let posted = AtomicU64::new(0);
    let ring = Ring::new(&words, &posted);
    let command = Command { op: OP_SEND, link: 1, stream: 1, seq: 0, bytes: 64, source: 0, target: 0 };
    let mut group = criterion.benchmark_group("command ring");
    group.warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(2)).sample_size(30);
    group.throughput(Throughput::Elements(1));
    let mut position = 0;
    group.bench_function("push and take, one thread", |bencher| {
        bencher.iter(|| {
            assert!(ring.push(position, &command));
            assert!(ring.peek(position).is_some());
            position += 1;
            ring.retire(position);
        });
    });
    group.bench_function("push and take, two threads", |bencher| {
        bencher.iter_custom(|count| {
            let (first, last) = (position, position + count);
            position = last;
            let start = Instant::now();
            std::thread::scope(|scope| {
                scope.spawn(|| (first..last).for_each(|at| while !ring.push(at, &command) {}));
                for at in first..last {
                    while ring.peek(at).is_none() {}
                    if at % 16 == 15 || at + 1 == last {
                        ring.retire(at + 1);
                    }
                }
            });
            start.elapsed()
        });
    });
}

criterion_group!(benches, commands, ring);
criterion_main!(benches);
