//! The types and constants of `include/ep.h`, field by field.
//!
//! `tests/abi` lets a C compiler compare names, types, offsets and sizes with the header.

use std::ffi::{c_char, c_void};

use ep_core::bootstrap::AllGatherFn;
use ep_core::config::MAX_PAYLOADS;

pub use ep_core::config::PeerStats as EpPeerStats;
pub use ep_core::tensor::RawTensor as EpTensor;

/// `ep_status_t`.
pub type EpStatus = i32;

/// The bytes of every fixed text in a struct, its NUL included.
pub const TEXT_BYTES: usize = 256;

/// `EP_SCOPE_NONE`.
pub const EP_SCOPE_NONE: i32 = 0;
/// `EP_SCOPE_CALLER`.
pub const EP_SCOPE_CALLER: i32 = 1;
/// `EP_SCOPE_CALL`.
pub const EP_SCOPE_CALL: i32 = 2;
/// `EP_SCOPE_GROUP`.
pub const EP_SCOPE_GROUP: i32 = 3;
/// `EP_SCOPE_PROCESS`.
pub const EP_SCOPE_PROCESS: i32 = 4;

/// `EP_BACKEND_AUTO`.
pub const EP_BACKEND_AUTO: i32 = 0;
/// `EP_BACKEND_HOST`.
pub const EP_BACKEND_HOST: i32 = 1;
/// `EP_BACKEND_CUDA`.
pub const EP_BACKEND_CUDA: i32 = 2;

/// `EP_TRANSPORT_AUTO`.
pub const EP_TRANSPORT_AUTO: i32 = 0;
/// `EP_TRANSPORT_SHARED_MEMORY`.
pub const EP_TRANSPORT_SHARED_MEMORY: i32 = 1;
/// `EP_TRANSPORT_FABRIC`.
pub const EP_TRANSPORT_FABRIC: i32 = 2;

/// `EP_ROUTE_AUTO`.
pub const EP_ROUTE_AUTO: i32 = 0;
/// `EP_ROUTE_RELAY`.
pub const EP_ROUTE_RELAY: i32 = 1;
/// `EP_ROUTE_DIRECT`.
pub const EP_ROUTE_DIRECT: i32 = 2;

/// `EP_RANK_ALIVE`.
pub const EP_RANK_ALIVE: i32 = 0;
/// `EP_RANK_LOST`.
pub const EP_RANK_LOST: i32 = 1;

/// `EP_REDUCE_DEFAULT`; the others are `ep_core::config::ReduceOrder`.
pub const EP_REDUCE_DEFAULT: i32 = 0;

/// `ep_group_t`: never looked into, on either side.
#[derive(Debug)]
#[repr(C)]
pub struct EpGroup {
    _opaque: [u8; 0],
}

/// `ep_stream_t`.
#[derive(Debug)]
#[repr(C)]
pub struct EpStream {
    _opaque: [u8; 0],
}

/// `ep_window_t`.
#[derive(Debug)]
#[repr(C)]
pub struct EpWindow {
    _opaque: [u8; 0],
}

/// `ep_plan_t`.
#[derive(Debug)]
#[repr(C)]
pub struct EpPlan {
    _opaque: [u8; 0],
}

/// `ep_unique_id_t`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[expect(missing_docs, reason = "the header documents each field")]
pub struct EpUniqueId {
    pub bytes: [u8; 128],
}

/// `ep_bootstrap_t`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[expect(missing_docs, reason = "the header documents each field")]
pub struct EpBootstrap {
    pub struct_size: u32,
    pub reserved_flags: u32,
    pub rank: i32,
    pub num_ranks: i32,
    pub all_gather: Option<AllGatherFn>,
    pub all_gather_ctx: *mut c_void,
    pub unique_id: *const EpUniqueId,
    pub file: *const c_char,
    pub timeout_ms: u32,
    pub reserved: u32,
}

/// `ep_group_config_t`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[expect(missing_docs, reason = "the header documents each field")]
pub struct EpGroupConfig {
    pub struct_size: u32,
    pub reserved_flags: u32,
    pub backend: i32,
    pub num_lanes: u32,
    pub timeout_ms: u32,
    pub node_id: u32,
    pub max_local_experts: u32,
    pub ring_bytes: u32,
    pub transport: i32,
    pub route: i32,
    pub chunk_bytes: u32,
    pub chunk_window: u32,
}

/// `ep_error_info_t`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[expect(missing_docs, reason = "the header documents each field")]
pub struct EpErrorInfo {
    pub struct_size: u32,
    pub status: EpStatus,
    pub rank: i32,
    pub peer: i32,
    pub lane: i32,
    pub reserved: u32,
    pub epoch: u64,
    pub text: [c_char; TEXT_BYTES],
}

/// `ep_group_info_t`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[expect(missing_docs, reason = "the header documents each field")]
pub struct EpGroupInfo {
    pub struct_size: u32,
    pub rank: i32,
    pub num_ranks: i32,
    pub num_nodes: i32,
    pub node: i32,
    pub backend: i32,
    pub num_lanes: u32,
    pub timeout_ms: u32,
    pub max_local_experts: u32,
    pub ring_bytes: u32,
    pub memory_bytes: u64,
    pub window_bytes: u64,
    pub backend_reason: [c_char; TEXT_BYTES],
    pub transport: i32,
    pub route: i32,
    pub chunk_bytes: u32,
    pub chunk_window: u32,
    pub network_bytes: u64,
    pub transport_reason: [c_char; TEXT_BYTES],
}

/// `ep_plan_config_t`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[expect(missing_docs, reason = "the header documents each field")]
pub struct EpPlanConfig {
    pub struct_size: u32,
    pub reserved_flags: u32,
    pub lane: u32,
    pub topk: u32,
    pub num_experts: u32,
    pub num_experts_per_rank: u32,
    pub experts_per_rank: *const u32,
    pub max_tokens: u64,
    pub layout: i32,
    pub expert_alignment: u32,
}

/// `ep_options_t`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[expect(missing_docs, reason = "the header documents each field")]
pub struct EpOptions {
    pub struct_size: u32,
    pub reserved_flags: u32,
    pub timeout_ms: u32,
    pub num_sms: u32,
    pub reduce_order: i32,
    pub wire_dtype: i32,
}

/// `ep_counts_t`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[expect(missing_docs, reason = "the header documents each field")]
pub struct EpCounts {
    pub struct_size: u32,
    pub num_local_experts: u32,
    pub num_ranks: u32,
    pub reserved: u32,
    pub rows_per_expert: *mut i64,
    pub rows_per_source: *mut i64,
    pub num_rows: i64,
    pub num_tokens: i64,
}

/// `ep_dispatch_inputs_t`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[expect(missing_docs, reason = "the header documents each field")]
pub struct EpDispatchInputs {
    pub struct_size: u32,
    pub num_payloads: u32,
    pub payloads: [EpTensor; MAX_PAYLOADS],
    pub topk_weights: EpTensor,
}

/// `ep_dispatch_outputs_t`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[expect(missing_docs, reason = "the header documents each field")]
pub struct EpDispatchOutputs {
    pub struct_size: u32,
    pub num_payloads: u32,
    pub payloads: [EpTensor; MAX_PAYLOADS],
    pub topk_idx: EpTensor,
    pub topk_weights: EpTensor,
    pub src_rank: *mut i32,
    pub src_token: *mut i32,
    pub src_slot: *mut i32,
    pub num_rows: *mut i64,
    pub num_required: *mut i64,
    pub num_dropped: *mut i64,
    pub rows_per_expert: *mut i64,
    pub expert_offsets: *mut i64,
}

/// `ep_combine_inputs_t`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[expect(missing_docs, reason = "the header documents each field")]
pub struct EpCombineInputs {
    pub struct_size: u32,
    pub reserved_flags: u32,
    pub rows: EpTensor,
    pub row_weights: EpTensor,
    pub topk_weights: EpTensor,
    pub bias: [EpTensor; 2],
}

/// `ep_combine_outputs_t`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[expect(missing_docs, reason = "the header documents each field")]
pub struct EpCombineOutputs {
    pub struct_size: u32,
    pub reserved_flags: u32,
    pub combined: EpTensor,
    pub combined_weights: EpTensor,
}
