//! A fake libfabric in Rust: one EFA device per thread that runs a test.
//!
//! Writes complete in no order, are checked against registrations and the receiver's peers, fail with the
//! device's own numbers, and completions beyond a queue's depth kill it. Whatever a caller must not do is put
//! down as an offence, which [`World::finish`] reports.

mod info;
mod objects;

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::ffi::{c_char, c_int};
use std::sync::Arc;

use ep_core::Result;

use crate::sys::library::Exports;
use crate::sys::{self, Library, newer};

thread_local! {
    static WORLD: RefCell<World> = RefCell::new(World::default());
}

/// Bytes of an address of the fake.
const ADDRESS_BYTES: usize = 32;

/// What the device is told to do.
#[derive(Clone, Debug)]
pub(crate) struct Behaviour {
    pub(crate) version: u32,
    /// Names of its fabrics, as `fi_getinfo` lists them.
    pub(crate) fabrics: Vec<&'static str>,
    /// `fi_setopt` and `fi_getopt` answer these with `-FI_ENOPROTOOPT`.
    pub(crate) unknown_options: Vec<c_int>,
    pub(crate) emulated_write: bool,
    /// Bits of an immediate that arrive.
    pub(crate) immediate_mask: u64,
    /// So many posts in a row are answered with `-FI_EAGAIN`, before every one that is taken.
    pub(crate) eagain_storm: u32,
    /// The next writes fail with these numbers of the provider.
    pub(crate) errors: VecDeque<i32>,
    /// The next posts are refused with these error numbers.
    pub(crate) refusals: VecDeque<u32>,
    /// This table is so long only; or lacks the entry.
    pub(crate) short_table: Option<(&'static str, usize)>,
    pub(crate) has_device_memory: bool,
    /// Writes are kept back until this many are in flight, or the queue was read so often.
    pub(crate) keep_back: usize,
}

impl Default for Behaviour {
    fn default() -> Behaviour {
        Behaviour {
            version: newer::version(2, 6),
            fabrics: vec!["efa", "efa-direct"],
            unknown_options: Vec::new(),
            emulated_write: false,
            immediate_mask: 0xffff_ffff,
            eagain_storm: 0,
            errors: VecDeque::new(),
            refusals: VecDeque::new(),
            short_table: None,
            has_device_memory: true,
            keep_back: 1,
        }
    }
}

/// The device, and what was done with it.
#[derive(Default)]
pub(crate) struct World {
    pub(crate) behaviour: Behaviour,
    /// Options that were set: endpoint, option, value as bytes.
    pub(crate) options: Vec<(usize, c_int, Vec<u8>)>,
    /// Objects that were closed, in this order.
    pub(crate) closed: Vec<&'static str>,
    pub(crate) registrations: Vec<Registration>,
    offences: Vec<String>,
    num_open: usize,
    endpoints: Vec<EndpointState>,
    queues: Vec<QueueState>,
    vectors: Vec<HashMap<u64, [u8; ADDRESS_BYTES]>>,
    in_flight: Vec<InFlight>,
    eagains: u32,
    next_id: u64,
    random: u64,
}

#[derive(Clone, Debug)]
pub(crate) struct Registration {
    pub(crate) id: u64,
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    pub(crate) key: u64,
    pub(crate) flags: u64,
    pub(crate) iface: u32,
    /// Descriptor and offset of a dma-buf.
    pub(crate) dmabuf: Option<(c_int, u64)>,
    pub(crate) open: bool,
}

#[derive(Default)]
struct EndpointState {
    queue: Option<usize>,
    vector: Option<usize>,
    enabled: bool,
    dead: bool,
    tx_depth: usize,
    num_in_flight: usize,
}

#[derive(Default)]
struct QueueState {
    depth: usize,
    events: VecDeque<Event>,
    overrun: bool,
    idle_reads: usize,
}

enum Event {
    Sent(usize),
    Arrived(u64),
    Failed { context: usize, provider_errno: i32 },
}

struct InFlight {
    from: usize,
    to: std::result::Result<usize, i32>,
    source: usize,
    target: u64,
    bytes: usize,
    key: u64,
    data: u64,
    context: usize,
}

/// A library whose device behaves so, on this thread.
pub(crate) fn library(behaviour: Behaviour) -> Arc<Library> {
    Arc::new(try_library(behaviour).expect("new enough"))
}

pub(crate) fn try_library(behaviour: Behaviour) -> Result<Library> {
    with(|world| *world = World { behaviour, random: 0x9e37_79b9_7f4a_7c15, ..World::default() });
    let exports = Exports {
        getinfo: info::getinfo,
        freeinfo: info::freeinfo,
        dupinfo: info::dupinfo,
        fabric: objects::open_fabric,
        version,
        strerror,
    };
    Library::from_exports(exports, String::from("a fake"))
}

/// Looks at or changes the device of this thread.
pub(crate) fn with<T>(look: impl FnOnce(&mut World) -> T) -> T {
    WORLD.with_borrow_mut(look)
}

unsafe extern "C" fn version() -> u32 {
    with(|world| world.behaviour.version)
}

unsafe extern "C" fn strerror(_: c_int) -> *const c_char {
    c"fake error".as_ptr()
}

impl World {
    /// Asserts that everything was closed and nothing forbidden was done.
    #[track_caller]
    pub(crate) fn finish(&self) {
        assert_eq!(self.offences, Vec::<String>::new());
        assert_eq!(self.num_open, 0, "objects left open; closed: {:?}", self.closed);
    }

    /// The endpoint's process is gone.
    pub(crate) fn kill(&mut self, address: &[u8]) {
        self.endpoints[address[1] as usize].dead = true;
    }

    fn offend(&mut self, what: impl Into<String>) {
        self.offences.push(what.into());
    }

    fn random(&mut self, below: usize) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random % below as u64) as usize
    }

    fn address_of(endpoint: usize) -> [u8; ADDRESS_BYTES] {
        let mut address = [0xfa; ADDRESS_BYTES];
        address[1] = endpoint as u8;
        address
    }

    /// Adds an event; one too many kills the queue.
    fn push(&mut self, queue: usize, event: Event) {
        let queue = &mut self.queues[queue];
        queue.overrun |= queue.events.len() == queue.depth;
        if !queue.overrun {
            queue.events.push_back(event);
        }
    }

    /// Lets the device work: completes writes in flight, in any order.
    fn progress(&mut self, reader: usize) {
        self.queues[reader].idle_reads += 1;
        if self.in_flight.len() < self.behaviour.keep_back && self.queues[reader].idle_reads < 8 {
            return;
        }
        self.queues[reader].idle_reads = 0;
        while !self.in_flight.is_empty() {
            let at = self.random(self.in_flight.len());
            let write = self.in_flight.swap_remove(at);
            self.complete(&write);
        }
    }

    fn complete(&mut self, write: &InFlight) {
        let source = &mut self.endpoints[write.from];
        source.num_in_flight -= 1;
        let own_queue = source.queue.expect("bound");
        let fault = self.behaviour.errors.pop_front().or_else(|| self.fault_of(write));
        if let Some(provider_errno) = fault {
            self.push(own_queue, Event::Failed { context: write.context, provider_errno });
            return;
        }
        let target = write.to.expect("a write without a fault has a target");
        // SAFETY: both ranges lie in registrations that are open, which the callers keep mapped.
        unsafe { std::ptr::copy(write.source as *const u8, write.target as *mut u8, write.bytes) };
        let queue = self.endpoints[target].queue.expect("bound");
        self.push(queue, Event::Arrived(write.data & self.behaviour.immediate_mask));
        self.push(own_queue, Event::Sent(write.context));
    }

    /// The device's number for what is wrong with a write.
    fn fault_of(&mut self, write: &InFlight) -> Option<i32> {
        let target = match write.to {
            Ok(target) => target,
            Err(number) => return Some(number),
        };
        if self.endpoints[target].dead {
            return Some(13);
        }
        let own = World::address_of(write.from);
        let vector = self.endpoints[target].vector.expect("bound");
        if !self.vectors[vector].values().any(|known| *known == own) {
            return Some(14);
        }
        let fits = self.registrations.iter().any(|region| {
            let end = write.target + write.bytes as u64;
            region.open
                && region.key == write.key
                && write.target >= region.address
                && end <= region.address + region.bytes
        });
        if fits { None } else { Some(7) }
    }

    /// Takes a write, or says why not.
    fn post(&mut self, from: usize, message: &sys::fi_msg_rma, flags: u64) -> c_int {
        let wanted = u64::from(sys::FI_REMOTE_CQ_DATA | sys::FI_COMPLETION | sys::FI_DELIVERY_COMPLETE);
        if flags != wanted
            || message.iov_count != 1
            || message.rma_iov_count != 1
            || message.context.is_null()
        {
            self.offend(format!(
                "a write with flags {flags:#x}, {} pieces, or no context",
                message.rma_iov_count
            ));
            return -(sys::FI_EINVAL as c_int);
        }
        if let Some(errno) = self.behaviour.refusals.pop_front() {
            return -(errno as c_int);
        }
        if self.eagains < self.behaviour.eagain_storm
            || self.endpoints[from].num_in_flight == self.endpoints[from].tx_depth
        {
            self.eagains += 1;
            return -(sys::FI_EAGAIN as c_int);
        }
        self.eagains = 0;
        // SAFETY: the caller's message has one piece on each side and one descriptor.
        let (local, remote, descriptor) = unsafe { (*message.msg_iov, *message.rma_iov, *message.desc) };
        let (start, end) = (local.iov_base as u64, local.iov_base as u64 + local.iov_len as u64);
        let covered = self.registrations.iter().any(|region| {
            let id = descriptor as u64;
            region.open && region.id == id && start >= region.address && end <= region.address + region.bytes
        });
        if !covered {
            // FI_MR_LOCAL: the descriptor of a registration that has the bytes.
            self.offend(format!("{} bytes at {start:#x} without a descriptor", local.iov_len));
            return -(sys::FI_EINVAL as c_int);
        }
        let vector = self.endpoints[from].vector.expect("bound");
        let Some(address) = self.vectors[vector].get(&message.addr) else {
            self.offend("a write to a peer that is not in the address vector");
            return -(sys::FI_EINVAL as c_int);
        };
        let to = self.endpoints.get(address[1] as usize).map(|_| address[1] as usize).ok_or(9);
        // FI_CONTEXT2: the context's 64 bytes are the provider's until the completion.
        // SAFETY: the caller keeps a `fi_context2` there.
        unsafe { message.context.cast::<[u8; 64]>().write([0x5a; 64]) };
        self.endpoints[from].num_in_flight += 1;
        self.in_flight.push(InFlight {
            from,
            to,
            source: local.iov_base as usize,
            target: remote.addr,
            bytes: local.iov_len,
            key: remote.key,
            data: message.data,
            context: message.context as usize,
        });
        0
    }
}
