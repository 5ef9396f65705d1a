//! What a proxy posts, and what it makes of completions, one at a time.

use super::cluster::STUCK;
use super::script::{Script, rank_0};
use crate::net::immediate::Immediate;
use crate::net::transport::{Completion, FaultClass, Write};
use crate::net::{CUT_BYTES, Kind, Stream};
use crate::{Error, Status};

const DESC: Stream = Stream::new(0, Kind::Desc);
const ROWS: Stream = Stream::new(0, Kind::Rows);
const CREDIT: Stream = Stream::new(0, Kind::Credit);
const LATE_NS: u64 = STUCK.as_nanos() as u64 + 1;

/// What comes for link 0 of rank 0.
fn incoming(stream: Stream, number: u16) -> Immediate {
    Immediate { link: 1, incarnation: 0, stream: stream.id() as u8, cut: false, number }
}

fn immediates(writes: &[Write]) -> Vec<Immediate> {
    writes.iter().map(|write| Immediate::decode(write.immediate)).collect()
}

#[test]
fn a_small_message_is_one_write_and_a_large_one_a_write_over_each_nic() {
    let nics = [Script::default(), Script::default()];
    let (mut proxy, port) = rank_0(&nics, 3);
    port.send(2, ROWS, 0, 100).unwrap();
    proxy.turn(0);
    let small = nics[0].lock().writes[0];
    assert_eq!((small.bytes, small.peer.0), (112, 2), "rounded up to 16");
    assert_eq!(small.local_offset, port.layout().staging(2, ROWS, 0));
    assert_eq!(small.remote_offset, port.layout().landing(0, ROWS, 0), "the peer's landing begins at 0");
    let expected = Immediate { link: 103, incarnation: 2, stream: ROWS.id() as u8, cut: false, number: 0 };
    assert_eq!(immediates(&[small]), [expected]);

    port.send(2, ROWS, 1, CUT_BYTES as usize).unwrap();
    proxy.turn(0);
    let (first, second) = (nics[0].lock().writes[1], nics[1].lock().writes[0]);
    assert_eq!((first.bytes, second.bytes), (CUT_BYTES / 2, CUT_BYTES / 2));
    assert_eq!(second.remote_offset - first.remote_offset, CUT_BYTES / 2);
    assert_eq!(second.local_offset - first.local_offset, CUT_BYTES / 2);
    assert_eq!(immediates(&[first, second]), [Immediate { cut: true, number: 1, ..expected }; 2]);

    let stats = port.stats(2);
    assert_eq!((stats.messages, stats.writes, stats.bytes), (2, 3, 112 + CUT_BYTES));
}

#[test]
fn a_slot_is_free_when_every_write_of_its_message_has_completed() {
    let nics = [Script::default(), Script::default()];
    let (mut proxy, port) = rank_0(&nics, 1);
    assert!(port.can_stage(0, ROWS, 0) && port.can_stage(0, ROWS, 7));
    port.send(0, ROWS, 0, CUT_BYTES as usize).unwrap();
    proxy.turn(0);
    assert!(!port.can_stage(0, ROWS, 8));
    nics[1].complete(0);
    proxy.turn(0);
    assert!(!port.can_stage(0, ROWS, 8), "half of it");
    nics[0].complete(0);
    proxy.turn(0);
    assert!(port.can_stage(0, ROWS, 8));
    assert!(!port.can_stage(0, ROWS, 16), "that is for the message after the next");
}

#[test]
fn a_cut_message_lands_with_its_last_write() {
    let nics = [Script::default(), Script::default()];
    let (mut proxy, port) = rank_0(&nics, 1);
    let cut = Immediate { cut: true, ..incoming(ROWS, 3) }.encode();
    nics[1].arrive(cut);
    proxy.turn(0);
    assert_eq!(port.landed(0, ROWS, 3), None);
    nics[0].arrive(cut);
    proxy.turn(0);
    assert!(port.landed(0, ROWS, 3).is_some());
    assert_eq!(port.landed(0, ROWS, 11), None, "the slot's next message");
}

#[test]
fn messages_land_in_any_order_within_two_windows() {
    let nic = Script::default();
    let (mut proxy, port) = rank_0(std::slice::from_ref(&nic), 1);
    for number in [7, 0, 5, 15, 8, 1, 2, 3, 4, 6] {
        nic.arrive(incoming(ROWS, number).encode());
        proxy.turn(0);
        assert!(port.landed(0, ROWS, number.into()).is_some(), "{number}: {:?}", port.failure(0));
    }
}

/// The link fails when this comes, after `before`.
fn refuses(before: &[Immediate], last: Immediate) {
    let nic = Script::default();
    let (mut proxy, port) = rank_0(std::slice::from_ref(&nic), 2);
    before.iter().for_each(|immediate| nic.arrive(immediate.encode()));
    proxy.turn(0);
    assert_eq!(port.failure(0), None);
    nic.arrive(last.encode());
    proxy.turn(0);
    let failure = port.failure(0).unwrap_or_else(|| panic!("{last:?} was accepted"));
    assert_eq!((failure.class, failure.peer), (FaultClass::Protocol, 1));
    assert!(failure.text.contains("rank 1") && failure.text.contains("script"), "{failure:?}");
    assert_eq!(port.failure(1), None, "the other link goes on");
}

#[test]
fn what_the_protocol_excludes_fails_its_link_and_no_other() {
    refuses(&[incoming(ROWS, 0)], incoming(ROWS, 0));
    refuses(&[], incoming(ROWS, 8));
    refuses(&[], incoming(ROWS, 500));
    refuses(&[], incoming(CREDIT, 1));
    refuses(&[], incoming(Stream::new(1, Kind::Rows), 0));
    refuses(&[], Immediate { stream: 127, ..incoming(ROWS, 0) });
}

#[test]
fn what_is_for_nobody_or_for_an_earlier_group_is_dropped() {
    let nic = Script::default();
    let (mut proxy, port) = rank_0(std::slice::from_ref(&nic), 1);
    nic.arrive(Immediate { incarnation: 3, ..incoming(ROWS, 0) }.encode());
    nic.arrive(Immediate { link: 77, ..incoming(ROWS, 0) }.encode());
    proxy.turn(0);
    assert_eq!((port.failure(0), port.landed(0, ROWS, 0)), (None, None));
}

#[test]
fn an_immediate_without_its_upper_half_fails_every_link_and_says_so() {
    let nic = Script::default();
    let (mut proxy, port) = rank_0(std::slice::from_ref(&nic), 2);
    nic.arrive(incoming(ROWS, 0).encode() & 0xFFFF);
    proxy.turn(0);
    for link in 0..2 {
        assert!(port.failure(link).unwrap().text.contains("upper half"), "link {link}");
    }
}

#[test]
fn credit_adds_up_in_any_order_and_is_given_in_quarters() {
    let nic = Script::default();
    let (mut proxy, port) = rank_0(std::slice::from_ref(&nic), 1);
    (0..8).for_each(|seq| port.send(0, ROWS, seq, 16).unwrap());
    proxy.turn(0);
    for freed in [2, 4, 2] {
        nic.arrive(incoming(CREDIT, freed).encode());
    }
    proxy.turn(0);
    assert_eq!(port.credit(0, ROWS), 8);

    nic.lock().writes.clear();
    port.send_credit(0, ROWS, 1).unwrap();
    proxy.turn(0);
    assert!(nic.lock().writes.is_empty(), "less than a quarter");
    port.send_credit(0, ROWS, 3).unwrap();
    port.send_credit(0, ROWS, 8).unwrap();
    proxy.turn(0);
    let writes = nic.lock().writes.clone();
    let numbers: Vec<u16> = immediates(&writes).iter().map(|immediate| immediate.number).collect();
    assert_eq!((numbers, writes[0].bytes), (vec![3, 5], 0));
    assert_eq!(port.send_credit(0, ROWS, 17).unwrap_err().status, Status::Internal);
}

#[test]
fn a_peer_whose_posts_must_wait_holds_up_nobody_else() {
    let nic = Script::default();
    let (mut proxy, port) = rank_0(std::slice::from_ref(&nic), 3);
    nic.lock().busy.insert(1);
    for seq in 0..3 {
        (0..3).for_each(|link| port.send(link, DESC, seq, 16).unwrap());
    }
    (0..3).for_each(|link| port.send_credit(link, ROWS, 4).unwrap());
    for _ in 0..4 {
        proxy.turn(0);
    }
    let to = |peer| nic.lock().writes.iter().filter(|write| write.peer.0 == peer).count();
    assert_eq!((to(0), to(1), to(2)), (4, 0, 4));
    // It goes on in time ...
    nic.lock().busy.clear();
    proxy.turn(LATE_NS - 10);
    assert_eq!((to(0), to(1), to(2)), (4, 4, 4));
    assert!(port.stats(1).again > 0);
    // ... or fails alone.
    nic.lock().busy.insert(1);
    port.send(1, ROWS, 0, 16).unwrap();
    proxy.turn(LATE_NS);
    proxy.turn(2 * LATE_NS - 1);
    assert_eq!(port.failure(1), None);
    proxy.turn(2 * LATE_NS + 1);
    let failure = port.failure(1).unwrap();
    assert_eq!((failure.class, failure.peer), (FaultClass::Stuck, 2));
    assert!(failure.text.contains("no write was taken"), "{failure:?}");
    assert_eq!((port.failure(0), port.failure(2)), (None, None));
    // Its slots are dead; sending to it is no error and has no effect.
    port.send(1, ROWS, 1, 16).unwrap();
    proxy.turn(3 * LATE_NS);
    assert_eq!(to(1), 4);
}

#[test]
fn limits_hold_from_the_next_turn_on() {
    let nics = [Script::default(), Script::default()];
    let (mut proxy, port) = rank_0(&nics, 1);
    port.limits().set_nics(0b10);
    (0..2).for_each(|seq| port.send(0, ROWS, seq, 70_000).unwrap());
    proxy.turn(0);
    let count = |nic: usize| nics[nic].lock().writes.len();
    assert_eq!((count(0), count(1)), (0, 2), "not over NIC 0, and so not cut");
    port.limits().set_nics(0);
    port.limits().set_bytes_in_flight(150_000);
    (2..8).for_each(|seq| port.send(0, ROWS, seq, 70_000).unwrap());
    proxy.turn(0);
    assert_eq!((count(0), count(1)), (1, 3), "one more until 150 000 bytes are exceeded");
    proxy.turn(0);
    assert_eq!(count(0), 1);
    (0..2).for_each(|write| nics[1].complete(write));
    proxy.turn(0);
    proxy.turn(0);
    assert_eq!((count(0), count(1)), (3, 5), "as many as completed");
}

#[test]
fn a_failed_write_fails_its_link_with_the_networks_words() {
    let nic = Script::default();
    let (mut proxy, port) = rank_0(std::slice::from_ref(&nic), 2);
    (0..2).for_each(|link| port.send(link, DESC, 0, 16).unwrap());
    proxy.turn(0);
    let context = Some(nic.lock().writes[1].context);
    let text = "error 13: it does not respond".to_string();
    nic.lock().completions.push(Completion::Failed { context, class: FaultClass::PeerDead, text });
    proxy.turn(0);
    let failure = port.failure(1).unwrap();
    assert_eq!((failure.class, failure.peer), (FaultClass::PeerDead, 2));
    for part in ["rank 2", "NIC script", "error 13"] {
        assert!(failure.text.contains(part), "{part} is not in {failure:?}");
    }
    assert_eq!(port.failure(0), None);
    // A peer that died while it wrote here is no failure of any link that is known.
    let (class, text) = (FaultClass::PeerDead, String::new());
    nic.lock().completions.push(Completion::Failed { context: None, class, text });
    proxy.turn(0);
    assert_eq!(port.failure(0), None);
}

#[test]
fn a_lost_nic_fails_every_link_and_later_ports_are_refused() {
    let nic = Script::default();
    let (mut proxy, port) = rank_0(std::slice::from_ref(&nic), 2);
    nic.lock().polled = Some(Error::new(Status::System, "the queue overflowed"));
    proxy.turn(0);
    for link in 0..2 {
        assert!(port.failure(link).unwrap().text.contains("the queue overflowed"), "link {link}");
    }
    let (_, bells) = super::cluster::bells(1);
    let shape = super::cluster::shape(1, 1);
    let refused = proxy.open(crate::net::PortSpec { shape, rank: 0, peers: vec![1], bells });
    assert!(refused.unwrap_err().message.contains("is lost"));
}

#[test]
fn more_than_the_slots_allow_is_an_error_of_the_caller() {
    let nic = Script::default();
    let (mut proxy, port) = rank_0(std::slice::from_ref(&nic), 1);
    let error = port.send(0, DESC, 0, 701).unwrap_err();
    assert!(error.message.contains("701") && error.message.contains("700"), "{error}");
    // The ring has room for what credits allow (3 of a window, rounded up to 4).
    (0..4).for_each(|seq| port.send(0, DESC, seq, 16).unwrap());
    assert!(port.send(0, DESC, 4, 16).unwrap_err().message.contains("without credit"));
    // Message 3 overwrites the slot of message 0, which is in flight.
    proxy.turn(0);
    assert!(port.failure(0).unwrap().text.contains("cannot be carried out"));
}
