//! `ep_combine`: the owner of a token reads its rows where the experts left them, in windows, or takes
//! them from rings in the order in which it asked for them; asks for what other nodes hold; and adds all of it.

use super::ask::{ask, discard_old_answers, missing_answers};
use super::between::{BetweenState, Told};
use super::call::CombineCall;
use super::exchange::{Exchange, Missing};
use super::gather::Gatherer;
use super::item::row_end;
use super::owner::Owner;
use super::pack::padded as padded_record;
use super::response::{Form, Response};
use super::scratch::LaneScratch;
use super::scratch_between::SourceState;
use super::serve::Server;
use super::update::Updated;
use crate::config::{Layout, PeerStats};
use crate::engine::{Group, LaneState, WindowTable};
use crate::error::{Error, Result, Status};
use crate::net::Kind;
use crate::plan::{PlanShape, PlanState};
use crate::wire::{
    CHUNK_BYTES, DescBody, FLAG_ORDER_SHIFT, FLAG_ROW_WEIGHTS, FLAG_WIRE_BF16, OP_COMBINE, RECORD_ALIGN,
};

/// Everything that the two sides of a combine share.
pub(super) struct Combine<'a> {
    pub(super) group: &'a Group,
    pub(super) shape: &'a PlanShape,
    pub(super) state: &'a PlanState<'a>,
    pub(super) call: &'a CombineCall,
    pub(super) num_tokens: usize,
    /// Columns of one piece of a row in a ring: the rows of a token fit a quarter of it together.
    pub(super) piece_cols: usize,
    /// The layout of answers between nodes.
    pub(super) response: Response,
}

impl<'a> Combine<'a> {
    fn new(
        group: &'a Group,
        shape: &'a PlanShape,
        state: &'a PlanState<'a>,
        updated: &Updated,
        call: &'a CombineCall,
    ) -> Result<Combine<'a>> {
        let piece_cols = piece_cols(group.layout.ring_bytes(), shape, call);
        let response = Response::new(group, shape, call);
        let combine =
            Combine { group, shape, state, call, num_tokens: updated.num_tokens, piece_cols, response };
        combine.check_messages()?;
        Ok(combine)
    }

    /// Refuses a call of which not even a column of a token fits a message.
    fn check_messages(&self) -> Result<()> {
        let Some(net) = &self.group.net else { return Ok(()) };
        let smallest = self.response.head_bytes(0) + RECORD_ALIGN * self.shape.topk;
        let asked = padded_record(4 * (1 + 3 * self.shape.topk));
        let (room, request) = (net.chunk_bytes(Kind::Response), net.chunk_bytes(Kind::Request));
        if CHUNK_BYTES + smallest <= room && CHUNK_BYTES + asked <= request {
            return Ok(());
        }
        Err(Error::new(
            Status::Capacity,
            format!(
                "a token with topk {} needs {smallest} bytes of an answer and {asked} of a request, and messages \
                 between nodes have {room} and {request}, {CHUNK_BYTES} of them for the header; raise chunk_bytes in \
                 the group's config",
                self.shape.topk
            ),
        ))
    }

    /// Weights of a row that travel with it.
    pub(super) fn weights_per_row(&self) -> usize {
        match (&self.call.row_weights, self.shape.layout) {
            (None, _) => 0,
            (Some(_), Layout::Flat) => self.shape.topk,
            (Some(_), Layout::ExpertMajor) => 1,
        }
    }

    /// Bytes of a row's piece that begins at column `col` of those before `end`.
    pub(super) fn piece_bytes(&self, col: usize, end: usize) -> usize {
        self.piece_cols.min(end - col) * self.call.rows.dtype.bytes()
    }

    /// Whether owners tell relays the factors: where relays add.
    pub(super) fn asks_with_weights(&self) -> bool {
        self.shape.layout == Layout::ExpertMajor && self.response.form != Form::Rows
    }

    /// The factor of a token's slot; 1 if the caller gave none.
    pub(super) fn topk_weight(&self, token: usize, slot: usize) -> f32 {
        match &self.call.topk_weights {
            // SAFETY: [tokens, topk] fp32, readable by the caller's word.
            Some(weights) => unsafe { row_end(weights, token, slot).address.cast::<f32>().read() },
            None => 1.0,
        }
    }
}

/// Runs a combine.
pub(crate) fn combine(
    group: &Group,
    lane: &mut LaneState,
    shape: &PlanShape,
    state: &PlanState<'_>,
    updated: &Updated,
    call: &CombineCall,
) -> Result<()> {
    let combine = Combine::new(group, shape, state, updated, call)?;
    let windows = WindowTable::of(group);
    let body = describe(shape, updated, call, &windows);
    let mut exchange = Exchange::begin(group, shape.lane, lane, body, call.deadline);
    exchange.publish_bases(&body, shape.column_words(), state.base)?;

    let LaneState { rings, scratch, between, .. } = lane;
    let LaneScratch { fetching, serving, piecing, gathering, rows_read, .. } = scratch;
    let told = Told { plan: Some((shape, state)) };
    let mut owner = Owner::new(&combine, &windows, fetching, piecing, rows_read);
    let mut server = Server::new(&combine, &body, serving);
    let mut gatherer = Gatherer::new(&combine, gathering);
    loop {
        let bell = exchange.bell();
        let mut progress = exchange.carry_descs(between, &told)?;
        progress |= owner.read_descriptors(&mut exchange)?;
        progress |= exchange.read_remotes(0, |_, _| ());
        progress |= discard_old_answers(&combine, &exchange, &mut between.cells);
        progress |= ask(&combine, &exchange, &mut between.cells)?;
        progress |= server.serve(&mut exchange, owner.holders(), rings)?;
        progress |= gatherer.gather(&mut exchange, &mut between.sources, owner.holders(), rings)?;
        let gathered = between.sources.iter().all(SourceState::is_done);
        progress |= owner.fetch(&mut exchange, rings, &mut between.cells, gathered)?;
        if owner.finished()
            && owner.peers_are_done(&exchange)
            && exchange.remotes_known()
            && between.descs_done()
        {
            break;
        }
        if progress {
            exchange.check_deadline("its tokens")?;
            exchange.progressed();
        } else {
            exchange.wait(bell, |exchange| missing(exchange, &combine, between, &owner, &gatherer))?;
        }
    }
    discard_rest(&exchange, rings);
    exchange.verdict()?;
    count_stats(&combine, rows_read);
    Ok(())
}

/// Whom the combine waits for.
fn missing(
    exchange: &Exchange<'_>,
    combine: &Combine<'_>,
    between: &BetweenState,
    owner: &Owner<'_>,
    gatherer: &Gatherer<'_>,
) -> Missing {
    let sources = combine.group.topology.sources().iter().zip(&between.sources);
    let asking = sources.filter(|(_, state)| !state.is_done()).map(|(source, _)| source.rank);
    owner
        .missing_places(exchange)
        .or_else(|| exchange.missing_remotes("the rows' place", between))
        .or_else(|| owner.missing_pieces(exchange))
        .or_else(|| gatherer.missing_pieces(exchange, owner.holders()))
        .or_else(|| missing_answers(exchange, combine, &between.cells, owner.token()))
        .or_else(|| Missing::of(asking, "its questions"))
        .or_else(|| owner.missing_ends(exchange))
}

/// Both sides of a ring come to the same number: all of it is in the signature or in the group's config.
fn piece_cols(ring_bytes: usize, shape: &PlanShape, call: &CombineCall) -> usize {
    let rows = match shape.layout {
        Layout::Flat => 1,
        Layout::ExpertMajor => shape.topk,
    };
    let bytes = (ring_bytes / 4 / rows) & !63;
    (bytes / call.rows.dtype.bytes()).min(call.rows.cols)
}

fn describe(shape: &PlanShape, updated: &Updated, call: &CombineCall, windows: &WindowTable) -> DescBody {
    let mut body = DescBody {
        plan_epoch: updated.epoch,
        plan_hash: shape.hash,
        plan_fields: shape.described(),
        op: OP_COMBINE,
        num_payloads: 1,
        dtypes: call.rows.dtype as u32,
        flags: (call.order as u32) << FLAG_ORDER_SHIFT,
        capacity: call.rows.rows as u64,
        ..DescBody::default()
    };
    body.row_bytes[0] = call.rows.row_bytes() as u32;
    body.places[..2].copy_from_slice(&call.places(windows));
    if call.wire_bf16 {
        body.flags |= FLAG_WIRE_BF16;
    }
    if call.row_weights.is_some() {
        body.flags |= FLAG_ROW_WEIGHTS;
    }
    body
}

/// After a call that failed on all ranks: pieces and requests on the way are void.
fn discard_rest(exchange: &Exchange<'_>, rings: &mut [crate::engine::RingPositions]) {
    if !exchange.mismatched() {
        return;
    }
    exchange.discard_rings(rings);
    for (channel, ring) in rings.iter_mut().enumerate() {
        ring.served = exchange.requests_in(channel).discard();
    }
}

fn count_stats(combine: &Combine<'_>, rows_read: &[u64]) {
    let row_bytes = combine.call.rows.row_bytes() as u64;
    let counters = &combine.group.lanes[combine.shape.lane].counters;
    for (rows, counters) in rows_read.iter().zip(counters) {
        counters.add(&PeerStats { calls: 1, bytes_combined: rows * row_bytes, ..PeerStats::default() });
    }
}

/// A piece's room in a ring of several rows.
pub(super) fn padded(bytes: usize) -> usize {
    bytes.next_multiple_of(64)
}
