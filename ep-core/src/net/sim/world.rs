//! The network's state and what happens in it.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use rustix::event::{EventfdFlags, eventfd};

use super::super::transport::{Completion, FaultClass, Posted, Write};
use super::rng::Rng;
use super::{POISON, SimOptions, SimStats};
use crate::error::{Error, Result, Status};

/// When what is held back happens: after everything else.
const AFTER_ALL: u64 = u64::MAX;
/// Things that happen before the network's thread lets others look.
const BURST: usize = 64;

/// The state under its lock, and what its thread waits for.
pub(super) struct Shared {
    world: Mutex<World>,
    pub(super) work: Condvar,
}

impl Shared {
    pub(super) fn new(world: World) -> Shared {
        Shared { world: Mutex::new(world), work: Condvar::new() }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, World> {
        self.world.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// The network's thread.
    pub(super) fn run(&self) {
        let mut world = self.lock();
        while !world.closed {
            if (0..BURST).all(|_| world.step()) {
                drop(world);
                std::thread::yield_now();
                world = self.lock();
            } else if world.events.is_empty() {
                world = self.work.wait(world).unwrap_or_else(|poisoned| poisoned.into_inner());
            }
        }
    }
}

/// A NIC's address: which one, and since which restart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Address {
    pub(super) nic: usize,
    pub(super) generation: u32,
}

/// Registered memory.
#[derive(Clone, Copy)]
struct Memory {
    address: usize,
    bytes: u64,
}

pub(super) struct Nic {
    pub(super) generation: u32,
    alive: bool,
    in_flight: usize,
    pub(super) completions: VecDeque<Completion>,
    overflowed: bool,
    /// By id, which is also the key.
    regions: HashMap<u32, Memory>,
    next_region: u32,
    pub(super) peers: Vec<Option<Address>>,
    event: Arc<OwnedFd>,
    /// The owner sleeps on the event.
    pub(super) armed: bool,
}

struct InFlight {
    source: Address,
    target: Address,
    write: Write,
    /// Chunks that have not come yet.
    left: usize,
    failed: bool,
    /// The failure was told; the place is free when the last chunk has come.
    told: bool,
    /// Its number among the writes from this NIC to that one.
    order: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Chunk {
        write: usize,
        chunk: usize,
    },
    Acknowledge {
        write: usize,
    },
    /// The index of a text in [`FAULTS`].
    Fail {
        write: usize,
        fault: usize,
    },
}

const DEAD: usize = 0;
const RESTARTED: usize = 1;
const STRANGER: usize = 2;
const BAD_KEY: usize = 3;
const UNREACHABLE: usize = 4;
const FAULTS: [(FaultClass, &str); 5] = [
    (FaultClass::PeerDead, "error 13: the remote does not respond"),
    (FaultClass::PeerDead, "error 9: no such queue pair at the remote"),
    (FaultClass::UnknownPeer, "error 14: the remote does not know this address"),
    (FaultClass::BadAddress, "error 7: bad address or key"),
    (FaultClass::PeerDead, "error 15: the remote is unreachable"),
];

pub(super) struct World {
    pub(super) options: SimOptions,
    pub(super) now_ns: u64,
    pub(super) stats: SimStats,
    pub(super) cuts: Vec<(usize, usize)>,
    pub(super) nics: Vec<Nic>,
    pub(super) closed: bool,
    rng: Rng,
    writes: Vec<Option<InFlight>>,
    free_writes: Vec<usize>,
    /// By time, then by a random number.
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    /// Writes posted between two NICs, and the highest number that has arrived.
    pairs: HashMap<(usize, usize), (u64, u64)>,
}

impl World {
    pub(super) fn new(options: SimOptions) -> World {
        World {
            now_ns: 0,
            stats: SimStats::default(),
            cuts: Vec::new(),
            nics: Vec::new(),
            closed: false,
            rng: Rng::new(options.seed),
            writes: Vec::new(),
            free_writes: Vec::new(),
            events: BinaryHeap::new(),
            pairs: HashMap::new(),
            options,
        }
    }

    pub(super) fn add_nic(&mut self) -> (usize, Arc<OwnedFd>) {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let event = Arc::new(event.expect("a test's process has descriptors left"));
        self.nics.push(Nic {
            generation: 0,
            alive: true,
            in_flight: 0,
            completions: VecDeque::new(),
            overflowed: false,
            regions: HashMap::new(),
            next_region: 1,
            peers: Vec::new(),
            event: Arc::clone(&event),
            armed: false,
        });
        (self.nics.len() - 1, event)
    }

    pub(super) fn register(&mut self, nic: usize, address: *mut u8, bytes: u64) -> u32 {
        let nic = &mut self.nics[nic];
        let id = nic.next_region;
        nic.next_region += 1;
        nic.regions.insert(id, Memory { address: address.addr(), bytes });
        id
    }

    /// False if there is no such region.
    pub(super) fn deregister(&mut self, nic: usize, id: u32) -> bool {
        self.nics[nic].regions.remove(&id).is_some()
    }

    pub(super) fn kill(&mut self, nic: usize) {
        let nic = &mut self.nics[nic];
        nic.alive = false;
        nic.generation += 1;
        nic.in_flight = 0;
        nic.regions.clear();
        nic.peers.clear();
        nic.completions.clear();
        wake(nic);
    }

    pub(super) fn restart(&mut self, nic: usize) {
        self.kill(nic);
        self.nics[nic].alive = true;
        self.nics[nic].overflowed = false;
    }

    /// Errors of a NIC that does not work any more.
    pub(super) fn check_nic(&self, nic: usize) -> Result<()> {
        let state = &self.nics[nic];
        if state.overflowed {
            let text = format!("the completion queue of {} entries overflowed", self.options.cq_depth);
            return Err(Error::new(Status::System, text));
        }
        if !state.alive {
            return Err(Error::new(Status::System, "the NIC was killed"));
        }
        Ok(())
    }

    pub(super) fn post(&mut self, nic: usize, write: &Write) -> Result<Posted> {
        self.check_nic(nic)?;
        let state = &self.nics[nic];
        let known = |peer: usize| state.peers.get(peer).copied().flatten();
        let Some(target) = known(write.peer.0 as usize) else {
            return Err(Error::new(Status::Internal, format!("there is no peer {}", write.peer.0)));
        };
        let local = state.regions.get(&write.local.0);
        let inside = |memory: &Memory| write.local_offset + write.bytes <= memory.bytes;
        if !local.is_some_and(inside) || write.bytes > self.options.max_write {
            let text = format!("{} bytes at {} leave the region", write.bytes, write.local_offset);
            return Err(Error::new(Status::Internal, text));
        }
        if state.in_flight >= self.options.tx_depth || self.rng.once_in(self.options.again_one_in) {
            self.stats.again += 1;
            return Ok(Posted::Again);
        }
        let source = Address { nic, generation: state.generation };
        self.nics[nic].in_flight += 1;
        self.stats.writes += 1;
        self.poison(target, write);
        self.schedule(source, target, write);
        Ok(Posted::Yes)
    }

    fn poison(&self, target: Address, write: &Write) {
        let nic = &self.nics[target.nic];
        if !self.options.poison || !nic.alive || nic.generation != target.generation {
            return;
        }
        if let Some(memory) = remote(nic, write) {
            let address = (memory.address + write.remote_offset as usize) as *mut u8;
            // SAFETY: inside a registered region, which stays mapped while it is registered; the writer's protocol
            // says that nobody uses the range, which is what this is to prove.
            unsafe { address.write_bytes(POISON, write.bytes as usize) };
        }
    }

    fn schedule(&mut self, source: Address, target: Address, write: &Write) {
        let chunks = (write.bytes as usize).div_ceil(self.options.mtu).max(1);
        let pair = self.pairs.entry((source.nic, target.nic)).or_default();
        let order = pair.0;
        pair.0 += 1;
        let in_flight =
            InFlight { source, target, write: *write, left: chunks, failed: false, told: false, order };
        let index = match self.free_writes.pop() {
            Some(index) => {
                self.writes[index] = Some(in_flight);
                index
            }
            None => {
                self.writes.push(Some(in_flight));
                self.writes.len() - 1
            }
        };
        let held = self.options.hold_first && order == 0;
        let mut times: Vec<u64> = (0..chunks)
            .map(|_| if held { AFTER_ALL } else { self.now_ns + self.delay(source.nic, target.nic) })
            .collect();
        if self.options.reverse_chunks {
            times.sort_unstable_by_key(|&time| Reverse(time));
        }
        for (chunk, time) in times.into_iter().enumerate() {
            self.at(time, Event::Chunk { write: index, chunk });
        }
    }

    /// Of one chunk on its path: mostly short, seldom long.
    fn delay(&mut self, one: usize, other: usize) -> u64 {
        let path = match self.rng.below(100) {
            0 => 1_000_000,
            1..10 => 50_000,
            _ => 10_000,
        };
        let slow = match self.options.slow_nic {
            Some((nic, ns)) if nic == one || nic == other => ns,
            _ => 0,
        };
        slow + path / 2 + self.rng.below(path)
    }

    fn at(&mut self, time: u64, event: Event) {
        let tie = self.rng.draw();
        self.events.push(Reverse((time, tie, event)));
    }

    /// Lets the next thing happen. False if nothing is left to.
    pub(super) fn step(&mut self) -> bool {
        let Some(Reverse((time, _, event))) = self.events.pop() else { return false };
        if time != AFTER_ALL {
            self.now_ns = self.now_ns.max(time);
        }
        match event {
            Event::Chunk { write, chunk } => self.chunk(write, chunk),
            Event::Acknowledge { write } => {
                if let Some((nic, context)) = self.retire(write) {
                    self.complete(nic, Completion::Sent { context });
                }
            }
            Event::Fail { write, fault } => {
                if let Some((nic, context)) = self.retire(write) {
                    let (class, text) = FAULTS[fault];
                    let context = Some(context);
                    self.complete(nic, Completion::Failed { context, class, text: text.into() });
                }
            }
        }
        true
    }

    /// Ends a write: what completes at its NIC, unless that is gone. Its place stays taken while chunks are to come.
    fn retire(&mut self, index: usize) -> Option<(usize, u64)> {
        let write = self.writes[index].as_mut()?;
        write.told = true;
        let (source, context) = (write.source, write.write.context);
        if write.left == 0 {
            self.writes[index] = None;
            self.free_writes.push(index);
        }
        self.is_current(source).then_some((source.nic, context))
    }

    fn is_current(&self, address: Address) -> bool {
        let nic = &self.nics[address.nic];
        nic.alive && nic.generation == address.generation
    }

    fn chunk(&mut self, index: usize, chunk: usize) {
        let Some(write) = &mut self.writes[index] else { return };
        write.left -= 1;
        let (last, failed, told) = (write.left == 0, write.failed, write.told);
        let (source, target, posted) = (write.source, write.target, write.write);
        if failed || !self.is_current(source) {
            // The last one to come for it frees its place: this chunk, or the failure.
            if last && (told || !failed) {
                self.retire(index);
            }
            return;
        }
        match self.copy(source, target, &posted, chunk) {
            Ok(()) if last => self.arrive(index),
            Ok(()) => {}
            Err(fault) => {
                if let Some(write) = &mut self.writes[index] {
                    write.failed = true;
                }
                let patience =
                    if fault == DEAD || fault == UNREACHABLE { self.options.dead_after_ns } else { 5000 };
                self.at(self.now_ns.saturating_add(patience), Event::Fail { write: index, fault });
            }
        }
    }

    /// Copies a chunk; or says what the target's NIC objects to.
    fn copy(
        &self,
        source: Address,
        target: Address,
        write: &Write,
        chunk: usize,
    ) -> std::result::Result<(), usize> {
        if self.cuts.contains(&(source.nic.min(target.nic), source.nic.max(target.nic))) {
            return Err(UNREACHABLE);
        }
        let nic = &self.nics[target.nic];
        if !nic.alive || nic.overflowed {
            return Err(DEAD);
        }
        if nic.generation != target.generation {
            return Err(RESTARTED);
        }
        if !nic.peers.contains(&Some(source)) {
            return Err(STRANGER);
        }
        let to = remote(nic, write).ok_or(BAD_KEY)?;
        let from = self.nics[source.nic].regions.get(&write.local.0).ok_or(BAD_KEY)?;
        let begin = chunk * self.options.mtu;
        let bytes = (write.bytes as usize).saturating_sub(begin).min(self.options.mtu);
        let from = (from.address + write.local_offset as usize + begin) as *const u8;
        let to = (to.address + write.remote_offset as usize + begin) as *mut u8;
        // SAFETY: both ranges lie inside regions that are registered, and so mapped. By the writer's protocol the
        // source does not change until the write completes, and the target is nobody's until the message lands.
        unsafe { std::ptr::copy(from, to, bytes) };
        Ok(())
    }

    /// All of a write's bytes are there.
    fn arrive(&mut self, index: usize) {
        let Some(write) = &self.writes[index] else { return };
        let (source, target, order) = (write.source.nic, write.target.nic, write.order);
        let immediate = write.write.immediate & self.options.immediate_mask;
        let pair = self.pairs.entry((source, target)).or_default();
        if order < pair.1 {
            self.stats.overtaken += 1;
        }
        pair.1 = pair.1.max(order);
        self.complete(target, Completion::Arrived { immediate });
        let way_back = self.delay(target, source);
        self.at(self.now_ns.saturating_add(way_back), Event::Acknowledge { write: index });
    }

    fn complete(&mut self, nic: usize, completion: Completion) {
        let state = &mut self.nics[nic];
        if state.completions.len() >= self.options.cq_depth {
            state.overflowed = true;
        } else {
            // Anywhere among those not yet polled: completions have no order either.
            let at = self.rng.below(state.completions.len() as u64 + 1) as usize;
            state.completions.push_back(completion);
            let last = state.completions.len() - 1;
            state.completions.swap(at, last);
            self.stats.most_completions = self.stats.most_completions.max(last + 1);
        }
        wake(state);
    }

    /// Moves completions out, as `out` has room for.
    pub(super) fn poll(&mut self, nic: usize, out: &mut Vec<Completion>) -> Result<()> {
        self.check_nic(nic)?;
        let state = &mut self.nics[nic];
        while out.len() < out.capacity() {
            let Some(completion) = state.completions.pop_front() else { break };
            if !matches!(completion, Completion::Arrived { .. }) {
                state.in_flight -= 1;
            }
            out.push(completion);
        }
        Ok(())
    }
}

/// The region that a write names at its target, if the write stays inside.
fn remote(nic: &Nic, write: &Write) -> Option<Memory> {
    let memory = nic.regions.get(&u32::try_from(write.remote.key).ok()?)?;
    (write.remote_offset + write.bytes <= memory.bytes).then_some(*memory)
}

fn wake(nic: &mut Nic) {
    if nic.armed {
        nic.armed = false;
        // Full only if it is readable anyway.
        let _ = rustix::io::write(&nic.event, &1u64.to_ne_bytes());
    }
}
