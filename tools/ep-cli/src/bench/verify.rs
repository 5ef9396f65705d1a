//! Compares what one call wrote with what the reference says it must write.

use anyhow::{Result, ensure};
use ep_core::reference::float::{decode, encode};
use ep_core::reference::{Routing, Source};
use ep_peer::checksum::checksum;
use ep_peer::content::fill_row;
use serde::{Deserialize, Serialize};

use super::rank::{BenchRank, EXPERT, INPUT};
use super::routing::{for_reference, rank_routing};
use super::shape::{Op, RowOrder, Shape};

/// Terms of a sum that are added again by each rank; more tokens are sampled.
const MAX_TERMS: usize = 1 << 24;

/// What was compared.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Verified {
    /// Rows (dispatch), sums (combine) or counts (plan).
    pub(crate) compared: usize,
    /// Out of how many.
    pub(crate) total: usize,
    /// Bytes of them.
    pub(crate) bytes: usize,
    /// Of all that the call wrote.
    pub(crate) checksum: u64,
}

/// Makes one call with `routing` into spoiled outputs and compares them.
///
/// # Errors
/// The first difference.
pub(crate) fn verify(rank: &mut BenchRank, routing: usize) -> Result<Verified> {
    rank.prepare(routing)?;
    let me = rank.member.group.rank();
    let expected = for_reference(&rank.shape, routing, vec![0; rank.shape.ranks])?;
    let counts = rank.plan.counts(None)?;
    ensure!(counts == expected.counts(me), "the counts differ from the reference: {counts:?}");
    let num_rows = counts.num_rows as usize;
    match rank.shape.op {
        Op::Plan => {
            let total = counts.rows_per_expert.len() + counts.rows_per_source.len() + 2;
            Ok(Verified { compared: total, total, bytes: 8 * total, checksum: 0 })
        }
        Op::Dispatch => {
            for (index, (dtype, cols)) in payloads(&rank.shape) {
                rank.rows.poison(index, num_rows * dtype.bytes() * cols);
            }
            rank.out_ids.as_mut_slice().fill(0xA5);
            rank.out_weights.as_mut_slice().fill(0xA5);
            rank.member.barrier.wait(rank.member.timeout)?;
            rank.call(routing, num_rows)?;
            dispatched(rank, routing, &expected)
        }
        Op::Combine => {
            rank.combined.as_mut_slice().fill(0xA5);
            rank.call(routing, num_rows)?;
            combined(rank, routing, &expected)
        }
    }
}

fn payloads(shape: &Shape) -> impl Iterator<Item = (usize, (ep_core::tensor::Dtype, usize))> {
    shape.dtype.payloads(shape.hidden).into_iter().enumerate()
}

fn dispatched(rank: &BenchRank, index: usize, routing: &Routing) -> Result<Verified> {
    let (shape, me) = (&rank.shape, rank.member.group.rank());
    let rows = routing.rows(me).rows;
    let (mut bytes, mut sum) = (0, 0);
    for (payload, (dtype, cols)) in payloads(shape) {
        let row_bytes = dtype.bytes() * cols;
        let mut expected = vec![0; row_bytes];
        let received = rank.rows.payload(payload, rows.len() * row_bytes);
        for (row, (received, source)) in received.chunks_exact(row_bytes).zip(&rows).enumerate() {
            let Some(source) = source else { continue };
            let name = [shape.seed, INPUT, payload as u64, source.rank as u64, source.token as u64];
            fill_row(&mut expected, dtype, &name);
            ensure!(received == expected, "row {row} of payload {payload} is not that of {source:?}");
        }
        bytes += received.len();
        sum = checksum(sum, received);
    }
    let sent: Vec<Vec<f32>> = (0..shape.ranks)
        .map(|source| Ok(rank_routing(shape, index, source)?.weights))
        .collect::<Result<_>>()?;
    let ids: &[i32] = bytemuck::cast_slice(rank.out_ids.as_slice());
    let weights: &[f32] = bytemuck::cast_slice(rank.out_weights.as_slice());
    for (row, source) in rows.iter().enumerate() {
        let Some(source) = source else { continue };
        let sent = |slot: usize| sent[source.rank][source.token * shape.topk + slot];
        if let Some(slot) = source.slot {
            ensure!(weights[row].to_bits() == sent(slot).to_bits(), "the weight of row {row} differs");
            continue;
        }
        for slot in 0..shape.topk {
            let local = routing.local_expert(source.rank, source.token, slot, me);
            let (id, weight) = local.map_or((-1, 0.0), |local| (local as i32, sent(slot)));
            let at = row * shape.topk + slot;
            ensure!(ids[at] == id, "slot {slot} of row {row} has expert {}, expected {id}", ids[at]);
            ensure!(weights[at].to_bits() == weight.to_bits(), "slot {slot} of row {row} has another weight");
        }
    }
    if shape.layout == RowOrder::Flat {
        // The order in which the MPI peer does it.
        for beside in [&rank.out_ids, &rank.out_weights] {
            sum = checksum(sum, &beside.as_slice()[..rows.len() * shape.topk * 4]);
        }
    }
    Ok(Verified { compared: rows.len(), total: rows.len(), bytes, checksum: sum })
}

fn combined(rank: &BenchRank, index: usize, routing: &Routing) -> Result<Verified> {
    let (shape, me) = (&rank.shape, rank.member.group.rank());
    let (dtype, _) = shape.dtype.payloads(shape.hidden)[0];
    let row_bytes = shape.row_bytes();
    let weights = rank_routing(shape, index, me)?.weights;
    let terms = terms(routing, me, shape);
    let step = (shape.tokens * shape.topk * shape.hidden).div_ceil(MAX_TERMS).max(1);
    let sum = checksum(0, rank.combined.as_slice());
    let mut verified = Verified { total: shape.tokens, checksum: sum, ..Verified::default() };
    let mut row = vec![0; row_bytes];
    for token in (0..shape.tokens).step_by(step) {
        let mut sum = vec![0f32; shape.hidden];
        for term in &terms[token] {
            fill_row(&mut row, dtype, &[shape.seed, EXPERT, term.rank as u64, term.row as u64]);
            let factor = term.slot.map_or(1.0, |slot| weights[token * shape.topk + slot]);
            for (sum, x) in sum.iter_mut().zip(decode(dtype, &row)) {
                *sum = factor.mul_add(x, *sum);
            }
        }
        let expected: Vec<u8> = sum.into_iter().flat_map(|x| encode(dtype, x)).collect();
        let found = &rank.combined.as_slice()[token * row_bytes..][..row_bytes];
        ensure!(found == expected, "the sum of token {token} differs from the reference");
        verified.compared += 1;
        verified.bytes += row_bytes;
    }
    Ok(verified)
}

struct Term {
    rank: usize,
    row: usize,
    slot: Option<usize>,
}

/// The terms of each token of rank `me`, in the order in which they are added.
fn terms(routing: &Routing, me: usize, shape: &Shape) -> Vec<Vec<Term>> {
    let mut terms: Vec<Vec<Term>> = (0..shape.tokens).map(|_| Vec::new()).collect();
    for rank in 0..shape.ranks {
        for (row, source) in routing.rows(rank).rows.into_iter().enumerate() {
            if let Some(Source { token, slot, .. }) = source.filter(|source| source.rank == me) {
                terms[token].push(Term { rank, row, slot });
            }
        }
    }
    if shape.layout == RowOrder::ExpertMajor {
        for terms in &mut terms {
            terms.sort_by_key(|term| term.slot);
        }
    }
    terms
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::measure::tests::measured;
    use crate::rank::tests::alone;

    fn rank(op: Op, layout: RowOrder) -> Result<BenchRank> {
        let shape = measured(30).shape;
        BenchRank::new(Shape { op, ranks: 1, hidden: 40, layout, routings: 2, ..shape }, alone()?)
    }

    #[test]
    fn a_wrong_byte_of_a_dispatch_is_found() -> Result<()> {
        for layout in [RowOrder::Flat, RowOrder::ExpertMajor] {
            let mut rank = rank(Op::Dispatch, layout)?;
            let whole = verify(&mut rank, 1)?;
            assert_eq!(whole.compared, whole.total);
            let routing = for_reference(&rank.shape, 1, vec![0])?;
            let again = dispatched(&rank, 1, &routing)?;
            assert_eq!(again.checksum, whole.checksum);
            rank.out_weights.as_mut_slice()[5] ^= 1;
            let error = dispatched(&rank, 1, &routing).expect_err("a weight is wrong");
            assert!(error.to_string().contains("weight"), "{error}");
            rank.rows.poison(0, 1);
            let error = dispatched(&rank, 1, &routing).expect_err("a row is wrong");
            assert!(error.to_string().contains("row 0 of payload 0"), "{error}");
        }
        Ok(())
    }

    #[test]
    fn a_wrong_byte_of_a_combine_is_found() -> Result<()> {
        for layout in [RowOrder::Flat, RowOrder::ExpertMajor] {
            let mut rank = rank(Op::Combine, layout)?;
            let whole = verify(&mut rank, 1)?;
            assert_eq!((whole.compared, whole.total), (30, 30));
            rank.combined.as_mut_slice()[29 * 80] ^= 1;
            let routing = for_reference(&rank.shape, 1, vec![0])?;
            let error = combined(&rank, 1, &routing).expect_err("a sum is wrong");
            assert!(error.to_string().contains("token 29"), "{error}");
        }
        Ok(())
    }
}
