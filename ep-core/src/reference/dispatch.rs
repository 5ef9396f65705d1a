//! What each rank must find after a dispatch.

use super::Routing;
use crate::config::Layout;

/// One payload: a row of bytes for each token of each rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Payload {
    /// Bytes of a row.
    pub row_bytes: usize,
    /// Per rank, `tokens * row_bytes` bytes.
    pub data: Vec<Vec<u8>>,
}

/// The inputs of a dispatch, of all ranks.
#[derive(Clone, Debug)]
pub struct DispatchCase<'a> {
    /// Where tokens go.
    pub routing: &'a Routing,
    /// Any number of payloads.
    pub payloads: &'a [Payload],
    /// Per rank, `tokens * topk` weights; None: not carried.
    pub topk_weights: Option<&'a [Vec<f32>]>,
    /// Per rank, how many rows fit; None: as many as come.
    pub capacity: &'a [Option<usize>],
}

/// The outputs of one rank.
///
/// The payloads have `num_rows` rows here; whatever the caller's memory holds behind them must be
/// untouched. Arrays per row have `capacity` entries, all of which must be written.
#[derive(Clone, Debug, PartialEq)]
pub struct Delivered {
    /// Rows that fit; what was asked for, or `num_required`.
    pub capacity: usize,
    /// Per payload, `num_rows * row_bytes` bytes; padding rows are zero.
    pub payloads: Vec<Vec<u8>>,
    /// Flat: `capacity * topk` local experts, -1 for slots of other ranks. Expert-major: empty.
    pub topk_idx: Vec<i64>,
    /// Flat: `capacity * topk`, expert-major: `capacity`. None if the case has none.
    pub topk_weights: Option<Vec<f32>>,
    /// `capacity` ranks; -1 for padding and behind the last row.
    pub src_rank: Vec<i32>,
    /// `capacity` tokens, as `src_rank`.
    pub src_token: Vec<i32>,
    /// `capacity` slots, as `src_rank`. Flat: empty.
    pub src_slot: Vec<i32>,
    /// Rows delivered, padding included.
    pub num_rows: usize,
    /// The capacity that would have dropped nothing.
    pub num_required: usize,
    /// Rows dropped, without padding.
    pub num_dropped: usize,
    /// Assignments delivered to each local expert, without padding.
    pub rows_per_expert: Vec<i64>,
    /// The first row of each local expert and the end of the last one's region, whether or not they
    /// fit. Flat: empty.
    pub expert_offsets: Vec<i64>,
}

/// The outputs of every rank.
pub fn dispatch(case: &DispatchCase) -> Vec<Delivered> {
    (0..case.routing.num_ranks()).map(|rank| dispatch_to(case, rank)).collect()
}

/// The outputs of `rank`.
fn dispatch_to(case: &DispatchCase, rank: usize) -> Delivered {
    let Routing { topk, layout, .. } = *case.routing;
    let all = case.routing.rows(rank);
    let num_required = all.rows.len();
    let capacity = case.capacity[rank].unwrap_or(num_required);
    let num_rows = num_required.min(capacity);
    let flat = layout == Layout::Flat;
    let weights_per_row = if flat { topk } else { 1 };
    let mut out = Delivered {
        capacity,
        payloads: case.payloads.iter().map(|payload| vec![0; num_rows * payload.row_bytes]).collect(),
        topk_idx: vec![-1; if flat { capacity * topk } else { 0 }],
        topk_weights: case.topk_weights.map(|_| vec![0.0; capacity * weights_per_row]),
        src_rank: vec![-1; capacity],
        src_token: vec![-1; capacity],
        src_slot: vec![-1; if flat { 0 } else { capacity }],
        num_rows,
        num_required,
        num_dropped: all.rows[num_rows..].iter().flatten().count(),
        rows_per_expert: vec![0; case.routing.experts_per_rank[rank]],
        expert_offsets: Vec::new(),
    };
    if !flat {
        out.expert_offsets = all.expert_offsets.iter().map(|&offset| offset as i64).collect();
    }

    for (row, source) in all.rows[..num_rows].iter().enumerate() {
        let Some(source) = source else { continue };
        out.src_rank[row] = source.rank as i32;
        out.src_token[row] = source.token as i32;
        for (to, payload) in out.payloads.iter_mut().zip(case.payloads) {
            let bytes = payload.row_bytes;
            let from = &payload.data[source.rank][source.token * bytes..][..bytes];
            to[row * bytes..][..bytes].copy_from_slice(from);
        }
        let weight = |slot: usize| case.topk_weights.map(|all| all[source.rank][source.token * topk + slot]);
        match source.slot {
            Some(slot) => {
                out.src_slot[row] = slot as i32;
                out.rows_per_expert[all.expert_of_row[row]] += 1;
                if let Some(weights) = &mut out.topk_weights {
                    weights[row] = weight(slot).expect("the case has weights");
                }
            }
            None => {
                for slot in 0..topk {
                    let local = case.routing.local_expert(source.rank, source.token, slot, rank);
                    let Some(local) = local else { continue };
                    out.topk_idx[row * topk + slot] = local as i64;
                    out.rows_per_expert[local] += 1;
                    if let Some(weights) = &mut out.topk_weights {
                        weights[row * topk + slot] = weight(slot).expect("the case has weights");
                    }
                }
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::super::tests::small;
    use super::*;

    /// Token t of rank r has the bytes [10 r + t, 100 + 10 r + t].
    fn payload() -> Payload {
        Payload { row_bytes: 2, data: vec![vec![0, 100, 1, 101], vec![10, 110]] }
    }

    fn weights() -> Vec<Vec<f32>> {
        vec![vec![0.5, 0.25, 2.0, 3.0], vec![4.0, 5.0]]
    }

    fn run(routing: &Routing, capacity: [Option<usize>; 2]) -> Vec<Delivered> {
        dispatch(&DispatchCase {
            routing,
            payloads: &[payload()],
            topk_weights: Some(&weights()),
            capacity: &capacity,
        })
    }

    #[test]
    fn flat_delivers_each_token_once_with_local_ids_and_weights() {
        let out = run(&small(Layout::Flat, 1), [None, None]);
        assert_eq!(
            out[0],
            Delivered {
                capacity: 3,
                payloads: vec![vec![0, 100, 1, 101, 10, 110]],
                topk_idx: vec![-1, 0, 1, 1, 0, -1],
                topk_weights: Some(vec![0.0, 0.25, 2.0, 3.0, 4.0, 0.0]),
                src_rank: vec![0, 0, 1],
                src_token: vec![0, 1, 0],
                src_slot: vec![],
                num_rows: 3,
                num_required: 3,
                num_dropped: 0,
                rows_per_expert: vec![2, 2],
                expert_offsets: vec![],
            }
        );
        assert_eq!(out[1].topk_idx, [0, -1]);
        assert_eq!(out[1].topk_weights, Some(vec![0.5, 0.0]));
    }

    #[test]
    fn expert_major_delivers_each_slot_and_zeroes_padding() {
        let out = run(&small(Layout::ExpertMajor, 4), [None, None]);
        assert_eq!(out[0].payloads[0], [0, 100, 10, 110, 0, 0, 0, 0, 1, 101, 1, 101, 0, 0, 0, 0]);
        assert_eq!(out[0].topk_weights, Some(vec![0.25, 4.0, 0.0, 0.0, 2.0, 3.0, 0.0, 0.0]));
        assert_eq!(out[0].src_rank, [0, 1, -1, -1, 0, 0, -1, -1]);
        assert_eq!(out[0].src_token, [0, 0, -1, -1, 1, 1, -1, -1]);
        assert_eq!(out[0].src_slot, [1, 0, -1, -1, 0, 1, -1, -1]);
        assert_eq!(out[0].expert_offsets, [0, 4, 8]);
        assert_eq!(out[0].rows_per_expert, [2, 2]);
        assert_eq!((out[0].num_rows, out[0].num_required, out[0].num_dropped), (8, 8, 0));
    }

    #[test]
    fn rows_at_or_behind_the_capacity_are_dropped_and_only_real_ones_counted() {
        let out = run(&small(Layout::ExpertMajor, 4), [Some(5), Some(0)]);
        assert_eq!(out[0].payloads[0], [0, 100, 10, 110, 0, 0, 0, 0, 1, 101]);
        assert_eq!((out[0].num_rows, out[0].num_required, out[0].num_dropped), (5, 8, 1));
        assert_eq!(out[0].rows_per_expert, [2, 1]);
        assert_eq!(out[0].expert_offsets, [0, 4, 8]);
        assert_eq!((out[1].num_rows, out[1].num_required, out[1].num_dropped), (0, 4, 1));
        assert_eq!(out[1].rows_per_expert, [0]);

        let out = run(&small(Layout::Flat, 1), [Some(1), None]);
        assert_eq!(out[0].topk_idx, [-1, 0]);
        assert_eq!(out[0].rows_per_expert, [1, 0]);
        assert_eq!((out[0].num_rows, out[0].num_required, out[0].num_dropped), (1, 3, 2));
    }

    #[test]
    fn behind_the_last_row_ids_and_sources_are_minus_one_and_payloads_untouched() {
        let out = run(&small(Layout::Flat, 1), [Some(4), None]);
        assert_eq!(out[0].payloads[0].len(), 3 * 2);
        assert_eq!(out[0].topk_idx[6..], [-1, -1]);
        assert_eq!(out[0].topk_weights.as_ref().unwrap()[6..], [0.0, 0.0]);
        assert_eq!((out[0].src_rank[3], out[0].src_token[3]), (-1, -1));
        let out = run(&small(Layout::ExpertMajor, 1), [Some(5), None]);
        assert_eq!(out[0].payloads[0].len(), 4 * 2);
        assert_eq!((out[0].src_rank[4], out[0].src_token[4], out[0].src_slot[4]), (-1, -1, -1));
    }
}
