//! What every call of a lane does: take an epoch, publish a descriptor to each peer, read theirs, agree,
//! and wait with a deadline for what is missing.
//!
//! The rule for calls that do not match: the descriptors alone decide. If not all signatures are equal,
//! every rank sees one that differs from its own; if all are, nobody does. So all ranks of an epoch come
//! to one verdict, and the lane goes on with the next epoch whatever it was.

use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::time::Instant;

use super::rank_set::RankSet;
use super::ring::{RingReader, RingWriter};
use super::wait::{Doorbell, Waiter, Woken};
use crate::config::PeerStats;
use crate::engine::{Group, LaneState};
use crate::error::{Error, Result, Status};
use crate::perturb::Stop;
use crate::wire::{
    DESC_BYTES, DescBody, FLAG_ORDER_SHIFT, FLAG_ROW_WEIGHTS, FLAG_TOPK_WEIGHTS, FLAG_WIRE_BF16, OP_COMBINE,
    OP_DISPATCH, OP_FAILED, OP_PLAN, REQUESTS, line,
};

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
    /// Peers for whom words were written since they were last woken.
    owed: RankSet,
    /// The peer that differs, and how.
    mismatch: Option<String>,
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
        }
    }

    /// Publishes a descriptor to `peer`. `fill` writes its tail of `words` words.
    pub(crate) fn publish(
        &self,
        peer: usize,
        body: &DescBody,
        words: usize,
        fill: impl FnOnce(&mut [u32]),
    ) -> Result<()> {
        self.step()?;
        let segment = &self.group.segments[peer];
        let offset = self.group.layout.desc(self.lane, self.group.rank, self.epoch);
        let start = segment.at(offset, DESC_BYTES + 4 * words);
        // SAFETY: this rank is the slot's only writer. Its last reader was the call of epoch - DEPTH, which
        // `peer` ended: the last call of this rank needed the peer's descriptor of epoch - 1.
        unsafe {
            start.add(8).cast::<DescBody>().write(*body);
            fill(std::slice::from_raw_parts_mut(start.add(DESC_BYTES).cast::<u32>(), words));
        }
        // Release: pairs with the acquire in `peek`; publishes body and tail. This is the credit.
        segment.u64(offset).store(self.epoch, Ordering::Release);
        self.ring(peer);
        Ok(())
    }

    /// The descriptor of `peer` for this epoch, if it is there. A different signature is noted.
    pub(crate) fn peek(&mut self, peer: usize, words: usize) -> Option<PeerDesc<'a>> {
        let segment = &self.group.segments[self.group.rank];
        let offset = self.group.layout.desc(self.lane, peer, self.epoch);
        // Acquire: pairs with the release in `publish`; makes body and tail visible.
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

    /// Says to `peer`: this rank touches what your descriptor of this epoch describes no more.
    pub(crate) fn arrive(&self, peer: usize) -> Result<()> {
        self.step()?;
        let offset = self.group.layout.line(self.lane, self.group.rank) + line::ARRIVAL;
        // Streaming stores are not ordered by a release store; the fence orders them before it.
        store_fence();
        // Release: pairs with the acquire in `has_arrived`; publishes all rows of this call, or says that
        // all reads of the peer's rows are done.
        self.group.segments[peer].u64(offset).store(self.epoch, Ordering::Release);
        self.ring(peer);
        Ok(())
    }

    /// True once `peer` has said the same to this rank.
    pub(crate) fn has_arrived(&self, peer: usize) -> bool {
        let offset = self.group.layout.line(self.lane, peer) + line::ARRIVAL;
        // Acquire: pairs with the release in `arrive`; makes the peer's rows visible.
        self.group.segments[self.group.rank].u64(offset).load(Ordering::Acquire) >= self.epoch
    }

    /// The verdict, once all descriptors were read.
    pub(crate) fn verdict(&self) -> Result<()> {
        match &self.mismatch {
            None => Ok(()),
            Some(text) => Err(Error::new(Status::Mismatch, text.clone())),
        }
    }

    /// Rings the peer's doorbell after a word was written for it.
    pub(crate) fn ring(&self, peer: usize) {
        self.group.doorbell(peer, self.lane).ring();
    }

    /// Tells the peer that a position moved `from` .. `to`. A peer that sleeps is woken when the position
    /// passes a multiple of `stride`, or when this rank waits itself: where processes share cores, each
    /// turn shall have work worth a change of process.
    pub(crate) fn moved(&mut self, peer: usize, from: u64, to: u64, stride: u64) {
        let bell = self.group.doorbell(peer, self.lane);
        bell.count_up();
        if from / stride == to / stride {
            self.owed.insert(peer);
        } else {
            self.owed.remove(peer);
            bell.wake();
        }
    }

    /// Gives the room of taken pieces back to the ring's writer, see [`RingReader::publish`].
    pub(crate) fn give_back(&mut self, peer: usize, reader: &mut RingReader<'_>, all: bool) {
        let before = reader.published();
        if reader.publish(all) {
            self.moved(peer, before, reader.published(), self.turn_bytes());
        }
    }

    /// Wakes everyone for whom words were written meanwhile.
    fn wake_owed(&mut self) {
        while let Some(peer) = self.owed.pop() {
            self.group.doorbell(peer, self.lane).wake();
        }
    }

    /// Bytes of a ring that are worth waking a sleeping peer for.
    pub(crate) fn turn_bytes(&self) -> u64 {
        self.group.layout.ring_bytes() as u64 / 2
    }

    /// The staging ring from this rank to `peer`, at position `sent`.
    pub(crate) fn ring_writer(&self, peer: usize, sent: u64) -> RingWriter<'a> {
        let (layout, rank) = (&self.group.layout, self.group.rank);
        let (own, theirs) = (&self.group.segments[rank], &self.group.segments[peer]);
        let data = theirs.at(layout.ring(self.lane, rank), layout.ring_bytes());
        let head = theirs.u64(layout.line(self.lane, rank) + line::RING_HEAD);
        let tail = own.u64(layout.line(self.lane, peer) + line::RING_TAIL);
        RingWriter::new(data, layout.ring_bytes(), head, tail, sent)
    }

    /// The staging ring from `peer` to this rank, at position `taken`.
    pub(crate) fn ring_reader(&self, peer: usize, taken: u64) -> RingReader<'a> {
        let (layout, rank) = (&self.group.layout, self.group.rank);
        let (own, theirs) = (&self.group.segments[rank], &self.group.segments[peer]);
        let data = own.at(layout.ring(self.lane, peer), layout.ring_bytes());
        let head = own.u64(layout.line(self.lane, peer) + line::RING_HEAD);
        let tail = theirs.u64(layout.line(self.lane, rank) + line::RING_TAIL);
        RingReader::new(data, layout.ring_bytes(), head, tail, taken)
    }

    /// Entry `index` of the request ring in the memory of `holder` that `owner` writes.
    pub(crate) fn request_entry(&self, holder: usize, owner: usize, index: u64) -> &'a AtomicU32 {
        let start = self.group.layout.requests(self.lane, owner);
        self.group.segments[holder].u32(start + 4 * (index % REQUESTS as u64) as usize)
    }

    /// Voids the requests of `owner` after a call that failed. Returns the new position.
    pub(crate) fn discard_requests(&self, owner: usize) -> u64 {
        let (layout, rank) = (&self.group.layout, self.group.rank);
        let head = self.group.segments[rank].u64(layout.line(self.lane, owner) + line::REQUEST_HEAD);
        // Acquire: pairs with the release in `request_rows`.
        let head = head.load(Ordering::Acquire);
        let tail = layout.line(self.lane, rank) + line::REQUEST_TAIL;
        // Release: pairs with the acquire in `request_rows`; the entries are not read any more.
        self.group.segments[owner].u64(tail).store(head, Ordering::Release);
        head
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
        self.group.doorbell(self.group.rank, self.lane)
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
        let text = format!(
            "rank {peer} left or died while rank {} waited in {} (lane {}, call {}) for {what} of it",
            self.group.rank,
            self.name(),
            self.lane,
            self.epoch,
        );
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
    /// The peers for which `is_missing` holds.
    pub(crate) fn among(num_ranks: usize, what: &'static str, is_missing: impl Fn(usize) -> bool) -> Missing {
        let mut missing = Missing { first: None, count: 0, what, ranks: RankSet::new() };
        for rank in (0..num_ranks).filter(|&rank| is_missing(rank)) {
            missing.first.get_or_insert(rank);
            missing.count += 1;
            missing.ranks.insert(rank);
        }
        missing
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

fn op_name(op: u32) -> &'static str {
    match op {
        OP_PLAN => "ep_plan_update",
        OP_DISPATCH => "ep_dispatch",
        OP_COMBINE => "ep_combine",
        OP_FAILED => "a queued call that failed",
        _ => "an unknown call",
    }
}

/// How two signatures differ, for a person; None if they are equal.
fn difference(own: &DescBody, peer: &DescBody) -> Option<String> {
    if own.op == OP_FAILED || peer.op == OP_FAILED {
        return Some(String::from(
            "the queued call of one of them failed before it began; its stream says why",
        ));
    }
    if own.op != peer.op {
        return Some(format!("one is in {}, the other in {}", op_name(own.op), op_name(peer.op)));
    }
    if own.plan_hash != peer.plan_hash {
        return Some(String::from("their plans have different configs (topk, experts, layout or alignment)"));
    }
    if own.plan_epoch != peer.plan_epoch {
        return Some(format!(
            "their plans were updated in different calls, {} and {}",
            own.plan_epoch, peer.plan_epoch
        ));
    }
    let fields = [
        ("num_payloads", own.num_payloads, peer.num_payloads),
        ("dtypes of the payloads (a byte each)", own.dtypes, peer.dtypes),
        ("bytes of a row of payload 0", own.row_bytes[0], peer.row_bytes[0]),
        ("bytes of a row of payload 1", own.row_bytes[1], peer.row_bytes[1]),
        ("bytes of a row of payload 2", own.row_bytes[2], peer.row_bytes[2]),
        ("bytes of a row of payload 3", own.row_bytes[3], peer.row_bytes[3]),
    ];
    if let Some((name, own, peer)) = fields.into_iter().find(|(_, own, peer)| own != peer) {
        return Some(format!("{name}: {own} and {peer}"));
    }
    let options = [
        (FLAG_TOPK_WEIGHTS, "one carries inputs.topk_weights, the other does not"),
        (FLAG_ROW_WEIGHTS, "one returns inputs.row_weights, the other does not"),
        (3 << FLAG_ORDER_SHIFT, "their reduce_order differs"),
        (FLAG_WIRE_BF16, "their wire_dtype differs"),
    ];
    let differing = own.flags ^ peer.flags;
    let found = options.into_iter().find(|(bits, _)| differing & bits != 0);
    found.map(|(_, text)| String::from(text))
}
