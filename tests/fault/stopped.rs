//! Ranks whose process is stopped for longer than a deadline: the survivors name them and go on, and a
//! rank that wakes up afterwards is told, and writes into nothing that is in use.

use std::path::Path;
use std::time::{Duration, Instant};

use ep_core::Status;
use ep_core::bootstrap::FileBootstrap;
use ep_core::config::Layout;
use ep_core::engine::Group;

use crate::process::{self, Rank, Scratch, role, say};
use crate::rng::Rng;
use crate::scene::{Op, Scene, Stage, check_reports, play};
use crate::threads::{LONG, config};
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
            stage.victim().stop();
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
        stage.victim().stop();
        check_and_wake(stage, Instant::now());
    }
}

/// Rank 0, which serves the meeting, is stopped while the group is made: the others end at their deadline.
#[test]
fn rank_stopped_while_a_group_is_made_keeps_nobody_waiting() {
    if let Some(role) = role() {
        let (rank, path) = (role[0].parse().unwrap(), Path::new(&role[1]));
        let met = FileBootstrap::connect(path, rank, 3, Instant::now() + LONG).unwrap();
        say("met");
        process::hear();
        let start = Instant::now();
        let error = Group::create(&config(LONG), Box::new(met), start + TIMEOUT).err().unwrap();
        assert_eq!(error.status, Status::Bootstrap, "{error}");
        return say(format!("failed {} {error}", start.elapsed().as_millis()));
    }
    let test = "stopped::rank_stopped_while_a_group_is_made_keeps_nobody_waiting";
    let scratch = Scratch::new();
    let role = |rank| format!("{rank} {}", scratch.file("meet").display());
    for victim in 0..2 {
        let mut ranks: Vec<Rank> = (0..3).map(|rank| Rank::spawn(test, &role(rank), &scratch)).collect();
        ranks.iter().for_each(|rank| drop(rank.await_line("met")));
        ranks[victim].stop();
        ranks.iter_mut().for_each(|rank| rank.tell("go"));
        let told: Vec<(usize, String)> = (0..3)
            .filter(|&rank| rank != victim)
            .map(|rank| (rank, ranks[rank].await_line("failed").1))
            .collect();
        for (rank, line) in &told {
            let (waited, error) = line.split_once(' ').unwrap();
            let waited = Duration::from_millis(waited.parse().unwrap());
            // The server of the meeting gives ranks a little more time, to tell them who is missing.
            assert!(waited < TIMEOUT + Duration::from_secs(2), "{waited:?}: {error}");
            assert!(error.contains(&format!("rank {victim}")) || victim == 0, "rank {rank} of {told:?}");
        }
        ranks[victim].signal(libc::SIGCONT);
        ranks[victim].await_line("failed");
        ranks.into_iter().for_each(Rank::finish);
    }
}
