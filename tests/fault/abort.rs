//! Abort: from any thread, at any time, and at once.

use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use ep_core::bootstrap::{TcpBootstrap, UniqueId};
use ep_core::config::Layout;
use ep_core::engine::{Group, Stream, Window};
use ep_core::{Error, Status};

use crate::threads::{LONG, Watchdog, config, run_calm};
use crate::work::{Member, Place, Shape};

/// What a busy machine may add to any time.
const SLACK: Duration = Duration::from_secs(2);

type Call = fn(&mut Member) -> Result<(), Error>;

/// Rank 0 of three waits in a call for rank 2, which does not come; `aborter` aborts, from a thread of its
/// own on rank 0 or as another rank. Returns how long after the abort each of ranks 0 and 1 came back.
fn abort_in(op: usize, place: Place, aborter: usize) -> Vec<(Duration, Error)> {
    let aborted_at = std::sync::Mutex::new(None);
    let abort = |group: &ep_core::engine::Group| {
        thread::sleep(Duration::from_millis(60));
        *aborted_at.lock().unwrap() = Some(Instant::now());
        group.abort();
    };
    let done = Barrier::new(3);
    let results = run_calm(3, LONG, |group| {
        let mut member = Member::new(group, Shape::small(3, Layout::ExpertMajor, place)).unwrap();
        member.prepare(1);
        let mut calls: Vec<Call> =
            vec![|member| member.update(None), |member| member.dispatch(None), |member| member.combine(None)];
        let last = calls.remove(op);
        calls.truncate(op);
        calls.into_iter().for_each(|call| call(&mut member).unwrap());
        let result = thread::scope(|scope| {
            if group.rank() == aborter {
                scope.spawn(|| abort(group));
            }
            (group.rank() != 2).then(|| {
                let error = last(&mut member).unwrap_err();
                let after = aborted_at.lock().unwrap().expect("it was aborted").elapsed();
                (after, error)
            })
        });
        // Every later call says the same, on every rank.
        done.wait();
        for call in
            [Member::update as fn(&mut Member, Option<&Stream>) -> _, Member::dispatch, Member::combine]
        {
            let error = call(&mut member, None).unwrap_err();
            assert_eq!(error.status, Status::Aborted, "{error}");
            assert!(
                error.message.contains(&format!("ep_group_abort was called on rank {aborter}")),
                "{error}"
            );
        }
        let info = group.health(&mut []).expect("the group is broken");
        assert_eq!((info.status, info.rank, info.peer), (Status::Aborted, aborter, None));
        result
    });
    results.into_iter().flatten().collect()
}

#[test]
fn waiting_calls_return_at_once_when_their_group_is_aborted() {
    let _watchdog = Watchdog::new("abort", 3 * LONG);
    for op in 0..3 {
        for place in [Place::Window, Place::Ring] {
            for aborter in 0..3 {
                // A scheduler's whim may delay one, but not each of five.
                let mut best = SLACK;
                for _ in 0..5 {
                    let results = abort_in(op, place, aborter);
                    for (after, error) in &results {
                        assert_eq!(error.status, Status::Aborted, "{error}");
                        assert!(*after < SLACK, "{after:?} after the abort");
                    }
                    best = best.min(results.iter().map(|(after, _)| *after).max().expect("two ranks"));
                    if best < Duration::from_millis(100) {
                        break;
                    }
                }
                assert!(best < Duration::from_millis(100), "{best:?} after the abort by rank {aborter}");
            }
        }
    }
}

#[test]
fn calls_on_a_stream_return_at_once_when_their_group_is_aborted() {
    let _watchdog = Watchdog::new("abort of a stream", LONG);
    run_calm(2, LONG, |group| {
        let mut member = Member::new(group, Shape::small(2, Layout::Flat, Place::Window)).unwrap();
        member.prepare(1);
        member.update(None).unwrap();
        if group.rank() == 1 {
            // Never comes; keeps the group until rank 0 was told.
            while group.health(&mut []).is_none() {
                thread::sleep(Duration::from_millis(1));
            }
            return;
        }
        let stream = Stream::new().unwrap();
        for _ in 0..20 {
            member.dispatch(Some(&stream)).unwrap();
        }
        thread::sleep(Duration::from_millis(30));
        let start = Instant::now();
        group.abort();
        let error = stream.synchronize(LONG).unwrap_err();
        assert_eq!(error.status, Status::Aborted, "{error}");
        assert!(start.elapsed() < SLACK, "{:?}", start.elapsed());
        stream.synchronize(LONG).expect("the error was returned once, and nothing is queued");
    });
}

/// Aborts that race with calls and with each other, at random moments of work.
#[test]
fn abort_in_the_middle_of_work_ends_every_rank() {
    let _watchdog = Watchdog::new("abort in the middle of work", LONG);
    for round in 0..12u64 {
        let layout = [Layout::Flat, Layout::ExpertMajor][round as usize % 2];
        let place = [Place::Window, Place::Ring][round as usize / 2 % 2];
        run_calm(4, LONG, |group| {
            let mut member = Member::new(group, Shape::large(4, layout, place)).unwrap();
            thread::scope(|scope| {
                if group.rank() < 2 {
                    scope.spawn(|| {
                        thread::sleep(Duration::from_micros(3000 * round));
                        group.abort();
                    });
                }
                let error = (0..).find_map(|seed| member.calls(seed).err()).unwrap();
                assert_eq!(error.status, Status::Aborted, "{error}");
                assert!(error.message.contains("ep_group_abort was called on rank "), "{error}");
            });
        });
    }
}

/// Groups of one process share nothing: one that is aborted, or whose rank is late, leaves the other alone.
#[test]
fn abort_of_one_group_leaves_another_alone() {
    let _watchdog = Watchdog::new("two groups", LONG);
    run_calm(3, LONG, |outer| {
        let shape = Shape::large(3, Layout::ExpertMajor, Place::Window);
        let mut outer_member = Member::new(outer, shape).unwrap();
        outer_member.round(1).unwrap();
        // Each rank has a group of its own threads besides.
        run_calm(2, LONG, |inner| {
            let mut member = Member::new(inner, Shape::small(2, Layout::Flat, Place::Window)).unwrap();
            member.round(1).unwrap();
            // Collective, so that both ranks are out of that round.
            ep_core::engine::Window::allocate(inner, 0).unwrap();
            if inner.rank() == 0 {
                inner.abort();
            }
            let error = (2..).find_map(|seed| member.calls(seed).err()).unwrap();
            assert_eq!(error.status, Status::Aborted, "{error}");
        });
        assert!(outer.health(&mut []).is_none());
        (2..5).for_each(|seed| outer_member.round(seed).unwrap());
    });
}

/// The bootstrap is the built-in one: a caller's own has its own deadline.
#[test]
fn window_allocation_that_waits_for_a_rank_ends_when_its_group_is_aborted() {
    let _watchdog = Watchdog::new("abort of an allocation", LONG);
    let id = UniqueId::create().unwrap();
    let aborted = Barrier::new(2);
    thread::scope(|scope| {
        for rank in 0..2 {
            let (id, aborted) = (&id, &aborted);
            scope.spawn(move || {
                let deadline = Instant::now() + LONG;
                let meeting = TcpBootstrap::connect(id, rank, 2, deadline).unwrap();
                let group = Group::create(&config(LONG), Box::new(meeting), deadline).unwrap();
                if rank == 1 {
                    // Never allocates; is there until rank 0 has given up.
                    aborted.wait();
                    return;
                }
                let start = Instant::now();
                let error = thread::scope(|scope| {
                    let allocation = scope.spawn(|| Window::allocate(&group, 4096).err().unwrap());
                    thread::sleep(Duration::from_millis(60));
                    group.abort();
                    allocation.join().unwrap()
                });
                assert_eq!(error.status, Status::Aborted, "{error}");
                assert!(error.message.contains("ep_group_abort was called on rank 0"), "{error}");
                assert!(start.elapsed() < SLACK, "{:?}", start.elapsed());
                aborted.wait();
            });
        }
    });
}
