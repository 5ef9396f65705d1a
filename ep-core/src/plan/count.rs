//! The counting pass over a routing.

use super::{NO_ROW, PlanShape, PlanState};
use crate::error::{Error, Result, Status};
use crate::tensor::{Dtype, Tensor};

/// A checked view of `topk_idx`: `[tokens, topk]` of i32 or i64.
#[derive(Clone, Copy)]
pub struct Routing {
    tensor: Tensor,
}

impl Routing {
    /// Takes a tensor for a plan of `shape`.
    ///
    /// # Errors
    /// [`Status::InvalidArgument`] or [`Status::Capacity`].
    pub fn new(tensor: Tensor, shape: &PlanShape) -> Result<Routing> {
        if !matches!(tensor.dtype, Dtype::I32 | Dtype::I64) {
            return Err(Error::invalid(format!(
                "topk_idx is {}, expected EP_DTYPE_I32 or EP_DTYPE_I64",
                tensor.dtype.name()
            )));
        }
        if tensor.cols != shape.topk {
            return Err(Error::invalid(format!(
                "topk_idx has {} columns, the plan's topk is {}",
                tensor.cols, shape.topk
            )));
        }
        if tensor.rows > shape.max_tokens {
            return Err(Error::new(
                Status::Capacity,
                format!(
                    "topk_idx has {} tokens, the plan was made for at most {}; make it with a larger max_tokens",
                    tensor.rows, shape.max_tokens
                ),
            ));
        }
        Ok(Routing { tensor })
    }

    /// The ids as they lie in memory.
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    /// Tokens of this rank.
    pub fn num_tokens(&self) -> usize {
        self.tensor.rows
    }

    /// Slot (token, k), as the caller wrote it.
    ///
    /// # Safety
    /// The tensor's memory is readable and the slot is inside it.
    unsafe fn id(&self, token: usize, k: usize) -> i64 {
        let element = token * self.tensor.row_stride + k * self.tensor.col_stride;
        // SAFETY: by the caller's word.
        unsafe {
            match self.tensor.dtype {
                Dtype::I64 => self.tensor.data.cast::<i64>().add(element).read(),
                _ => i64::from(self.tensor.data.cast::<i32>().add(element).read()),
            }
        }
    }

    /// Finds an id that names no expert and is not -1. Nothing is written.
    ///
    /// # Errors
    /// [`Status::OutOfRange`] naming token, slot and id.
    ///
    /// # Safety
    /// The tensor's memory is readable.
    pub unsafe fn check(&self, num_experts: usize) -> Result<()> {
        let topk = self.tensor.cols;
        for token in 0..self.tensor.rows {
            let mut worst = 0;
            for k in 0..topk {
                // SAFETY: inside the tensor; readable by the caller's word. -1 maps to 0.
                worst = worst.max(unsafe { self.id(token, k) }.wrapping_add(1) as u64);
            }
            if worst > num_experts as u64 {
                // SAFETY: as above.
                return Err(unsafe { self.describe(token, num_experts) });
            }
        }
        Ok(())
    }

    /// # Safety
    /// As [`Routing::check`].
    #[cold]
    unsafe fn describe(&self, token: usize, num_experts: usize) -> Error {
        let text = (0..self.tensor.cols)
            // SAFETY: as in `check`.
            .map(|k| (k, unsafe { self.id(token, k) }))
            .find(|(_, id)| *id < -1 || *id >= num_experts as i64)
            .map_or(String::from("topk_idx changed while it was read"), |(k, id)| {
                format!(
                    "topk_idx of token {token}, slot {k} is {id}, expected -1 or an expert in 0..{num_experts}"
                )
            });
        Error::new(Status::OutOfRange, text)
    }
}

/// Copies a routing into the plan and counts it: one pass over the slots, and one to list the tokens of
/// each destination. Ids are clamped to "none" should they have changed since [`Routing::check`].
///
/// # Safety
/// The tensor's memory is readable.
pub unsafe fn count(routing: &Routing, shape: &PlanShape, state: &mut PlanState<'_>) {
    let topk = shape.topk;
    let num_experts = shape.experts.num_experts() as i64;
    let owners = shape.experts.owners();
    state.expert_count.fill(0);
    state.stamp.fill(0);
    state.send_start.fill(0);
    for token in 0..routing.num_tokens() {
        for k in 0..topk {
            // SAFETY: inside the tensor; readable by the caller's word.
            let id = unsafe { routing.id(token, k) };
            let slot = token * topk + k;
            state.rank_pos[slot] = NO_ROW;
            if id < 0 || id >= num_experts {
                state.expert[slot] = -1;
                state.slot_pos[slot] = NO_ROW;
                continue;
            }
            state.expert[slot] = id as i32;
            state.slot_pos[slot] = state.expert_count[id as usize];
            state.expert_count[id as usize] += 1;
            let rank = owners[id as usize] as usize;
            if state.stamp[rank] != token as u32 + 1 {
                state.stamp[rank] = token as u32 + 1;
                // Counts are kept one place ahead, so that the prefix sum below leaves starts.
                state.rank_pos[slot] = state.send_start[rank + 1];
                state.send_start[rank + 1] += 1;
            }
        }
    }
    for rank in 0..shape.num_ranks() {
        state.send_start[rank + 1] += state.send_start[rank];
    }
    for slot in 0..routing.num_tokens() * topk {
        if state.rank_pos[slot] != NO_ROW {
            let rank = owners[state.expert[slot] as usize] as usize;
            state.send_token[(state.send_start[rank] + state.rank_pos[slot]) as usize] = (slot / topk) as u32;
        }
    }
}
