//! Delays and random peer order at every step of the protocol: results are right all the same.

use std::time::Duration;

use ep_core::perturb::{Disturbance, Perturb};

use crate::rng::{Rng, hash};
use crate::threads::{LONG, Watchdog, config, run};
use crate::work::{Member, Shape};

/// One group with everything chosen by `seed`.
fn check(seed: u64, max_ranks: usize) {
    let mut rng = Rng::new(seed);
    let num_ranks = 2 + rng.below(max_ranks - 1);
    let delay_one_in = 1 + rng.below(40) as u64;
    let delay_max = Duration::from_micros(1 + rng.below(1000) as u64);
    let shapes: Vec<Shape> = (0..3).map(|_| Shape::random(num_ranks, &mut rng)).collect();
    let what = format!("seed {seed} with {num_ranks} ranks and {shapes:?}");
    let _watchdog = Watchdog::new(&*what, LONG);
    let perturb = |rank: usize| {
        let seed = hash(&[seed, rank as u64]);
        Perturb::new(Disturbance { seed, delay_one_in, delay_max, stop_at_step: 0 })
    };
    run(num_ranks, &config(LONG), perturb, |group| {
        // Several plans at a time in one lane, and their calls in turn.
        let members = shapes.iter().map(|&shape| Member::new(group, shape));
        let mut members: Vec<Member> = members.map(|member| member.expect("windows are made")).collect();
        for round in 0..4 {
            for member in &mut members {
                member.prepare(hash(&[seed, round]));
                member.update(None).unwrap_or_else(|error| panic!("{error}: {what}"));
            }
            for member in &mut members {
                member.dispatch(None).unwrap_or_else(|error| panic!("{error}: {what}"));
                member.check_dispatch();
                member.compute();
            }
            for member in &mut members {
                member.combine(None).unwrap_or_else(|error| panic!("{error}: {what}"));
                member.check_combine();
            }
        }
    });
}

#[test]
fn delayed_and_reordered_steps_do_not_change_results() {
    (0..40).for_each(|seed| check(seed, 6));
    (100..110).for_each(|seed| check(seed, 16));
}

#[test]
#[ignore = "slow: run with EP_TEST_SLOW=1"]
fn slow_delayed_and_reordered_steps_do_not_change_results() {
    (1000..2000).for_each(|seed| check(seed, 6));
    (2000..2300).for_each(|seed| check(seed, 16));
}
