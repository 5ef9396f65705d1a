//! Groups over TCP, from both ends, on 127.0.0.1.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::thread;
use std::time::{Duration, Instant};

use super::root::{RootHandle, RootOptions};
use super::wire::{self, Greeting};
use super::*;

/// Long enough for a loaded machine; no test waits for it.
pub(super) fn far() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

pub(super) fn soon(ms: u64) -> Instant {
    Instant::now() + Duration::from_millis(ms)
}

pub(super) fn create() -> (UniqueId, RootHandle) {
    UniqueId::create_at(SocketAddr::from(([127, 0, 0, 1], 0)), RootOptions::default()).unwrap()
}

/// An id from an address whose port was free a moment ago.
fn from_free_address(secret: &str) -> UniqueId {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    UniqueId::from_address(&address, secret).unwrap()
}

/// Connects each `(rank, num_ranks)` from a thread of its own.
pub(super) fn connect_all(
    id: &UniqueId,
    ranks: &[(usize, usize)],
    deadline: Instant,
) -> Vec<Result<TcpBootstrap>> {
    thread::scope(|scope| {
        let connect =
            |&(rank, num_ranks)| scope.spawn(move || TcpBootstrap::connect(id, rank, num_ranks, deadline));
        let threads: Vec<_> = ranks.iter().map(connect).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn meet(id: &UniqueId, num_ranks: usize) -> Vec<TcpBootstrap> {
    let ranks: Vec<_> = (0..num_ranks).map(|rank| (rank, num_ranks)).collect();
    connect_all(id, &ranks, far()).into_iter().map(|member| member.unwrap()).collect()
}

fn blob(rank: usize, round: usize) -> Vec<u8> {
    vec![(rank + round) as u8; rank * 331 * round % 5000]
}

/// Every member gathers `rounds` times from a thread of its own.
pub(super) fn gather_all(members: &mut [TcpBootstrap], rounds: usize) {
    let num_ranks = members.len();
    thread::scope(|scope| {
        for member in members {
            scope.spawn(move || {
                for round in 0..rounds {
                    let all = member.all_gather(&blob(member.rank(), round), far()).unwrap();
                    assert_eq!(all.len(), num_ranks);
                    for (rank, found) in all.iter().enumerate() {
                        assert_eq!(*found, blob(rank, round), "rank {rank} round {round}");
                    }
                }
            });
        }
    });
}

fn messages(results: Vec<Result<TcpBootstrap>>) -> Vec<String> {
    let error = |result: Result<TcpBootstrap>| {
        let error = result.expect_err("this group cannot meet");
        assert_eq!(error.status, Status::Bootstrap, "{error}");
        error.message
    };
    results.into_iter().map(error).collect()
}

#[test]
fn every_size_gathers_blobs_of_varying_length() {
    for num_ranks in 1..=16 {
        gather_all(&mut meet(&create().0, num_ranks), 4);
    }
}

#[test]
fn rank_0_hosts_an_id_from_an_address() {
    let id = from_free_address("shared");
    // One after another at one port: the port is free as soon as the group has met.
    let mut first = meet(&id, 3);
    let mut second = meet(&id, 5);
    gather_all(&mut second, 3);
    gather_all(&mut first, 3);
}

#[test]
fn ranks_wait_for_a_root_that_is_not_up_yet() {
    let id = from_free_address("late");
    thread::scope(|scope| {
        let early = scope.spawn(move || TcpBootstrap::connect(&id, 1, 2, far()));
        thread::sleep(Duration::from_millis(150));
        let mut root = TcpBootstrap::connect(&id, 0, 2, far()).unwrap();
        let mut early = early.join().unwrap().unwrap();
        let gather = scope.spawn(move || early.all_gather(b"one", far()).unwrap());
        assert_eq!(root.all_gather(b"zero", far()).unwrap(), [b"zero".to_vec(), b"one".to_vec()]);
        assert_eq!(gather.join().unwrap().len(), 2);
    });
}

#[test]
fn large_blobs_arrive() {
    let mut members = meet(&create().0, 3);
    thread::scope(|scope| {
        for member in &mut members {
            scope.spawn(move || {
                let mine = vec![member.rank() as u8 + 1; 3 << 20];
                let all = member.all_gather(&mine, far()).unwrap();
                for (rank, blob) in all.iter().enumerate() {
                    assert_eq!(blob.len(), 3 << 20);
                    assert!(blob.iter().all(|&byte| byte == rank as u8 + 1));
                }
            });
        }
    });
}

#[test]
fn groups_at_the_same_time_do_not_mix() {
    let ids = [create().0, create().0, from_free_address("third")];
    thread::scope(|scope| {
        for (index, id) in ids.iter().enumerate() {
            scope.spawn(move || gather_all(&mut meet(id, 2 + index), 5));
        }
    });
}

#[test]
fn absent_ranks_are_named_to_all_at_the_deadline() {
    let id = create().0;
    let start = Instant::now();
    let results = connect_all(&id, &[(0, 4), (3, 4)], soon(300));
    assert!(start.elapsed() >= Duration::from_millis(300));
    assert!(start.elapsed() < Duration::from_millis(1300), "{:?}", start.elapsed());
    for text in messages(results) {
        assert!(text.starts_with("ranks 1 and 2 of 4 did not join within 0.3 s (root 127.0.0.1:"), "{text}");
        assert!(text.ends_with("check that they were started with the same id"), "{text}");
    }
}

#[test]
fn absent_root_is_told_at_the_deadline() {
    let id = from_free_address("nobody");
    let start = Instant::now();
    let text = messages(connect_all(&id, &[(1, 2)], soon(200))).remove(0);
    assert!(start.elapsed() < Duration::from_millis(1200));
    assert!(text.starts_with("rank 1 of 2 could not join within 0.2 s: the root 127.0.0.1:"), "{text}");
}

#[test]
fn silent_root_is_told_at_the_deadline() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let id = UniqueId::from_address(&listener.local_addr().unwrap().to_string(), "x").unwrap();
    let start = Instant::now();
    let text = messages(connect_all(&id, &[(1, 2)], soon(200))).remove(0);
    assert!(start.elapsed() < Duration::from_millis(1200));
    assert!(text.contains("it does not answer"), "{text}");
}

#[test]
fn wrong_secret_is_told_and_disturbs_nobody() {
    let id = from_free_address("right");
    let wrong = UniqueId::from_address(&id.address().unwrap().to_string(), "wrong").unwrap();
    thread::scope(|scope| {
        let waiting = scope.spawn(move || TcpBootstrap::connect(&id, 0, 2, far()).unwrap());
        let text = messages(connect_all(&wrong, &[(1, 2)], far())).remove(0);
        assert!(text.contains("secret differs"), "{text}");
        let other = TcpBootstrap::connect(&id, 1, 2, far()).unwrap();
        gather_all(&mut [waiting.join().unwrap(), other], 2);
    });
}

#[test]
fn wrong_secret_is_told_to_those_who_wait_in_vain() {
    let id = from_free_address("right");
    let wrong = UniqueId::from_address(&id.address().unwrap().to_string(), "wrong").unwrap();
    thread::scope(|scope| {
        let waiting = scope.spawn(move || connect_all(&id, &[(0, 2)], soon(3000)));
        messages(connect_all(&wrong, &[(1, 2)], far()));
        let text = messages(waiting.join().unwrap()).remove(0);
        assert!(text.starts_with("rank 1 of 2 did not join"), "{text}");
        assert!(
            text.contains("another secret") && text.contains("refused, the last one from 127.0.0.1"),
            "{text}"
        );
    });
}

#[test]
fn duplicate_rank_is_named_to_all() {
    for text in messages(connect_all(&create().0, &[(0, 3), (1, 3), (1, 3)], far())) {
        assert!(text.starts_with("rank 1 of 3 joined twice"), "{text}");
    }
}

#[test]
fn late_rank_hears_why_the_group_failed_before() {
    let id = create().0;
    connect_all(&id, &[(1, 3), (1, 3)], far());
    let texts = messages(connect_all(&id, &[(0, 3), (2, 3)], far()));
    assert!(texts.iter().all(|text| text.starts_with("rank 1 of 3 joined twice")), "{texts:?}");
}

#[test]
fn duplicate_of_a_group_that_has_met_is_refused_alone() {
    let id = create().0;
    let mut members = meet(&id, 2);
    let text = messages(connect_all(&id, &[(1, 2)], far())).remove(0);
    assert!(text.starts_with("rank 1 cannot join: all 2 ranks of the group have met already"), "{text}");
    gather_all(&mut members, 2);
}

#[test]
fn duplicate_rank_0_that_would_host_is_named_to_all() {
    let id = from_free_address("two roots");
    for text in messages(connect_all(&id, &[(0, 3), (0, 3), (1, 3)], far())) {
        assert!(text.starts_with("rank 0 of 3 joined twice"), "{text}");
    }
    // The port serves again after the failure.
    gather_all(&mut meet(&id, 2), 2);
}

#[test]
fn rank_out_of_range_is_named_to_all() {
    for text in messages(connect_all(&create().0, &[(0, 3), (3, 3)], far())) {
        assert!(text.starts_with("rank 3 is out of range: the 3 ranks are 0 to 2"), "{text}");
    }
}

#[test]
fn different_numbers_of_ranks_are_named_to_all() {
    for text in messages(connect_all(&create().0, &[(0, 3), (1, 4)], far())) {
        assert!(text.contains("rank 0") && text.contains("rank 1"), "{text}");
        assert!(text.contains("was started with"), "{text}");
    }
}

#[test]
fn invalid_arguments_are_told_without_a_root() {
    let id = create().0;
    for (id, rank, num_ranks) in [(id, 0, 0), (bytemuck::Zeroable::zeroed(), 0, 1), (id, 0, MAX_RANKS + 1)] {
        let error = TcpBootstrap::connect(&id, rank, num_ranks, far()).unwrap_err();
        assert_eq!(error.status, Status::InvalidArgument, "{error}");
    }
}

#[test]
fn rank_that_dies_between_rounds_is_named_and_the_error_stays() {
    let mut members = meet(&create().0, 3);
    gather_all(&mut members, 1);
    members.remove(1);
    thread::scope(|scope| {
        for member in &mut members {
            scope.spawn(move || {
                let error = member.all_gather(b"x", far()).unwrap_err();
                assert_eq!(error.status, Status::Bootstrap);
                let start = "rank 1 of 3 left or died before all-gather round 2";
                assert!(error.message.starts_with(start), "{error}");
                assert_eq!(member.all_gather(b"x", far()).unwrap_err(), error);
            });
        }
    });
}

#[test]
fn rank_that_dies_while_others_wait_is_named() {
    let mut members = meet(&create().0, 3);
    let dying = members.remove(2);
    thread::scope(|scope| {
        for member in &mut members {
            scope.spawn(move || {
                let error = member.all_gather(b"x", far()).unwrap_err();
                assert!(error.message.starts_with("rank 2 of 3 left or died before"), "{error}");
            });
        }
        thread::sleep(Duration::from_millis(50));
        drop(dying);
    });
}

#[test]
fn rank_that_does_not_gather_is_named_at_the_deadline() {
    let mut members = meet(&create().0, 3);
    let start = Instant::now();
    let error = members[0].all_gather(b"x", soon(300)).unwrap_err();
    assert!(start.elapsed() >= Duration::from_millis(300));
    assert!(start.elapsed() < Duration::from_millis(1300), "{:?}", start.elapsed());
    let expected = "ranks 1 and 2 of 3 did not take part in all-gather round 1 within 0.3 s";
    assert!(error.message.starts_with(expected), "{error}");
    // The others hear of it at their next call, however late that is.
    assert_eq!(members[1].all_gather(b"x", far()).unwrap_err(), error);
    thread::sleep(Duration::from_millis(1300));
    assert_eq!(members[2].all_gather(b"x", far()).unwrap_err(), error);
}

#[test]
fn too_long_blob_is_named_to_all() {
    let mut members = meet(&create().0, 2);
    let error = members[1].all_gather(&vec![0; MAX_BLOB_BYTES + 1], far()).unwrap_err();
    assert!(error.message.starts_with("rank 1 gave 67108865 bytes"), "{error}");
    assert_eq!(members[0].all_gather(b"x", far()).unwrap_err(), error);
}

#[test]
fn ended_root_is_told() {
    let (id, root) = create();
    let mut members = meet(&id, 2);
    root.stop();
    let error = members[0].all_gather(b"x", far()).unwrap_err();
    assert!(error.message.starts_with("rank 0 lost the root 127.0.0.1:"), "{error}");
}

#[test]
fn root_that_gives_up_during_the_handshake_is_told_at_the_deadline() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let id = UniqueId::from_address(&listener.local_addr().unwrap().to_string(), "s").unwrap();
    let root = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut greeting = [0; wire::GREETING_BYTES];
        stream.read_exact(&mut greeting).unwrap();
        stream.write_all(&Greeting::new([7; auth::NONCE_BYTES]).encode()).unwrap();
        // Its process has told the ranks that it knew, and exits.
        drop((stream, listener));
    });
    let error = TcpBootstrap::connect(&id, 1, 3, soon(600)).unwrap_err();
    root.join().unwrap();
    assert_eq!(error.status, Status::Bootstrap);
    assert!(error.message.contains("gave up") && error.message.contains("since then"), "{error}");
}
