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
        for token in 0..self.tensor.rows {
            let row = token * self.tensor.row_stride;
            // -1 maps to 0.
            let worst = |read: unsafe fn(*const u8) -> u64| {
                let element = |k: usize| (row + k * self.tensor.col_stride) * self.tensor.dtype.bytes();
                // SAFETY: inside the tensor; readable by the caller's word.
                let id = |k: usize| unsafe { read(self.tensor.data.wrapping_add(element(k))) };
                (0..self.tensor.cols).fold(0, |worst: u64, k| worst.max(id(k).wrapping_add(1)))
            };
            let worst = match self.tensor.dtype {
                Dtype::I64 => worst(read_i64),
                _ => worst(read_i32),
            };
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
                    "topk_idx of token {token}, slot {k} is {id}, expected -1 or an expert from 0 to {}",
                    num_experts - 1
                )
            });
        Error::new(Status::OutOfRange, text)
    }
}

/// Copies a routing into the plan and counts it. With few ranks each has room for all tokens, and one pass
/// lists the tokens of each; with more, a second pass does. Ids are clamped to "none" should they have changed
/// since [`Routing::check`].
///
/// # Safety
/// The tensor's memory is readable.
pub unsafe fn count(routing: &Routing, shape: &PlanShape, state: &mut PlanState<'_>) {
    state.expert_count.fill(0);
    state.stamp.fill(0);
    state.send_count.fill(0);
    let one_pass = shape.num_ranks() <= shape.topk;
    if one_pass {
        // One place more than tokens: see `count_slots`.
        let starts = state.send_start.iter_mut().enumerate();
        starts.for_each(|(rank, start)| *start = (rank * (shape.max_tokens + 1)) as u32);
    }
    // SAFETY: by the caller's word.
    unsafe {
        match (routing.tensor.dtype, one_pass) {
            (Dtype::I64, true) => count_slots::<true>(routing, shape, state, read_i64),
            (Dtype::I64, false) => count_slots::<false>(routing, shape, state, read_i64),
            (_, true) => count_slots::<true>(routing, shape, state, read_i32),
            (_, false) => count_slots::<false>(routing, shape, state, read_i32),
        }
    }
    if !one_pass {
        let mut sum = 0;
        for (start, count) in state.send_start.iter_mut().zip(&*state.send_count) {
            *start = sum;
            sum += count;
        }
        list_tokens(routing.num_tokens(), shape, state);
    }
    if shape.num_cells != 0 {
        list_cells(routing.num_tokens(), shape, state);
    }
}

/// Lists the tokens that go to each cell: counts them, then writes them down.
fn list_cells(num_tokens: usize, shape: &PlanShape, state: &mut PlanState<'_>) {
    let (topk, owners) = (shape.topk, shape.experts.owners());
    let (stamps, counts) = (&mut *state.cell_stamp, &mut *state.cell_count);
    let (starts, lists) = (&mut *state.cell_start, &mut *state.cell_token);
    counts.fill(0);
    for write in [false, true] {
        stamps.fill(0);
        for (token, experts) in state.expert.chunks_exact(topk).enumerate().take(num_tokens) {
            for expert in experts.iter().filter(|&&expert| expert >= 0) {
                let cell = shape.cell_of[owners[*expert as usize] as usize];
                if cell == NO_ROW || stamps[cell as usize] == token as u32 + 1 {
                    continue;
                }
                let cell = cell as usize;
                stamps[cell] = token as u32 + 1;
                if write {
                    lists[(starts[cell] + counts[cell]) as usize] = token as u32;
                }
                counts[cell] += 1;
            }
        }
        if !write {
            let mut sum = 0;
            for (start, count) in starts.iter_mut().zip(&mut *counts) {
                *start = sum;
                sum += std::mem::take(count);
            }
        }
    }
}

/// # Safety
/// `address` may be read.
#[inline(always)]
unsafe fn read_i64(address: *const u8) -> u64 {
    // SAFETY: by the caller's word.
    unsafe { address.cast::<i64>().read() as u64 }
}

/// # Safety
/// `address` may be read.
#[inline(always)]
unsafe fn read_i32(address: *const u8) -> u64 {
    // SAFETY: by the caller's word.
    i64::from(unsafe { address.cast::<i32>().read() }) as u64
}

const _: () = assert!(NO_ROW == u32::MAX);

/// Gives each slot its position within its expert, and each first slot its position within its rank. Whether a
/// slot is its token's first to a rank cannot be predicted, so it is not branched on: with `LIST` the token is
/// written behind the rank's list in any case, and stays there if the list grows.
///
/// # Safety
/// `read` may read every element's address.
#[inline(always)]
unsafe fn count_slots<const LIST: bool>(
    routing: &Routing,
    shape: &PlanShape,
    state: &mut PlanState<'_>,
    read: unsafe fn(*const u8) -> u64,
) {
    let (topk, owners, tensor) = (shape.topk, shape.experts.owners(), &routing.tensor);
    let (row_pitch, col_pitch) = (tensor.row_pitch(), tensor.col_stride * tensor.dtype.bytes());
    let (stamps, counts, expert_count) =
        (&mut *state.stamp, &mut *state.send_count, &mut *state.expert_count);
    let (starts, lists) = (&*state.send_start, &mut *state.send_token);
    let slots = state.expert.chunks_exact_mut(topk).zip(state.slot_pos.chunks_exact_mut(topk));
    let slots = slots.zip(state.rank_pos.chunks_exact_mut(topk)).enumerate();
    for (token, ((experts, slot_pos), rank_pos)) in slots.take(routing.num_tokens()) {
        let stamp = token as u32 + 1;
        let row = tensor.data.wrapping_add(token * row_pitch);
        for k in 0..topk {
            // SAFETY: an element of the tensor; readable by the caller's word.
            let id = unsafe { read(row.wrapping_add(k * col_pitch)) };
            let Some(&rank) = owners.get(id as usize) else {
                (experts[k], slot_pos[k], rank_pos[k]) = (-1, NO_ROW, NO_ROW);
                continue;
            };
            experts[k] = id as i32;
            slot_pos[k] = expert_count[id as usize];
            expert_count[id as usize] += 1;
            let rank = rank as usize;
            let fresh = u32::from(stamps[rank] != stamp);
            stamps[rank] = stamp;
            let position = counts[rank];
            if LIST {
                lists[(starts[rank] + position) as usize] = token as u32;
            }
            // All ones, which is NO_ROW, unless the rank is new.
            rank_pos[k] = position | fresh.wrapping_sub(1);
            counts[rank] = position + fresh;
        }
    }
}

/// Lists the tokens that go to each rank.
fn list_tokens(num_tokens: usize, shape: &PlanShape, state: &mut PlanState<'_>) {
    let (topk, owners) = (shape.topk, shape.experts.owners());
    let (starts, lists) = (&*state.send_start, &mut *state.send_token);
    let slots = state.expert.chunks_exact(topk).zip(state.rank_pos.chunks_exact(topk)).enumerate();
    for (token, (experts, rank_pos)) in slots.take(num_tokens) {
        for (&expert, &position) in experts.iter().zip(rank_pos) {
            if position != NO_ROW {
                lists[(starts[owners[expert as usize] as usize] + position) as usize] = token as u32;
            }
        }
    }
}
