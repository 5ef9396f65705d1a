//! The proxy of `ep-core` over NICs of this crate: what groups will do. Ranks are threads with a proxy and two NICs
//! each.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use ep_core::mem::{Mapping, Words};
use ep_core::net::{
    Bell, Closed, Kind, Port, PortSpec, ProxyHandle, ProxyOptions, Shape, Slots, Stream, Transport,
};
use ep_fabric::Nic;

use crate::alone::assert_runs;
use crate::cell::cells;
use crate::rank::selection;

const RANKS: usize = 3;
const MESSAGES: u64 = 200;
const DESC: Stream = Stream::new(0, Kind::Desc);
const ROWS: Stream = Stream::new(0, Kind::Rows);
/// Enough to be cut over both NICs.
const ROWS_BYTES: usize = 150_000;
const ROWS_WINDOW: u64 = 8;

#[test]
fn ports_exchange_messages_and_credits_over_two_nics() {
    for cell in cells() {
        assert_runs(&cell, "ports", &[]);
    }
}

fn far() -> Instant {
    Instant::now() + Duration::from_secs(40)
}

fn open(rank: usize) -> Port {
    let (selection, settings) = selection();
    let nic =
        |nic_idx| Box::new(Nic::open(&selection, nic_idx, &settings).expect("opens")) as Box<dyn Transport>;
    let proxy = ProxyHandle::start(vec![nic(0), nic(1)], ProxyOptions::default()).expect("a proxy");
    let (segment, _) = Mapping::create(4096).expect("memory");
    let bell = Bell { segment: Words::new(Arc::new(segment)), bell: 0, sleeping: 4 };
    let shape = Shape {
        num_links: RANKS - 1,
        num_lanes: 1,
        desc: Slots { window: 3, bytes: 700 },
        rows: Slots { window: ROWS_WINDOW as u32, bytes: ROWS_BYTES as u32 },
        request: Slots { window: 4, bytes: 512 },
        response: Slots { window: 4, bytes: 4096 },
        error_bytes: 288,
    };
    let peers = (0..RANKS).filter(|&peer| peer != rank).collect();
    proxy.open(PortSpec { shape, rank, peers, bells: vec![bell] }, far()).expect("a port")
}

pub(crate) fn scene() {
    let ports: Vec<Port> = (0..RANKS).map(open).collect();
    let offers: Vec<Vec<u8>> = ports.iter().map(|port| port.offer().to_vec()).collect();
    for (rank, port) in ports.iter().enumerate() {
        let offers = (0..RANKS).filter(|&peer| peer != rank).map(|peer| offers[peer].clone()).collect();
        assert_eq!(port.connect(offers, far()).expect("connects"), None);
    }
    let probes: Vec<_> = ports.iter().map(|port| port.begin_probe(far())).collect();
    probes.into_iter().for_each(|probe| probe.wait(far(), "probe").expect("the links work"));
    thread::scope(|scope| {
        for (rank, port) in ports.iter().enumerate() {
            scope.spawn(move || exchange(rank, port));
        }
    });
    for port in ports {
        assert_eq!(port.close(far()), Ok(Closed::Drained));
    }
}

fn wait(port: &Port, link: usize, what: &str, done: impl Fn() -> bool) {
    let deadline = far();
    while !done() {
        assert_eq!(port.failure(link), None);
        assert!(Instant::now() < deadline, "{what} of link {link} did not come");
        thread::yield_now();
    }
}

/// What each byte of message `seq` of a rank is, from `at` on.
fn content(rank: usize, seq: u64, at: usize) -> u8 {
    (at as u64 * 7 + seq * 13 + rank as u64 * 101 + 1) as u8
}

fn exchange(rank: usize, port: &Port) {
    for seq in 0..MESSAGES {
        for link in 0..RANKS - 1 {
            wait(port, link, "credit", || {
                port.can_stage(link, ROWS, seq) && seq < port.credit(link, ROWS) + ROWS_WINDOW
            });
            wait(port, link, "a slot", || port.can_stage(link, DESC, seq));
            // Rows of odd messages are short, so that both ways to send them are taken.
            let bytes = if seq % 2 == 0 { ROWS_BYTES } else { 1024 };
            let slot = port.slot_staging(link, ROWS, seq);
            // SAFETY: the slot has `ROWS_BYTES` bytes, and is free.
            let rows = unsafe { std::slice::from_raw_parts_mut(slot, bytes) };
            rows.iter_mut().enumerate().for_each(|(at, byte)| *byte = content(rank, seq, at));
            port.send(link, ROWS, seq, bytes).expect("a good message");
            // SAFETY: the slot has 700 bytes, and is free.
            unsafe { port.slot_staging(link, DESC, seq).cast::<u64>().write(bytes as u64) };
            port.send(link, DESC, seq, 8).expect("a good message");
        }
        for link in 0..RANKS - 1 {
            wait(port, link, "a descriptor", || port.landed(link, DESC, seq).is_some());
            wait(port, link, "rows", || port.landed(link, ROWS, seq).is_some());
            let desc = port.landed(link, DESC, seq).expect("landed");
            // SAFETY: the message has landed and has 8 bytes.
            let bytes = unsafe { desc.cast::<u64>().read() } as usize;
            let rows = port.landed(link, ROWS, seq).expect("landed");
            // SAFETY: the message has landed and has that many bytes; it stays until it is freed below.
            let rows = unsafe { std::slice::from_raw_parts(rows, bytes) };
            let wrong =
                rows.iter().enumerate().find(|&(at, &byte)| byte != content(port.peer(link), seq, at));
            assert_eq!(wrong, None, "message {seq} from rank {}", port.peer(link));
            port.send_credit(link, ROWS, seq + 1).expect("consumed in order");
        }
    }
}
