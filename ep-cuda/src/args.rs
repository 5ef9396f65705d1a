//! Mirrors of `kernels/include/ep/args.h`; a test compares the two.

use bytemuck::{NoUninit, Pod, Zeroable};
use ep_core::tensor::Tensor;
use ep_core::wire::{MAX_PAYLOADS, Place};

/// `EP_CUDA_MAX_RANKS`.
pub const MAX_RANKS: usize = 72;
/// `EP_CUDA_MAX_WINDOWS`.
pub const MAX_WINDOWS: usize = 64;
/// `EP_CUDA_MAX_TOPK`.
pub const MAX_TOPK: usize = 64;
/// `EP_CUDA_MAX_CHUNKS`.
pub const MAX_CHUNKS: usize = 64;
/// `EP_CUDA_RING_HEADER_BYTES`.
pub const RING_HEADER_BYTES: u64 = 8192;

/// Bytes of `ep_cuda_lane_t`.
pub const LANE_BYTES: usize = 384;
/// Bytes of `ep_cuda_plan_header_t`.
pub const PLAN_HEADER_BYTES: usize = 64;

/// `EP_CUDA_SITE_`.
pub mod site {
    /// Waiting for a peer's counts.
    pub const PLAN_COUNTS: u32 = 1;
    /// Waiting for a peer's credit.
    pub const DISPATCH_CREDIT: u32 = 2;
    /// Waiting for a peer's rows.
    pub const DISPATCH_ROWS: u32 = 3;
    /// Waiting for a peer's descriptor.
    pub const COMBINE_ROWS: u32 = 4;
    /// Waiting for a peer to have read this rank's rows.
    pub const COMBINE_READERS: u32 = 5;
    /// A peer names a window that is not there.
    pub const BAD_PLACE: u32 = 6;
    /// topk_idx holds an id out of range.
    pub const BAD_ID: u32 = 7;
    /// A message does not fit a ring.
    pub const RING_TOO_SMALL: u32 = 8;
    /// Waiting for room in a ring, or for a message in it.
    pub const DISPATCH_RING: u32 = 9;
    /// The same in a combine.
    pub const COMBINE_RING: u32 = 10;
    /// The call of one of two ranks failed before it began.
    pub const FAILED: u32 = 20;
    /// Descriptors differ in the call.
    pub const OP: u32 = 21;
    /// … in the plan's config.
    pub const PLAN_HASH: u32 = 22;
    /// … in the plan's last update.
    pub const PLAN_EPOCH: u32 = 23;
    /// … in the number of payloads.
    pub const NUM_PAYLOADS: u32 = 24;
    /// … in their types.
    pub const DTYPES: u32 = 25;
    /// … in options.
    pub const FLAGS: u32 = 26;
    /// … in the row bytes of payload 0; those of the others follow.
    pub const ROW_BYTES: u32 = 27;
}

/// `ep_cuda_report_t`.
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
#[repr(C)]
pub struct Report {
    /// 0 none, 1 being written, 2 written.
    pub state: u32,
    /// One of [`site`].
    pub site: u32,
    /// Who found it.
    pub rank: i32,
    /// Whom it is about, or -1.
    pub peer: i32,
    /// Its lane.
    pub lane: i32,
    /// `EP_ERR_`.
    pub status: i32,
    /// The call in its lane.
    pub epoch: u64,
    /// What was waited for.
    pub expected: u64,
    /// What was there.
    pub seen: u64,
    /// Written by the host: kernels that wait give up.
    pub host_abort: u32,
    /// Zero.
    pub reserved: [u32; 3],
}

/// `ep_cuda_group_t`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Group {
    /// This rank.
    pub rank: u32,
    /// Ranks of the group.
    pub num_ranks: u32,
    /// The lane of the call.
    pub lane: u32,
    /// Limit of the group.
    pub max_local_experts: u32,
    /// From the start of the kernel.
    pub timeout_ns: u64,
    /// [`Report`].
    pub report: u64,
    /// The lane's private words.
    pub state: u64,
    /// Base addresses by window - 1 and rank.
    pub windows: u64,
    /// Their sizes.
    pub window_bytes: u64,
    /// Of the error record.
    pub error_offset: u64,
    /// Of this lane's lines.
    pub line_offset: u64,
    /// Of this lane's descriptors.
    pub desc_offset: u64,
    /// Between descriptors.
    pub desc_stride: u64,
    /// Of this lane's staging rings.
    pub ring_offset: u64,
    /// Of one ring.
    pub ring_bytes: u64,
    /// Node of each rank.
    pub node_of: [u32; MAX_RANKS],
    /// Segment of each rank.
    pub segments: [u64; MAX_RANKS],
}

/// `ep_cuda_plan_t`.
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
#[repr(C)]
pub struct Plan {
    /// Of the config.
    pub hash: u64,
    /// Slots of a token.
    pub topk: u32,
    /// Over all ranks.
    pub num_experts: u32,
    /// Of this rank.
    pub num_local: u32,
    /// `EP_LAYOUT_`.
    pub layout: u32,
    /// Rows.
    pub alignment: u32,
    /// Of an update.
    pub max_tokens: u32,
    /// What an update leaves.
    pub header: u64,
    /// `[num_experts]`.
    pub owner: u64,
    /// `[num_ranks + 1]`.
    pub first: u64,
    /// `[max_tokens * topk]`.
    pub expert: u64,
    /// `[max_tokens * topk]`.
    pub slot_pos: u64,
    /// `[max_tokens * topk]`.
    pub rank_pos: u64,
    /// `[max_tokens * topk]`, expert-major plans only.
    pub send_pos: u64,
    /// `[MAX_CHUNKS]` times what an update counts.
    pub chunk_counts: u64,
    /// `[num_ranks][1 + num_local]`.
    pub column: u64,
    /// `[num_ranks][1 + num_local]`.
    pub base: u64,
    /// `[num_local]`.
    pub expert_rows: u64,
    /// `[num_local + 1]`.
    pub expert_start: u64,
    /// Pinned.
    pub host_counts: u64,
}

/// `ep_cuda_matrix_t`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Matrix {
    /// Address; 0: absent.
    pub data: u64,
    /// Number of rows.
    pub rows: u64,
    /// Number of columns.
    pub cols: u32,
    /// Bytes of an element.
    pub element: u32,
    /// Bytes between rows.
    pub row_pitch: u64,
    /// Bytes between columns.
    pub col_pitch: u64,
}

/// What stands for the address of a tensor that is there and has no rows.
const EMPTY: u64 = 16;

impl Matrix {
    /// A tensor; None: absent.
    pub fn of(tensor: Option<&Tensor>) -> Matrix {
        let Some(tensor) = tensor else { return Matrix::default() };
        let element = tensor.dtype.bytes();
        Matrix {
            data: if tensor.rows == 0 { EMPTY } else { tensor.data.addr() as u64 },
            rows: tensor.rows as u64,
            // At most 2^28, by the check of the tensor.
            cols: tensor.cols as u32,
            element: element as u32,
            row_pitch: tensor.row_pitch() as u64,
            col_pitch: (tensor.col_stride * element) as u64,
        }
    }
}

/// `ep_cuda_plan_args_t`.
#[derive(Clone, Copy, Debug, NoUninit, Zeroable)]
#[repr(C)]
pub struct PlanArgs {
    /// The group and lane.
    pub group: Group,
    /// The plan.
    pub plan: Plan,
    /// The ids.
    pub topk_idx: Matrix,
    /// Tokens of this rank.
    pub num_tokens: u32,
    /// Pieces.
    pub num_chunks: u32,
    /// Tokens of a piece.
    pub chunk_tokens: u32,
    /// Of the plan's updates, from 1.
    pub sequence: u32,
}

/// `ep_cuda_dispatch_args_t`.
#[derive(Clone, Copy, Debug, NoUninit, Zeroable)]
#[repr(C)]
pub struct DispatchArgs {
    /// The group and lane.
    pub group: Group,
    /// The plan.
    pub plan: Plan,
    /// Payloads of the call.
    pub num_payloads: u32,
    /// A byte per payload.
    pub dtypes: u32,
    /// This rank's tokens.
    pub inputs: [Matrix; MAX_PAYLOADS],
    /// This rank's outputs.
    pub outputs: [Matrix; MAX_PAYLOADS],
    /// The outputs, as peers find them.
    pub places: [Place; MAX_PAYLOADS],
    /// `[tokens, topk]` fp32.
    pub topk_weights: Matrix,
    /// Rows that fit.
    pub capacity: u64,
    /// 4 or 8; 0: not wanted.
    pub out_idx_element: u32,
    /// Dynamic shared memory of a block.
    pub shared_bytes: u32,
    /// `[capacity, topk]`.
    pub out_idx: u64,
    /// `[capacity, topk or 1]`.
    pub out_weights: u64,
    /// `[capacity]`.
    pub src_rank: u64,
    /// `[capacity]`.
    pub src_token: u64,
    /// `[capacity]`.
    pub src_slot: u64,
    /// One.
    pub num_rows: u64,
    /// One.
    pub num_required: u64,
    /// One.
    pub num_dropped: u64,
    /// `[num_local]`.
    pub rows_per_expert: u64,
    /// `[num_local + 1]`.
    pub expert_offsets: u64,
}

/// `ep_cuda_combine_args_t`.
#[derive(Clone, Copy, Debug, NoUninit, Zeroable)]
#[repr(C)]
pub struct CombineArgs {
    /// The group and lane.
    pub group: Group,
    /// The plan.
    pub plan: Plan,
    /// This rank's rows.
    pub rows: Matrix,
    /// Their weights.
    pub row_weights: Matrix,
    /// Both, as peers find them.
    pub places: [Place; 2],
    /// `[tokens, topk]` fp32.
    pub topk_weights: Matrix,
    /// `[tokens, cols]` each.
    pub bias: [Matrix; 2],
    /// `[tokens, cols]`.
    pub combined: Matrix,
    /// `[tokens, topk]` fp32.
    pub combined_weights: Matrix,
    /// `EP_DTYPE_`.
    pub dtype: u32,
    /// `EP_REDUCE_`.
    pub order: u32,
    /// Node partials are rounded to bf16.
    pub wire_bf16: u32,
    /// Dynamic shared memory of a block.
    pub shared_bytes: u32,
}
