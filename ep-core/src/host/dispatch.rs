//! `ep_dispatch`: one loop that sends to whoever gave credit and takes what arrives, until both are done.

use super::call::DispatchCall;
use super::exchange::{Exchange, Missing};
use super::receive::Receiver;
use super::scratch::{Receiving, Sending};
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
}

impl Dispatch<'_> {
    /// Bytes of a message's first piece: origin, ids, positions, weights.
    pub(super) fn meta_bytes(&self) -> usize {
        4 * (1 + self.shape.topk * (2 + usize::from(self.call.topk_weights.is_some())))
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
    let body = describe(shape, updated, call, &windows);
    let mut exchange = Exchange::begin(group, shape.lane, lane, body, call.deadline);
    let ring_bytes = group.layout.ring_bytes();
    let dispatch = Dispatch { group, shape, state, updated, call, piece_bytes: ring_bytes / 8 };
    give_credit(&exchange, &dispatch, &body)?;

    let LaneState { rings, scratch, .. } = lane;
    let mut sender = Sender::new(&dispatch, &windows, &mut scratch.sending);
    let mut receiver = Receiver::new(&dispatch, &body, &mut scratch.receiving);
    receiver.fill_gaps();
    loop {
        let bell = exchange.bell();
        let mut progress = sender.read_credits(&mut exchange)?;
        progress |= sender.send(&mut exchange, rings)?;
        progress |= receiver.take(&mut exchange, rings, sender.peers())?;
        if sender.finished() && receiver.finished() {
            break;
        }
        if progress {
            exchange.check_deadline("its rows")?;
            exchange.progressed();
        } else {
            exchange.wait(bell, |_| missing(sender.peers(), receiver.peers()))?;
        }
    }
    receiver.discard_rest(&exchange, rings);
    exchange.verdict()?;
    receiver.write_counts();
    count_stats(&dispatch, lane);
    Ok(())
}

/// Whom the dispatch waits for: first those whose credit is missing, then those whose rows are.
fn missing(sending: &[Sending], receiving: &[Receiving]) -> Missing {
    let num_ranks = sending.len();
    let credits = Missing::among(num_ranks, "the credit", |rank| !sending[rank].credited);
    if credits.count > 0 {
        return credits;
    }
    let room = Missing::among(num_ranks, "room in the ring", |rank| !sending[rank].done);
    if room.count > 0 {
        return room;
    }
    Missing::among(num_ranks, "the rows", |rank| !receiving[rank].finished)
}

/// This rank's descriptor: its signature, and where peers write.
fn describe(shape: &PlanShape, updated: &Updated, call: &DispatchCall, windows: &WindowTable) -> DescBody {
    let mut body = DescBody {
        plan_epoch: updated.epoch,
        plan_hash: shape.hash,
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

/// Publishes to each peer where its rows go. The base comes with the credit.
fn give_credit(exchange: &Exchange<'_>, dispatch: &Dispatch<'_>, body: &DescBody) -> Result<()> {
    let group = dispatch.group;
    let words = dispatch.shape.column_words();
    let first = group.perturb.first_peer(group.rank, group.num_ranks);
    for peer in (0..group.num_ranks).map(|i| (first + i) % group.num_ranks) {
        let base = &dispatch.state.base[peer * words..(peer + 1) * words];
        exchange.publish(peer, body, words, |tail| tail.copy_from_slice(base))?;
    }
    Ok(())
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
    for (peer, sent) in lane.scratch.sending.iter().enumerate() {
        dispatch.group.lanes[dispatch.shape.lane].counters[peer].add(&PeerStats {
            calls: 1,
            rows_sent: sent.rows,
            bytes_sent: sent.rows * row_bytes as u64,
            rows_received: per_source(peer),
            rows_dropped: sent.dropped,
            ..PeerStats::default()
        });
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
