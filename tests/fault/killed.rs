//! Ranks whose process dies: the survivors learn it from the closed socket, long before any deadline.

use std::time::{Duration, Instant};

use ep_core::Status;
use ep_core::config::Layout;

use crate::process::role;
use crate::rng::Rng;
use crate::scene::{Op, Scene, Stage, check_reports, play};
use crate::work::Place;

const PLACES: [(Place, Layout); 2] = [(Place::Window, Layout::Flat), (Place::Ring, Layout::ExpertMajor)];

/// The victim dies at `died` or a little before.
fn check_and_go_on(mut stage: Stage, died: Instant) {
    let reports = stage.reports();
    check_reports(&stage, &reports, Status::PeerLost);
    for report in &reports {
        let after = report.when.saturating_duration_since(died);
        assert!(after < Duration::from_secs(1), "{after:?} after the death: {report:?}, {:?}", stage.scene);
    }
    stage.go_on();
    stage.finish();
}

#[test]
fn rank_killed_before_a_call_is_named_by_all_at_once() {
    if let Some(role) = role() {
        return play(&role);
    }
    for (place, layout) in PLACES {
        for op in Op::ALL {
            let scene = Scene { op: Some(op), before: true, victim: 0, ..Scene::new(place, layout) };
            let mut stage = Stage::new("killed::rank_killed_before_a_call_is_named_by_all_at_once", scene);
            stage.await_entered();
            stage.victim().signal(libc::SIGKILL);
            check_and_go_on(stage, Instant::now());
        }
    }
}

#[test]
fn rank_killed_inside_a_call_is_named_by_all_at_once() {
    if let Some(role) = role() {
        return play(&role);
    }
    for (place, layout) in PLACES {
        for op in Op::ALL {
            // All but rank 2 have met in the call; the victim serves the meeting as well, in one of them.
            let victim = if op == Op::Dispatch { 0 } else { 1 };
            let scene = Scene { op: Some(op), late: Some(2), victim, ..Scene::new(place, layout) };
            let mut stage = Stage::new("killed::rank_killed_inside_a_call_is_named_by_all_at_once", scene);
            stage.await_entered();
            stage.victim().signal(libc::SIGKILL);
            let died = Instant::now();
            stage.rank(2).tell("go");
            check_and_go_on(stage, died);
        }
    }
}

#[test]
fn rank_that_exits_inside_a_call_is_named_as_if_it_was_killed() {
    if let Some(role) = role() {
        return play(&role);
    }
    for (place, layout) in PLACES {
        let scene = Scene { op: Some(Op::Dispatch), late: Some(2), victim: 3, ..Scene::new(place, layout) };
        let mut stage =
            Stage::new("killed::rank_that_exits_inside_a_call_is_named_as_if_it_was_killed", scene);
        stage.await_entered();
        stage.victim().tell("exit");
        let died = Instant::now();
        stage.rank(2).tell("go");
        check_and_go_on(stage, died);
    }
}

/// A child keeps the rank's sockets open, as the workers of a data loader do for some seconds.
#[test]
fn rank_whose_children_live_on_is_named_at_once() {
    if let Some(role) = role() {
        return play(&role);
    }
    for (place, layout) in PLACES {
        let op = if place == Place::Ring { Op::Combine } else { Op::Update };
        let scene = Scene { op: Some(op), before: true, forks: true, ..Scene::new(place, layout) };
        let mut stage = Stage::new("killed::rank_whose_children_live_on_is_named_at_once", scene);
        stage.await_entered();
        stage.victim().signal(libc::SIGKILL);
        check_and_go_on(stage, Instant::now());
    }
}

/// The victim kills itself at this step of a run of rounds: in the middle of credits, rows, requests.
fn check_death_at_step(test: &str, step: u64, place: Place, layout: Layout) {
    let scene = Scene { die_at_step: step, victim: step as usize % 4, ..Scene::new(place, layout) };
    let mut stage = Stage::new(test, scene);
    let died = stage.victim().await_line("dying").0;
    check_and_go_on(stage, died);
}

#[test]
fn rank_killed_at_a_step_of_the_protocol_is_named_by_all_at_once() {
    if let Some(role) = role() {
        return play(&role);
    }
    let test = "killed::rank_killed_at_a_step_of_the_protocol_is_named_by_all_at_once";
    // 4 steps of the update, 4 credits, then rows, arrivals and the combine.
    for (i, step) in [1, 3, 5, 7, 9, 12, 14, 20, 40, 80, 150].into_iter().enumerate() {
        let layout = [Layout::Flat, Layout::ExpertMajor][i / 2 % 2];
        let place = [Place::Window, Place::Ring][i % 2];
        check_death_at_step(test, step, place, layout);
    }
}

#[test]
fn rank_killed_at_any_moment_is_named_by_all_at_once() {
    if let Some(role) = role() {
        return play(&role);
    }
    let test = "killed::rank_killed_at_any_moment_is_named_by_all_at_once";
    check_random_deaths(test, 8);
}

#[test]
#[ignore = "slow: run with EP_TEST_SLOW=1"]
fn slow_rank_killed_at_any_moment_is_named_by_all_at_once() {
    if let Some(role) = role() {
        return play(&role);
    }
    let test = "killed::slow_rank_killed_at_any_moment_is_named_by_all_at_once";
    check_random_deaths(test, 200);
    for step in 1..200 {
        let layout = [Layout::Flat, Layout::ExpertMajor][step as usize / 2 % 2];
        let place = [Place::Window, Place::Ring][step as usize % 2];
        check_death_at_step(test, step, place, layout);
    }
}

fn check_random_deaths(test: &str, times: u64) {
    for seed in 0..times {
        let mut rng = Rng::new(seed);
        let layout = [Layout::Flat, Layout::ExpertMajor][rng.below(2)];
        let place = [Place::Window, Place::Ring][rng.below(2)];
        let scene = Scene { victim: rng.below(4), ..Scene::new(place, layout) };
        let mut stage = Stage::new(test, scene);
        for rank in 0..4 {
            stage.rank(rank).await_line("round");
        }
        std::thread::sleep(Duration::from_micros(rng.below(40_000) as u64));
        stage.victim().signal(libc::SIGKILL);
        check_and_go_on(stage, Instant::now());
    }
}
