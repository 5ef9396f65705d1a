//! What every call of a lane does: take an epoch, publish a descriptor to each peer, read theirs, agree,
//! and wait with a deadline for what is missing.
//!
//! The rule for calls that do not match: the descriptors alone decide. If not all signatures are equal,
//! every rank sees one that differs from its own; if all are, nobody does. So all ranks of an epoch come
//! to one verdict, and the lane goes on with the next epoch whatever it was.

use std::sync::atomic::{Ordering, fence};
use std::time::Instant;

use super::between::BetweenState;
use super::difference::{difference, op_name};
use super::rank_set::RankSet;
use super::request::RequestRing;
use super::ring::{RingReader, RingWriter};
use super::wait::{Doorbell, Waiter, Woken};
use crate::config::PeerStats;
use crate::engine::{Group, LaneState, RingPositions};
use crate::error::{Error, Result, Status};
use crate::mem::Words;
use crate::perturb::Stop;
use crate::wire::{DESC_BYTES, DescBody, OP_COMBINE, line};

/// One call in progress on this rank.
pub(crate) struct Exchange<'a> {
    pub(crate) group: &'a Group,
    pub(crate) lane: usize,
    pub(crate) epoch: u64,
    /// This rank's descriptor; its signature is what peers must match.
    own: DescBody,
    waiter: Waiter,
    deadline: Instant,
    started_waiting: Option<Instant>,
    /// How often this rank has said in its segment that it waits, see [`super::blame`].
    pub(super) looks: u32,
    /// A peer that was seen to have left at the last wait.
    suspect: Option<usize>,
    /// Places of ranks for whom words were written since they were last woken.
    owed: RankSet,
    /// The peer that differs, and how.
    mismatch: Option<String>,
    /// How many of the remote ranks' descriptors were read; they are read in order.
    remotes_read: usize,
}

/// A peer's descriptor of the current epoch.
#[derive(Clone, Copy)]
pub(crate) struct PeerDesc<'a> {
    pub(crate) body: DescBody,
    /// `tail[0]`, then one word per local expert of the side that the op defines.
    pub(crate) tail: &'a [u32],
}

impl<'a> Exchange<'a> {
    /// Begins a call: it now has an epoch, whatever happens.
    pub(crate) fn begin(
        group: &'a Group,
        lane: usize,
        state: &mut LaneState,
        own: DescBody,
        deadline: Instant,
    ) -> Exchange<'a> {
        state.epoch += 1;
        state.between.begin_call();
        Exchange {
            group,
            lane,
            epoch: state.epoch,
            own,
            waiter: Waiter::new(group.patience, deadline),
            deadline,
            started_waiting: None,
            looks: 0,
            suspect: None,
            owed: RankSet::new(),
            mismatch: None,
            remotes_read: 0,
        }
    }

    /// This rank's descriptor.
    pub(super) fn own(&self) -> &DescBody {
        &self.own
    }

    /// Publishes a descriptor to the rank at `place`. `fill` writes its tail of `words` words.
    pub(crate) fn publish(
        &self,
        place: usize,
        body: &DescBody,
        words: usize,
        fill: impl FnOnce(&mut [u32]),
    ) -> Result<()> {
        self.step()?;
        self.publish_for(self.group.rank, place, body, words, fill);
        Ok(())
    }

    /// Publishes to each rank of this node where its rows lie: `base` has `words` for each rank. What the rank passes
    /// on for a remote rank lies where that rank's rows do.
    pub(super) fn publish_bases(&self, body: &DescBody, words: usize, base: &[u32]) -> Result<()> {
        let topology = &self.group.topology;
        let (num_locals, own) = (topology.locals().len(), topology.own_place());
        let of_rank = |rank: usize| &base[rank * words..(rank + 1) * words];
        let first = self.group.perturb.first_peer(own, num_locals);
        for place in (0..num_locals).map(|i| (first + i) % num_locals) {
            if place != own {
                for (index, &source) in topology.served_by(place).iter().enumerate() {
                    let offset = self.group.layout.relay_tail(self.lane, index, own, self.epoch);
                    let start = self.group.segments[place].at(offset, 4 * words);
                    // SAFETY: this rank is the slot's only writer, and its last reader ended the call of epoch - DEPTH,
                    // as for descriptors. The store of the descriptor's epoch, next, publishes it.
                    unsafe { std::slice::from_raw_parts_mut(start.cast::<u32>(), words) }
                        .copy_from_slice(of_rank(source));
                }
            }
            let base = of_rank(topology.locals()[place]);
            self.publish(place, body, words, |tail| tail.copy_from_slice(base))?;
        }
        Ok(())
    }

    /// Where the rows of the `index`-th source lie at the rank at `place`, as that rank published it with its
    /// descriptor.
    pub(super) fn relay_tail(&self, index: usize, place: usize) -> *const u32 {
        let offset = self.group.layout.relay_tail(self.lane, index, place, self.epoch);
        self.group.own_segment().at(offset, 4).cast_const().cast()
    }

    /// Publishes the descriptor of `rank`, which is this rank, or one whose messages it takes, to the rank at `place`.
    pub(super) fn publish_for(
        &self,
        rank: usize,
        place: usize,
        body: &DescBody,
        words: usize,
        fill: impl FnOnce(&mut [u32]),
    ) {
        let segment = &self.group.segments[place];
        let offset = self.group.layout.desc(self.lane, rank, self.epoch);
        let start = segment.at(offset, DESC_BYTES + 4 * words);
        // SAFETY: this rank is the slot's only writer. Its last reader was the call of epoch - DEPTH, which
        // the rank at `place` ended: the last call of this rank needed its descriptor of epoch - 1.
        unsafe {
            start.add(8).cast::<DescBody>().write(*body);
            fill(std::slice::from_raw_parts_mut(start.add(DESC_BYTES).cast::<u32>(), words));
        }
        // Release: pairs with the acquire in `peek`; publishes body and tail. This is the credit.
        segment.u64(offset).store(self.epoch, Ordering::Release);
        self.ring(place);
    }

    /// Reads the descriptors of remote ranks that have come; `keep(rank, tail)` gets the tails of those that match,
    /// of `words` words. True if there was one.
    pub(super) fn read_remotes(&mut self, words: usize, mut keep: impl FnMut(usize, &[u32])) -> bool {
        let remotes = self.group.topology.remotes();
        let before = self.remotes_read;
        while let Some(&rank) = remotes.get(self.remotes_read) {
            let Some(desc) = self.peek(rank, words) else { break };
            if self.matches(&desc) {
                keep(rank, desc.tail);
            }
            self.remotes_read += 1;
        }
        self.remotes_read != before
    }

    /// True once the descriptors of all remote ranks were read.
    pub(super) fn remotes_known(&self) -> bool {
        self.remotes_read == self.group.topology.remotes().len()
    }

    /// The descriptor of `peer` for this epoch, if it is there. A different signature is noted.
    pub(crate) fn peek(&mut self, peer: usize, words: usize) -> Option<PeerDesc<'a>> {
        let segment = self.group.own_segment();
        let offset = self.group.layout.desc(self.lane, peer, self.epoch);
        // Acquire: pairs with the release in `publish_for`; makes body and tail visible.
        if segment.u64(offset).load(Ordering::Acquire) != self.epoch {
            return None;
        }
        let start = segment.at(offset, DESC_BYTES + 4 * words);
        // SAFETY: the epoch word was seen with acquire, and the peer does not write the slot again before
        // this rank has ended the epoch.
        let (body, tail) = unsafe {
            (
                start.add(8).cast::<DescBody>().read(),
                std::slice::from_raw_parts(start.add(DESC_BYTES).cast::<u32>(), words),
            )
        };
        if self.mismatch.is_none()
            && let Some(difference) = difference(&self.own, &body)
        {
            let (rank, lane, epoch) = (self.group.rank, self.lane, self.epoch);
            self.mismatch = Some(format!(
                "ranks {rank} and {peer} do not match in call {epoch} of lane {lane}: {difference}; every rank \
                 issues the same calls in a lane, with the same shapes"
            ));
        }
        Some(PeerDesc { body, tail })
    }

    /// True if the peer's signature equals this rank's: only then may either touch the other's memory.
    pub(crate) fn matches(&self, desc: &PeerDesc<'_>) -> bool {
        difference(&self.own, &desc.body).is_none()
    }

    /// True once a peer's signature differed: no more rows move in this epoch.
    pub(crate) fn mismatched(&self) -> bool {
        self.mismatch.is_some()
    }

    /// Says to the rank at `place`: this rank touches what your descriptor of this epoch describes no more.
    pub(crate) fn arrive(&self, place: usize) -> Result<()> {
        self.step()?;
        let offset = self.group.layout.line(self.lane, self.group.topology.own_place()) + line::ARRIVAL;
        // Streaming stores are not ordered by a release store; the fence orders them before it.
        store_fence();
        // Release: pairs with the acquire in `has_arrived`; publishes all rows of this call, or says that
        // all reads of the peer's rows are done.
        self.group.segments[place].u64(offset).store(self.epoch, Ordering::Release);
        self.ring(place);
        Ok(())
    }

    /// True once the rank at `place` has said the same to this rank.
    pub(crate) fn has_arrived(&self, place: usize) -> bool {
        let offset = self.group.layout.line(self.lane, place) + line::ARRIVAL;
        // Acquire: pairs with the release in `arrive`; makes the peer's rows visible.
        self.group.own_segment().u64(offset).load(Ordering::Acquire) >= self.epoch
    }

    /// The verdict, once all descriptors were read.
    pub(crate) fn verdict(&self) -> Result<()> {
        match &self.mismatch {
            None => Ok(()),
            Some(text) => Err(Error::new(Status::Mismatch, text.clone())),
        }
    }

    /// Rings the doorbell of the rank at `place` after a word was written for it.
    pub(crate) fn ring(&self, place: usize) {
        self.group.doorbell(place, self.lane).ring();
    }

    /// Tells the rank at `place` that a position moved `from` .. `to`. A peer that sleeps is woken when the
    /// position passes a multiple of `stride`, or when this rank waits itself: where processes share cores, each
    /// turn shall have work worth a change of process.
    pub(crate) fn moved(&mut self, place: usize, from: u64, to: u64, stride: u64) {
        let bell = self.group.doorbell(place, self.lane);
        bell.count_up();
        if from / stride == to / stride {
            self.owed.insert(place);
        } else {
            self.owed.remove(place);
            bell.wake();
        }
    }

    /// Gives the room of taken pieces back to the ring's writer at `place`, see [`RingReader::publish`].
    pub(crate) fn give_back(&mut self, place: usize, reader: &mut RingReader<'_>, all: bool) {
        let before = reader.published();
        if reader.publish(all) {
            self.moved(place, before, reader.published(), self.turn_bytes());
        }
    }

    /// Wakes everyone for whom words were written meanwhile.
    fn wake_owed(&mut self) {
        while let Some(place) = self.owed.pop() {
            self.group.doorbell(place, self.lane).wake();
        }
    }

    /// Bytes of a ring that are worth waking a sleeping peer for.
    pub(crate) fn turn_bytes(&self) -> u64 {
        self.group.layout.ring_bytes() as u64 / 2
    }

    /// The rank at the other end of `channel`, and this rank's channel there.
    fn other_end(&self, channel: usize) -> (&'a Words, usize) {
        let place = channel % self.group.segments.len();
        (&self.group.segments[place], channel - place + self.group.topology.own_place())
    }

    /// The staging ring from this rank through `channel`, at position `sent`.
    pub(crate) fn ring_writer(&self, channel: usize, sent: u64) -> RingWriter<'a> {
        let layout = &self.group.layout;
        let (own, (theirs, there)) = (self.group.own_segment(), self.other_end(channel));
        let data = theirs.at(layout.ring(self.lane, there), layout.ring_bytes());
        let head = theirs.u64(layout.line(self.lane, there) + line::RING_HEAD);
        let tail = own.u64(layout.line(self.lane, channel) + line::RING_TAIL);
        RingWriter::new(data, layout.ring_bytes(), head, tail, sent)
    }

    /// After a call that failed on all ranks: what the peers had put into their rings is void.
    pub(super) fn discard_rings(&self, rings: &mut [RingPositions]) {
        if !self.mismatched() {
            return;
        }
        for (channel, ring) in rings.iter_mut().enumerate() {
            let mut reader = self.ring_reader(channel, ring.taken);
            reader.discard();
            reader.publish(true);
            ring.taken = reader.position();
        }
    }

    /// The staging ring through `channel` to this rank, at position `taken`.
    pub(crate) fn ring_reader(&self, channel: usize, taken: u64) -> RingReader<'a> {
        let layout = &self.group.layout;
        let (own, (theirs, there)) = (self.group.own_segment(), self.other_end(channel));
        let data = own.at(layout.ring(self.lane, channel), layout.ring_bytes());
        let head = own.u64(layout.line(self.lane, channel) + line::RING_HEAD);
        let tail = theirs.u64(layout.line(self.lane, there) + line::RING_TAIL);
        RingReader::new(data, layout.ring_bytes(), head, tail, taken)
    }

    /// The request ring from this rank through `channel`.
    pub(super) fn requests_out(&self, channel: usize) -> RequestRing<'a> {
        let layout = &self.group.layout;
        let (own, (theirs, there)) = (self.group.own_segment(), self.other_end(channel));
        RequestRing {
            entries: theirs,
            start: layout.requests(self.lane, there),
            head: theirs.u64(layout.line(self.lane, there) + line::REQUEST_HEAD),
            tail: own.u64(layout.line(self.lane, channel) + line::REQUEST_TAIL),
        }
    }

    /// The request ring through `channel` to this rank.
    pub(super) fn requests_in(&self, channel: usize) -> RequestRing<'a> {
        let layout = &self.group.layout;
        let (own, (theirs, there)) = (self.group.own_segment(), self.other_end(channel));
        RequestRing {
            entries: own,
            start: layout.requests(self.lane, channel),
            head: own.u64(layout.line(self.lane, channel) + line::REQUEST_HEAD),
            tail: theirs.u64(layout.line(self.lane, there) + line::REQUEST_TAIL),
        }
    }

    /// Gives up if the deadline has passed although something moved: a call that is never idle must end
    /// too. One that is idle gives up in [`Exchange::wait`], which knows whom it waits for.
    ///
    /// # Errors
    /// [`Status::Timeout`].
    pub(crate) fn check_deadline(&self, what: &str) -> Result<()> {
        if Instant::now() < self.deadline {
            return Ok(());
        }
        let text = format!(
            "rank {} was still busy with {what} in {} (lane {}, call {}) at its deadline; raise timeout_ms",
            self.group.rank,
            self.name(),
            self.lane,
            self.epoch
        );
        Err(self.fail(Status::Timeout, None, text))
    }

    /// This rank's own doorbell count; take it before looking at the words.
    pub(crate) fn bell(&self) -> u32 {
        self.own_bell().count()
    }

    pub(super) fn own_bell(&self) -> Doorbell<'a> {
        self.group.doorbell(self.group.topology.own_place(), self.lane)
    }

    /// A point at which tests disturb the protocol, and at which an abort is noticed.
    pub(crate) fn step(&self) -> Result<()> {
        if let Some(error) = self.group.broken() {
            return Err(error);
        }
        self.group.perturb.step().map_err(|Stop| self.stopped())
    }

    /// A disturbed rank vanishes: as after a crash, its peers learn it by deadline, or by its segment.
    fn stopped(&self) -> Error {
        Error::new(Status::Aborted, format!("rank {} was stopped by its test", self.group.rank))
    }

    /// Something moved since the last look.
    pub(crate) fn progressed(&mut self) {
        self.waiter.progressed();
        self.started_waiting = None;
        self.denounce();
    }

    /// Waits until a word of this lane may have changed since `seen`. `missing` lists the peers this rank
    /// waits for; it is called only when the wait is long.
    ///
    /// # Errors
    /// [`Status::Timeout`] and [`Status::PeerLost`] naming a missing peer, or what broke the group.
    pub(crate) fn wait(&mut self, seen: u32, missing: impl Fn(&Exchange<'a>) -> Missing) -> Result<()> {
        self.wake_owed();
        let started = *self.started_waiting.get_or_insert_with(Instant::now);
        let woken = self.waiter.wait(&self.own_bell(), seen);
        if woken == Woken::LookAgain {
            return Ok(());
        }
        self.group.poll_net();
        if let Some(error) = self.group.broken() {
            return Err(error);
        }
        let missing = missing(self);
        let Some(peer) = missing.first else { return Ok(()) };
        self.charge(&missing, peer, started);
        self.announce(peer);
        if let Some(lost) = missing.ranks().find(|&rank| self.group.has_left(rank)) {
            return self.peer_lost(lost, missing.what);
        }
        if woken == Woken::TimeUp {
            let culprit = self.culprit(&missing, peer)?;
            let text = format!(
                "rank {} waited in {} (lane {}, call {}) for {} of rank {} until its deadline",
                self.group.rank,
                self.name(),
                self.lane,
                self.epoch,
                missing.what,
                if missing.has(culprit) {
                    format!("{culprit}")
                } else {
                    format!("{peer}, held up by rank {culprit},")
                },
            );
            return Err(self.fail(Status::Timeout, Some(culprit), text));
        }
        Ok(())
    }

    /// A peer has left. What it wrote before is visible by now, but may not have been when the caller
    /// looked: the caller looks once more, and comes back if its part is still missing.
    fn peer_lost(&mut self, peer: usize, what: &str) -> Result<()> {
        if self.suspect != Some(peer) {
            self.suspect = Some(peer);
            return Ok(());
        }
        let mut text = format!(
            "rank {peer} left or died while rank {} waited in {} (lane {}, call {}) for {what} of it",
            self.group.rank,
            self.name(),
            self.lane,
            self.epoch,
        );
        if let Some(failure) = self.group.link_failure(peer) {
            text = format!("{text}: {}", failure.text);
        }
        Err(self.fail(Status::PeerLost, Some(peer), text))
    }

    /// Charges the time waited to the peer that alone is missing.
    fn charge(&mut self, missing: &Missing, peer: usize, started: Instant) {
        if missing.count != 1 {
            return;
        }
        let waited = started.elapsed().as_nanos() as u64;
        let mut stats = PeerStats::default();
        match self.own.op {
            OP_COMBINE => stats.wait_combine_ns = waited,
            _ => stats.wait_dispatch_ns = waited,
        }
        self.group.lanes[self.lane].counters[peer].add(&stats);
        self.started_waiting = Some(Instant::now());
    }

    /// The ranks of this node for whose place `is_missing` holds.
    pub(super) fn missing_locals(&self, what: &'static str, is_missing: impl Fn(usize) -> bool) -> Missing {
        let locals = self.group.topology.locals().iter().enumerate();
        Missing::of(locals.filter(|(place, _)| is_missing(*place)).map(|(_, &rank)| rank), what)
    }

    /// The ranks of other nodes whose descriptors are missing, where this rank takes them, and otherwise the ranks
    /// that take them and know for whom they wait; or the ranks to which this rank's own does not go.
    pub(super) fn missing_remotes(&self, what: &'static str, state: &BetweenState) -> Missing {
        let topology = &self.group.topology;
        let absent = |rank: &usize| {
            let offset = self.group.layout.desc(self.lane, *rank, self.epoch);
            // Relaxed: nothing else is read.
            self.group.own_segment().u64(offset).load(Ordering::Relaxed) != self.epoch
        };
        let named = |rank: usize| match topology.local_relay(rank) {
            relay if relay == self.group.rank => rank,
            relay => relay,
        };
        Missing::of(topology.remotes().iter().copied().filter(absent).map(named), what).or_else(|| {
            let unsent = topology.cells().iter().zip(&state.cells).filter(|(_, sent)| !sent.desc_sent);
            Missing::of(unsent.map(|(cell, _)| cell.relay), "the network to take a descriptor")
        })
    }

    /// Breaks the group.
    pub(crate) fn fail(&self, status: Status, peer: Option<usize>, text: String) -> Error {
        self.group.fail(&self.group.error_info(status, peer, Some(self.lane), self.epoch, text))
    }

    fn name(&self) -> &'static str {
        op_name(self.own.op)
    }
}

impl Drop for Exchange<'_> {
    fn drop(&mut self) {
        self.wake_owed();
        self.denounce();
    }
}

/// Whom a call waits for.
pub(crate) struct Missing {
    pub(crate) first: Option<usize>,
    pub(crate) count: usize,
    /// What is missing, such as "a credit".
    pub(crate) what: &'static str,
    ranks: RankSet,
}

impl Missing {
    /// These ranks.
    pub(crate) fn of(ranks: impl Iterator<Item = usize>, what: &'static str) -> Missing {
        let mut missing = Missing { first: None, count: 0, what, ranks: RankSet::new() };
        for rank in ranks {
            missing.first.get_or_insert(rank);
            missing.count += usize::from(!missing.ranks.contains(rank));
            missing.ranks.insert(rank);
        }
        missing
    }

    /// This, or if it is nobody, `next`.
    pub(super) fn or_else(self, next: impl FnOnce() -> Missing) -> Missing {
        if self.count > 0 { self } else { next() }
    }

    pub(super) fn ranks(&self) -> impl Iterator<Item = usize> + '_ {
        self.ranks.iter()
    }

    fn has(&self, rank: usize) -> bool {
        self.ranks.contains(rank)
    }
}

/// Orders earlier streaming stores before later stores.
pub(crate) fn store_fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 processor has sfence.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
    // Release: elsewhere there are no streaming stores, and this is what the name says.
    #[cfg(not(target_arch = "x86_64"))]
    fence(Ordering::Release);
    #[cfg(target_arch = "x86_64")]
    let _ = fence;
}
