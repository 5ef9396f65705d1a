//! Random messages of all kinds between all ranks, every byte and every number checked.

use super::cluster::{Cluster, link_to};
use crate::net::sim::{POISON, Rng, SimOptions};
use crate::net::{Kind, Port, Stream};

/// The bytes of a message follow from who sends it and its number.
fn fill(slot: *mut u8, bytes: usize, key: u64) {
    let mut rng = Rng::new(key);
    for at in (0..bytes).step_by(8) {
        let word = rng.draw().to_le_bytes();
        // SAFETY: the slot has these bytes, and the test's rules say that it is free.
        unsafe { std::ptr::copy_nonoverlapping(word.as_ptr(), slot.add(at), (bytes - at).min(8)) };
    }
}

fn check(slot: *const u8, bytes: usize, key: u64, what: &str) {
    let mut expected = vec![0; bytes];
    fill(expected.as_mut_ptr(), bytes, key);
    // SAFETY: the slot has these bytes, and its message has landed.
    let found = unsafe { std::slice::from_raw_parts(slot, bytes) };
    if let Some(at) = (0..bytes).find(|&at| found[at] != expected[at]) {
        let poison = if found[at] == POISON { ", which is poison" } else { "" };
        panic!("{what}: byte {at} of {bytes} is {:#x}{poison}, not {:#x}", found[at], expected[at]);
    }
}

fn key(from: usize, to: usize, stream: Stream, seq: u64) -> u64 {
    (from as u64) << 48 ^ (to as u64) << 40 ^ (stream.id() as u64) << 32 ^ seq
}

/// How long message `seq` is: from nothing to the slot's size, sometimes over the limit for cutting.
fn length(port: &Port, key: u64, stream: Stream) -> usize {
    let mut rng = Rng::new(key ^ 0xABCD);
    let longest = port.layout().max_bytes(stream);
    match rng.below(4) {
        0 => 0,
        1 => longest as usize,
        2 => rng.below(200) as usize,
        _ => rng.below(longest + 1) as usize,
    }
}

/// One direction of one stream of one link, as sender and receiver see it.
#[derive(Default)]
pub(super) struct Flow {
    pub(super) sent: u64,
    /// Messages before this one were all consumed.
    pub(super) consumed: u64,
    /// Those behind it that were, by number modulo 64.
    early: u64,
}

pub(super) struct Traffic {
    num_lanes: usize,
    /// Messages of each flow.
    quota: u64,
    rng: Rng,
    /// `[from][to][stream id]`
    flows: Vec<Vec<Vec<Flow>>>,
    pub(super) stopped: Vec<bool>,
}

const KINDS: [Kind; 4] = [Kind::Desc, Kind::Rows, Kind::Request, Kind::Response];

impl Traffic {
    pub(super) fn new(seed: u64, num_ranks: usize, num_lanes: usize, quota: u64) -> Traffic {
        let flows = || (0..Stream::COUNT).map(|_| Flow::default()).collect();
        let to = || (0..num_ranks).map(|_| flows()).collect();
        Traffic {
            num_lanes,
            quota,
            rng: Rng::new(seed),
            flows: (0..num_ranks).map(|_| to()).collect(),
            stopped: vec![false; num_ranks],
        }
    }

    fn num_ranks(&self) -> usize {
        self.flows.len()
    }

    fn pairs(&self) -> Vec<(usize, usize)> {
        let all = 0..self.num_ranks();
        all.clone().flat_map(|from| all.clone().map(move |to| (from, to))).filter(|(a, b)| a != b).collect()
    }

    /// True when every message between ranks that were not stopped was consumed.
    pub(super) fn is_done(&self) -> bool {
        self.pairs().into_iter().filter(|&(from, to)| !self.stopped[from] && !self.stopped[to]).all(
            |(from, to)| {
                let of = |lane: usize, kind| &self.flows[from][to][Stream::new(lane, kind).id()];
                (0..self.num_lanes)
                    .all(|lane| KINDS.iter().all(|&kind| of(lane, kind).consumed == self.quota))
            },
        )
    }

    pub(super) fn unfinished(&self) -> String {
        let mut text = String::new();
        for (from, to) in self.pairs() {
            for lane in 0..self.num_lanes {
                for kind in KINDS {
                    let flow = &self.flows[from][to][Stream::new(lane, kind).id()];
                    if flow.consumed < self.quota {
                        text += &format!(
                            "{from}→{to} {lane} {kind:?}: {} sent {} consumed; ",
                            flow.sent, flow.consumed
                        );
                    }
                }
            }
        }
        text
    }

    /// A rank does one random thing.
    pub(super) fn act(&mut self, cluster: &Cluster) {
        let pairs = self.pairs();
        let (from, to) = pairs[self.rng.below(pairs.len() as u64) as usize];
        let stream = Stream::new(
            self.rng.below(self.num_lanes as u64) as usize,
            KINDS[self.rng.below(KINDS.len() as u64) as usize],
        );
        if self.rng.below(2) == 0 {
            if !self.stopped[from] {
                self.send(cluster.port(from), from, to, stream);
            }
        } else if !self.stopped[to] {
            self.receive(cluster.port(to), from, to, stream);
        }
    }

    /// True if the receiver has freed the slot of the next message, as the sender can know.
    fn is_free(&self, port: &Port, from: usize, to: usize, stream: Stream) -> bool {
        let window = port.layout().window(stream);
        let seq = self.flows[from][to][stream.id()].sent;
        let back = |kind| &self.flows[to][from][Stream::new(stream.lane(), kind).id()];
        match stream.kind() {
            Kind::Rows => port.credit(link_to(from, to), stream) + window > seq,
            // A call begins when the one before it has been read of the peer, who had then read the one before that.
            Kind::Desc => back(Kind::Desc).consumed >= seq,
            Kind::Request => back(Kind::Response).consumed + window > seq,
            Kind::Response => back(Kind::Request).consumed > seq,
            Kind::Error | Kind::Credit | Kind::Probe => false,
        }
    }

    fn send(&mut self, port: &Port, from: usize, to: usize, stream: Stream) {
        let (link, seq) = (link_to(from, to), self.flows[from][to][stream.id()].sent);
        if seq == self.quota || !self.is_free(port, from, to, stream) || !port.can_stage(link, stream, seq) {
            return;
        }
        let key = key(from, to, stream, seq);
        let bytes = length(port, key, stream);
        fill(port.slot_staging(link, stream, seq), bytes, key);
        port.send(link, stream, seq, bytes).unwrap();
        self.flows[from][to][stream.id()].sent += 1;
    }

    /// Consumes a message that has landed: any one, not only the next.
    fn receive(&mut self, port: &Port, from: usize, to: usize, stream: Stream) {
        let link = link_to(to, from);
        let flow = &mut self.flows[from][to][stream.id()];
        let window = port.layout().window(stream);
        let seq = flow.consumed + self.rng.below(window);
        if flow.early >> (seq % 64) & 1 != 0 {
            return;
        }
        let Some(slot) = port.landed(link, stream, seq) else { return };
        assert!(seq < flow.sent, "{from}→{to} {stream:?}: {seq} landed and was not sent");
        let key = key(from, to, stream, seq);
        check(slot, length(port, key, stream), key, &format!("{from}→{to} {stream:?} {seq}"));
        flow.early |= 1 << (seq % 64);
        while flow.early >> (flow.consumed % 64) & 1 != 0 {
            flow.early &= !(1 << (flow.consumed % 64));
            flow.consumed += 1;
        }
        if stream.kind() == Kind::Rows {
            port.send_credit(link, stream, flow.consumed).unwrap();
        }
    }
}

/// Runs traffic to its end, a random thing at a time.
pub(super) fn run(cluster: &mut Cluster, traffic: &mut Traffic, what: &str) {
    let mut chance = Rng::new(traffic.rng.draw());
    let mut idle = 0;
    while !traffic.is_done() {
        for _ in 0..chance.below(8) {
            traffic.act(cluster);
        }
        let mut moved = false;
        for rank in 0..cluster.ranks.len() {
            if chance.below(3) == 0 {
                moved |= cluster.ranks[rank].proxy.turn(cluster.net.now_ns());
            }
        }
        for _ in 0..chance.below(6) {
            moved |= cluster.net.step();
        }
        idle = if moved { 0 } else { idle + 1 };
        if idle > 50 {
            cluster.net.pass(100_000);
        }
        assert!(idle < 200_000, "{what}: stuck: {}", traffic.unfinished());
        if idle % 1000 == 0 {
            assert_links_live(cluster, traffic, what);
        }
    }
    assert_links_live(cluster, traffic, what);
}

/// No link between ranks that were not stopped has failed.
fn assert_links_live(cluster: &Cluster, traffic: &Traffic, what: &str) {
    for rank in (0..cluster.ranks.len()).filter(|&rank| !traffic.stopped[rank]) {
        for link in 0..cluster.ranks.len() - 1 {
            let peer = cluster.port(rank).peer(link);
            let failure = cluster.port(rank).failure(link);
            assert!(failure.is_none() || traffic.stopped[peer], "{what}: rank {rank}: {failure:?}");
        }
    }
}

fn random(seed: u64, quota: u64) {
    let mut rng = Rng::new(seed);
    let num_ranks = 2 + rng.below(4) as usize;
    let num_nics: Vec<usize> = (0..num_ranks).map(|_| 1 + rng.below(3) as usize).collect();
    let num_lanes = 1 + rng.below(2) as usize;
    let options = SimOptions {
        seed: rng.draw(),
        tx_depth: [8, 64, 1024][rng.below(3) as usize],
        mtu: [512, 8192][rng.below(2) as usize],
        again_one_in: [0, 0, 2, 10][rng.below(4) as usize],
        reverse_chunks: rng.below(2) == 0,
        hold_first: rng.below(4) == 0,
        slow_nic: (rng.below(4) == 0).then_some((0, 10_000_000)),
        ..SimOptions::default()
    };
    let what = format!("seed {seed}: {num_nics:?} NICs, {num_lanes} lanes, {options:?}");
    let mut cluster = Cluster::connected(options, &num_nics, num_lanes);
    let mut traffic = Traffic::new(rng.draw(), num_ranks, num_lanes, quota);
    run(&mut cluster, &mut traffic, &what);
}

#[test]
fn random_traffic_arrives_to_the_byte_whatever_the_order() {
    let seeds = crate::net::tests::seeds(30);
    for seed in seeds {
        println!("seed {seed}");
        random(seed, 40);
    }
}

#[test]
fn numbers_wrap_many_times() {
    let mut cluster = Cluster::connected(SimOptions { seed: 7, ..SimOptions::default() }, &[2, 2], 1);
    let mut traffic = Traffic::new(7, 2, 1, 4000);
    run(&mut cluster, &mut traffic, "4000 messages a stream: 512 numbers wrap 7 times");
    let stats = cluster.net.stats();
    assert!(stats.overtaken > 1000, "the network reordered: {stats:?}");
}

#[test]
#[ignore = "slow"]
fn slow_random_traffic_over_many_networks() {
    for seed in crate::net::tests::seeds(400) {
        println!("seed {seed}");
        random(seed, 12);
    }
}
