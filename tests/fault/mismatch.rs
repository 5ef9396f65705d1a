//! Ranks that meet in a lane with different calls: all of them are told, and the next calls work.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use ep_core::bootstrap::LocalBootstrap;
use ep_core::config::{GroupConfig, Layout};
use ep_core::engine::Group;
use ep_core::perturb::{Disturbance, Perturb};
use ep_core::{Error, Status};

use crate::rng::{Rng, hash};
use crate::threads::{LONG, Watchdog, config, run, run_calm};
use crate::work::{Member, Place, Shape};

/// One of the calls of a rank that has three plans: the last is a twin of the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Call {
    Update(usize),
    Dispatch(usize),
    Combine(usize),
    DispatchFewerCols(usize),
    CombineFewerCols(usize),
    CombineByRank(usize),
}

impl Call {
    fn any(rng: &mut Rng) -> Call {
        let plan = rng.below(3);
        let calls: [fn(usize) -> Call; 6] = [
            Call::Update,
            Call::Dispatch,
            Call::Combine,
            Call::DispatchFewerCols,
            Call::CombineFewerCols,
            Call::CombineByRank,
        ];
        calls[rng.below(calls.len())](plan)
    }

    /// Two calls that do match although they differ.
    fn matches(self, other: Call) -> bool {
        let same = |a: Call, b: Call| {
            let twins = matches!((a, b), (Call::Update(0), Call::Update(2)));
            // By rank is the default order of flat rows.
            let default = matches!((a, b), (Call::CombineByRank(1), Call::Combine(1)));
            a == b || twins || default
        };
        same(self, other) || same(other, self)
    }

    fn run(self, members: &mut [Member]) -> Result<(), Error> {
        match self {
            Call::Update(plan) => members[plan].update(None),
            Call::Dispatch(plan) => members[plan].dispatch(None),
            Call::Combine(plan) => members[plan].combine(None),
            Call::DispatchFewerCols(plan) => {
                members[plan].fewer_cols = 1;
                let result = members[plan].dispatch(None);
                members[plan].fewer_cols = 0;
                result
            }
            Call::CombineFewerCols(plan) => {
                members[plan].fewer_cols = 1;
                let result = members[plan].combine(None);
                members[plan].fewer_cols = 0;
                result
            }
            Call::CombineByRank(plan) => {
                members[plan].options.reduce_order = 2;
                let result = members[plan].combine(None);
                members[plan].options.reduce_order = 0;
                result
            }
        }
    }
}

/// Plans of which the first passes more through its rings than they hold.
fn members(group: &Arc<Group>) -> Vec<Member> {
    let num_ranks = group.num_ranks();
    let ring =
        Shape { cols: 640, max_tokens: 64, ..Shape::large(num_ranks, Layout::ExpertMajor, Place::Ring) };
    let ring = Shape { min_tokens: 40, ..ring };
    let window = Shape { place: Place::Window, ..Shape::small(num_ranks, Layout::Flat, Place::Window) };
    [ring, window, ring].map(|shape| Member::new(group, shape).expect("windows are made")).into()
}

/// A mismatch names two ranks that differ, the caller first.
fn assert_names(error: &Error, rank: usize, differs: impl Fn(usize) -> bool, what: &str) {
    assert_eq!(error.status, Status::Mismatch, "rank {rank}: {error}: {what}");
    let rest = error.message.strip_prefix(&format!("ranks {rank} and ")).unwrap_or_else(|| panic!("{error}"));
    let (peer, _) = rest.split_once(" do not match").unwrap_or_else(|| panic!("{error}"));
    let peer: usize = peer.parse().unwrap_or_else(|_| panic!("{error}"));
    assert!(peer != rank && differs(peer), "rank {rank}: {error}: {what}");
}

/// `rounds` times: calls that match, one that does not, and a look whether the next ones are right.
fn check_random(seed: u64, num_ranks: usize, rounds: u64) {
    let what = format!("seed {seed} with {num_ranks} ranks");
    let _watchdog = Watchdog::new(&*what, 3 * LONG);
    let perturb = |rank: usize| {
        let (delay_one_in, delay_max) = (30, Duration::from_micros(300));
        let seed = hash(&[seed, 7, rank as u64]);
        Perturb::new(Disturbance { seed, delay_one_in, delay_max, stop_at_step: 0 })
    };
    run(num_ranks, &config(LONG), perturb, |group| play_random(group, seed, rounds, &what));
}

/// The part of a rank.
pub(crate) fn play_random(group: &Arc<Group>, seed: u64, rounds: u64, what: &str) {
    let num_ranks = group.num_ranks();
    let mut members = members(group);
    for round in 0..rounds {
        let mut rng = Rng::new(hash(&[seed, round]));
        for (plan, member) in members.iter_mut().enumerate() {
            member.prepare(hash(&[seed, round, plan as u64]));
            member.update(None).unwrap_or_else(|error| panic!("{error}: {what}, round {round}"));
        }
        let (one, other) = loop {
            let (one, other) = (Call::any(&mut rng), Call::any(&mut rng));
            if !one.matches(other) {
                break (one, other);
            }
        };
        // Any split of the ranks, but for all on one side.
        let sides = 1 + rng.next() % ((1 << num_ranks) - 2);
        let side = |rank: usize| sides >> rank & 1;
        let delays: Vec<u64> = (0..num_ranks).map(|_| rng.next() % 4).collect();
        let rank = group.rank();
        if delays[rank] == 0 {
            thread::sleep(Duration::from_millis(3));
        }
        let call = if side(rank) == 0 { one } else { other };
        let what = format!("{what}, round {round}: {one:?} and {other:?}");
        let error = call.run(&mut members).expect_err(&what);
        assert_names(&error, rank, |peer| side(peer) != side(rank), &what);
        let next = &mut members[rng.below(3)];
        next.round(hash(&[seed, round, 9])).unwrap_or_else(|error| panic!("{error} after {what}"));
    }
    for member in &mut members {
        member.round(seed).expect("the last round works");
    }
}

#[test]
fn lane_works_after_any_mismatch() {
    for num_ranks in [3, 4, 5] {
        check_random(num_ranks as u64, num_ranks, 70);
    }
}

#[test]
#[ignore = "slow: run with EP_TEST_SLOW=1"]
fn slow_lane_works_after_any_mismatch() {
    for seed in 0..20 {
        check_random(100 + seed, 2 + seed as usize % 6, 500);
    }
}

/// Each kind of difference, with one odd rank and the text that says what differs.
#[test]
fn each_kind_of_mismatch_says_what_differs() {
    let kinds: [(Call, Call, &str); 7] = [
        (Call::Update(0), Call::Dispatch(0), "in ep_"),
        (Call::Dispatch(0), Call::Combine(0), "in ep_"),
        (Call::Update(0), Call::Update(1), "different configs, "),
        (Call::Dispatch(0), Call::Dispatch(1), "different configs, "),
        (Call::Dispatch(0), Call::Dispatch(2), "updated in different calls"),
        (Call::Dispatch(0), Call::DispatchFewerCols(0), "bytes of a row of payloads[0]: "),
        (Call::Combine(0), Call::CombineByRank(0), "reduce_order"),
    ];
    let _watchdog = Watchdog::new("kinds of mismatches", LONG);
    run_calm(3, LONG, |group| {
        let mut members = members(group);
        for (i, (call, odd, text)) in kinds.into_iter().enumerate() {
            members.iter_mut().for_each(|member| member.prepare(i as u64));
            members.iter_mut().for_each(|member| member.update(None).expect("the update works"));
            let odd_rank = i % 3;
            let (rank, call) = (group.rank(), if group.rank() == odd_rank { odd } else { call });
            let error = call.run(&mut members).expect_err("the calls differ");
            assert_names(&error, rank, |peer| (peer == odd_rank) != (rank == odd_rank), text);
            assert!(error.message.contains(text), "{error} should say {text:?}");
            assert!(group.health(&mut []).is_none(), "a mismatch does not break the group");
        }
    });
}

/// Updates of two plans that are alike do match; the dispatch that follows does not.
#[test]
fn rank_that_updates_another_plan_of_the_same_config_is_found_by_the_dispatch() {
    let _watchdog = Watchdog::new("the twin plan", LONG);
    run_calm(3, LONG, |group| {
        let mut members = members(group);
        members.iter_mut().for_each(|member| member.prepare(4));
        members.iter_mut().for_each(|member| member.update(None).expect("the update works"));
        let odd = group.rank() == 1;
        members[if odd { 2 } else { 0 }].update(None).expect("the configs are the same");
        let error = members[0].dispatch(None).expect_err("rank 1 updated another plan");
        assert_names(&error, group.rank(), |peer| (peer == 1) != odd, "twins");
        members[0].round(5).expect("the next round works");
        members[2].round(6).expect("the next round works");
    });
}

/// Configs that differ: nobody becomes a member, and everybody learns why.
#[test]
fn ranks_with_other_configs_are_named_to_all() {
    let _watchdog = Watchdog::new("configs that differ", LONG);
    let base = config(LONG);
    let odd = [
        ("num_lanes", GroupConfig { num_lanes: 3, ..base }),
        ("timeout_ms", GroupConfig { timeout_ms: 5, ..base }),
        ("max_local_experts", GroupConfig { max_local_experts: 17, ..base }),
        ("ring_bytes", GroupConfig { ring_bytes: 1 << 20, ..base }),
        ("node_id", GroupConfig { node_id: 1, ..base }),
    ];
    for (i, (field, odd)) in odd.into_iter().enumerate() {
        let odd_rank = i % 3;
        let deadline = std::time::Instant::now() + LONG;
        let errors: Vec<Error> = thread::scope(|scope| {
            let create = |(rank, bootstrap): (usize, LocalBootstrap)| {
                let config = if rank == odd_rank { odd } else { base };
                scope.spawn(move || Group::create(&config, Box::new(bootstrap), deadline).err())
            };
            let ranks: Vec<_> = LocalBootstrap::group(3).into_iter().enumerate().map(create).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap().expect("the configs differ")).collect()
        });
        for error in &errors {
            assert_eq!(error, &errors[0], "all are told the same");
            assert_eq!(error.status, Status::Mismatch, "{error}");
            let named = if odd_rank == 0 { "ranks 0 and 1" } else { &format!("ranks 0 and {odd_rank}") };
            assert!(error.message.contains(named) && error.message.contains(field), "{error}");
        }
    }
}
