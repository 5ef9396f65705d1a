//! The error record when its writer dies in the middle of it, and calls that begin while their group closes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::Group;
use crate::Status;
use crate::bootstrap::LocalBootstrap;
use crate::config::GroupConfig;
use crate::layout;

fn group_of_two() -> Vec<Arc<Group>> {
    let deadline = Instant::now() + Duration::from_secs(60);
    std::thread::scope(|scope| {
        let members = LocalBootstrap::group(2).into_iter();
        let create = |member: LocalBootstrap| {
            scope.spawn(move || Group::create(&GroupConfig::default(), Box::new(member), deadline).unwrap())
        };
        let members: Vec<_> = members.map(create).collect();
        members.into_iter().map(|member| member.join().unwrap()).collect()
    })
}

/// What a rank leaves in rank 1's segment that dies between its claim of the record and its last store.
fn leave_half_a_record(groups: &[Arc<Group>]) {
    groups[1].segments[1].u32(layout::ERROR).store(super::fault::STATE_WRITING, Ordering::Relaxed);
}

#[test]
fn abort_works_although_a_peer_died_while_it_wrote_an_error_here() {
    let groups = group_of_two();
    leave_half_a_record(&groups);
    let error = groups[1].check_usable().unwrap_err();
    assert!(error.message.contains("stopped before it could say why"), "{error}");
    groups[1].abort();
    let error = groups[1].check_usable().unwrap_err();
    assert_eq!(error.status, Status::Aborted);
    assert!(error.message.contains("ep_group_abort was called on rank 1"), "{error}");
    assert_eq!(groups[1].broken().map(|error| error.status), Some(Status::Aborted));
    assert_eq!(groups[1].health(&mut []).map(|info| info.rank), Some(1));
    // The peer is told as ever.
    assert_eq!(groups[0].health(&mut []).map(|info| info.rank), Some(1));
}

#[test]
fn error_of_this_rank_stays_the_first_one_when_a_stopped_peer_finishes_its_record() {
    let groups = group_of_two();
    leave_half_a_record(&groups);
    groups[1].abort();
    let info = groups[0].error_info(Status::Timeout, Some(1), None, 7, String::from("late"));
    groups[1].segments[1].u32(layout::ERROR).store(0, Ordering::Relaxed);
    super::fault::record(&groups[1].segments[1], &info);
    assert_eq!(groups[1].health(&mut []).map(|info| info.status), Some(Status::Aborted));
}

#[test]
fn rank_with_half_a_record_reports_what_its_peers_know() {
    let groups = group_of_two();
    leave_half_a_record(&groups);
    // The writer begins with its own segment, where it told everything.
    let info = groups[0].error_info(Status::PeerLost, Some(7), None, 3, String::from("rank 7 died"));
    super::fault::record(&groups[0].segments[0], &info);
    let error = groups[1].check_usable().unwrap_err();
    assert!(error.message.ends_with("rank 0 reported: rank 7 died"), "{error}");
    assert_eq!(groups[1].health(&mut []), Some(info.clone()));
    // Its own error is a consequence.
    groups[1].abort();
    assert_eq!(groups[1].health(&mut []), Some(info));
}

#[test]
fn no_call_is_in_progress_once_its_group_is_closed() {
    for _ in 0..100 {
        let groups = group_of_two();
        let (group, inside) = (&groups[0], &AtomicBool::new(false));
        std::thread::scope(|scope| {
            let calls = scope.spawn(move || {
                // Closed at any moment of this loop.
                while let Ok(in_progress) = group.enter() {
                    // Relaxed: ordered by the guard, which `close` waits for.
                    inside.store(true, Ordering::Relaxed);
                    std::hint::spin_loop();
                    inside.store(false, Ordering::Relaxed);
                    drop(in_progress);
                }
                group.enter().err().map(|error| error.status)
            });
            group.close(Duration::from_secs(5)).unwrap();
            assert!(!inside.load(Ordering::Relaxed));
            assert_eq!(calls.join().unwrap(), Some(Status::BadHandle));
        });
    }
}
