//! Groups that end: early, late, twice, in use, or while their peers are still in the last call.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use ep_core::Status;
use ep_core::config::Layout;
use ep_core::engine::Stream;
use ep_core::perturb::{Disturbance, Perturb};

use crate::process::{self, Rank, Scratch, role};
use crate::rng::hash;
use crate::threads::{LONG, Watchdog, config, run, run_calm};
use crate::work::{Member, Place, Shape};

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn close_aborts_a_call_that_does_not_end() {
    let _watchdog = Watchdog::new("close during a call", LONG);
    let done = std::sync::Barrier::new(2);
    run_calm(2, LONG, |group| {
        let mut member = Member::new(group, Shape::small(2, Layout::Flat, Place::Ring)).unwrap();
        member.prepare(1);
        if group.rank() == 1 {
            done.wait();
            return;
        }
        thread::scope(|scope| {
            let call = scope.spawn(|| member.update(None).unwrap_err());
            thread::sleep(Duration::from_millis(50));
            let start = Instant::now();
            group.close(Duration::from_millis(100)).expect("the call ended");
            assert!(start.elapsed() >= Duration::from_millis(100), "{:?}", start.elapsed());
            assert!(start.elapsed() < 3 * SECOND, "{:?}", start.elapsed());
            let error = call.join().unwrap();
            assert_eq!(error.status, Status::Aborted, "{error}");
        });
        done.wait();
    });
}

#[test]
fn close_waits_for_a_call_that_ends() {
    let _watchdog = Watchdog::new("close during a call", LONG);
    run_calm(2, LONG, |group| {
        let mut member = Member::new(group, Shape::small(2, Layout::Flat, Place::Ring)).unwrap();
        member.prepare(1);
        if group.rank() == 1 {
            thread::sleep(Duration::from_millis(150));
            return member.update(None).expect("rank 0 is there until its call has ended");
        }
        thread::scope(|scope| {
            let call = scope.spawn(|| member.update(None));
            thread::sleep(Duration::from_millis(50));
            group.close(LONG).expect("the call ended");
            call.join().unwrap().expect("the call was not disturbed");
        });
    });
}

#[test]
fn everything_of_a_closed_group_is_refused_and_may_be_dropped_in_any_order() {
    let _watchdog = Watchdog::new("use after close", LONG);
    for order in 0..4 {
        run_calm(2, LONG, |group| {
            let mut member = Member::new(group, Shape::small(2, Layout::Flat, Place::Window)).unwrap();
            member.round(1).unwrap();
            let stream = Stream::new().unwrap();
            group.close(LONG).unwrap();
            group.close(LONG).expect("a second time changes nothing");
            for stream in [None, Some(&stream)] {
                for error in [member.update(stream), member.dispatch(stream), member.combine(stream)] {
                    assert_eq!(error.unwrap_err().status, Status::BadHandle);
                }
            }
            stream.synchronize(LONG).expect("nothing was queued");
            let error = member.plan.counts(None).unwrap_err();
            assert_eq!(error.status, Status::BadHandle, "{error}");
            if order % 2 == 0 {
                drop(stream);
                drop(member);
            } else {
                drop(member);
                drop(stream);
            }
        });
    }
}

/// Calls that are queued when the group closes are not run.
#[test]
fn calls_queued_on_a_stream_do_not_outlive_their_group() {
    let _watchdog = Watchdog::new("queued calls", LONG);
    let done = std::sync::Barrier::new(2);
    run_calm(2, LONG, |group| {
        let mut member = Member::new(group, Shape::small(2, Layout::Flat, Place::Window)).unwrap();
        member.prepare(1);
        member.update(None).unwrap();
        if group.rank() == 0 {
            let stream = Stream::new().unwrap();
            for _ in 0..10 {
                member.dispatch(Some(&stream)).unwrap();
            }
            thread::sleep(Duration::from_millis(30));
            let start = Instant::now();
            group.close(Duration::from_millis(50)).expect("the call in progress ended");
            // The rest has not begun, so nothing waits for it.
            let error = stream.synchronize(LONG).unwrap_err();
            assert!(matches!(error.status, Status::Aborted | Status::BadHandle), "{error}");
            drop((member, stream));
            assert!(start.elapsed() < 5 * SECOND, "{:?}", start.elapsed());
        }
        done.wait();
    });
}

/// A rank that has finished its last call and leaves takes nothing from those who are still in it.
#[test]
fn rank_may_leave_as_soon_as_its_last_call_returns() {
    let _watchdog = Watchdog::new("leaving", 3 * LONG);
    for seed in 0..60 {
        let num_ranks = 2 + seed as usize % 4;
        let layout = [Layout::Flat, Layout::ExpertMajor][seed as usize % 2];
        let place = [Place::Window, Place::Ring][seed as usize / 2 % 2];
        let perturb = |rank: usize| {
            let what = Disturbance {
                seed: hash(&[seed, rank as u64]),
                delay_one_in: 6,
                delay_max: Duration::from_millis(1),
                stop_at_step: 0,
            };
            Perturb::new(what)
        };
        let last = seed % 3;
        run(num_ranks, &config(LONG), perturb, |group| {
            let mut member = Member::new(group, Shape::small(num_ranks, layout, place)).unwrap();
            member.prepare(seed);
            member.update(None).expect("the update works");
            if last > 0 {
                member.dispatch(None).expect("the dispatch works");
                member.check_dispatch();
            }
            if last > 1 {
                member.compute();
                member.combine(None).expect("the combine works");
                member.check_combine();
            }
            group.close(LONG).expect("it has no calls");
        });
    }
}

/// The same with processes that exit, which closes their sockets.
#[test]
fn process_may_exit_as_soon_as_its_last_call_returns() {
    if let Some(role) = role() {
        let (rank, path) = (role[0].parse().unwrap(), Path::new(&role[1]));
        let what = Disturbance {
            seed: rank as u64,
            delay_one_in: 6,
            delay_max: Duration::from_millis(10),
            stop_at_step: 0,
        };
        let group = process::meet(path, rank, 4, &config(LONG), Perturb::new(what));
        let mut member = Member::new(&group, Shape::small(4, Layout::ExpertMajor, Place::Ring)).unwrap();
        member.round(rank as u64 / 100).expect("the round works");
        std::process::exit(0);
    }
    let test = "ending::process_may_exit_as_soon_as_its_last_call_returns";
    for _ in 0..5 {
        let scratch = Scratch::new();
        let role = |rank| format!("{rank} {}", scratch.file("meet").display());
        let ranks: Vec<Rank> = (0..4).map(|rank| Rank::spawn(test, &role(rank), &scratch)).collect();
        ranks.into_iter().for_each(Rank::finish);
    }
}

#[test]
fn rank_that_leaves_early_is_named() {
    let _watchdog = Watchdog::new("leaving early", LONG);
    run_calm(3, LONG, |group| {
        let mut member = Member::new(group, Shape::small(3, Layout::Flat, Place::Window)).unwrap();
        member.round(1).unwrap();
        if group.rank() == 2 {
            return group.close(LONG).unwrap();
        }
        let start = Instant::now();
        let error = member.calls(2).unwrap_err();
        assert!(matches!(error.status, Status::PeerLost | Status::Aborted), "{error}");
        assert!(error.message.contains("rank 2 left or died"), "{error}");
        assert!(start.elapsed() < 2 * SECOND, "{:?}", start.elapsed());
        let mut alive = [false; 3];
        let info = group.health(&mut alive).expect("the group is broken");
        assert_eq!((info.status, info.peer), (Status::PeerLost, Some(2)));
        assert!(!alive[2]);
    });
}
