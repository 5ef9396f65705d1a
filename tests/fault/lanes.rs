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

/// A call behind one that could not begin is not run: the peers that wait for it are told at once.
#[test]
fn peers_of_a_stream_that_skips_a_call_are_told() {
    let _watchdog = Watchdog::new("a stream that skips", LONG);
    run_calm(2, LONG, |group| {
        let shape = Shape::small(2, Layout::Flat, Place::Ring);
        let mut member = Member::new(group, shape).expect("the plan is made");
        member.prepare(3);
        member.update(None).unwrap();
        let start = Instant::now();
        let stream = Stream::new().unwrap();
        if group.rank() == 1 {
            member.spoil_ids();
        }
        // Refused at once where the peer was quick.
        let queued = [member.update(Some(&stream)), member.dispatch(Some(&stream))];
        let error = [stream.synchronize(LONG)].into_iter().chain(queued).find_map(Result::err).unwrap();
        if group.rank() == 1 {
            assert_eq!(error.status, Status::OutOfRange, "{error}");
        } else {
            assert_eq!(error.status, Status::Aborted, "{error}");
            assert!(error.message.contains("a stream of rank 1 skipped a call"), "{error}");
        }
        assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
        // What comes afterwards is told what broke the group.
        let error = member.dispatch(None).unwrap_err();
        assert_eq!(error.status, Status::Aborted, "{error}");
    });
}
