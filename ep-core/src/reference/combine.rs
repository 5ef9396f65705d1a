//! What each token's owner must find after a combine.

use std::collections::HashMap;

use super::float::{bf16_to_f32, decode, encode, f32_to_bf16};
use super::{Routing, Source};
use crate::config::{Layout, ReduceOrder};
use crate::tensor::Dtype;

/// The inputs of a combine, of all ranks.
#[derive(Clone, Debug)]
pub struct CombineCase<'a> {
    /// Where tokens went.
    pub routing: &'a Routing,
    /// bf16, fp16 or fp32.
    pub dtype: Dtype,
    /// Numbers in a row.
    pub cols: usize,
    /// Per rank, the rows as dispatched. Rows of the routing behind the last one were dropped.
    pub rows: &'a [Vec<u8>],
    /// Per rank, a weight per row and slot (flat) or per row (expert-major).
    pub row_weights: Option<&'a [Vec<f32>]>,
    /// Per rank, `tokens * topk` factors, or None: 1. Expert-major only. Empty: None on every rank.
    pub topk_weights: &'a [Option<Vec<f32>>],
    /// Per rank, up to two biases of `tokens` rows. Empty: none on any rank.
    pub bias: &'a [Vec<Vec<u8>>],
    /// The order of the sum.
    pub order: ReduceOrder,
    /// Whether node partials are rounded to bf16.
    pub wire_bf16: bool,
}

/// The outputs of one rank.
#[derive(Clone, Debug, PartialEq)]
pub struct Combined {
    /// `tokens` rows.
    pub combined: Vec<u8>,
    /// `tokens * topk` weights, with `row_weights`.
    pub combined_weights: Option<Vec<f32>>,
}

/// One row that takes part in a token's sum.
struct Term {
    rank: usize,
    row: usize,
    /// The factor; None for flat rows, which are added as they are.
    factor: Option<f32>,
}

/// The outputs of every rank.
pub fn combine(case: &CombineCase) -> Vec<Combined> {
    let routing = case.routing;
    let row_bytes = case.cols * case.dtype.bytes();
    let places: Vec<HashMap<Source, usize>> = case
        .rows
        .iter()
        .enumerate()
        .map(|(rank, rows)| routing.places(rank, rows.len() / row_bytes))
        .collect();
    (0..routing.num_ranks())
        .map(|rank| {
            let mut combined = Vec::new();
            let mut combined_weights = Vec::new();
            for token in 0..routing.num_tokens(rank) {
                combined.extend(token_sum(case, &places, rank, token));
                combined_weights.extend(token_weights(case, &places, rank, token));
            }
            Combined { combined, combined_weights: case.row_weights.map(|_| combined_weights) }
        })
        .collect()
}

/// The terms of a token, by slot in expert-major layout, by rank in flat.
fn terms(case: &CombineCase, places: &[HashMap<Source, usize>], rank: usize, token: usize) -> Vec<Term> {
    let routing = case.routing;
    match routing.layout {
        Layout::Flat => (0..routing.num_ranks())
            .filter_map(|at| {
                let row = *places[at].get(&Source { rank, token, slot: None })?;
                Some(Term { rank: at, row, factor: None })
            })
            .collect(),
        Layout::ExpertMajor => (0..routing.topk)
            .filter_map(|slot| {
                let (at, _) = routing.owner(routing.expert(rank, token, slot)?);
                let row = *places[at].get(&Source { rank, token, slot: Some(slot) })?;
                let weights = case.topk_weights.get(rank).and_then(Option::as_ref);
                let factor = weights.map_or(1.0, |weights| weights[token * routing.topk + slot]);
                Some(Term { rank: at, row, factor: Some(factor) })
            })
            .collect(),
    }
}

/// The sum of one token, rounded.
fn token_sum(case: &CombineCase, places: &[HashMap<Source, usize>], rank: usize, token: usize) -> Vec<u8> {
    let row_bytes = case.cols * case.dtype.bytes();
    let row_of = |rows: &[u8], row: usize| decode(case.dtype, &rows[row * row_bytes..][..row_bytes]);
    let mut sum = match case.bias.get(rank).map_or(&[][..], Vec::as_slice) {
        [] => vec![0.0; case.cols],
        [only] => row_of(only, token),
        [first, second] => add(row_of(first, token), &row_of(second, token)),
        more => panic!("{} biases, at most 2", more.len()),
    };
    let terms = terms(case, places, rank, token);
    match case.order {
        ReduceOrder::TopkSlot => {
            for term in &terms {
                let factor = term.factor.expect("expert-major");
                sum = multiply_add(factor, &row_of(&case.rows[term.rank], term.row), sum);
            }
        }
        ReduceOrder::Rank => {
            for at in 0..case.routing.num_ranks() {
                if let Some(partial) = rank_partial(case, &terms, at) {
                    sum = add(sum, &partial);
                }
            }
        }
        ReduceOrder::NodeRank => {
            let last_node = *case.routing.nodes.iter().max().expect("a group has ranks");
            for node in 0..=last_node {
                if let Some(partial) = node_partial(case, &terms, node) {
                    sum = add(sum, &partial);
                }
            }
        }
    }
    sum.into_iter().flat_map(|x| encode(case.dtype, x)).collect()
}

/// P(r): what `rank` contributes; None if it has no term, for then nothing is added.
fn rank_partial(case: &CombineCase, terms: &[Term], rank: usize) -> Option<Vec<f32>> {
    let row_bytes = case.cols * case.dtype.bytes();
    let mut partial = None;
    for term in terms.iter().filter(|term| term.rank == rank) {
        let row = decode(case.dtype, &case.rows[rank][term.row * row_bytes..][..row_bytes]);
        partial = Some(match term.factor {
            None => row,
            Some(factor) => multiply_add(factor, &row, partial.unwrap_or(vec![0.0; case.cols])),
        });
    }
    partial
}

/// Q(n): what the ranks of `node` contribute, as it crosses the wire; None if none has a term.
fn node_partial(case: &CombineCase, terms: &[Term], node: usize) -> Option<Vec<f32>> {
    let mut partial = None;
    for rank in 0..case.routing.num_ranks() {
        if case.routing.nodes[rank] != node {
            continue;
        }
        if let Some(of_rank) = rank_partial(case, terms, rank) {
            partial = Some(add(partial.unwrap_or(vec![0.0; case.cols]), &of_rank));
        }
    }
    let partial = partial?;
    if !case.wire_bf16 {
        return Some(partial);
    }
    Some(partial.into_iter().map(|x| bf16_to_f32(f32_to_bf16(x))).collect())
}

/// The weights that came back for the slots of a token.
fn token_weights(
    case: &CombineCase,
    places: &[HashMap<Source, usize>],
    rank: usize,
    token: usize,
) -> Vec<f32> {
    let routing = case.routing;
    let Some(row_weights) = case.row_weights else { return Vec::new() };
    (0..routing.topk)
        .map(|slot| {
            let Some(expert) = routing.expert(rank, token, slot) else { return 0.0 };
            let (at, _) = routing.owner(expert);
            let (slot_key, width, column) = match routing.layout {
                Layout::Flat => (None, routing.topk, slot),
                Layout::ExpertMajor => (Some(slot), 1, 0),
            };
            let row = places[at].get(&Source { rank, token, slot: slot_key });
            row.map_or(0.0, |row| row_weights[at][row * width + column])
        })
        .collect()
}

fn add(sum: Vec<f32>, terms: &[f32]) -> Vec<f32> {
    sum.into_iter().zip(terms).map(|(sum, term)| sum + term).collect()
}

fn multiply_add(factor: f32, row: &[f32], sum: Vec<f32>) -> Vec<f32> {
    row.iter().zip(sum).map(|(&x, sum)| factor.mul_add(x, sum)).collect()
}

#[cfg(test)]
mod tests {
    use super::super::tests::small;
    use super::*;

    fn bytes(numbers: &[f32]) -> Vec<u8> {
        numbers.iter().flat_map(|x| x.to_ne_bytes()).collect()
    }

    fn numbers(bytes: &[u8]) -> Vec<f32> {
        decode(Dtype::F32, bytes)
    }

    fn case<'a>(routing: &'a Routing, rows: &'a [Vec<u8>]) -> CombineCase<'a> {
        CombineCase {
            routing,
            dtype: Dtype::F32,
            cols: 1,
            rows,
            row_weights: None,
            topk_weights: &[],
            bias: &[],
            order: if routing.layout == Layout::Flat { ReduceOrder::Rank } else { ReduceOrder::TopkSlot },
            wire_bf16: false,
        }
    }

    /// One token of rank 0 with a slot on each of `ranks`; expert r is the only one of rank r.
    fn one_token(ranks: &[i64], nodes: &[usize], layout: Layout) -> Routing {
        let mut topk_idx = vec![Vec::new(); nodes.len()];
        topk_idx[0] = ranks.to_vec();
        Routing {
            nodes: nodes.to_vec(),
            experts_per_rank: vec![1; nodes.len()],
            topk: ranks.len(),
            layout,
            expert_alignment: 1,
            topk_idx,
        }
    }

    #[test]
    fn flat_adds_one_row_per_rank() {
        // Rank 0 holds rows of (0,0), (0,1), (1,0); rank 1 one of (0,0).
        let rows = [bytes(&[1.0, 2.0, 4.0]), bytes(&[8.0])];
        let out = combine(&case(&small(Layout::Flat, 1), &rows));
        assert_eq!(numbers(&out[0].combined), [9.0, 2.0]);
        assert_eq!(numbers(&out[1].combined), [4.0]);
        assert_eq!(out[0].combined_weights, None);
    }

    #[test]
    fn expert_major_adds_one_weighted_row_per_slot_and_skips_padding() {
        // Rank 0: (0,0,1), (1,0,0), pad, pad, (0,1,0), (0,1,1), pad, pad; rank 1: (0,0,0), pads.
        let routing = small(Layout::ExpertMajor, 4);
        let nan = f32::NAN;
        let rows = [bytes(&[1.0, 2.0, nan, nan, 4.0, 8.0, nan, nan]), bytes(&[16.0, nan, nan, nan])];
        let weights = [Some(vec![0.5, 3.0, 1.0, -1.0]), Some(vec![10.0, 99.0])];
        let out = combine(&CombineCase { topk_weights: &weights, ..case(&routing, &rows) });
        assert_eq!(numbers(&out[0].combined), [16.0 * 0.5 + 3.0, 4.0 - 8.0]);
        assert_eq!(numbers(&out[1].combined), [20.0]);
    }

    #[test]
    fn dropped_rows_have_no_term_and_weight_zero() {
        let routing = small(Layout::ExpertMajor, 1);
        // Of (0,0,1), (1,0,0), (0,1,0), (0,1,1) on rank 0 the last does not fit; rank 1 has no room.
        let rows = [bytes(&[1.0, 2.0, 4.0]), Vec::new()];
        let row_weights = [vec![0.1, 0.2, 0.3], Vec::new()];
        let out = combine(&CombineCase { row_weights: Some(&row_weights), ..case(&routing, &rows) });
        assert_eq!(numbers(&out[0].combined), [1.0, 4.0]);
        assert_eq!(out[0].combined_weights, Some(vec![0.0, 0.1, 0.3, 0.0]));
        assert_eq!(out[1].combined_weights, Some(vec![0.2, 0.0]));
    }

    #[test]
    fn flat_row_weights_come_back_from_the_column_of_the_slot() {
        let routing = small(Layout::Flat, 1);
        let rows = [bytes(&[1.0, 2.0, 4.0]), bytes(&[8.0])];
        let row_weights = [vec![-1.0, 0.1, 0.2, 0.3, 0.4, -1.0], vec![0.5, -1.0]];
        let out = combine(&CombineCase { row_weights: Some(&row_weights), ..case(&routing, &rows) });
        assert_eq!(out[0].combined_weights, Some(vec![0.5, 0.1, 0.2, 0.3]));
        assert_eq!(out[1].combined_weights, Some(vec![0.4, 0.0]));
    }

    #[test]
    fn the_sum_starts_from_the_biases() {
        let routing = one_token(&[-1], &[0], Layout::ExpertMajor);
        let minus_zero = bytes(&[-0.0]);
        let start = |bias: Vec<Vec<u8>>| {
            let out = combine(&CombineCase { bias: &[bias], ..case(&routing, &[Vec::new()]) });
            numbers(&out[0].combined)[0].to_bits()
        };
        assert_eq!(start(vec![]), 0f32.to_bits());
        assert_eq!(start(vec![minus_zero]), (-0f32).to_bits(), "one bias is not added to zero");
        assert_eq!(start(vec![bytes(&[1e8]), bytes(&[3.0])]), (1e8f32 + 3.0).to_bits());
    }

    #[test]
    fn orders_differ_as_written() {
        // Slots on ranks 2, 0, 1; nodes {0, 2} and {1}. 2^24 + 1 is not an fp32.
        let routing = one_token(&[2, 0, 1], &[0, 1, 0], Layout::ExpertMajor);
        let rows = [bytes(&[1.0]), bytes(&[-16777216.0]), bytes(&[16777216.0])];
        let run = |order| numbers(&combine(&CombineCase { order, ..case(&routing, &rows) })[0].combined)[0];
        assert_eq!(run(ReduceOrder::TopkSlot), 0.0, "(2^24 + 1) - 2^24");
        assert_eq!(run(ReduceOrder::Rank), 1.0, "(1 - 2^24) + 2^24, and 1 - 2^24 is exact");
        assert_eq!(run(ReduceOrder::NodeRank), 0.0, "(1 + 2^24) - 2^24");
    }

    #[test]
    fn a_rank_partial_is_rounded_before_it_is_added() {
        // Both slots are on rank 1, whose partial 1 + 2^-24 rounds to 1.
        let routing = one_token(&[1, 1], &[0, 1], Layout::ExpertMajor);
        let rows = [Vec::new(), bytes(&[1.0, 2f32.powi(-24)])];
        let bias = [vec![bytes(&[-1.0])], Vec::new()];
        let run = |order| {
            numbers(&combine(&CombineCase { order, bias: &bias, ..case(&routing, &rows) })[0].combined)[0]
        };
        assert_eq!(run(ReduceOrder::TopkSlot), 2f32.powi(-24));
        assert_eq!(run(ReduceOrder::Rank), 0.0);
    }

    #[test]
    fn terms_are_fused() {
        let routing = one_token(&[0], &[0], Layout::ExpertMajor);
        let x = 1.0 + f32::EPSILON;
        let bias = [vec![bytes(&[-(x * x)])]];
        let rows = [bytes(&[x])];
        let weights = [Some(vec![x])];
        let out = combine(&CombineCase { bias: &bias, topk_weights: &weights, ..case(&routing, &rows) });
        assert_eq!(numbers(&out[0].combined), [f32::EPSILON * f32::EPSILON]);
    }

    #[test]
    fn the_wire_rounds_every_node_the_own_one_too() {
        let routing = one_token(&[0, 1], &[0, 1], Layout::Flat);
        let rows = [bytes(&[1.0 + 2f32.powi(-8)]), bytes(&[3.0 * (1.0 + 2f32.powi(-9))])];
        let order = ReduceOrder::NodeRank;
        let exact = combine(&CombineCase { order, ..case(&routing, &rows) });
        let wired = combine(&CombineCase { order, wire_bf16: true, ..case(&routing, &rows) });
        assert_eq!(numbers(&exact[0].combined), [4.0 + 2f32.powi(-8) + 3.0 * 2f32.powi(-9)]);
        assert_eq!(numbers(&wired[0].combined), [4.0]);
    }

    #[test]
    fn nan_has_one_pattern_and_overflow_is_infinite() {
        let routing = one_token(&[0], &[0], Layout::Flat);
        let run = |dtype, row: Vec<u8>| combine(&CombineCase { dtype, ..case(&routing, &[row]) });
        let nan = 0xFFC1_2345u32;
        assert_eq!(run(Dtype::F32, nan.to_ne_bytes().to_vec())[0].combined, 0x7FFF_FFFFu32.to_ne_bytes());
        assert_eq!(run(Dtype::Bf16, 0xFFC1u16.to_ne_bytes().to_vec())[0].combined, 0x7FFFu16.to_ne_bytes());
        assert_eq!(run(Dtype::F16, 0x7C01u16.to_ne_bytes().to_vec())[0].combined, 0x7FFFu16.to_ne_bytes());
        let max = 0x7BFFu16.to_ne_bytes().to_vec();
        let bias = [vec![max.clone()]];
        let rows = [max];
        let out = combine(&CombineCase { dtype: Dtype::F16, bias: &bias, ..case(&routing, &rows) });
        assert_eq!(out[0].combined, 0x7C00u16.to_ne_bytes());
    }

    #[test]
    fn a_rank_without_a_term_leaves_minus_zero_alone() {
        let routing = one_token(&[1], &[0, 1], Layout::ExpertMajor);
        let bias = [vec![bytes(&[-0.0])], Vec::new()];
        for order in [ReduceOrder::TopkSlot, ReduceOrder::Rank, ReduceOrder::NodeRank] {
            let sum = |rows: &[Vec<u8>]| {
                let out = combine(&CombineCase { order, bias: &bias, ..case(&routing, rows) });
                numbers(&out[0].combined)[0].to_bits()
            };
            assert_eq!(sum(&[Vec::new(), Vec::new()]), (-0f32).to_bits(), "{order:?}: dropped");
            let minus_zero = if order == ReduceOrder::TopkSlot { -0f32 } else { 0.0 };
            assert_eq!(
                sum(&[Vec::new(), bytes(&[-0.0])]),
                minus_zero.to_bits(),
                "{order:?}: P starts from +0"
            );
        }
    }
}
