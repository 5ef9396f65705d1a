//! Lanes on streams: no order among them, so no order in which ranks use them can matter.

use std::time::{Duration, Instant};

use ep_core::Status;
use ep_core::config::Layout;
use ep_core::engine::Stream;
use ep_core::perturb::{Disturbance, Perturb};

use crate::rng::{Rng, hash};
use crate::threads::{LONG, Watchdog, config, run, run_calm};
use crate::work::{Member, Place, Shape};

fn shapes(num_ranks: usize) -> [Shape; 2] {
    [
        Shape::large(num_ranks, Layout::ExpertMajor, Place::Ring),
        Shape { lane: 1, ..Shape::large(num_ranks, Layout::Flat, Place::Window) },
    ]
}

#[test]
fn lanes_may_be_issued_in_another_order_on_each_rank() {
    let _watchdog = Watchdog::new("lanes in opposite order", LONG);
    run_calm(2, LONG, |group| {
        let mut members = shapes(2).map(|shape| Member::new(group, shape).expect("windows are made"));
        let streams = [Stream::new().unwrap(), Stream::new().unwrap()];
        let order = if group.rank() == 0 { [0, 1] } else { [1, 0] };
        for round in 0..6 {
            for lane in order {
                let (member, stream) = (&mut members[lane], Some(&streams[lane]));
                member.prepare(hash(&[round, lane as u64]));
                // All three at once, and without a look between them.
                member.update(stream).unwrap();
                member.dispatch(stream).unwrap();
                member.combine(stream).unwrap();
                member.dispatch(stream).unwrap();
            }
            for lane in order {
                streams[lane].synchronize(LONG).unwrap();
                members[lane].check_dispatch();
                members[lane].compute();
            }
            for lane in order {
                members[lane].combine(Some(&streams[lane])).unwrap();
            }
            for lane in order {
                streams[lane].synchronize(LONG).unwrap();
                members[lane].check_combine();
            }
        }
    });
}

#[test]
fn dispatch_of_one_lane_overlaps_a_combine_of_another() {
    let num_ranks = 3;
    let _watchdog = Watchdog::new("overlapping lanes", LONG);
    let perturb = |rank: usize| {
        let seed = hash(&[77, rank as u64]);
        Perturb::new(Disturbance {
            seed,
            delay_one_in: 20,
            delay_max: Duration::from_micros(300),
            stop_at_step: 0,
        })
    };
    run(num_ranks, &config(LONG), perturb, |group| {
        let mut members = shapes(num_ranks).map(|shape| Member::new(group, shape).expect("windows are made"));
        let streams = [Stream::new().unwrap(), Stream::new().unwrap()];
        let mut rng = Rng::new(group.rank() as u64);
        for round in 0..10u64 {
            // This round's lane combines while the other one dispatches.
            let combining = (round % 2) as usize;
            let dispatching = 1 - combining;
            let new = |lane: usize| hash(&[round, lane as u64]);
            if round == 0 {
                members[combining].prepare(new(combining));
                members[combining].update(None).unwrap();
                members[combining].dispatch(None).unwrap();
            }
            members[combining].check_dispatch();
            members[combining].compute();
            members[dispatching].prepare(new(dispatching));
            if rng.below(2) == 0 {
                members[combining].combine(Some(&streams[combining])).unwrap();
                members[dispatching].update(Some(&streams[dispatching])).unwrap();
                members[dispatching].dispatch(Some(&streams[dispatching])).unwrap();
            } else {
                members[dispatching].update(Some(&streams[dispatching])).unwrap();
                members[dispatching].dispatch(Some(&streams[dispatching])).unwrap();
                members[combining].combine(Some(&streams[combining])).unwrap();
            }
            streams.iter().for_each(|stream| stream.synchronize(LONG).unwrap());
            members[combining].check_combine();
        }
    });
}

/// Two lanes on one stream do have an order; ranks that contradict each other there wait for each other,
/// until the deadline.
#[test]
fn lanes_on_one_stream_in_opposite_order_end_at_the_deadline() {
    let timeout = Duration::from_millis(500);
    let _watchdog = Watchdog::new("opposite orders on one stream", LONG);
    run_calm(2, timeout, |group| {
        let mut members = shapes(2).map(|shape| Member::new(group, shape).expect("windows are made"));
        let stream = Stream::new().unwrap();
        members.iter_mut().for_each(|member| member.prepare(1));
        let start = Instant::now();
        let first = group.rank();
        members[first].update(Some(&stream)).unwrap();
        members[1 - first].update(Some(&stream)).unwrap();
        let error = stream.synchronize(LONG).unwrap_err();
        assert_eq!(error.status, Status::Timeout, "{error}");
        assert!(start.elapsed() < timeout + Duration::from_secs(1), "{:?}", start.elapsed());
    });
}

/// A queued call that cannot begin, and those behind it, fail on all ranks; the lane stays in step.
#[test]
fn queued_call_that_cannot_begin_fails_on_every_rank_and_the_next_works() {
    let _watchdog = Watchdog::new("a call that cannot begin", LONG);
    run_calm(3, LONG, |group| {
        let shape = Shape::large(3, Layout::ExpertMajor, Place::Ring);
        let mut member = Member::new(group, shape).expect("the plan is made");
        let stream = Stream::new().unwrap();
        for round in 0..20u64 {
            let odd = round as usize % 3;
            member.prepare(round);
            if group.rank() == odd {
                member.spoil_ids();
            }
            let start = Instant::now();
            member.update(Some(&stream)).unwrap();
            member.dispatch(Some(&stream)).unwrap();
            member.combine(Some(&stream)).unwrap();
            let error = stream.synchronize(LONG).unwrap_err();
            let expected = if group.rank() == odd { Status::OutOfRange } else { Status::Mismatch };
            assert_eq!(error.status, expected, "{error}");
            assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
            member.round(round).expect("the next round works");
        }
    });
}

/// A stream that keeps the error of one group skips the calls of another, whose ranks are told as well.
#[test]
fn error_of_one_group_on_a_stream_does_not_leave_the_peers_of_another_waiting() {
    let _watchdog = Watchdog::new("two groups on a stream", LONG);
    run_calm(2, LONG, |broken| {
        let shape = Shape::small(2, Layout::Flat, Place::Ring);
        if broken.rank() == 1 {
            // Does not come, and keeps its group until the end.
            while broken.health(&mut []).is_none() {
                std::thread::sleep(Duration::from_millis(1));
            }
            return;
        }
        // A group of two more threads.
        run_calm(2, LONG, |group| {
            let mut member = Member::new(group, shape).expect("the plan is made");
            member.round(1).expect("the round works");
            member.prepare(2);
            let start = Instant::now();
            if group.rank() == 0 {
                return (0..2).for_each(|_| {
                    let error = member.update(None).expect_err("rank 1 skips this call");
                    assert_eq!(error.status, Status::Mismatch, "{error}");
                    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
                });
            }
            let mut of_broken = Member::new(broken, shape).expect("the plan is made");
            of_broken.prepare(1);
            let stream = Stream::new().unwrap();
            of_broken.update(Some(&stream)).expect("the call is queued");
            member.update(Some(&stream)).expect("the call is queued");
            member.update(Some(&stream)).expect("the call is queued");
            broken.abort();
            let error = stream.synchronize(LONG).unwrap_err();
            assert_eq!(error.status, Status::Aborted, "{error}");
        });
    });
}
