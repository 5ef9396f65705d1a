//! What a relay answers for a token: a bit per slot whose row is there, the weights that come back, and rows. Which
//! rows they are follows from the order of the sum, so that as much as may be is added before the network.

use super::call::CombineCall;
use super::combine::Combine;
use super::pack::padded;
use super::reduce::Values;
use crate::config::{Layout, MAX_TOPK, ReduceOrder};
use crate::engine::Group;
use crate::plan::PlanShape;

/// What the rows of an answer are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// Rows as they are: by slot, or in flat layout by rank.
    Rows,
    /// A partial sum for each rank that has a term, ascending; fp32.
    Ranks,
    /// One partial sum.
    Node,
}

/// The layout of answers of one call.
#[derive(Clone, Copy, Debug)]
pub(super) struct Response {
    pub(super) form: Form,
    /// What the rows hold, and bytes of each.
    pub(super) values: Values,
    pub(super) element: usize,
    /// Words of the bits.
    pub(super) mask_words: usize,
    /// Words of the weights, 0 if none come back.
    weight_words: usize,
}

/// A bit per slot.
pub(super) type Mask = [u32; MAX_TOPK / 32];

impl Response {
    pub(super) fn new(group: &Group, shape: &PlanShape, call: &CombineCall) -> Response {
        let layout = shape.layout;
        let form = match (call.order, layout) {
            (ReduceOrder::TopkSlot, _) | (ReduceOrder::Rank, Layout::Flat) => Form::Rows,
            (ReduceOrder::Rank, Layout::ExpertMajor) => Form::Ranks,
            (ReduceOrder::NodeRank, _) if !group.topology.is_direct() => Form::Node,
            // A cell is a part of its node, whose partial sum only the owner can make.
            (ReduceOrder::NodeRank, Layout::Flat) => Form::Rows,
            (ReduceOrder::NodeRank, Layout::ExpertMajor) => Form::Ranks,
        };
        let (values, element) = match form {
            Form::Rows => (Values::Own, call.rows.dtype.bytes()),
            Form::Node if call.wire_bf16 => (Values::Bf16, 2),
            Form::Ranks | Form::Node => (Values::F32, 4),
        };
        let topk = shape.topk;
        let weight_words = if call.row_weights.is_some() { topk } else { 0 };
        Response { form, values, element, mask_words: topk.div_ceil(32), weight_words }
    }

    /// Words of weights in an answer that begins at column `col`: they come with the first columns.
    pub(super) fn weight_words(&self, col: usize) -> usize {
        if col == 0 { self.weight_words } else { 0 }
    }

    /// Bytes before the rows.
    pub(super) fn head_bytes(&self, col: usize) -> usize {
        padded(4 * (self.mask_words + self.weight_words(col)))
    }

    /// Bytes of `cols` columns of a row.
    pub(super) fn row_bytes(&self, cols: usize) -> usize {
        padded(cols * self.element)
    }

    /// Rows of an answer in which the slots of `mask` are there.
    pub(super) fn num_rows(&self, combine: &Combine<'_>, experts: &[i32], mask: &Mask) -> usize {
        match self.form {
            Form::Rows => mask.iter().map(|word| word.count_ones() as usize).sum(),
            Form::Node => usize::from(mask.iter().any(|word| *word != 0)),
            Form::Ranks => {
                let owner = |slot: &usize| combine.shape.experts.owner(experts[*slot]);
                let there = |slot: &usize| has(mask, *slot);
                let first =
                    |slot: &usize| !(0..*slot).filter(there).any(|other| owner(&other) == owner(slot));
                (0..experts.len()).filter(|slot| there(slot) && first(slot)).count()
            }
        }
    }
}

pub(super) fn has(mask: &Mask, slot: usize) -> bool {
    mask[slot / 32] >> (slot % 32) & 1 != 0
}

pub(super) fn set(mask: &mut Mask, slot: usize) {
    mask[slot / 32] |= 1 << (slot % 32);
}
