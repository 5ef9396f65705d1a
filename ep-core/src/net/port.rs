//! What one rank of one group owns of the network: slots in registered memory, words that say what became of
//! messages, and rings to the proxy.
//!
//! The callers are the threads of the rank's lanes; the other side is the proxy. Everything here is a load, a store
//! or a copy: no call waits, locks or allocates, and only a proxy that sleeps costs a system call.
//!
//! Each stream of a link numbers its messages from 0, without gaps. Message `seq` has slot `seq mod window`. What a
//! caller owes:
//!
//! - One thread at a time sends on a (lane, kind), whatever the link; one gives credit for a lane.
//! - A slot is staged only when [`Port::can_stage`] says so *and* the receiver has freed it: for ROWS when
//!   `seq < credit + window`, for the other kinds when the protocol proves it.
//! - A landed slot is read only until it is freed: by [`Port::send_credit`], or by what the protocol sends.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use super::command::{Command, OP_CREDIT, OP_SEND, Ring, UNIT};
use super::counters::{LinkCounters, LinkStats};
use super::layout::{Kind, PortLayout, Shape, Stream};
use super::limits::Limiter;
use super::mailbox::{Mailbox, Pending, Request};
use super::transport::FaultClass;
use super::waker::Waker;
use crate::error::{Error, Result, Status};
use crate::host::Doorbell;
use crate::mem::{Mapping, Words};
use crate::proto::has_landed;

/// What a group asks for when it opens its port.
#[derive(Clone, Debug)]
pub struct PortSpec {
    /// Links, lanes and slots.
    pub shape: Shape,
    /// This rank in its group.
    pub rank: usize,
    /// The rank at the other end of each link.
    pub peers: Vec<usize>,
    /// The doorbell of each lane, rung when a word of the lane changes; every one when a link fails.
    pub bells: Vec<Bell>,
}

/// A doorbell of the rank's segment that the proxy can keep.
#[derive(Clone, Debug)]
pub struct Bell {
    /// The segment.
    pub segment: Words,
    /// Offset of the count, as in [`Doorbell::new`].
    pub bell: usize,
    /// Offset of the word that says that the owner sleeps.
    pub sleeping: usize,
}

impl Bell {
    /// Tells the lane that a word changed.
    pub(super) fn ring(&self) {
        Doorbell::new(&self.segment, self.bell, self.sleeping).ring();
    }
}

/// Why a link carries nothing any more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkFailure {
    /// The rank at its other end.
    pub peer: usize,
    /// Whose fault it is.
    pub class: FaultClass,
    /// One sentence: the NIC, the call, the network's words.
    pub text: String,
}

/// The end of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Closed {
    /// Nothing of it was in flight, and its memory is free.
    Drained,
    /// So many own writes were still in flight. The proxy keeps the memory until they have completed.
    Quarantined {
        /// Writes without completion.
        writes: u64,
    },
}

/// What caller and proxy share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) layout: PortLayout,
    pub(super) rank: usize,
    pub(super) peers: Vec<usize>,
    pub(super) bells: Vec<Bell>,
    pub(super) region: Arc<Mapping>,
    pub(super) control: Words,
    pub(super) failures: Box<[OnceLock<LinkFailure>]>,
    pub(super) counters: Box<[LinkCounters]>,
    pub(super) limiter: Limiter,
    pub(super) waker: Arc<Waker>,
    /// Commands pushed, by [`Stream::id`]. Each has one writer, the thread that sends on the stream.
    pushed: Box<[AtomicU64; Stream::COUNT]>,
    /// Messages of (lane, Rows) that the peer of a link was told are free, `[link][lane]`. One writer each.
    given: Box<[AtomicU64]>,
}

impl Shared {
    pub(super) fn new(spec: PortSpec, waker: Arc<Waker>) -> Result<Shared> {
        let layout = PortLayout::new(spec.shape)?;
        let (links, lanes) = (spec.shape.num_links, spec.shape.num_lanes);
        if spec.peers.len() != links || spec.bells.len() != lanes {
            let text = format!(
                "a port of {links} links and {lanes} lanes was given {} peers and {} doorbells",
                spec.peers.len(),
                spec.bells.len()
            );
            return Err(Error::invalid(text));
        }
        // The descriptors may go: no other process maps these.
        let (region, _) = Mapping::create(bytes_here(layout.region_bytes())?)?;
        let (control, _) = Mapping::create(bytes_here(layout.control_bytes())?)?;
        // Not the region: a NIC that needs its pages pins them, and where none does, unused slots cost nothing.
        control.populate(&(0..control.bytes()))?;
        Ok(Shared {
            rank: spec.rank,
            peers: spec.peers,
            bells: spec.bells,
            region: Arc::new(region),
            control: Words::new(Arc::new(control)),
            failures: (0..links).map(|_| OnceLock::new()).collect(),
            counters: (0..links).map(|_| LinkCounters::default()).collect(),
            limiter: Limiter::default(),
            waker,
            pushed: Box::new([const { AtomicU64::new(0) }; Stream::COUNT]),
            given: (0..links * lanes).map(|_| AtomicU64::new(0)).collect(),
            layout,
        })
    }

    /// The ring of a stream that has one.
    pub(super) fn ring(&self, stream: Stream) -> Option<Ring<'_>> {
        let (posted, commands, depth) = self.layout.ring(stream)?;
        let first = self.control.at(commands, depth as usize * super::command::COMMAND_BYTES);
        // SAFETY: `at` checked that the commands are inside the mapping, which lives as long as `self`; they are
        // aligned (the ring begins on a line) and every access to them is atomic.
        let commands = unsafe { std::slice::from_raw_parts(first.cast(), depth as usize) };
        Some(Ring::new(commands, self.control.u64(posted)))
    }

    /// The address of byte `offset` of the region, which `layout` made.
    pub(super) fn at(&self, offset: u64) -> *mut u8 {
        debug_assert!(offset < self.layout.region_bytes(), "offset {offset} leaves the region");
        // SAFETY: the layout's offsets lie inside the region that was allocated for it.
        unsafe { self.region.base().add(offset as usize) }
    }

    /// Proxy: records why `link` failed, wakes every lane. The first reason stays.
    pub(super) fn fail(&self, link: usize, class: FaultClass, text: String) {
        let failure = LinkFailure { peer: self.peers[link], class, text };
        if self.failures[link].set(failure).is_ok() {
            // Release: pairs with the acquire in `Port::failure`, and with a kernel's; the record is there.
            self.control.u64(self.layout.failure_word(link)).store(1, Ordering::Release);
            self.bells.iter().for_each(Bell::ring);
        }
    }
}

fn bytes_here(bytes: u64) -> Result<usize> {
    usize::try_from(bytes).map_err(|_| Error::new(Status::OutOfMemory, format!("{bytes} bytes do not fit")))
}

/// A rank's port. Dropping it closes it without waiting.
#[derive(Debug)]
pub struct Port {
    shared: Arc<Shared>,
    mailbox: Arc<Mailbox>,
    offer: Vec<u8>,
}

impl Port {
    pub(super) fn new(shared: Arc<Shared>, mailbox: Arc<Mailbox>, offer: Vec<u8>) -> Port {
        Port { shared, mailbox, offer }
    }

    /// Where things lie, and the shape.
    pub fn layout(&self) -> &PortLayout {
        &self.shared.layout
    }

    /// What the peers need to connect: to be given to every rank with a link to this one, by the bootstrap.
    pub fn offer(&self) -> &[u8] {
        &self.offer
    }

    /// Connects every link, given the offer of the rank at its other end. Nothing is written yet: a peer must know
    /// this rank first, so a barrier lies between this and [`Port::probe`].
    ///
    /// Returns a sentence about what is not as it might be (ranks have different numbers of NICs), or none.
    ///
    /// # Errors
    /// [`Status::Mismatch`] if the ranks' versions or shapes differ, [`Status::Bootstrap`] for an offer that is
    /// none or an address that cannot be reached, [`Status::Timeout`] at the deadline. Each names the peer.
    pub fn connect(&self, offers: Vec<Vec<u8>>, deadline: Instant) -> Result<Option<String>> {
        self.begin_connect(offers).wait(deadline, "connecting the links between nodes")
    }

    /// The first half of [`Port::connect`], for those who turn the proxy themselves.
    pub fn begin_connect(&self, offers: Vec<Vec<u8>>) -> Pending<Option<String>> {
        let port = Arc::clone(&self.shared);
        self.mailbox.ask(|reply| Request::Connect { port, offers, reply })
    }

    /// Writes a pattern over every NIC of every link, and waits until it has arrived and the peer's has come.
    ///
    /// # Errors
    /// [`Status::PeerLost`] if a write failed, [`Status::Timeout`] at the deadline, naming the rank, the NIC and what
    /// was missing.
    pub fn probe(&self, deadline: Instant) -> Result<()> {
        self.begin_probe(deadline).wait(deadline, "testing the links between nodes")
    }

    /// The first half of [`Port::probe`]; the proxy still ends it at the deadline.
    pub fn begin_probe(&self, deadline: Instant) -> Pending<()> {
        let port = Arc::clone(&self.shared);
        self.mailbox.ask(|reply| Request::Probe { port, deadline, reply })
    }

    /// Ends the port: waits until own writes have completed, at most until the deadline. Commands that were pushed
    /// and not yet posted are posted first.
    ///
    /// # Errors
    /// [`Status::Timeout`] if the proxy does not answer; it then closes the port later.
    pub fn close(self, deadline: Instant) -> Result<Closed> {
        self.begin_close(deadline).wait(deadline, "closing the links between nodes")
    }

    /// The first half of [`Port::close`].
    pub fn begin_close(&self, deadline: Instant) -> Pending<Closed> {
        let port = Arc::clone(&self.shared);
        self.mailbox.ask(|reply| Request::Close { port, deadline, reply: Some(reply) })
    }

    /// The slot for message `seq`, of [`PortLayout::max_bytes`] bytes rounded up to 64.
    ///
    /// # Panics
    /// If there is no such link or stream, which is a defect of the caller.
    pub fn slot_staging(&self, link: usize, stream: Stream, seq: u64) -> *mut u8 {
        self.slot(link, stream, seq);
        self.shared.at(self.shared.layout.staging(link, stream, seq))
    }

    /// True if the staging slot of message `seq` may be filled: the message that was in it lies in the peer's
    /// memory.
    pub fn can_stage(&self, link: usize, stream: Stream, seq: u64) -> bool {
        let slot = self.slot(link, stream, seq);
        // Acquire: pairs with the release in the proxy's `sent`; the NIC has read the slot.
        let sent = self.shared.control.u64(self.shared.layout.sent_word(slot)).load(Ordering::Acquire);
        sent + self.shared.layout.window(stream) == seq + 1
            || (sent == 0 && seq < self.shared.layout.window(stream))
    }

    /// Sends message `seq`, the next of its stream, from its staging slot. `bytes` is rounded up to 16.
    ///
    /// # Errors
    /// [`Status::Internal`] for a message that is too long, or that has no room in the ring because the caller did
    /// not keep to its credits.
    pub fn send(&self, link: usize, stream: Stream, seq: u64, bytes: usize) -> Result<()> {
        self.slot(link, stream, seq);
        let layout = &self.shared.layout;
        if bytes as u64 > layout.max_bytes(stream) {
            return Err(too_long(stream, bytes, layout.max_bytes(stream)));
        }
        self.push(
            stream,
            &Command {
                op: OP_SEND,
                link: link as u16,
                stream: stream.id() as u8,
                seq: seq as u16,
                bytes: (bytes as u64).next_multiple_of(UNIT),
                source: layout.staging(link, stream, seq),
                target: layout.offset_in_link(stream, seq),
            },
        )
    }

    /// Message `seq`, if it has come. The bytes stay until the slot is freed.
    pub fn landed(&self, link: usize, stream: Stream, seq: u64) -> Option<*const u8> {
        let slot = self.slot(link, stream, seq);
        // Acquire: pairs with the release in the proxy's `arrive`; the message's bytes are visible.
        let landed = self.shared.control.u64(self.shared.layout.landed_word(slot)).load(Ordering::Acquire);
        has_landed(landed, seq)
            .then(|| self.shared.at(self.shared.layout.landing(link, stream, seq)).cast_const())
    }

    /// Tells the peer of `link` that its messages before `consumed` of (lane, Rows) were consumed, all of them. Told
    /// in steps of a quarter of the window; less than a step stays untold, so a sender never sees the window empty.
    ///
    /// # Errors
    /// [`Status::Internal`] if more is freed than can have come.
    pub fn send_credit(&self, link: usize, stream: Stream, consumed: u64) -> Result<()> {
        let window = self.shared.layout.window(stream);
        let given = &self.shared.given[link * self.shared.bells.len() + stream.lane()];
        // Relaxed: this thread is the only one that gives credit for the lane.
        let before = given.load(Ordering::Relaxed);
        let Some(freed) = self.shared.layout.rules(stream).credit_due(consumed, before) else {
            return Ok(());
        };
        if freed > window || stream.kind() != Kind::Rows {
            return Err(too_much_credit(link, stream, freed, window));
        }
        // Relaxed: as above.
        given.store(consumed, Ordering::Relaxed);
        let credit = Stream::new(stream.lane(), Kind::Credit);
        let (link, stream) = (link as u16, credit.id() as u8);
        let seq = freed as u16;
        self.push(credit, &Command { op: OP_CREDIT, link, stream, seq, bytes: 0, source: 0, target: 0 })
    }

    /// How many messages of `stream`, of kind Rows, the peer of `link` has freed.
    pub fn credit(&self, link: usize, stream: Stream) -> u64 {
        let offset = self.shared.layout.credit_word(link, stream.lane());
        // Acquire: pairs with the release in the proxy's `arrive`; what the peer did before it gave the credit
        // happened before.
        self.shared.control.u64(offset).load(Ordering::Acquire)
    }

    /// Why `link` has failed, if it has. What it had sent may or may not have arrived; nothing more will.
    pub fn failure(&self, link: usize) -> Option<&LinkFailure> {
        self.shared.failures[link].get()
    }

    /// The rank at the other end of `link`.
    pub fn peer(&self, link: usize) -> usize {
        self.shared.peers[link]
    }

    /// What went over `link` so far.
    pub fn stats(&self, link: usize) -> LinkStats {
        self.shared.counters[link].read()
    }

    /// What the port may use of the NICs; changed at any time, in effect within a turn of the proxy.
    pub fn limits(&self) -> &Limiter {
        &self.shared.limiter
    }

    fn slot(&self, link: usize, stream: Stream, seq: u64) -> usize {
        match self.shared.layout.slot(link, stream, seq) {
            Some(slot) => slot,
            None => panic!("no stream {stream:?} on link {link} of {}", self.shared.peers.len()),
        }
    }

    fn push(&self, stream: Stream, command: &Command) -> Result<()> {
        let pushed = &self.shared.pushed[stream.id()];
        // Relaxed: this thread is the only one that sends on the stream.
        let position = pushed.load(Ordering::Relaxed);
        let room = self.shared.ring(stream).is_some_and(|ring| ring.push(position, command));
        if !room {
            return Err(no_room(stream, command.link, position));
        }
        // Relaxed: as above.
        pushed.store(position + 1, Ordering::Relaxed);
        self.shared.waker.wake_if_asleep();
        Ok(())
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        let port = Arc::clone(&self.shared);
        self.mailbox.tell(Request::Close { port, deadline: Instant::now(), reply: None });
    }
}

#[cold]
fn too_long(stream: Stream, bytes: usize, max_bytes: u64) -> Error {
    let text = format!("a message of {bytes} bytes was sent on {stream:?}, whose slots have {max_bytes}");
    Error::new(Status::Internal, text)
}

#[cold]
fn too_much_credit(link: usize, stream: Stream, freed: u64, window: u64) -> Error {
    let text =
        format!("{freed} messages of {stream:?} were freed at once on link {link}, of at most {window}");
    Error::new(Status::Internal, text)
}

#[cold]
fn no_room(stream: Stream, link: u16, position: u64) -> Error {
    let text = format!("command {position} of {stream:?}, for link {link}, has no room: sent without credit");
    Error::new(Status::Internal, text)
}
