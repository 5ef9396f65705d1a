//! One NIC of this process: the transport over libfabric.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::rc::Rc;

use ep_core::{Error, Result, Status};

use crate::av::AddressVector;
use crate::cq::{BATCH, CompletionQueue, CqError, Read32};
use crate::endpoint::{Endpoint, Post};
use crate::fabric::{Domain, Fabric};
use crate::info::Info;
use crate::mr::{MemoryRegion, MrMode};
use crate::peers::Peers;
use crate::select::Selection;
use crate::settings::Settings;
use crate::slots::{InFlight, Slots};
use crate::sys::{self, fi_cq_data_entry};
use crate::transport::{
    Completion, FaultClass, Limits, MAX_ADDRESS_BYTES, PeerId, Posted, Region, RegionId, Registered,
    Transport, Write,
};
use crate::{fault, options, self_test};

/// The most writes in flight without being asked for more: what a P5 has.
const MAX_TX_DEPTH: usize = 4096;

/// What to wait with, the preferred first.
const WAITS: [sys::fi_wait_obj; 2] = [sys::FI_WAIT_FD, sys::FI_WAIT_NONE];

/// An endpoint, its completion queue and its peers. The thread that has it is the only one that uses it.
pub struct Nic {
    // Dropped in this order: the endpoint goes before the memory that it reads and the contexts that it keeps.
    endpoint: Endpoint,
    regions: Vec<Option<MemoryRegion>>,
    slots: Slots,
    peers: Peers,
    domain: Rc<Domain>,
    /// Failures of writes that the provider refused when they were posted; at most one for each slot.
    refused: VecDeque<Completion>,
    entries: Box<[fi_cq_data_entry; BATCH]>,
    address: Vec<u8>,
    limits: Limits,
    mr_mode: MrMode,
    next_key: u64,
    key_mask: u64,
    is_efa: bool,
}

// SAFETY: every clone of an `Rc` in here lies in this value and is never handed out, so they move together; the
// objects of libfabric may be used by any thread, one at a time (FI_THREAD_DOMAIN); the raw pointers lead to them.
unsafe impl Send for Nic {}

impl Nic {
    /// Opens NIC number `nic_idx` of `selection`, and proves that a write to itself arrives with all 32 bits of
    /// its immediate. Takes at most about 5 s.
    ///
    /// # Errors
    /// [`Status::Capacity`] if the settings do not fit the NIC; [`Status::Unsupported`] if it does not do what the
    /// protocol needs; otherwise what libfabric says, with the call. The sentence names the NIC.
    pub fn open(selection: &Selection, nic_idx: usize, settings: &Settings) -> Result<Nic> {
        let info = selection.info(nic_idx)?;
        let name = format!("{} {}", selection.kind(), info.address());
        Nic::assemble(info, name.clone(), settings)
            .and_then(|mut nic| self_test::run(&mut nic).map(|()| nic))
            .map_err(|error| Error::new(error.status, format!("{name}: {}", error.message)))
    }

    fn assemble(info: &Info, name: String, settings: &Settings) -> Result<Nic> {
        let mut info = info.duplicate()?;
        let (tx_depth, cq_depth) = depths(&info, settings)?;
        info.set_tx_depth(tx_depth);
        let is_efa = info.provider() == "efa";
        let fabric = Fabric::open(&info)?;
        let domain = Domain::open(fabric, &info)?;
        // The descriptor of `net`, the preview of `tcp` in 1.17, stays readable for ever after the first completion.
        let waits: &[_] = if info.provider() == "net" { &[sys::FI_WAIT_NONE] } else { &WAITS };
        let queue = CompletionQueue::open(Rc::clone(&domain), cq_depth, waits)?;
        let vector = AddressVector::open(Rc::clone(&domain))?;
        let endpoint = Endpoint::open(Rc::clone(&domain), &info, queue, vector)?;
        if is_efa {
            options::prepare_efa(&endpoint, info.has_device_memory())?;
            options::check_efa(&endpoint)?;
        }
        endpoint.enable()?;
        let address = endpoint.address()?;
        let own_limit = options::max_write(&endpoint).unwrap_or(None).unwrap_or(usize::MAX);
        let (major, minor) = info.library().version();
        let limits = Limits {
            max_write: info.max_write().min(own_limit) as u64,
            tx_depth,
            cq_depth,
            name: format!("{name} (libfabric {major}.{minor})"),
        };
        // SAFETY: integers and pointers that may be null.
        let entries = Box::new(unsafe { std::mem::zeroed::<[fi_cq_data_entry; BATCH]>() });
        let key_mask = u64::MAX.checked_shr(64 - 8 * info.mr_key_bytes().min(8) as u32).unwrap_or(u64::MAX);
        Ok(Nic {
            endpoint,
            regions: Vec::new(),
            slots: Slots::new(tx_depth),
            peers: Peers::default(),
            domain,
            refused: VecDeque::with_capacity(tx_depth),
            entries,
            address,
            limits,
            mr_mode: MrMode::new(info.mr_mode(), info.has_device_memory()),
            next_key: first_key()?,
            key_mask,
            is_efa,
        })
    }

    /// The region and the peer that a write names, checked against its bounds on both sides.
    #[inline]
    fn check(&self, write: &Write) -> Result<(Post, u32)> {
        let Some(known) = self.peers.get(write.peer) else {
            return Err(refuse(format!("peer {} is not connected", write.peer.0)));
        };
        let Some(Some(local)) = self.regions.get(write.local.0 as usize) else {
            return Err(refuse(format!("region {} is not registered", write.local.0)));
        };
        let fits = |offset: u64, whole: u64| offset.checked_add(write.bytes).is_some_and(|end| end <= whole);
        if !fits(write.local_offset, local.bytes())
            || !fits(write.remote_offset, write.remote.bytes)
            || write.bytes > self.limits.max_write
        {
            return Err(self.out_of_bounds(write, local.bytes()));
        }
        let post = Post {
            peer: known.address,
            // The address keeps no provenance: libfabric reads the memory, not Rust.
            local: std::ptr::without_provenance_mut((local.address() + write.local_offset) as usize),
            descriptor: local.descriptor(),
            bytes: write.bytes as usize,
            remote: write.remote.base.wrapping_add(write.remote_offset),
            key: write.remote.key,
            immediate: write.immediate,
            context: std::ptr::null_mut(),
        };
        Ok((post, known.entry))
    }

    #[cold]
    fn out_of_bounds(&self, write: &Write, local_bytes: u64) -> Error {
        refuse(format!(
            "{} bytes from offset {} of {local_bytes} registered here to offset {} of {} registered there; the largest \
             write has {}",
            write.bytes, write.local_offset, write.remote_offset, write.remote.bytes, self.limits.max_write
        ))
    }

    /// A write that libfabric did not take.
    #[cold]
    fn not_posted(&mut self, code: isize, what: InFlight) -> Result<Posted> {
        let errno = sys::errno_of(code);
        let error = sys::refused(self.endpoint.library(), code, "fi_writemsg");
        match fault::class_of_errno(errno) {
            // As if it had been posted: the peer's end is told by a completion, whenever it is noticed.
            class @ FaultClass::PeerDead => {
                self.refused.push_back(Completion::Failed {
                    context: Some(what.context),
                    class,
                    text: error.message,
                });
                Ok(Posted::Yes)
            }
            _ => Err(error),
        }
    }

    #[cold]
    fn failed(&mut self, error: CqError) -> Completion {
        let class = fault::class_of(&error, self.is_efa);
        let known = self.slots.give_back(error.context);
        if let Some(known) = known {
            self.peers.completed(self.endpoint.vector(), known.entry);
        }
        Completion::Failed { context: known.map(|known| known.context), class, text: error.text }
    }
}

impl Transport for Nic {
    fn address(&self) -> Vec<u8> {
        self.address.clone()
    }

    fn limits(&self) -> Limits {
        self.limits.clone()
    }

    fn register(&mut self, region: &Region<'_>) -> Result<Registered> {
        let key = self.next_key & self.key_mask;
        self.next_key = self.next_key.wrapping_add(1);
        let region = MemoryRegion::register(Rc::clone(&self.domain), self.mr_mode, region, key)
            .map_err(|error| Error::new(error.status, format!("{}: {}", self.limits.name, error.message)))?;
        let remote = region.remote();
        let at = self.regions.iter().position(Option::is_none).unwrap_or(self.regions.len());
        if at == self.regions.len() {
            self.regions.push(None);
        }
        self.regions[at] = Some(region);
        Ok(Registered { id: RegionId(at as u32), remote })
    }

    fn deregister(&mut self, id: RegionId) -> Result<()> {
        match self.regions.get_mut(id.0 as usize).and_then(Option::take) {
            Some(region) => region.close(),
            None => Err(Error::invalid(format!("{}: region {} is not registered", self.limits.name, id.0))),
        }
    }

    fn connect(&mut self, address: &[u8]) -> Result<PeerId> {
        // The provider reads as many bytes as its own addresses have.
        if address.len() != self.address.len() {
            let (got, expected) = (address.len(), self.address.len());
            debug_assert!(expected <= MAX_ADDRESS_BYTES);
            let message = format!(
                "{}: a peer's address has {got} bytes, expected {expected}; all ranks must use one provider",
                self.limits.name
            );
            return Err(Error::new(Status::Bootstrap, message));
        }
        self.peers.connect(self.endpoint.vector(), address)
    }

    fn disconnect(&mut self, peer: PeerId) {
        self.peers.disconnect(self.endpoint.vector(), peer);
    }

    fn write(&mut self, write: &Write) -> Result<Posted> {
        let (mut post, entry) = self.check(write)?;
        let what = InFlight { context: write.context, entry };
        let Some(context) = self.slots.take(what) else { return Ok(Posted::Again) };
        post.context = context;
        // SAFETY: `check` found the bytes inside a region that is registered; the context is a slot's, which is
        // not taken again before its completion and goes after the endpoint.
        let code = unsafe { self.endpoint.write(&post) };
        if code == 0 {
            self.peers.posted(entry);
            return Ok(Posted::Yes);
        }
        self.slots.give_back(context.addr());
        match sys::is(code as i64, sys::FI_EAGAIN) {
            true => Ok(Posted::Again),
            false => self.not_posted(code, what),
        }
    }

    fn poll(&mut self, out: &mut Vec<Completion>) -> Result<()> {
        while out.len() < out.capacity()
            && let Some(refused) = self.refused.pop_front()
        {
            out.push(refused);
        }
        loop {
            let room = (out.capacity() - out.len()).min(BATCH);
            if room == 0 {
                return Ok(());
            }
            let found = match self.endpoint.queue().read(&mut self.entries[..room])? {
                Read32::Some(found) => found,
                Read32::None => return Ok(()),
                Read32::Error(error) => {
                    let failed = self.failed(error);
                    out.push(failed);
                    continue;
                }
            };
            for entry in &self.entries[..found] {
                // Own writes are told by their context: providers differ in the flags of both kinds.
                if let Some(known) = self.slots.give_back(entry.op_context.addr()) {
                    self.peers.completed(self.endpoint.vector(), known.entry);
                    out.push(Completion::Sent { context: known.context });
                } else if entry.flags & u64::from(sys::FI_REMOTE_CQ_DATA) != 0 {
                    // Others than EFA carry 64 bits; the protocol has 32.
                    out.push(Completion::Arrived { immediate: entry.data as u32 });
                }
                // Anything else is of no write that was posted here or has an immediate: nobody waits for it.
            }
            if found < room {
                return Ok(());
            }
        }
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        self.endpoint.queue().wait_fd()
    }

    fn may_sleep(&mut self) -> bool {
        self.refused.is_empty() && self.endpoint.queue().may_sleep()
    }
}

/// Writes in flight and completions in the queue, by the settings and within what the NIC has.
fn depths(info: &Info, settings: &Settings) -> Result<(usize, usize)> {
    let most = info.tx_depth().max(1);
    let tx_depth = settings.tx_depth.unwrap_or_else(|| most.min(MAX_TX_DEPTH));
    let capacity = |message: String| Err(Error::new(Status::Capacity, message));
    if tx_depth > most {
        return capacity(format!(
            "EP_FABRIC_TX_DEPTH={tx_depth}, and the NIC takes at most {most} writes in flight"
        ));
    }
    if tx_depth >= settings.cq_depth {
        return capacity(format!(
            "{tx_depth} writes in flight leave no room for peers in a queue of {} completions; raise \
             EP_FABRIC_CQ_DEPTH or lower EP_FABRIC_TX_DEPTH",
            settings.cq_depth
        ));
    }
    Ok((tx_depth, settings.cq_depth))
}

/// Keys that this process chooses begin at a random number, so that one of another process fits nothing here.
fn first_key() -> Result<u64> {
    getrandom::u64().map_err(|error| Error::system("getrandom", error))
}

#[cold]
fn refuse(message: String) -> Error {
    Error::invalid(format!("a write was refused: {message}"))
}
