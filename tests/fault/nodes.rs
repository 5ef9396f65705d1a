//! Ranks of several nodes: what `mismatch`, `steps`, `abort` and `quiet` show inside a node holds between nodes too.

use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use ep_core::Status;
use ep_core::config::Layout;
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
