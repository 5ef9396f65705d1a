//! A plan in the device's memory, and its calls.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use bytemuck::Zeroable;
use ep_core::config::{self, Counts, MAX_PAYLOADS, ReduceOrder};
use ep_core::engine::{DevicePlan, How};
use ep_core::host::{CombineCall, DispatchCall, UpdateCall};
use ep_core::plan::PlanShape;
use ep_core::tensor::{Dtype, Tensor};
use ep_core::wire::Place;
use ep_core::{Error, Result, Status};

use crate::args::{self, MAX_CHUNKS, MAX_TOPK, Matrix, PLAN_HEADER_BYTES};
use crate::check;
use crate::group::{Shared, Start};
use crate::launch::{self, PLAN_MAX_BINS, launch};
use crate::module::{Element, Kernel, Sum};
use crate::pinned::Pinned;
use crate::pool::Buffer;

/// In the first word of `host_counts`: the update failed.
const FAILED: u64 = 1 << 63;

/// Where the arrays of a plan lie in its memory, in bytes.
struct Layout {
    header: Range<usize>,
    owner: Range<usize>,
    first: Range<usize>,
    expert: Range<usize>,
    slot_pos: Range<usize>,
    rank_pos: Range<usize>,
    send_pos: Range<usize>,
    chunk_counts: Range<usize>,
    column: Range<usize>,
    base: Range<usize>,
    expert_rows: Range<usize>,
    expert_start: Range<usize>,
    bytes: usize,
}

impl Layout {
    fn new(shape: &PlanShape) -> Layout {
        let mut bytes = 0;
        // 256: what a warp reads at once begins where it should.
        let mut array = |words: usize| {
            let start = bytes;
            bytes = (bytes + 4 * words).next_multiple_of(256);
            start..start + 4 * words
        };
        let (ranks, experts, local) = (shape.num_ranks(), shape.experts.num_experts(), shape.num_local());
        let slots = shape.max_tokens * shape.topk;
        let expert_major = shape.layout == config::Layout::ExpertMajor;
        Layout {
            header: array(PLAN_HEADER_BYTES / 4),
            owner: array(experts),
            first: array(ranks + 1),
            expert: array(slots),
            slot_pos: array(slots),
            rank_pos: array(slots),
            send_pos: array(if expert_major { slots } else { 0 }),
            chunk_counts: array(MAX_CHUNKS * bins(shape)),
            column: array(ranks * (1 + local)),
            base: array(ranks * (1 + local)),
            expert_rows: array(local),
            expert_start: array(local + 1),
            bytes,
        }
    }
}

/// Bytes of a plan's device memory.
///
/// # Errors
/// [`Status::Unsupported`] for a shape that the kernels do not have.
pub(crate) fn plan_bytes(shape: &PlanShape) -> Result<usize> {
    if shape.topk > MAX_TOPK {
        return Err(Error::new(
            Status::Unsupported,
            format!("topk is {}, the CUDA backend has at most {MAX_TOPK}", shape.topk),
        ));
    }
    if bins(shape) > PLAN_MAX_BINS {
        return Err(Error::new(
            Status::Unsupported,
            format!(
                "experts and ranks (twice in EP_LAYOUT_EXPERT_MAJOR) are {}, the CUDA backend has at most \
                 {PLAN_MAX_BINS}",
                bins(shape)
            ),
        ));
    }
    Ok(Layout::new(shape).bytes)
}

/// What an update counts: slots of each expert, tokens of each rank and, in expert-major layout, its slots.
fn bins(shape: &PlanShape) -> usize {
    let per_rank = if shape.layout == config::Layout::ExpertMajor { 2 } else { 1 };
    shape.experts.num_experts() + per_rank * shape.num_ranks()
}

/// A plan on a CUDA device.
pub(crate) struct CudaPlan {
    shared: Arc<Shared>,
    shape: PlanShape,
    args: args::Plan,
    counts: Pinned,
    /// Of the last update that was queued; 0: none.
    sequence: AtomicU32,
    /// None: the caller's memory.
    _own: Option<Buffer>,
}

impl CudaPlan {
    pub(crate) fn new(
        shared: Arc<Shared>,
        shape: &PlanShape,
        memory: Option<(u64, usize)>,
    ) -> Result<CudaPlan> {
        let needed = plan_bytes(shape)?;
        let (memory, own) = match memory {
            Some((address, bytes)) => (of_caller(&shared, address, bytes, needed)?, None),
            None => {
                let own = shared.device.pool.allocate(needed)?;
                (own.base(), Some(own))
            }
        };
        let layout = Layout::new(shape);
        let experts = &shape.experts;
        let first: Vec<u32> = (0..shape.num_ranks())
            .map(|rank| experts.first(rank))
            .chain([experts.num_experts() as u32])
            .collect();
        let pool = &shared.device.pool;
        pool.write(memory + layout.owner.start as u64, bytemuck::cast_slice(experts.owners()))?;
        pool.write(memory + layout.first.start as u64, bytemuck::cast_slice(&first))?;
        let words = COUNTS + shape.num_local() + shape.num_ranks();
        let counts = shared.device.pinned.allocate(8 * words)?;
        let args = plan_args(shape, &layout, memory, counts.device());
        Ok(CudaPlan { shared, shape: shape.clone(), args, counts, sequence: AtomicU32::new(0), _own: own })
    }

    fn context(&self) -> &crate::Context {
        &self.shared.device.context
    }

    fn check(&self, tensor: Option<&Tensor>, name: &str) -> Result<()> {
        check::tensor(self.context(), tensor, name)
    }

    /// Dynamic shared memory that a block of the kernel may have here.
    fn most_shared(&self, kernel: Kernel) -> Result<usize> {
        Ok(self.shared.device.kernels.function(kernel)?.max_shared)
    }

    /// Queues a kernel of a call that `start` began.
    ///
    /// # Safety
    /// As of [`launch`].
    unsafe fn launch<A: bytemuck::NoUninit>(
        &self,
        kernel: Kernel,
        shape: launch::Shape,
        start: &Start<'_>,
        args: &A,
    ) -> Result<()> {
        let function = self.shared.device.kernels.function(kernel)?;
        // SAFETY: by the caller's word.
        unsafe { launch(kernel, function, shape, start.stream, args) }
    }
}

/// Checks memory that the caller gave for a plan, and zeroes its header.
fn of_caller(shared: &Shared, address: u64, bytes: usize, needed: usize) -> Result<u64> {
    if !address.is_multiple_of(64) {
        return Err(Error::invalid(format!("plan memory {address:#x} is not aligned to 64 bytes")));
    }
    if bytes < needed {
        return Err(Error::new(
            Status::Capacity,
            format!("plan memory has {bytes} bytes, ep_plan_bytes says {needed}"),
        ));
    }
    check::address(&shared.device.context, address, "memory")?;
    check::address(&shared.device.context, address + bytes as u64 - 1, "the end of memory")?;
    shared.device.pool.zero(address, PLAN_HEADER_BYTES)?;
    Ok(address)
}

fn plan_args(shape: &PlanShape, layout: &Layout, memory: u64, host_counts: u64) -> args::Plan {
    let at = |range: &Range<usize>| memory + range.start as u64;
    args::Plan {
        hash: shape.hash,
        topk: shape.topk as u32,
        num_experts: shape.experts.num_experts() as u32,
        num_local: shape.num_local() as u32,
        layout: shape.layout as u32,
        alignment: shape.alignment as u32,
        max_tokens: shape.max_tokens as u32,
        header: at(&layout.header),
        owner: at(&layout.owner),
        first: at(&layout.first),
        expert: at(&layout.expert),
        slot_pos: at(&layout.slot_pos),
        rank_pos: at(&layout.rank_pos),
        send_pos: at(&layout.send_pos),
        chunk_counts: at(&layout.chunk_counts),
        column: at(&layout.column),
        base: at(&layout.base),
        expert_rows: at(&layout.expert_rows),
        expert_start: at(&layout.expert_start),
        host_counts,
    }
}

/// The kernel that adds as the call says.
fn combine_kernel(shape: &PlanShape, call: &CombineCall) -> Kernel {
    let element = match call.rows.dtype {
        Dtype::F32 => Element::F32,
        Dtype::F16 => Element::F16,
        // The engine lets no other dtype through.
        _ => Element::Bf16,
    };
    let sum = match (call.order, shape.layout) {
        (ReduceOrder::TopkSlot, _) | (ReduceOrder::Rank, config::Layout::Flat) => Sum::Chain,
        (ReduceOrder::Rank, config::Layout::ExpertMajor) => Sum::Ranks,
        (ReduceOrder::NodeRank, _) if call.wire_bf16 => Sum::NodesBf16,
        (ReduceOrder::NodeRank, _) => Sum::Nodes,
    };
    Kernel::Combine(element, sum)
}

/// Words of `host_counts` before the arrays: the update, rows, tokens.
const COUNTS: usize = 3;

impl DevicePlan for CudaPlan {
    unsafe fn update(&self, call: &UpdateCall, how: &How) -> Result<()> {
        let ids = call.routing.tensor();
        self.check(Some(ids), "topk_idx")?;
        // SAFETY: by the caller's word.
        let start = unsafe { self.shared.start(self.shape.lane, how) }?;
        let (chunk_tokens, num_chunks) = launch::chunks(ids.rows);
        // Relaxed: the lane lets one update run at a time; `counts` needs the number alone.
        let sequence = self.sequence.load(Ordering::Relaxed).wrapping_add(1).max(1);
        let args = args::PlanArgs {
            group: start.group,
            plan: self.args,
            topk_idx: Matrix::of(Some(ids)),
            num_tokens: ids.rows as u32,
            num_chunks: num_chunks as u32,
            chunk_tokens: chunk_tokens as u32,
            sequence,
        };
        for kernel in [Kernel::PlanCount, Kernel::PlanPlace] {
            let shape = launch::plan(kernel, start.num_sms, num_chunks, bins(&self.shape));
            // SAFETY: the context is current, the stream checked, and the tensor's memory vouched for.
            unsafe { self.launch(kernel, shape, &start, &args) }?;
        }
        // Relaxed: as above.
        self.sequence.store(sequence, Ordering::Relaxed);
        start.finish()
    }

    unsafe fn dispatch(&self, call: &DispatchCall, places: &[Place; MAX_PAYLOADS], how: &How) -> Result<()> {
        self.check_dispatch(call)?;
        // SAFETY: by the caller's word.
        let start = unsafe { self.shared.start(self.shape.lane, how) }?;
        let shape = launch::dispatch(start.num_sms, self.most_shared(Kernel::Dispatch)?);
        let shared_bytes = shape.shared as u32;
        let args = args::DispatchArgs { shared_bytes, ..self.dispatch_args(call, places, start.group) };
        // SAFETY: the context is current, the stream checked, and the tensors' memory vouched for.
        unsafe { self.launch(Kernel::Dispatch, shape, &start, &args) }?;
        start.finish()
    }

    unsafe fn combine(&self, call: &CombineCall, places: &[Place; 2], how: &How) -> Result<()> {
        self.check_combine(call)?;
        // SAFETY: by the caller's word.
        let start = unsafe { self.shared.start(self.shape.lane, how) }?;
        let serves = self.serves(call, places, start.group.ring_bytes)?;
        let kernel = combine_kernel(&self.shape, call);
        let shape = launch::combine(start.num_sms, serves, self.most_shared(kernel)?);
        let args = args::CombineArgs {
            group: start.group,
            plan: self.args,
            rows: Matrix::of(Some(&call.rows)),
            row_weights: Matrix::of(call.row_weights.as_ref()),
            places: *places,
            topk_weights: Matrix::of(call.topk_weights.as_ref()),
            bias: [Matrix::of(call.bias[0].as_ref()), Matrix::of(call.bias[1].as_ref())],
            combined: Matrix::of(Some(&call.combined)),
            combined_weights: Matrix::of(call.combined_weights.as_ref()),
            dtype: call.rows.dtype as u32,
            order: call.order as u32,
            wire_bf16: u32::from(call.wire_bf16),
            shared_bytes: shape.shared as u32,
        };
        // SAFETY: the context is current, the stream checked, and the tensors' memory vouched for.
        unsafe { self.launch(kernel, shape, &start, &args) }?;
        start.finish()
    }

    fn counts(&self) -> Result<Option<Counts>> {
        // Relaxed: the caller's thread queued the update, or was told of it by one that did.
        let sequence = u64::from(self.sequence.load(Ordering::Relaxed));
        // SAFETY: the first word of the block, only accessed as a whole on either side.
        let done = unsafe { AtomicU64::from_ptr(self.counts.host().cast()) };
        // Acquire: pairs with the kernel's release of the word; makes the counts visible.
        let seen = done.load(Ordering::Acquire);
        if seen == sequence | FAILED {
            return Err(self.shared.take_call_error(self.shape.lane).unwrap_or_else(|| {
                Error::new(Status::Mismatch, "the plan's update failed; ep_group_health tells more")
            }));
        }
        if seen != sequence {
            return Ok(None);
        }
        let word = |index: usize| {
            // SAFETY: inside the block; the kernel that wrote it is done, or the check below finds out.
            unsafe { self.counts.host().cast::<i64>().add(index).read_volatile() }
        };
        let (local, ranks) = (self.shape.num_local(), self.shape.num_ranks());
        let counts = Counts {
            num_rows: word(1),
            num_tokens: word(2),
            rows_per_expert: (0..local).map(|i| word(COUNTS + i)).collect(),
            rows_per_source: (0..ranks).map(|i| word(COUNTS + local + i)).collect(),
        };
        // Acquire fence: orders the reads above before the second look.
        fence(Ordering::Acquire);
        // Relaxed: ordered by the fence.
        Ok((done.load(Ordering::Relaxed) == seen).then_some(counts))
    }
}

impl CudaPlan {
    /// Whether this rank's rows go through rings of `ring_bytes`.
    ///
    /// # Errors
    /// [`Status::Capacity`] if one of them does not fit.
    fn serves(&self, call: &CombineCall, places: &[Place; 2], ring_bytes: u64) -> Result<bool> {
        if self.shape.num_ranks() == 1 || call.rows.rows == 0 || places[0].window != 0 {
            return Ok(false);
        }
        let weights = call.row_weights.as_ref().map_or(0, Tensor::row_bytes);
        let message = (call.rows.row_bytes().next_multiple_of(16) + weights).next_multiple_of(128);
        if args::RING_HEADER_BYTES + message as u64 > ring_bytes {
            return Err(Error::new(
                Status::Capacity,
                format!(
                    "a row takes {message} bytes of a staging ring, which has {ring_bytes}; raise ring_bytes, or place \
                     inputs.rows in a window of the group"
                ),
            ));
        }
        Ok(true)
    }

    fn check_dispatch(&self, call: &DispatchCall) -> Result<()> {
        const INPUTS: [&str; MAX_PAYLOADS] =
            ["inputs.payloads[0]", "inputs.payloads[1]", "inputs.payloads[2]", "inputs.payloads[3]"];
        const OUTPUTS: [&str; MAX_PAYLOADS] =
            ["outputs.payloads[0]", "outputs.payloads[1]", "outputs.payloads[2]", "outputs.payloads[3]"];
        for i in 0..call.num_payloads {
            self.check(call.inputs[i].as_ref(), INPUTS[i])?;
            self.check(call.outputs[i].as_ref(), OUTPUTS[i])?;
        }
        self.check(call.topk_weights.as_ref(), "inputs.topk_weights")?;
        self.check(call.out_idx.as_ref(), "outputs.topk_idx")?;
        self.check(call.out_weights.as_ref(), "outputs.topk_weights")?;
        let arrays = [
            ("outputs.src_rank", call.src_rank.addr()),
            ("outputs.src_token", call.src_token.addr()),
            ("outputs.src_slot", call.src_slot.addr()),
            ("outputs.num_rows", call.num_rows.addr()),
            ("outputs.num_required", call.num_required.addr()),
            ("outputs.num_dropped", call.num_dropped.addr()),
            ("outputs.rows_per_expert", call.rows_per_expert.addr()),
            ("outputs.expert_offsets", call.expert_offsets.addr()),
        ];
        arrays.iter().try_for_each(|(name, array)| check::address(self.context(), *array as u64, name))
    }

    fn check_combine(&self, call: &CombineCall) -> Result<()> {
        let tensors = [
            ("inputs.rows", Some(&call.rows)),
            ("inputs.row_weights", call.row_weights.as_ref()),
            ("inputs.topk_weights", call.topk_weights.as_ref()),
            ("inputs.bias[0]", call.bias[0].as_ref()),
            ("inputs.bias[1]", call.bias[1].as_ref()),
            ("outputs.combined", Some(&call.combined)),
            ("outputs.combined_weights", call.combined_weights.as_ref()),
        ];
        tensors.iter().try_for_each(|(name, tensor)| self.check(*tensor, name))
    }

    fn dispatch_args(
        &self,
        call: &DispatchCall,
        places: &[Place; MAX_PAYLOADS],
        group: args::Group,
    ) -> args::DispatchArgs {
        let address = |tensor: &Option<Tensor>| Matrix::of(tensor.as_ref()).data;
        let mut args = args::DispatchArgs {
            group,
            plan: self.args,
            num_payloads: call.num_payloads as u32,
            places: *places,
            topk_weights: Matrix::of(call.topk_weights.as_ref()),
            capacity: call.capacity as u64,
            out_idx_element: call.out_idx.map_or(0, |idx| idx.dtype.bytes() as u32),
            out_idx: address(&call.out_idx),
            out_weights: address(&call.out_weights),
            src_rank: call.src_rank.addr() as u64,
            src_token: call.src_token.addr() as u64,
            src_slot: call.src_slot.addr() as u64,
            num_rows: call.num_rows.addr() as u64,
            num_required: call.num_required.addr() as u64,
            num_dropped: call.num_dropped.addr() as u64,
            rows_per_expert: call.rows_per_expert.addr() as u64,
            expert_offsets: call.expert_offsets.addr() as u64,
            ..args::DispatchArgs::zeroed()
        };
        for i in 0..call.num_payloads {
            args.inputs[i] = Matrix::of(call.inputs[i].as_ref());
            args.outputs[i] = Matrix::of(call.outputs[i].as_ref());
            args.dtypes |= call.inputs[i].map_or(0, |input| input.dtype as u32) << (8 * i);
        }
        args
    }
}
