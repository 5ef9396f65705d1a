//! Ranks that vanish at each step of the protocol in turn: the others end in time, and name that rank.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use ep_core::config::{ErrorInfo, Layout};
use ep_core::engine::Group;
use ep_core::perturb::{Disturbance, Perturb};
use ep_core::{Error, Status};

use crate::rng::{Rng, hash};
use crate::threads::{LONG, Watchdog, config, run};
use crate::work::{Member, Place, Shape};

const NUM_RANKS: usize = 3;
const TIMEOUT: Duration = Duration::from_millis(300);
/// Scenarios at a time: nearly all of their time is waiting.
const AT_ONCE: u64 = 12;

/// What the victim does once it has stopped.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Then {
    /// Nothing, for ever, as a process that hangs.
    Hangs,
    /// Leaves the group, as a thread that unwinds.
    Leaves,
}

pub(crate) struct Outcome {
    pub(crate) result: Result<(), Error>,
    pub(crate) info: Option<ErrorInfo>,
    /// How long its last call took.
    pub(crate) waited: Duration,
    /// Keeps the group alive until every rank is done.
    _member: Option<Member>,
}

fn play(shape: Shape, victim: usize, step: u64, then: Then) -> Vec<Outcome> {
    let perturb = |rank| {
        let stop_at_step = if rank == victim { step } else { 0 };
        Perturb::new(Disturbance { seed: 0, delay_one_in: 0, delay_max: Duration::ZERO, stop_at_step })
    };
    run(NUM_RANKS, &config(TIMEOUT), perturb, |group| play_rank(group, shape, victim, then))
}

/// The calls of a rank.
pub(crate) fn play_rank(group: &Arc<Group>, shape: Shape, victim: usize, then: Then) -> Outcome {
    let mut member = Member::new(group, shape).expect("windows are made");
    member.prepare(5);
    let mut start = Instant::now();
    let mut timed = |call: &mut dyn FnMut() -> Result<(), Error>| {
        start = Instant::now();
        call()
    };
    let mut calls = || {
        timed(&mut || member.update(None))?;
        timed(&mut || member.dispatch(None))?;
        timed(&mut || member.combine(None))?;
        timed(&mut || member.dispatch(None))
    };
    let result = calls();
    let waited = start.elapsed();
    let info = group.health(&mut []);
    let leaves = then == Then::Leaves && group.rank() == victim;
    Outcome { result, info, waited, _member: (!leaves).then_some(member) }
}

/// True if the victim got as far as `step`.
fn check(shape: Shape, victim: usize, step: u64, then: Then) -> bool {
    let what = format!("rank {victim} {then:?} at step {step} of {shape:?}");
    let _watchdog = Watchdog::new(&*what, LONG);
    let outcomes = play(shape, victim, step, then);
    let stopped = match &outcomes[victim].result {
        Err(error) => error.message.contains("stopped by its test"),
        Ok(()) => false,
    };
    for (rank, outcome) in outcomes.iter().enumerate().filter(|(rank, _)| *rank != victim) {
        assert!(
            outcome.waited < TIMEOUT + Duration::from_secs(1),
            "rank {rank}: {:?}: {what}",
            outcome.waited
        );
        let Err(error) = &outcome.result else {
            // All that it needed was there.
            continue;
        };
        assert!(stopped, "{error} without a reason: {what}");
        let expected = if then == Then::Hangs { Status::Timeout } else { Status::PeerLost };
        assert!(matches!(error.status, Status::Aborted) || error.status == expected, "{error}: {what}");
        let info = outcome.info.as_ref().expect("the group is broken");
        assert_eq!((info.status, info.peer), (expected, Some(victim)), "{error}: {what}");
    }
    stopped
}

fn check_every_step(shape: Shape, victim: usize, then: Then) {
    let mut first = 1;
    loop {
        let stopped: Vec<bool> = thread::scope(|scope| {
            let steps =
                (first..first + AT_ONCE).map(|step| scope.spawn(move || check(shape, victim, step, then)));
            let steps: Vec<_> = steps.collect();
            steps.into_iter().map(|step| step.join().expect("the step's checks pass")).collect()
        });
        if !stopped.contains(&true) {
            assert!(first > 2 * NUM_RANKS as u64, "only {first} steps");
            return;
        }
        first += AT_ONCE;
    }
}

#[test]
fn rank_that_hangs_at_any_step_is_named_at_the_deadline() {
    for victim in 0..NUM_RANKS {
        check_every_step(Shape::small(NUM_RANKS, Layout::Flat, Place::Window), victim, Then::Hangs);
        check_every_step(Shape::small(NUM_RANKS, Layout::ExpertMajor, Place::Ring), victim, Then::Hangs);
    }
}

#[test]
fn rank_that_leaves_at_any_step_is_named_soon() {
    for victim in 0..NUM_RANKS {
        check_every_step(Shape::small(NUM_RANKS, Layout::ExpertMajor, Place::Window), victim, Then::Leaves);
        check_every_step(Shape::small(NUM_RANKS, Layout::Flat, Place::Ring), victim, Then::Leaves);
    }
}

/// Deadlines that are too short for anything, or nearly so: a call works or is late, and its results are
/// right or nobody's.
#[test]
fn deadlines_of_a_few_milliseconds_end_in_results_or_timeouts() {
    let _watchdog = Watchdog::new("short deadlines", LONG);
    let mut outcomes = [0, 0];
    for seed in 0..60 {
        let mut rng = Rng::new(seed);
        let num_ranks = 2 + rng.below(4);
        let shape = Shape::random(num_ranks, &mut rng);
        let timeout = Duration::from_millis(1 + rng.below(8) as u64);
        let perturb = |rank: usize| {
            let (delay_one_in, delay_max) = (20, Duration::from_millis(2));
            let seed = hash(&[seed, rank as u64]);
            Perturb::new(Disturbance { seed, delay_one_in, delay_max, stop_at_step: 0 })
        };
        let results = run(num_ranks, &config(timeout), perturb, |group| {
            // Windows have the deadline of calls too, and do not break the group when they are late.
            let shape = Shape { place: Place::Ring, ..shape };
            let mut member = Member::new(group, shape).expect("the plan is made");
            (0..5).try_for_each(|round| member.round(round))
        });
        let late = results.iter().any(Result::is_err);
        outcomes[usize::from(late)] += 1;
        for error in results.into_iter().filter_map(Result::err) {
            let lost = [Status::Timeout, Status::Aborted, Status::PeerLost];
            assert!(lost.contains(&error.status), "seed {seed}: {error}");
        }
    }
    assert!(outcomes[1] > 0, "no deadline was missed: {outcomes:?}");
}
