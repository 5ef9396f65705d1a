//! Ranks whose process is stopped for longer than a deadline: the survivors name them and go on, and a
//! rank that wakes up afterwards is told, and writes into nothing that is in use.

use std::time::{Duration, Instant};

use ep_core::Status;
use ep_core::config::Layout;

use crate::process::role;
use crate::rng::Rng;
use crate::scene::{Op, Scene, Stage, check_reports, play};
use crate::work::Place;

const TIMEOUT: Duration = Duration::from_millis(700);

/// The victim was stopped at `stopped`. Survivors report, go on as a new group, and the victim wakes up
/// while that group's windows hold a pattern.
fn check_and_wake(mut stage: Stage, stopped: Instant) {
    let reports = stage.reports();
    check_reports(&stage, &reports, Status::Timeout);
    for report in &reports {
        let after = report.when.saturating_duration_since(stopped);
        assert!(after < TIMEOUT + Duration::from_secs(1), "{after:?} after: {report:?}, {:?}", stage.scene);
        if report.status == Status::Timeout {
            let most = TIMEOUT + Duration::from_secs(1);
            assert!(report.waited <= most, "{report:?}, {:?}", stage.scene);
        }
    }
    // The first to report waited for its whole deadline, and not less.
    let longest = reports.iter().map(|report| report.waited).max().expect("there are survivors");
    assert!(longest >= TIMEOUT - Duration::from_millis(1), "{reports:?}, {:?}", stage.scene);
    stage.go_on();
    let victim = stage.scene.victim;
    stage.victim().signal(libc::SIGCONT);
    if stage.scene.before {
        stage.victim().tell("go");
    }
    let late = stage.report(victim);
    assert!(matches!(late.status, Status::Timeout | Status::Aborted), "{late:?}, {:?}", stage.scene);
    assert_eq!(late.peer, victim as i32, "{late:?}, {:?}", stage.scene);
    assert!(late.text.contains(&format!("of rank {victim}")), "{late:?}, {:?}", stage.scene);
    stage.ranks[victim].take().expect("it has not ended").finish();
    stage.finish();
}

#[test]
fn rank_stopped_before_a_call_is_named_at_the_deadline() {
    if let Some(role) = role() {
        return play(&role);
    }
    for (place, layout) in [(Place::Window, Layout::ExpertMajor), (Place::Ring, Layout::Flat)] {
        for op in Op::ALL {
            let scene = Scene { op: Some(op), before: true, timeout: TIMEOUT, ..Scene::new(place, layout) };
            let mut stage = Stage::new("stopped::rank_stopped_before_a_call_is_named_at_the_deadline", scene);
            stage.await_entered();
            stage.victim().signal(libc::SIGSTOP);
            check_and_wake(stage, Instant::now());
        }
    }
}
#[test]
fn rank_stopped_at_any_moment_is_named_at_the_deadline() {
    if let Some(role) = role() {
        return play(&role);
    }
    check_random_stops("stopped::rank_stopped_at_any_moment_is_named_at_the_deadline", 8);
}

#[test]
#[ignore = "slow: run with EP_TEST_SLOW=1"]
fn slow_rank_stopped_at_any_moment_is_named_at_the_deadline() {
    if let Some(role) = role() {
        return play(&role);
    }
    check_random_stops("stopped::slow_rank_stopped_at_any_moment_is_named_at_the_deadline", 200);
}

fn check_random_stops(test: &str, times: u64) {
    for seed in 0..times {
        let mut rng = Rng::new(seed);
        let layout = [Layout::Flat, Layout::ExpertMajor][rng.below(2)];
        let place = [Place::Window, Place::Ring][rng.below(2)];
        let scene = Scene { victim: rng.below(4), timeout: TIMEOUT, ..Scene::new(place, layout) };
        let mut stage = Stage::new(test, scene);
        for rank in 0..4 {
            stage.rank(rank).await_line("round");
        }
        std::thread::sleep(Duration::from_micros(rng.below(40_000) as u64));
        stage.victim().signal(libc::SIGSTOP);
        check_and_wake(stage, Instant::now());
    }
}
