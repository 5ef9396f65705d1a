//! What two ranks do, each scene with the test that runs it.

use std::time::{Duration, Instant};
use std::{env, thread};

use ep_core::Status;
use ep_fabric::transport::{FaultClass, Posted, RegionId, RemoteRegion, Transport, Write};

use crate::alone;
use crate::cell::{SCENE, both, both_with};
use crate::rank::{POISON, Rank};

/// The process of one rank; started by [`crate::cell`] only.
#[test]
#[ignore = "a part of the other tests"]
fn rank() {
    match env::var(SCENE).expect("set by the parent").as_str() {
        "sizes" => sizes(),
        "many" => many(),
        "few_slots" => few_slots(),
        "sleep" => sleep(),
        "wrong_key" => wrong_key(),
        "bounds" => bounds(),
        "rank_1_is_killed" => rank_1_is_killed(),
        "again_connected" => again_connected(),
        "two_nics" => two_nics(),
        other => alone::scene(other),
    }
}

/// Bytes of the largest write here.
const LARGE: usize = 64 << 20;

#[test]
fn every_size_arrives_with_all_bits_of_its_immediate() {
    both("sizes");
}

fn sizes() {
    let mut rank = Rank::meet(0, LARGE);
    let sizes = [0, 1, 7, 8, 4095, 65536, (1 << 20) + 1, LARGE];
    let content = |at: usize, byte: usize| (byte * 31 + (byte >> 12) + at * 7 + 1) as u8;
    for (at, &size) in sizes.iter().enumerate() {
        for sender in 0..2 {
            let immediate = 0xffff_fff0 - at as u32;
            if rank.number == sender {
                rank.memory().iter_mut().enumerate().for_each(|(byte, value)| *value = content(at, byte));
                rank.barrier();
                let write = rank.write_of(0, size as u64, immediate, at as u64);
                rank.post(&write);
                rank.poll_until("sent", |rank| rank.sent.len() == 1);
                assert_eq!(rank.sent.pop(), Some(at as u64));
            } else {
                rank.memory().fill(POISON);
                rank.barrier();
                rank.poll_until("arrived", |rank| rank.arrived.len() == 1);
                assert_eq!(rank.arrived.pop(), Some(immediate));
                let wrong =
                    rank.memory()[..size].iter().enumerate().find(|&(byte, &got)| got != content(at, byte));
                assert_eq!(wrong, None, "in a write of {size} bytes");
                assert!(rank.memory()[size..].iter().all(|&byte| byte == POISON), "beyond {size} bytes");
            }
            rank.barrier();
        }
    }
    assert_eq!(rank.failed, []);
}

/// Writes from each side at once.
const MANY: usize = 20_000;
const CELL: usize = 64;

#[test]
fn many_writes_in_both_directions_arrive_once_each() {
    both("many");
}

#[test]
fn four_slots_are_enough_for_many_writes() {
    both_with("few_slots", &[("EP_FABRIC_TX_DEPTH", "4")]);
}

fn many() {
    let again = flood(MANY);
    assert!(again > 0, "the depth was never reached");
}

fn few_slots() {
    let again = flood(2000);
    assert!(again > 400, "four slots were full {again} times only");
}

/// Both ranks write `count` cells to the other; returns how often there was no room.
fn flood(count: usize) -> u64 {
    let half = count * CELL;
    let mut rank = Rank::meet(0, 2 * half);
    let own = rank.number as u8 + 1;
    for (cell, bytes) in rank.memory()[..half].chunks_exact_mut(CELL).enumerate() {
        bytes.fill((cell % 251) as u8 ^ own);
    }
    rank.barrier();
    for cell in 0..count {
        let mut write = rank.write_of((cell * CELL) as u64, CELL as u64, cell as u32, !(cell as u64));
        write.remote_offset += half as u64;
        rank.post(&write);
    }
    rank.poll_until("all", |rank| rank.sent.len() == count && rank.arrived.len() == count);
    rank.barrier();
    rank.sent.sort_unstable_by_key(|&context| !context);
    assert!(rank.sent.iter().enumerate().all(|(cell, &context)| context == !(cell as u64)));
    rank.arrived.sort_unstable();
    assert!(rank.arrived.iter().enumerate().all(|(cell, &immediate)| immediate == cell as u32));
    let other = 2 - rank.number as u8;
    for (cell, bytes) in rank.memory()[half..].chunks_exact(CELL).enumerate() {
        assert!(bytes.iter().all(|&byte| byte == (cell % 251) as u8 ^ other), "cell {cell}: {bytes:?}");
    }
    assert_eq!(rank.failed, []);
    rank.again
}

#[test]
fn a_sleeper_is_woken_by_an_arrival() {
    both("sleep");
}

fn sleep() {
    let mut rank = Rank::meet(0, 4096);
    if rank.nic.wait_fd().is_none() {
        assert!(rank.nic.limits().name.starts_with("net "), "{} cannot be slept on", rank.nic.limits().name);
        assert!(!rank.nic.may_sleep());
        return;
    }
    // The first write also makes the connection, for which both sides must poll.
    for round in 0..5u32 {
        rank.barrier();
        if rank.number == 0 {
            thread::sleep(Duration::from_millis(if round == 0 { 0 } else { 100 }));
            let write = rank.write_of(0, 64, round, 0);
            rank.post(&write);
            rank.poll_until("sent", |rank| rank.sent.len() > round as usize);
        } else if round == 0 {
            rank.poll_until("arrived", |rank| !rank.arrived.is_empty());
        } else {
            let started = Instant::now();
            let mut naps = 0;
            while rank.arrived.len() <= round as usize {
                rank.poll();
                if rank.arrived.len() <= round as usize && rank.nic.may_sleep() {
                    naps += 1;
                    assert!(nap(&rank), "nothing woke the sleeper in round {round}");
                }
                assert!(started.elapsed() < Duration::from_secs(60), "round {round}: {naps} naps");
            }
            assert!((1..50).contains(&naps), "{naps} naps for one arrival");
        }
    }
    rank.barrier();
}

/// Sleeps on the NIC's descriptor; false if nothing came for 20 s.
fn nap(rank: &Rank) -> bool {
    let fd = rank.nic.wait_fd().expect("asked before");
    let mut poll =
        libc::pollfd { fd: std::os::fd::AsRawFd::as_raw_fd(&fd), events: libc::POLLIN, revents: 0 };
    // SAFETY: one element, as it is told.
    (unsafe { libc::poll(&mut poll, 1, 20_000) }) == 1
}

#[test]
fn a_wrong_key_changes_no_memory_and_hangs_nobody() {
    both("wrong_key");
}

fn wrong_key() {
    let mut rank = Rank::meet(0, 4096);
    rank.barrier();
    if rank.number == 0 {
        rank.memory().fill(1);
        let mut write = rank.write_of(0, 4096, 7, 7);
        write.remote.key ^= 0x5555;
        rank.post(&write);
        // The provider tells of it, or ends the connection, or says nothing at all: all three are seen.
        let deadline = Instant::now() + Duration::from_secs(2);
        while rank.failed.is_empty() && rank.sent.is_empty() && Instant::now() < deadline {
            rank.poll();
        }
        println!("a wrong key: {:?}, sent {:?}", rank.failed, rank.sent);
    }
    rank.barrier();
    if rank.number == 1 {
        assert!(!rank.arrived.contains(&7), "a write with a wrong key was announced");
        assert!(rank.memory().iter().all(|&byte| byte == POISON), "a write with a wrong key landed");
    }
}

#[test]
fn what_lies_out_of_bounds_is_refused_where_it_is_posted() {
    both("bounds");
}

fn bounds() {
    let mut rank = Rank::meet(0, 4096);
    let good = rank.write_of(0, 4096, 0, 0);
    let remote = RemoteRegion { bytes: 4095, ..good.remote };
    let bad: [(Write, &str); 7] = [
        (Write { bytes: 4097, ..good }, "4097 bytes"),
        (Write { local_offset: 1, ..good }, "offset 1 of 4096"),
        (Write { remote_offset: 1, ..good }, "offset 1 of 4096"),
        (Write { remote, ..good }, "4095"),
        (Write { remote_offset: u64::MAX, ..good }, "registered there"),
        (Write { peer: ep_fabric::transport::PeerId(9), ..good }, "peer 9 is not connected"),
        (Write { local: RegionId(5), ..good }, "region 5 is not registered"),
    ];
    for (write, part) in bad {
        let error = rank.nic.write(&write).expect_err(part);
        assert_eq!(error.status, Status::InvalidArgument);
        assert!(error.message.contains(part), "{part} is not in {error}");
    }
    let address = rank.nic.address();
    let error = rank.nic.connect(&address[1..]).unwrap_err();
    assert_eq!(error.status, Status::Bootstrap, "{error}");
    let local = rank.local;
    rank.nic.deregister(local).expect("registered");
    assert!(rank.nic.deregister(local).is_err());
    assert!(rank.nic.write(&good).unwrap_err().message.contains("not registered"));
}

#[test]
fn a_killed_peer_is_a_failure_of_the_writes_to_it() {
    both("rank_1_is_killed");
}

fn rank_1_is_killed() {
    let mut rank = Rank::meet(0, 1 << 20);
    let write = rank.write_of(0, 1 << 20, 1, 0);
    rank.post(&write);
    rank.poll_until("met", |rank| !rank.sent.is_empty() && !rank.arrived.is_empty());
    rank.barrier();
    if rank.number == 1 {
        // SAFETY: ends this process, as the scene wants.
        unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
    }
    let started = Instant::now();
    let mut context = 1;
    while rank.failed.is_empty() {
        let write = Write { context, ..write };
        match rank.nic.write(&write) {
            Ok(Posted::Yes) => context += 1,
            Ok(Posted::Again) => {}
            Err(error) => panic!("a dead peer is no defect of this side: {error}"),
        }
        rank.poll();
        assert!(
            started.elapsed() < Duration::from_secs(15),
            "{} writes to a dead peer, none failed",
            context
        );
    }
    println!("{:?} after {:?}", rank.failed, started.elapsed());
    for (context, class, text) in &rank.failed {
        assert!(context.is_some_and(|context| context > 0), "{text}");
        assert_eq!(*class, FaultClass::PeerDead, "{text}");
    }
}

#[test]
fn a_peer_that_was_forgotten_can_be_connected_again() {
    both("again_connected");
}

fn again_connected() {
    let mut rank = Rank::meet(0, 4096);
    let own = rank.nic.address();
    for round in 1..4 {
        let write = rank.write_of(0, 64, round, u64::from(round));
        rank.post(&write);
        rank.poll_until("both", |rank| {
            rank.sent.len() == round as usize && rank.arrived.len() == round as usize
        });
        // A second name for an address that is in use, and none for the first.
        let itself = rank.nic.connect(&own).expect("the own address is one");
        let twice = rank.nic.connect(&own).expect("the own address is one");
        assert_ne!(itself, twice);
        rank.nic.disconnect(itself);
        assert!(rank.nic.write(&Write { peer: itself, ..write }).is_err());
        rank.nic.disconnect(twice);
        rank.barrier();
    }
    assert_eq!(rank.failed, []);
}

#[test]
fn two_nics_of_a_process_work_side_by_side() {
    both("two_nics");
}

fn two_nics() {
    let mut nics = [Rank::meet(0, 4096), Rank::meet(1, 4096)];
    for (at, rank) in nics.iter_mut().enumerate() {
        rank.memory().fill(at as u8);
        let mut write = rank.write_of(0, 2048, at as u32, 0);
        write.remote_offset = 2048;
        rank.post(&write);
    }
    for (at, rank) in nics.iter_mut().enumerate() {
        rank.poll_until("both", |rank| rank.sent.len() == 1 && rank.arrived.len() == 1);
        assert_eq!(rank.arrived, [at as u32]);
        assert!(rank.memory().iter().all(|&byte| byte == at as u8));
    }
    nics[0].barrier();
    nics[1].barrier();
}
