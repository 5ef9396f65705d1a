//! Descriptors between nodes: a rank sends its own once to each cell, and passes on those of the ranks whose messages
//! it takes, so that every rank finds the descriptors of all ranks in its own memory.

use super::exchange::Exchange;
use super::scratch_between::{CellState, SourceState};
use crate::engine::{Cell, Net, Topology};
use crate::error::{Error, Result, Status};
use crate::net::{Kind, Stream};
use crate::plan::{PlanShape, PlanState};
use crate::wire::{DescBody, OP_PLAN, RELAY_DESC_BYTES, RelayDesc};

/// How far a lane is with each cell and each source, and how far its call is.
pub(crate) struct BetweenState {
    pub(super) cells: Vec<CellState>,
    pub(super) sources: Vec<SourceState>,
    /// Descriptors of the call to be sent or taken.
    descs_left: usize,
}

impl BetweenState {
    pub(crate) fn new(topology: &Topology) -> BetweenState {
        BetweenState {
            cells: topology.cells().iter().map(|_| CellState::default()).collect(),
            sources: topology.sources().iter().map(|_| SourceState::default()).collect(),
            descs_left: 0,
        }
    }

    /// Forgets the last call.
    pub(super) fn begin_call(&mut self) {
        self.descs_left = self.cells.len() + self.sources.len();
        self.cells.iter_mut().for_each(CellState::begin_call);
        self.sources.iter_mut().for_each(SourceState::begin_call);
    }

    /// True once this rank has sent its descriptors and passed on those that it takes.
    pub(super) fn descs_done(&self) -> bool {
        self.descs_left == 0
    }
}

/// What a rank tells the ranks of another node in its descriptor.
pub(super) struct Told<'a> {
    /// None in a call that failed before it began.
    pub(super) plan: Option<(&'a PlanShape, &'a PlanState<'a>)>,
}

impl Told<'_> {
    fn num_tokens(&self, cell: usize) -> usize {
        self.plan.map_or(0, |(_, state)| state.tokens_to_cell(cell).len())
    }

    /// Tokens for `rank` and assignments for each of its experts; in an update only.
    fn counts(&self, op: u32, rank: usize) -> Option<(u32, &[u32])> {
        let (shape, state) = self.plan.filter(|_| op == OP_PLAN)?;
        let experts = shape.experts.first(rank) as usize..;
        let counts = &state.expert_count[experts][..shape.experts.num_local(rank)];
        Some((state.tokens_to(rank).len() as u32, counts))
    }
}

impl Exchange<'_> {
    pub(super) fn stream(&self, kind: Kind) -> Stream {
        Stream::new(self.lane, kind)
    }

    /// Sends this rank's descriptor to the cells and passes on those that have come. True if there was one.
    pub(super) fn carry_descs(&mut self, state: &mut BetweenState, told: &Told<'_>) -> Result<bool> {
        let Some(net) = self.group.net.as_ref().filter(|_| state.descs_left != 0) else { return Ok(false) };
        let before = state.descs_left;
        for (index, cell) in self.group.topology.cells().iter().enumerate() {
            let sent = &mut state.cells[index];
            if !sent.desc_sent && net.port.can_stage(cell.link, self.stream(Kind::Desc), self.epoch - 1) {
                self.step()?;
                self.send_desc(net, index, cell, sent, told)?;
                sent.desc_sent = true;
                state.descs_left -= 1;
            }
        }
        for (index, source) in self.group.topology.sources().iter().enumerate() {
            if state.sources[index].known {
                continue;
            }
            let landed = net.port.landed(source.link, self.stream(Kind::Desc), self.epoch - 1);
            let Some(message) = landed else { continue };
            self.step()?;
            self.pass_on(source.rank, message, &mut state.sources[index])?;
            state.descs_left -= 1;
        }
        Ok(state.descs_left != before)
    }

    fn send_desc(
        &self,
        net: &Net,
        index: usize,
        cell: &Cell,
        sent: &CellState,
        told: &Told<'_>,
    ) -> Result<()> {
        let (stream, seq) = (self.stream(Kind::Desc), self.epoch - 1);
        let head = RelayDesc {
            epoch: self.epoch,
            body: *self.own(),
            // Not the next numbers: rows and requests may leave before a descriptor that has to wait for its slot.
            rows_first: sent.rows_first,
            requests_first: sent.requests_first,
            num_tokens: told.num_tokens(index) as u32,
            num_ranks: cell.ranks.len() as u32,
            reserved: [0; 2],
        };
        let slot = net.port.slot_staging(cell.link, stream, seq);
        let room = net.port.layout().max_bytes(stream) as usize / 4;
        // SAFETY: the slot has `room` words, is aligned, and is this call's, since it may be staged.
        let words = unsafe { std::slice::from_raw_parts_mut(slot.cast::<u32>(), room) };
        words[..RELAY_DESC_BYTES / 4].copy_from_slice(bytemuck::cast_slice(bytemuck::bytes_of(&head)));
        let (lengths, mut tails) = words[RELAY_DESC_BYTES / 4..].split_at_mut(cell.ranks.len());
        let mut bytes = RELAY_DESC_BYTES + 4 * lengths.len();
        for (length, &rank) in lengths.iter_mut().zip(&cell.ranks) {
            *length = 0;
            if let Some((tokens, counts)) = told.counts(self.own().op, rank) {
                *length = 1 + counts.len() as u32;
                tails[0] = tokens;
                tails[1..1 + counts.len()].copy_from_slice(counts);
                tails = &mut tails[1 + counts.len()..];
                bytes += 4 * (1 + counts.len());
            }
        }
        net.port.send(cell.link, stream, seq, bytes).map_err(|error| self.defect(cell.relay, error))
    }

    /// Copies a descriptor of `rank` to the ranks that it is for, this rank included.
    fn pass_on(&self, rank: usize, message: *const u8, source: &mut SourceState) -> Result<()> {
        let max_bytes =
            self.group.net.as_ref().map_or(0, |net| net.port.layout().max_bytes(self.stream(Kind::Desc)));
        // SAFETY: a landed slot has this many bytes, is aligned, and is not written again before three more calls.
        let words = unsafe { std::slice::from_raw_parts(message.cast::<u32>(), max_bytes as usize / 4) };
        let (head, rest) = words.split_at(RELAY_DESC_BYTES / 4);
        let head: RelayDesc = bytemuck::pod_read_unaligned(bytemuck::cast_slice(head));
        let places = self.group.topology.served_places();
        let torn = || self.torn(rank, "descriptor");
        if head.epoch != self.epoch || head.num_ranks as usize != places.len() || rest.len() < places.len() {
            return Err(torn());
        }
        let (lengths, mut tails) = rest.split_at(places.len());
        for (place, &length) in places.zip(lengths) {
            let length = length as usize;
            if length > tails.len() || length > 1 + self.group.config.max_local_experts as usize {
                return Err(torn());
            }
            let tail;
            (tail, tails) = tails.split_at(length);
            self.publish_for(rank, place, &head.body, length, |to| to.copy_from_slice(tail));
        }
        source.open(&head, self.matches_body(&head.body));
        Ok(())
    }

    /// A message that no rank of this library sends.
    pub(super) fn torn(&self, rank: usize, what: &str) -> Error {
        let text = format!(
            "the {what} of rank {rank} for call {} of lane {} came torn over the network; the link is not to be \
             trusted, make a new group",
            self.epoch, self.lane
        );
        self.fail(Status::PeerLost, Some(rank), text)
    }

    /// A port that refused a message although this rank kept to its credits.
    pub(super) fn defect(&self, peer: usize, error: Error) -> Error {
        self.fail(error.status, Some(peer), error.message)
    }

    /// Whether a signature equals this rank's.
    fn matches_body(&self, body: &DescBody) -> bool {
        super::difference::difference(self.own(), body).is_none()
    }
}
