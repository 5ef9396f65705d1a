//! The simulated network itself: it must be as unfriendly as it claims.

use crate::Status;
use crate::mem::Mapping;
use crate::net::Transport;
use crate::net::sim::{POISON, SimNet, SimNic, SimOptions};
use crate::net::transport::{
    Completion, FaultClass, PeerId, Posted, Region, RegionId, Registered, RemoteRegion, Write,
};

/// Two NICs that know each other, with memory.
struct Pair {
    net: SimNet,
    nics: [SimNic; 2],
    regions: [Registered; 2],
    memory: [Mapping; 2],
}

const BYTES: usize = 1 << 20;

fn pair(options: SimOptions) -> Pair {
    let net = SimNet::stepped(options);
    let mut nics = [net.nic(), net.nic()];
    let memory = [1, 2].map(|byte| {
        let (mapping, _) = Mapping::create(BYTES).unwrap();
        // SAFETY: the mapping has these bytes, and nobody else has it yet.
        unsafe { mapping.base().write_bytes(byte, BYTES) };
        mapping
    });
    let addresses = [nics[0].address(), nics[1].address()];
    let mut regions = Vec::new();
    for (index, nic) in nics.iter_mut().enumerate() {
        assert_eq!(nic.connect(&addresses[1 - index]).unwrap(), PeerId(0));
        // SAFETY: the memory lives as long as the pair, and is read only after a write has landed.
        let region = unsafe { Region::new(memory[index].base(), BYTES as u64, None) };
        regions.push(nic.register(&region).unwrap());
    }
    Pair { net, nics, regions: [regions[0], regions[1]], memory }
}

impl Pair {
    fn write(&self, context: u64, bytes: u64) -> Write {
        Write {
            peer: PeerId(0),
            local: self.regions[0].id,
            local_offset: 0,
            remote: self.regions[1].remote,
            remote_offset: 0,
            bytes,
            immediate: context as u32,
            context,
        }
    }

    /// A byte of NIC 1's memory.
    fn byte(&self, at: usize) -> u8 {
        assert!(at < BYTES);
        // SAFETY: inside the mapping; the network runs in this thread only, so nothing changes meanwhile.
        unsafe { self.memory[1].base().add(at).read_volatile() }
    }

    fn all(&self, bytes: usize, value: u8) -> bool {
        (0..bytes).all(|at| self.byte(at) == value)
    }

    fn any(&self, bytes: usize, value: u8) -> bool {
        (0..bytes).any(|at| self.byte(at) == value)
    }

    fn poll(&mut self, nic: usize) -> Vec<Completion> {
        let mut out = Vec::with_capacity(4096);
        self.nics[nic].poll(&mut out).unwrap();
        out
    }

    /// Everything happens; what NIC 0 is told.
    fn outcome(&mut self, write: Write) -> Completion {
        assert_eq!(self.nics[0].write(&write), Ok(Posted::Yes));
        while self.net.step() {}
        self.poll(0).remove(0)
    }
}

fn class(completion: Completion) -> (FaultClass, String) {
    match completion {
        Completion::Failed { context: Some(9), class, text } => (class, text),
        other => panic!("{other:?} is no failure of write 9"),
    }
}

#[test]
fn a_write_lands_whole_before_its_immediate_and_the_immediate_before_its_completion() {
    let mut pair = pair(SimOptions::default());
    let write = pair.write(9, 100_000);
    pair.nics[0].write(&write).unwrap();
    assert!(pair.all(100_000, POISON), "poisoned when posted");
    let mut partial = false;
    while pair.poll(1).is_empty() {
        assert!(pair.poll(0).is_empty(), "complete before it landed");
        partial |= pair.any(100_000, 1) && pair.any(100_000, POISON);
        assert!(pair.net.step());
    }
    assert!(partial, "chunks come one at a time");
    assert!(pair.all(100_000, 1));
    assert_eq!(pair.byte(100_000), 2);
    while pair.net.step() {}
    assert_eq!(pair.poll(0), [Completion::Sent { context: 9 }]);
}

#[test]
fn messages_overtake_each_other_and_chunks_come_backwards_when_asked() {
    let mut shuffled = pair(SimOptions::default());
    for context in 0..100 {
        let write = shuffled.write(context, 64);
        shuffled.nics[0].write(&write).unwrap();
    }
    while shuffled.net.step() {}
    let arrived = shuffled.poll(1);
    assert_eq!(arrived.len(), 100);
    let sorted: Vec<_> = (0..100).map(|immediate| Completion::Arrived { immediate }).collect();
    assert_ne!(arrived, sorted);
    assert!(shuffled.net.stats().overtaken > 10);

    let mut backwards = pair(SimOptions { reverse_chunks: true, ..SimOptions::default() });
    let write = backwards.write(0, 100_000);
    backwards.nics[0].write(&write).unwrap();
    while backwards.byte(99_999) == POISON {
        assert!(backwards.net.step());
    }
    assert_eq!(backwards.byte(0), POISON, "the last byte came before the first");
}

#[test]
fn the_same_seed_is_the_same_network() {
    let order = |seed| {
        let mut pair = pair(SimOptions { seed, ..SimOptions::default() });
        for context in 0..50 {
            let write = pair.write(context, 20_000);
            pair.nics[0].write(&write).unwrap();
        }
        while pair.net.step() {}
        (pair.poll(1), pair.net.now_ns())
    };
    assert_eq!(order(5), order(5));
    assert_ne!(order(5), order(6));
}

#[test]
fn the_first_message_can_come_last() {
    let mut pair = pair(SimOptions { hold_first: true, ..SimOptions::default() });
    for context in 0..5 {
        let write = pair.write(context, 64);
        pair.nics[0].write(&write).unwrap();
    }
    let mut arrived = Vec::new();
    while pair.net.step() {
        arrived.append(&mut pair.poll(1));
    }
    assert_eq!(arrived.last(), Some(&Completion::Arrived { immediate: 0 }));
}

#[test]
fn a_full_send_queue_says_again_until_completions_are_polled() {
    let mut pair = pair(SimOptions { tx_depth: 2, ..SimOptions::default() });
    let write = pair.write(9, 16);
    assert_eq!(pair.nics[0].write(&write), Ok(Posted::Yes));
    assert_eq!(pair.nics[0].write(&write), Ok(Posted::Yes));
    while pair.net.step() {}
    assert_eq!(pair.nics[0].write(&write), Ok(Posted::Again), "completed, but not polled");
    assert_eq!(pair.poll(0).len(), 2);
    assert_eq!(pair.nics[0].write(&write), Ok(Posted::Yes));
}

#[test]
fn an_overflowing_completion_queue_is_the_end_of_the_nic() {
    let mut pair = pair(SimOptions { cq_depth: 4, ..SimOptions::default() });
    for context in 0..5 {
        let write = pair.write(context, 16);
        pair.nics[0].write(&write).unwrap();
    }
    while pair.net.step() {
        let _ = pair.nics[0].poll(&mut Vec::with_capacity(8));
    }
    let error = pair.nics[1].poll(&mut Vec::with_capacity(8)).unwrap_err();
    assert_eq!(error.status, Status::System);
    assert!(error.message.contains("4 entries overflowed"), "{error}");
}

#[test]
fn the_target_checks_keys_bounds_and_acquaintance() {
    let mut pair = pair(SimOptions::default());
    let good = pair.write(9, 16);
    let key = Write { remote: RemoteRegion { key: 77, ..good.remote }, ..good };
    assert_eq!(class(pair.outcome(key)).0, FaultClass::BadAddress);
    let outside = Write { remote_offset: BYTES as u64 - 8, ..good };
    assert_eq!(class(pair.outcome(outside)).0, FaultClass::BadAddress);
    let empty = Write { remote: RemoteRegion { key: 77, ..good.remote }, bytes: 0, ..good };
    assert_eq!(class(pair.outcome(empty)).0, FaultClass::BadAddress, "also without bytes");
    pair.nics[1].disconnect(PeerId(0));
    assert_eq!(class(pair.outcome(good)).0, FaultClass::UnknownPeer);
    let local = Write { local_offset: BYTES as u64, ..good };
    assert!(pair.nics[0].write(&local).unwrap_err().message.contains("leave the region"));
    assert!(pair.nics[0].write(&Write { local: RegionId(99), ..good }).is_err());
    assert!(pair.nics[0].write(&Write { peer: PeerId(5), ..good }).unwrap_err().message.contains("peer 5"));
    assert!(pair.nics[0].connect(&[1, 2]).is_err());
    assert_eq!(pair.poll(1), [], "nothing of all that was told to the target");
}

#[test]
fn a_dead_peer_is_told_after_a_time_and_a_restarted_one_at_once() {
    let mut pair = pair(SimOptions::default());
    let write = pair.write(9, 100_000);
    pair.net.kill(1);
    let (fault, text) = class(pair.outcome(write));
    assert_eq!(fault, FaultClass::PeerDead);
    assert!(text.contains("error 13") && pair.net.now_ns() >= 1_000_000_000);
    pair.net.restart(1);
    let before = pair.net.now_ns();
    let (fault, text) = class(pair.outcome(write));
    assert_eq!(fault, FaultClass::PeerDead);
    assert!(text.contains("error 9") && pair.net.now_ns() < before + 100_000_000);
}

#[test]
fn a_killed_nic_writes_nothing_more_and_works_no_longer() {
    let mut pair = pair(SimOptions { poison: false, ..SimOptions::default() });
    let write = pair.write(9, 100_000);
    pair.nics[0].write(&write).unwrap();
    pair.net.kill(0);
    while pair.net.step() {}
    assert!(pair.all(BYTES, 2));
    assert_eq!(pair.poll(1), []);
    assert!(pair.nics[0].write(&write).unwrap_err().message.contains("killed"));
}
