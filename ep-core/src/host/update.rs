//! `ep_plan_update`: count, tell each rank its share of the counts, and place the rows that come.

use std::time::Instant;

use super::between::Told;
use super::call::UpdateCall;
use super::exchange::Exchange;
use crate::config::PeerStats;
use crate::engine::{Group, LaneState};
use crate::error::Result;
use crate::plan::{PlanShape, PlanState, count};
use crate::wire::{DescBody, OP_FAILED, OP_PLAN};

/// What an update leaves behind.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Updated {
    /// The call that made it.
    pub(crate) epoch: u64,
    /// Tokens of this rank.
    pub(crate) num_tokens: usize,
    /// Rows that a dispatch delivers here.
    pub(crate) num_rows: u64,
}

/// Runs an update. Counts travel one way: each source writes them into the memory of the rank they are
/// for, and only that rank adds them up.
pub(crate) fn update(
    group: &Group,
    lane: &mut LaneState,
    shape: &PlanShape,
    state: &mut PlanState<'_>,
    call: &UpdateCall,
) -> Result<Updated> {
    let (plan_hash, plan_fields) = (shape.hash, shape.described());
    let body = DescBody { op: OP_PLAN, plan_hash, plan_fields, ..DescBody::default() };
    let mut exchange = Exchange::begin(group, shape.lane, lane, body, call.deadline);
    // SAFETY: the caller of `Plan::update` vouches for the ids until the call is done.
    unsafe { count(&call.routing, shape, state) };

    let topology = &group.topology;
    let num_locals = topology.locals().len();
    let first = group.perturb.first_peer(topology.own_place(), num_locals);
    for place in (0..num_locals).map(|i| (first + i) % num_locals) {
        let peer = topology.locals()[place];
        let experts = shape.experts.first(peer) as usize..;
        let counts = &state.expert_count[experts][..shape.experts.num_local(peer)];
        exchange.publish(place, &body, 1 + counts.len(), |tail| {
            tail[0] = state.tokens_to(peer).len() as u32;
            tail[1..].copy_from_slice(counts);
        })?;
    }
    let words = shape.column_words();
    let column = std::mem::take(&mut state.column);
    let told = Told { plan: Some((shape, state)) };
    let collected = collect(&mut exchange, words, lane, &told, |source, tail| {
        column[source * words..(source + 1) * words].copy_from_slice(tail);
    });
    state.column = column;
    collected?;
    exchange.verdict()?;
    let num_rows = match state.place_rows(shape) {
        Ok(rows) => rows,
        Err(error) => return Err(exchange.fail(error.status, None, error.message)),
    };
    for counters in &group.lanes[shape.lane].counters {
        counters.add(&PeerStats { calls: 1, ..PeerStats::default() });
    }
    Ok(Updated { epoch: exchange.epoch, num_tokens: call.routing.num_tokens(), num_rows })
}

/// Uses up an epoch for a call that failed before it began, on a stream, where the peers' calls are on
/// their way: they fail with it, and the lane stays in step.
pub(crate) fn refuse(group: &Group, lane: &mut LaneState, in_lane: usize, deadline: Instant) -> Result<()> {
    let body = DescBody { op: OP_FAILED, ..DescBody::default() };
    let mut exchange = Exchange::begin(group, in_lane, lane, body, deadline);
    for place in 0..group.topology.locals().len() {
        exchange.publish(place, &body, 0, |_| ())?;
    }
    collect(&mut exchange, 0, lane, &Told { plan: None }, |_, _| ())
}

/// Reads every source's descriptor; `keep(source, tail)` gets those that match. Sees to it that the ranks of other
/// nodes can do the same.
fn collect(
    exchange: &mut Exchange<'_>,
    words: usize,
    lane: &mut LaneState,
    told: &Told<'_>,
    mut keep: impl FnMut(usize, &[u32]),
) -> Result<()> {
    let LaneState { scratch, between, .. } = lane;
    let seen_from = &mut scratch.receiving;
    seen_from.iter_mut().for_each(|source| source.taken = 0);
    let locals = exchange.group.topology.locals();
    loop {
        let bell = exchange.bell();
        let mut missing = 0;
        let mut progress = exchange.carry_descs(between, told)?;
        for (&source, seen) in locals.iter().zip(seen_from.iter_mut()) {
            if seen.taken != 0 {
                continue;
            }
            match exchange.peek(source, words) {
                None => missing += 1,
                Some(desc) => {
                    seen.taken = 1;
                    progress = true;
                    if exchange.matches(&desc) {
                        keep(source, desc.tail);
                    }
                }
            }
        }
        progress |= exchange.read_remotes(words, &mut keep);
        if missing == 0 && exchange.remotes_known() && between.descs_done() {
            return Ok(());
        }
        if progress {
            exchange.progressed();
            continue;
        }
        exchange.wait(bell, |exchange| {
            let local = exchange.missing_locals("the counts", |place| seen_from[place].taken == 0);
            local.or_else(|| exchange.missing_remotes("the counts", between))
        })?;
    }
}
