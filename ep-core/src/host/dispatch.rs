//! `ep_dispatch`: one loop that sends to whoever gave credit and takes what arrives, until both are done.

use super::between::Told;
use super::call::DispatchCall;
use super::exchange::Exchange;
use super::forward::{Forwarder, missing_rows_of_sources};
use super::item::Tally;
use super::pack::{Packing, all_packed, meta_bytes, missing_room_in_cells, pack};
use super::receive::Receiver;
use super::scratch_between::SourceState;
use super::send::Sender;
use crate::config::{Layout, PeerStats};
use crate::engine::{Group, LaneState, WindowTable};
use crate::error::{Error, Result, Status};
use crate::plan::{PlanShape, PlanState};
use crate::tensor::Tensor;
use crate::wire::{DescBody, FLAG_TOPK_WEIGHTS, OP_DISPATCH, WANTS_META};

use super::update::Updated;

/// Everything that the two halves of a dispatch share.
pub(super) struct Dispatch<'a> {
    pub(super) group: &'a Group,
    pub(super) shape: &'a PlanShape,
    pub(super) state: &'a PlanState<'a>,
    pub(super) updated: &'a Updated,
    pub(super) call: &'a DispatchCall,
    /// The largest piece of a payload row in a ring.
    pub(super) piece_bytes: usize,
    /// How tokens lie in messages between nodes.
    pub(super) packing: Packing,
}

impl Dispatch<'_> {
    /// Bytes of a message's first piece: origin, ids, positions, weights; before them, if the token was passed on, its
    /// rank and its position.
    pub(super) fn head_bytes(&self, relayed: bool, meta: bool) -> usize {
        let meta = if meta { meta_bytes(self.shape, self.call) } else { 0 };
        meta + if relayed { 8 } else { 0 }
    }

    /// Pieces of a row of `tensor`.
    pub(super) fn num_pieces(&self, tensor: &Tensor) -> usize {
        tensor.row_bytes().div_ceil(self.piece_bytes)
    }
}

/// Runs a dispatch.
pub(crate) fn dispatch(
    group: &Group,
    lane: &mut LaneState,
    shape: &PlanShape,
    state: &PlanState<'_>,
    updated: &Updated,
    call: &DispatchCall,
) -> Result<()> {
    let windows = WindowTable::of(group);
    let packing = Packing::new(group, shape, call)?;
    let body = describe(shape, updated, call, &windows);
    let mut exchange = Exchange::begin(group, shape.lane, lane, body, call.deadline);
    let piece_bytes = packing.piece_bytes(group.layout.ring_bytes() / 8);
    let dispatch = Dispatch { group, shape, state, updated, call, piece_bytes, packing };
    exchange.publish_bases(&body, shape.column_words(), state.base)?;

    let LaneState { rings, scratch, between, .. } = lane;
    let told = Told { plan: Some((shape, state)) };
    let mut sender = Sender::new(&dispatch, &windows, &mut scratch.sending);
    let mut receiver = Receiver::new(&dispatch, &body, &mut scratch.receiving);
    let mut forwarder = Forwarder::new(&dispatch);
    receiver.fill_gaps();
    loop {
        let bell = exchange.bell();
        let mut progress = exchange.carry_descs(between, &told)?;
        progress |= sender.read_credits(&mut exchange)?;
        progress |= exchange.read_remotes(0, |_, _| ());
        progress |= pack(&dispatch, &exchange, &mut between.cells)?;
        progress |= forwarder.forward(&exchange, &mut between.sources, sender.peers(), rings)?;
        let forwarded = between.sources.iter().all(SourceState::is_done);
        progress |= sender.send(&mut exchange, rings, forwarded)?;
        progress |= receiver.take(&mut exchange, rings, sender.peers())?;
        if sender.finished()
            && receiver.finished()
            && exchange.remotes_known()
            && between.descs_done()
            && (exchange.mismatched() || all_packed(&dispatch, &between.cells))
        {
            break;
        }
        if progress {
            exchange.check_deadline("its rows")?;
            exchange.progressed();
        } else {
            // First those whose credit is missing, then those whose rows are.
            exchange.wait(bell, |exchange| {
                let (sending, receiving) = (sender.peers(), receiver.peers());
                let own_rows =
                    |place: usize| !sending[place].done && sending[place].next != sending[place].end;
                exchange
                    .missing_locals("the credit", |place| !sending[place].credited)
                    .or_else(|| exchange.missing_remotes("the credit", between))
                    .or_else(|| exchange.missing_locals("room in the ring", own_rows))
                    .or_else(|| forwarder.missing_room(exchange))
                    .or_else(|| missing_rows_of_sources(exchange, between))
                    .or_else(|| missing_room_in_cells(exchange, &dispatch, between))
                    .or_else(|| exchange.missing_locals("the rows", |place| !receiving[place].finished))
            })?;
        }
    }
    exchange.discard_rings(rings);
    exchange.verdict()?;
    receiver.write_counts();
    forwarder.count_stats();
    count_stats(&dispatch, lane);
    Ok(())
}

/// This rank's descriptor: its signature, and where peers write.
fn describe(shape: &PlanShape, updated: &Updated, call: &DispatchCall, windows: &WindowTable) -> DescBody {
    let mut body = DescBody {
        plan_epoch: updated.epoch,
        plan_hash: shape.hash,
        plan_fields: shape.described(),
        op: OP_DISPATCH,
        num_payloads: call.num_payloads as u32,
        flags: if call.topk_weights.is_some() { FLAG_TOPK_WEIGHTS } else { 0 },
        capacity: call.capacity as u64,
        ..DescBody::default()
    };
    let mut all_direct = true;
    for (i, output) in call.outputs.iter().enumerate().take(call.num_payloads) {
        if let Some(output) = output {
            body.dtypes |= (output.dtype as u32) << (8 * i);
            body.row_bytes[i] = output.row_bytes() as u32;
            body.places[i] = windows.place(output);
            all_direct &= body.places[i].window != 0;
        }
    }
    let ids_needed = shape.layout == Layout::ExpertMajor && !all_direct;
    let counted = shape.layout == Layout::Flat
        && !call.rows_per_expert.is_null()
        && updated.num_rows > call.capacity as u64;
    if call.wants_origin() || ids_needed || counted {
        body.wants |= WANTS_META;
    }
    body
}

fn count_stats(dispatch: &Dispatch<'_>, lane: &LaneState) {
    let row_bytes: usize = dispatch.call.inputs.iter().flatten().map(Tensor::row_bytes).sum();
    let words = dispatch.shape.column_words();
    let capacity = dispatch.call.capacity as u64;
    // Rows from `base` on, as far as they fit.
    let fit = |base: u32, rows: u32| u64::from(rows).min(capacity.saturating_sub(base.into()));
    let per_source = |source: usize| {
        let base = &dispatch.state.base[source * words..(source + 1) * words];
        let column = &dispatch.state.column[source * words..(source + 1) * words];
        match dispatch.shape.layout {
            Layout::Flat => fit(base[0], column[0]),
            Layout::ExpertMajor => {
                base[1..].iter().zip(&column[1..]).map(|(&base, &rows)| fit(base, rows)).sum()
            }
        }
    };
    let topology = &dispatch.group.topology;
    for (peer, counters) in dispatch.group.lanes[dispatch.shape.lane].counters.iter().enumerate() {
        let sent = match topology.place(peer) {
            Some(place) => lane.scratch.sending[place].tally,
            None => Tally { rows: rows_to(dispatch, peer), dropped: 0 },
        };
        counters.add(&PeerStats {
            calls: 1,
            rows_sent: sent.rows,
            bytes_sent: sent.rows * row_bytes as u64,
            rows_received: per_source(peer),
            rows_dropped: sent.dropped,
            ..PeerStats::default()
        });
    }
}

/// Rows that this rank has for `peer`, whether they fit there or not.
fn rows_to(dispatch: &Dispatch<'_>, peer: usize) -> u64 {
    let (shape, state) = (dispatch.shape, dispatch.state);
    match shape.layout {
        Layout::Flat => state.tokens_to(peer).len() as u64,
        Layout::ExpertMajor => {
            let experts = shape.experts.first(peer) as usize..;
            state.expert_count[experts][..shape.experts.num_local(peer)].iter().copied().map(u64::from).sum()
        }
    }
}

/// A peer's credit that cannot be right: a defect or a torn window, not a caller's mistake.
pub(super) fn bad_place(exchange: &Exchange<'_>, peer: usize) -> Error {
    exchange.fail(
        Status::PeerLost,
        Some(peer),
        format!(
            "rank {peer} names a window that rank {} does not have; it was released while calls still used it",
            exchange.group.rank
        ),
    )
}
