//! What a case is: one plan and the calls made with it, with all inputs and all expected outputs.

use std::sync::Arc;

use ep_core::config::{Counts, ReduceOrder};
use ep_core::reference::{Combined, Delivered, Routing};
use ep_core::tensor::Dtype;

/// One plan of one group, from its creation to its end.
#[derive(Debug)]
pub struct Case {
    /// Which of the world's groups.
    pub group: usize,
    /// The plan's lane.
    pub lane: u32,
    /// Whether the plan's config names the experts of each rank; otherwise they are even.
    pub names_experts: bool,
    /// Per rank.
    pub max_tokens: Vec<u64>,
    /// Whether calls go through a stream.
    pub streamed: bool,
    /// The calls, in order. The first is an update.
    pub ops: Vec<Op>,
    /// Chooses, with the rank, what ranks may choose for themselves: strides, places, optional outputs.
    pub salt: u64,
    /// Whether payloads may lie side by side in records.
    pub records: bool,
}

impl Case {
    /// The routing of the first update, for what all updates have in common.
    pub fn first_routing(&self) -> &Routing {
        match &self.ops[0] {
            Op::Update(update) => &update.routing,
            other => panic!("a case begins with an update, not with {other:?}"),
        }
    }
}

/// One call on every rank.
#[derive(Debug)]
pub enum Op {
    /// `ep_plan_update`.
    Update(UpdateOp),
    /// `ep_plan_counts`; what it must answer is in the update before.
    Counts(Arc<Vec<Counts>>),
    /// `ep_dispatch`.
    Dispatch(DispatchOp),
    /// `ep_combine`.
    Combine(CombineOp),
}

/// A new routing.
#[derive(Debug)]
pub struct UpdateOp {
    pub routing: Arc<Routing>,
}

/// The kind of one payload.
#[derive(Clone, Copy, Debug)]
pub struct PayloadSpec {
    pub dtype: Dtype,
    pub cols: usize,
    /// Whether rows lie side by side in memory, as scales often do.
    pub column_major: bool,
}

impl PayloadSpec {
    /// A payload of rows.
    pub fn rows(dtype: Dtype, cols: usize) -> PayloadSpec {
        PayloadSpec { dtype, cols, column_major: false }
    }

    /// Bytes of one row.
    pub fn row_bytes(&self) -> usize {
        self.cols * self.dtype.bytes()
    }
}

/// A dispatch of all ranks. Everything per rank is indexed by rank.
#[derive(Debug)]
pub struct DispatchOp {
    pub specs: Vec<PayloadSpec>,
    /// Per payload.
    pub payloads: Vec<ep_core::reference::Payload>,
    pub topk_weights: Option<Vec<Vec<f32>>>,
    pub expected: Vec<Delivered>,
}

/// A combine of all ranks. Everything per rank is indexed by rank.
#[derive(Debug)]
pub struct CombineOp {
    pub dtype: Dtype,
    pub cols: usize,
    pub rows: Vec<Vec<u8>>,
    pub row_weights: Option<Vec<Vec<f32>>>,
    pub topk_weights: Vec<Option<Vec<f32>>>,
    pub bias: Vec<Vec<Vec<u8>>>,
    pub order: ReduceOrder,
    /// Whether the order is asked for by name or by default.
    pub default_order: bool,
    pub wire_bf16: bool,
    pub expected: Vec<Combined>,
}
