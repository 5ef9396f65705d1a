//! Calls as the host device runs them: everything checked, nothing owned.

use std::time::Instant;

use crate::config::{MAX_PAYLOADS, ReduceOrder};
use crate::engine::WindowTable;
use crate::plan::Routing;
use crate::tensor::Tensor;
use crate::wire::Place;

/// `ep_plan_update`.
#[derive(Clone, Copy)]
pub struct UpdateCall {
    /// The ids; already found to be in range, or checked at the start of the call.
    pub routing: Routing,
    /// When to give up.
    pub deadline: Instant,
}

/// `ep_dispatch`.
#[derive(Clone, Copy)]
pub struct DispatchCall {
    /// Payloads of the call.
    pub num_payloads: usize,
    /// `[tokens, cols]`; None behind `num_payloads`.
    pub inputs: [Option<Tensor>; MAX_PAYLOADS],
    /// `[capacity, cols]`.
    pub outputs: [Option<Tensor>; MAX_PAYLOADS],
    /// `[tokens, topk]` fp32, any strides.
    pub topk_weights: Option<Tensor>,
    /// Rows that fit the outputs.
    pub capacity: usize,
    /// Flat: `[capacity, topk]`, contiguous.
    pub out_idx: Option<Tensor>,
    /// `[capacity, topk]` or `[capacity, 1]`, contiguous.
    pub out_weights: Option<Tensor>,
    /// `[capacity]`, or null.
    pub src_rank: *mut i32,
    /// `[capacity]`, or null.
    pub src_token: *mut i32,
    /// `[capacity]`, or null.
    pub src_slot: *mut i32,
    /// One, or null.
    pub num_rows: *mut i64,
    /// One, or null.
    pub num_required: *mut i64,
    /// One, or null.
    pub num_dropped: *mut i64,
    /// `[local experts]`, or null.
    pub rows_per_expert: *mut i64,
    /// `[local experts + 1]`, or null.
    pub expert_offsets: *mut i64,
    /// When to give up.
    pub deadline: Instant,
}

impl DispatchCall {
    /// True if a row's origin, ids or weights are wanted beside its payloads.
    pub fn wants_origin(&self) -> bool {
        self.out_idx.is_some()
            || self.out_weights.is_some()
            || !self.src_rank.is_null()
            || !self.src_token.is_null()
            || !self.src_slot.is_null()
    }
}

// SAFETY: the addresses are the caller's, who vouches for them until the call is done, on any thread.
unsafe impl Send for DispatchCall {}

/// `ep_combine`.
#[derive(Clone, Copy)]
pub struct CombineCall {
    /// `[rows, cols]`, rows contiguous.
    pub rows: Tensor,
    /// `[rows, topk]` or `[rows, 1]` fp32, contiguous.
    pub row_weights: Option<Tensor>,
    /// `[tokens, topk]` fp32, any strides.
    pub topk_weights: Option<Tensor>,
    /// `[tokens, cols]`, rows contiguous.
    pub bias: [Option<Tensor>; 2],
    /// `[tokens, cols]`, rows contiguous.
    pub combined: Tensor,
    /// `[tokens, topk]` fp32, contiguous.
    pub combined_weights: Option<Tensor>,
    /// The order of the sum.
    pub order: ReduceOrder,
    /// Node partials are rounded to bf16.
    pub wire_bf16: bool,
    /// When to give up.
    pub deadline: Instant,
}

impl CombineCall {
    /// Where peers find rows and row weights. Both come one way, so that a holder's ring is either used for a token
    /// or not: if one is not in a window, neither has a place.
    pub(crate) fn places(&self, windows: &WindowTable) -> [Place; 2] {
        let weights = self.row_weights.as_ref().map(|weights| windows.place(weights));
        let rows = windows.place(&self.rows);
        let hidden = rows.window == 0 || weights.is_some_and(|weights| weights.window == 0);
        if hidden { [Place::default(); 2] } else { [rows, weights.unwrap_or_default()] }
    }
}
