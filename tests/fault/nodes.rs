//! Ranks of several nodes: what `mismatch`, `steps`, `abort` and `quiet` show inside a node holds between nodes too.

use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use ep_core::Status;
use ep_core::config::{GroupConfig, Layout};
use ep_core::engine::Group;
use ep_core::net::LinkStats;
use ep_core::perturb::{Disturbance, Perturb};

use crate::alloc;
use crate::mismatch::play_random;
use crate::rng::{Rng, hash};
use crate::steps::{Outcome, Then, play_rank};
use crate::threads::{LONG, Nodes, Watchdog};
use crate::work::{Member, Place, Shape};

const TIMEOUT: Duration = Duration::from_millis(400);

fn layouts_and_places() -> impl Iterator<Item = (Layout, Place)> {
    let layouts = [Layout::Flat, Layout::ExpertMajor];
    layouts.into_iter().flat_map(|layout| [Place::Window, Place::Ring].map(|place| (layout, place)))
}

fn delays(seed: u64) -> impl Fn(usize) -> Perturb + Sync {
    move |rank| {
        let (delay_one_in, delay_max) = (30, Duration::from_micros(300));
        let seed = hash(&[seed, 7, rank as u64]);
        Perturb::new(Disturbance { seed, delay_one_in, delay_max, stop_at_step: 0 })
    }
}

#[test]
fn rounds_between_nodes_are_right_in_every_layout_place_and_route() {
    let _watchdog = Watchdog::new("rounds between nodes", LONG);
    for (index, node_ids) in [&[1, 1, 2, 2][..], &[1, 2, 2, 2], &[1, 2, 1, 3, 2]].into_iter().enumerate() {
        let mut nodes = Nodes::new(node_ids, index as u64, LONG);
        for route in [1, 2] {
            nodes.config.route = route;
            nodes.run(delays(5), |group| {
                for (layout, place) in layouts_and_places() {
                    for shape in [Shape::small, Shape::large] {
                        let shape = shape(node_ids.len(), layout, place);
                        let mut member = Member::new(group, shape).expect("windows are made");
                        for order in [0, 2, 3] {
                            member.options.reduce_order = order;
                            member.round(order as u64).expect("the round works");
                        }
                    }
                }
            });
        }
    }
}

#[test]
fn calls_between_nodes_do_not_allocate() {
    let _watchdog = Watchdog::new("calls between nodes that do not allocate", LONG);
    let nodes = Nodes::new(&[1, 1, 2, 2], 1, LONG);
    for (layout, place) in layouts_and_places() {
        let counts = nodes.run(
            |_| Perturb::none(),
            |group| {
                let shape = Shape { cols: 600, ..Shape::large(4, layout, place) };
                let mut member = Member::new(group, shape).expect("windows are made");
                let mut sum = 0;
                for round in 0..30 {
                    member.prepare(round % 7);
                    member.origins = round % 2 == 0;
                    member.options.reduce_order = if round % 3 == 0 { 3 } else { 0 };
                    let calls = || {
                        member.update(None).expect("the update works");
                        member.dispatch(None).expect("the dispatch works");
                        member.combine(None).expect("the combine works");
                    };
                    let count = alloc::count(calls).1;
                    sum += if round < 2 { 0 } else { count };
                }
                sum
            },
        );
        assert_eq!(counts, [0; 4], "{layout:?} {place:?}");
    }
}

/// Calls of ranks of different nodes that do not match: rows, questions and answers that were on their way are void,
/// and none of them is taken for one of a later call.
#[test]
fn lane_between_nodes_works_after_any_mismatch() {
    for (seed, node_ids) in [&[1, 1, 2][..], &[1, 2, 3, 3], &[1, 2, 1, 2]].into_iter().enumerate() {
        let what = format!("mismatches between nodes {node_ids:?}");
        let _watchdog = Watchdog::new(&*what, 3 * LONG);
        let mut nodes = Nodes::new(node_ids, seed as u64, LONG);
        nodes.config.route = 1 + seed as i32 % 2;
        nodes.run(delays(seed as u64), |group| play_random(group, seed as u64, 40, &what));
    }
}

#[test]
fn abort_is_heard_on_other_nodes() {
    let _watchdog = Watchdog::new("abort between nodes", LONG);
    let nodes = Nodes::new(&[1, 1, 2, 2], 1, LONG);
    let results = nodes.run(
        |_| Perturb::none(),
        |group| {
            let mut member =
                Member::new(group, Shape::small(4, Layout::Flat, Place::Ring)).expect("windows are made");
            member.round(1).expect("the round works");
            if group.rank() == 1 {
                thread::sleep(Duration::from_millis(100));
                group.abort();
                return (Instant::now(), None, group.clone());
            }
            member.prepare(2);
            let error = member.update(None).expect_err("rank 1 aborts");
            (Instant::now(), Some(error), group.clone())
        },
    );
    let aborted = results[1].0;
    for (when, error, _) in &results {
        let Some(error) = error else { continue };
        assert_eq!(error.status, Status::Aborted, "{error}");
        assert!(error.message.contains("ep_group_abort was called on rank 1"), "{error}");
        assert!(when.saturating_duration_since(aborted) < Duration::from_secs(1), "{error}");
    }
}

/// A rank of another node that does not begin a call is named by everybody.
#[test]
fn a_late_rank_of_another_node_is_named() {
    let _watchdog = Watchdog::new("a late rank of another node", LONG);
    let nodes = Nodes::new(&[1, 1, 2, 2], 1, TIMEOUT);
    for op in 0..3 {
        let barrier = Barrier::new(4);
        let results = nodes.run(
            |_| Perturb::none(),
            |group| {
                let shape = Shape::small(4, Layout::ExpertMajor, Place::Ring);
                let mut member = Member::new(group, shape).expect("windows are made");
                member.round(1).expect("the round works");
                member.prepare(2);
                if group.rank() != 3 {
                    member.update(None).expect_err("rank 3 does not come");
                }
                let info = group.health(&mut []);
                barrier.wait();
                info
            },
        );
        for info in results[..3].iter().flatten() {
            assert_eq!((info.status, info.peer), (Status::Timeout, Some(3)), "{op}: {}", info.text);
        }
    }
}

fn play_nodes(nodes: &Nodes, shape: Shape, victim: usize, step: u64, then: Then) -> Vec<Outcome> {
    let perturb = |rank| {
        let stop_at_step = if rank == victim { step } else { 0 };
        Perturb::new(Disturbance { seed: 0, delay_one_in: 0, delay_max: Duration::ZERO, stop_at_step })
    };
    nodes.run(perturb, |group| play_rank(group, shape, victim, then))
}

/// A rank vanishes at some step: the others end in time and name it. It may be a source, a relay, or a rank behind one.
fn check_step(shape: Shape, node_ids: &[u32], victim: usize, step: u64, then: Then) -> bool {
    let what = format!("rank {victim} of {node_ids:?} {then:?} at step {step} of {shape:?}");
    let _watchdog = Watchdog::new(&*what, LONG);
    let nodes = Nodes::new(node_ids, step, TIMEOUT);
    let outcomes = play_nodes(&nodes, shape, victim, step, then);
    let stopped =
        outcomes[victim].result.as_ref().is_err_and(|error| error.message.contains("stopped by its test"));
    for (rank, outcome) in outcomes.iter().enumerate().filter(|(rank, _)| *rank != victim) {
        assert!(
            outcome.waited < TIMEOUT + Duration::from_secs(1),
            "rank {rank}: {:?}: {what}",
            outcome.waited
        );
        let Err(error) = &outcome.result else { continue };
        assert!(stopped, "rank {rank}: {error}: {what}");
        let info = outcome.info.as_ref().unwrap_or_else(|| panic!("rank {rank}: {error}: {what}"));
        assert!(
            matches!(info.status, Status::Timeout | Status::PeerLost),
            "rank {rank}: {}: {what}",
            info.text
        );
        assert_eq!(info.peer, Some(victim), "rank {rank}: {}: {what}", info.text);
    }
    stopped
}

#[test]
fn a_rank_that_vanishes_is_named_on_all_nodes() {
    let mut rng = Rng::new(11);
    let mut scenes = Vec::new();
    for (layout, place) in layouts_and_places() {
        for then in [Then::Hangs, Then::Leaves] {
            for _ in 0..6 {
                scenes.push((layout, place, then, rng.below(4), 1 + rng.below(60) as u64));
            }
        }
    }
    for some in scenes.chunks(12) {
        thread::scope(|scope| {
            for &(layout, place, then, victim, step) in some {
                let shape = Shape::small(4, layout, place);
                scope.spawn(move || check_step(shape, &[1, 1, 2, 2], victim, step, then));
            }
        });
    }
}

/// A link is cut in the middle of rounds: somebody at one of its ends is named, with the NIC's words, or a deadline
/// passes.
#[test]
fn a_cut_link_ends_the_calls_of_all_nodes() {
    let _watchdog = Watchdog::new("a cut link", LONG);
    let nodes = Nodes::new(&[1, 1, 2, 2], 9, Duration::from_secs(3));
    let results = nodes.run(
        |_| Perturb::none(),
        |group| {
            let shape = Shape::large(4, Layout::Flat, Place::Ring);
            let mut member = Member::new(group, shape).expect("windows are made");
            let mut round = 0;
            let error = loop {
                if group.rank() == 0 && round == 3 {
                    // Each rank has two NICs.
                    for (one, other) in [(0, 4), (0, 5), (1, 4), (1, 5)] {
                        nodes.network.net().cut(one, other);
                    }
                }
                match member.round(round) {
                    Ok(()) => round += 1,
                    Err(error) => break error,
                }
            };
            (error, group.clone())
        },
    );
    for (error, group) in &results {
        assert!(matches!(error.status, Status::Timeout | Status::PeerLost), "{error}");
        let info = group.health(&mut []).expect("the group is broken");
        assert!(matches!(info.peer, Some(0 | 2)), "{}", info.text);
    }
}

/// Messages and bytes that a dispatch and a combine of one round send, as docs/FABRIC.md says they do.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Traffic {
    messages: u64,
    bytes: u64,
}

fn sent(group: &Group) -> Traffic {
    let add = |sum: Traffic, (_, stats): (usize, LinkStats)| Traffic {
        messages: sum.messages + stats.messages,
        bytes: sum.bytes + stats.bytes,
    };
    group.link_stats().into_iter().fold(Traffic::default(), add)
}

/// What `call` sends; the proxies count when they take a message, which may be a moment later.
fn traffic_of(group: &Group, barrier: &Barrier, expected: Traffic, call: impl FnOnce()) -> Traffic {
    // What was sent before is counted before.
    thread::sleep(Duration::from_millis(200));
    let before = sent(group);
    // Nobody goes on before all have looked.
    barrier.wait();
    call();
    let deadline = Instant::now() + Duration::from_secs(2);
    loop {
        let now = sent(group);
        let found = Traffic { messages: now.messages - before.messages, bytes: now.bytes - before.bytes };
        if found == expected || Instant::now() > deadline {
            return found;
        }
        thread::sleep(Duration::from_millis(1));
    }
}

/// Tokens of `rank` that go to each node: to each of them once.
fn tokens_to_nodes(shape: &Shape, seed: u64, rank: usize, node_ids: &[u32]) -> Vec<u64> {
    let mut nodes: Vec<u32> = node_ids.to_vec();
    nodes.dedup();
    let ids = shape.ids(seed, rank);
    let goes = |slots: &[i32], node: u32| {
        slots.iter().any(|&id| id >= 0 && node_ids[shape.owner(id as usize)] == node)
    };
    let count = |&node: &u32| ids.chunks(shape.topk).filter(|slots| goes(slots, node)).count() as u64;
    nodes.iter().filter(|&&node| node != node_ids[rank]).map(count).collect()
}

/// Rows cross once per node: the bytes of a dispatch are within 3 % of the rows that must cross, and the messages are
/// as many as the formula says. So are those of a combine in `node_rank` order: a partial sum for each row.
#[test]
fn bytes_and_messages_between_nodes_are_those_of_the_formula() {
    let _watchdog = Watchdog::new("bytes between nodes", LONG);
    const DESC: u64 = 288;
    const HEAD: u64 = 64;
    let node_ids = [1, 1, 2, 2, 3, 3];
    let mut nodes = Nodes::new(&node_ids, 3, LONG);
    nodes.config.chunk_bytes = 128 << 10;
    nodes.config.chunk_window = 4;
    for layout in [Layout::Flat, Layout::ExpertMajor] {
        let barrier = Barrier::new(6);
        nodes.run(
            |_| Perturb::none(),
            |group| {
                let base = Shape { cols: 1792, max_tokens: 200, ..Shape::large(6, layout, Place::Ring) };
                let shape = Shape { min_tokens: 150, ..base };
                let mut member = Member::new(group, shape).expect("windows are made");
                member.round(6).expect("the round works");
                member.prepare(7);
                member.update(None).expect("the update works");
                let to_nodes = tokens_to_nodes(&shape, 7, group.rank(), &node_ids);
                let (row, cells) = (4 * shape.cols as u64, to_nodes.len() as u64);
                let ids = (4 * (1 + 2 * shape.topk as u64)).next_multiple_of(16);
                let room = (128 << 10) - HEAD;

                let per_message = room / (ids + row);
                let chunks: u64 = to_nodes.iter().map(|tokens| tokens.div_ceil(per_message)).sum();
                let tokens: u64 = to_nodes.iter().sum();
                // A descriptor names the words of two ranks' tails.
                let desc = (DESC + 8).next_multiple_of(16);
                let expected = Traffic {
                    messages: cells + chunks,
                    bytes: cells * desc + chunks * HEAD + tokens * (ids + row),
                };
                let found = traffic_of(group, &barrier, expected, || {
                    member.dispatch(None).expect("the dispatch works")
                });
                assert_eq!(found, expected, "dispatch of rank {}", group.rank());
                let least = tokens * row;
                assert!(found.bytes * 100 <= least * 103, "{found:?} for {least} bytes of rows");

                // The ranks of other nodes with this rank's place ask as often as this rank does them.
                member.options.reduce_order = 3;
                let mut asked = Traffic { messages: cells, bytes: cells * desc };
                let weights = if layout == Layout::Flat { 0 } else { 4 * shape.topk as u64 };
                let record = (4 * (1 + 2 * shape.topk as u64) + weights).next_multiple_of(16);
                for tokens in &to_nodes {
                    let questions = tokens.div_ceil(room / (16 + row));
                    asked.messages += questions;
                    asked.bytes += questions * HEAD + tokens * record;
                }
                for other in (0..6).filter(|other| node_ids[*other] != node_ids[group.rank()]) {
                    if other % 2 == group.rank() % 2 {
                        let mine: Vec<u32> = node_ids.to_vec();
                        let to = tokens_to_nodes(&shape, 7, other, &mine);
                        let own =
                            node_ids[group.rank()] - 1 - u32::from(node_ids[group.rank()] > node_ids[other]);
                        let tokens = to[own as usize];
                        let answers = tokens.div_ceil(room / (16 + row));
                        asked.messages += answers;
                        asked.bytes += answers * HEAD + tokens * (16 + row);
                    }
                }
                let found =
                    traffic_of(group, &barrier, asked, || member.combine(None).expect("the combine works"));
                assert_eq!(found, asked, "combine of rank {}", group.rank());
            },
        );
    }
}

/// As many ranks as a large cluster has, once.
#[test]
#[ignore = "slow: run with EP_TEST_SLOW=1"]
fn slow_1024_ranks_in_128_nodes_dispatch_and_combine() {
    let _watchdog = Watchdog::new("1024 ranks in 128 nodes", 10 * LONG);
    let start = Instant::now();
    let num_ranks: usize =
        std::env::var("EP_TEST_RANKS").map_or(1024, |text| text.parse().expect("a number"));
    let node_ids: Vec<u32> = (0..num_ranks as u32).map(|rank| 1 + rank / 8).collect();
    // A proxy has numbers for 8191 links, of which a rank here has 127; half of them are enough.
    let mut nodes = Nodes::with_proxies(&node_ids, 1, 4 * LONG, num_ranks / 32);
    nodes.patience = 6 * LONG;
    nodes.config = GroupConfig {
        num_lanes: 1,
        max_local_experts: 1,
        chunk_bytes: 2 << 10,
        chunk_window: 1,
        ..nodes.config
    };
    nodes.run(
        |_| Perturb::none(),
        |group| {
            let shape = Shape {
                num_experts: num_ranks,
                max_tokens: 4,
                min_tokens: 2,
                topk: 4,
                cols: 64,
                ..Shape::small(num_ranks, Layout::Flat, Place::Ring)
            };
            if group.rank() == 0 {
                println!("the group is made after {:.1?}", start.elapsed());
            }
            let mut member = Member::new(group, shape).expect("the plan is made");
            member.calls(3).expect("the calls work");
            member.round(4).expect("the round works");
            if group.rank() == 0 {
                println!("two rounds are done after {:.1?}", start.elapsed());
            }
        },
    );
}

/// Rounds of random shapes over a group on random nodes; both follow from the seed.
fn play_rounds(seed: u64, rounds: u64) {
    let mut rng = Rng::new(hash(&[seed, 77]));
    let num_ranks = 2 + rng.below(6);
    let num_nodes = 2 + rng.below(num_ranks.min(4) - 1);
    let node_ids: Vec<u32> = (0..num_ranks)
        .map(|rank| 1 + if rank < num_nodes { rank } else { rng.below(num_nodes) } as u32)
        .collect();
    let mut nodes = Nodes::new(&node_ids, seed, LONG);
    nodes.config.route = 1 + rng.below(2) as i32;
    nodes.config.chunk_bytes = (2 << 10) << rng.below(6);
    nodes.config.chunk_window = 1 + rng.below(8) as u32;
    let what = format!("seed {seed}: nodes {node_ids:?}, {:?}", nodes.config);
    let _watchdog = Watchdog::new(&*what, 5 * LONG);
    nodes.run(
        |_| Perturb::none(),
        |group| {
            for round in 0..rounds {
                let mut rng = Rng::new(hash(&[seed, round]));
                let shape = Shape::random(num_ranks, &mut rng);
                let mut member = Member::new(group, shape).unwrap_or_else(|error| panic!("{error}: {what}"));
                member.origins = rng.below(2) == 0;
                for again in 0..2 {
                    member.options.reduce_order = [0, 2, 3][rng.below(3)];
                    let result = member.round(hash(&[seed, round, again]));
                    result.unwrap_or_else(|error| panic!("{error}: round {round} of {what}"));
                }
            }
        },
    );
}

#[test]
fn random_rounds_over_random_nodes_are_right() {
    for seed in 0..8 {
        play_rounds(seed, 10);
    }
}

/// `EP_TEST_ROUNDS` rounds, 10,000 if it is not set; `EP_TEST_SEED` begins somewhere else than at 1000.
#[test]
#[ignore = "slow: run with EP_TEST_SLOW=1"]
fn slow_ten_thousand_rounds_over_random_nodes_are_right() {
    let number = |name: &str, default: u64| match std::env::var(name) {
        Ok(text) => text.parse().unwrap_or_else(|e| panic!("{name}: {e}")),
        Err(_) => default,
    };
    let (rounds, first) = (number("EP_TEST_ROUNDS", 10_000), number("EP_TEST_SEED", 1000));
    // A group plays 25 shapes twice.
    let groups = rounds.div_ceil(50);
    let start = Instant::now();
    for seed in first..first + groups {
        play_rounds(seed, 25);
    }
    println!("{} rounds over {groups} groups, seeds {first} and up: {:.0?}", 50 * groups, start.elapsed());
}
