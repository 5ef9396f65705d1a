//! What a caller may choose, checked once into types that cannot be wrong.

use std::time::Duration;

use crate::error::{Error, Result, Status};
use crate::tensor::{Dtype, RawTensor};

/// The most ranks of a group.
pub const MAX_RANKS: usize = 4096;
/// The most lanes of a group.
pub const MAX_LANES: usize = 16;
/// The most payload tensors of a dispatch.
pub const MAX_PAYLOADS: usize = 4;
/// The most slots of a token.
pub const MAX_TOPK: usize = 256;
/// The most experts of a plan, over all ranks.
pub const MAX_EXPERTS: usize = 1 << 20;
/// The most windows that are alive at a time in a group.
pub const MAX_WINDOWS: usize = 64;
/// Deadline of a call when nobody chose one.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30);

/// What `ep_group_config_t` says, not yet checked. Zero means the default everywhere.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupConfig {
    /// `EP_BACKEND_`: 0 chooses, 1 host, 2 CUDA.
    pub backend: i32,
    /// How many lanes; 0 means 2.
    pub num_lanes: u32,
    /// Deadline of collective calls; 0 means 30 s.
    pub timeout_ms: u32,
    /// 0: nodes are found by trying to map; otherwise ranks of one id form a node.
    pub node_id: u32,
    /// The most experts that a plan places on one rank; 0 means 256.
    pub max_local_experts: u32,
    /// Bytes of each staging ring; 0 chooses.
    pub ring_bytes: u32,
    /// `EP_TRANSPORT_`: 0 chooses, 1 shared memory, 2 the network between nodes.
    pub transport: i32,
    /// `EP_ROUTE_`: 0 chooses, 1 relays, 2 direct.
    pub route: i32,
    /// Bytes of the largest message between nodes; 0 chooses.
    pub chunk_bytes: u32,
    /// Messages of a kind that may be on their way between two ranks at once; 0 chooses.
    pub chunk_window: u32,
}

/// `EP_TRANSPORT_`: how ranks reach each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Transport {
    /// Shared memory among the ranks that have it, the network between the others.
    Auto = 0,
    /// Shared memory only.
    SharedMemory = 1,
    /// The network between ranks of different nodes, even where they could share memory.
    Fabric = 2,
}

impl Transport {
    /// The transport with this number.
    ///
    /// # Errors
    /// [`Status::InvalidArgument`] for any other number.
    pub fn from_code(code: i32) -> Result<Transport> {
        match code {
            0 => Ok(Transport::Auto),
            1 => Ok(Transport::SharedMemory),
            2 => Ok(Transport::Fabric),
            _ => Err(Error::invalid(format!("transport is {code}, expected an EP_TRANSPORT_ value, 0 to 2"))),
        }
    }
}

/// `EP_ROUTE_`: how tokens come to the ranks of another node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Route {
    /// Once to each node, to a rank that passes them on.
    Relay = 1,
    /// To each rank by itself.
    Direct = 2,
}

impl Route {
    /// The route with this number; 0 is [`Route::Relay`], which is the same as direct where nodes have one rank.
    ///
    /// # Errors
    /// [`Status::InvalidArgument`] for any other number.
    pub fn from_code(code: i32) -> Result<Route> {
        match code {
            0 | 1 => Ok(Route::Relay),
            2 => Ok(Route::Direct),
            _ => Err(Error::invalid(format!("route is {code}, expected an EP_ROUTE_ value, 0 to 2"))),
        }
    }
}

/// What `ep_plan_config_t` says, not yet checked.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PlanConfig {
    /// The lane the plan's calls run in.
    pub lane: u32,
    /// Slots of a token.
    pub topk: u32,
    /// Experts over all ranks.
    pub num_experts: u32,
    /// None: even, the first `num_experts % num_ranks` ranks have one more.
    pub experts_per_rank: Option<Vec<u32>>,
    /// The most tokens of this rank in any update.
    pub max_tokens: u64,
    /// Order of the rows.
    pub layout: Layout,
    /// Rows that each expert's first row is aligned to; 0 means 1.
    pub expert_alignment: u32,
}

/// `EP_LAYOUT_`: the order in which rows arrive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(i32)]
pub enum Layout {
    /// One row per (token, rank), by source rank, then source token.
    #[default]
    Flat = 0,
    /// One row per (token, slot), by local expert, source rank, source token, slot.
    ExpertMajor = 1,
}

impl Layout {
    /// The layout with this number.
    ///
    /// # Errors
    /// [`Status::InvalidArgument`] for any other number.
    pub fn from_code(code: i32) -> Result<Layout> {
        match code {
            0 => Ok(Layout::Flat),
            1 => Ok(Layout::ExpertMajor),
            _ => Err(Error::invalid(format!(
                "layout is {code}, expected EP_LAYOUT_FLAT (0) or EP_LAYOUT_EXPERT_MAJOR (1)"
            ))),
        }
    }
}

/// `EP_REDUCE_`: the order in which a token's terms are added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum ReduceOrder {
    /// By slot; no reduction before the owner.
    TopkSlot = 1,
    /// By rank.
    Rank = 2,
    /// By rank inside each node, then by node.
    NodeRank = 3,
}

impl ReduceOrder {
    /// The order with this number; 0 is the layout's default.
    ///
    /// # Errors
    /// [`Status::InvalidArgument`] for an unknown number, and for `TopkSlot` over flat rows.
    pub fn from_code(code: i32, layout: Layout) -> Result<ReduceOrder> {
        match (code, layout) {
            (0, Layout::Flat) | (2, _) => Ok(ReduceOrder::Rank),
            (0, Layout::ExpertMajor) | (1, Layout::ExpertMajor) => Ok(ReduceOrder::TopkSlot),
            (3, _) => Ok(ReduceOrder::NodeRank),
            (1, Layout::Flat) => Err(Error::invalid(
                "EP_REDUCE_TOPK_SLOT needs a row per slot; the plan's layout is EP_LAYOUT_FLAT, \
                 which has one per rank. Use EP_LAYOUT_EXPERT_MAJOR or EP_REDUCE_RANK",
            )),
            _ => Err(Error::invalid(format!("reduce_order is {code}, expected an EP_REDUCE_ value, 0 to 3"))),
        }
    }
}

/// What `ep_options_t` says. Zero means the default everywhere.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Deadline of this call; 0 means the group's.
    pub timeout_ms: u32,
    /// CUDA: SMs the call may use; 0 chooses.
    pub num_sms: u32,
    /// `EP_REDUCE_`; combine only.
    pub reduce_order: i32,
    /// Rounding of node partials in `EP_REDUCE_NODE_RANK`: 0 or a dtype code.
    pub wire_dtype: i32,
}

impl Options {
    /// True if node partials are rounded to bf16.
    ///
    /// # Errors
    /// [`Status::InvalidArgument`] for anything but fp32 and bf16.
    pub fn wire_is_bf16(&self) -> Result<bool> {
        match self.wire_dtype {
            0 => Ok(false),
            code if code == Dtype::F32 as i32 => Ok(false),
            code if code == Dtype::Bf16 as i32 => Ok(true),
            code => Err(Error::invalid(format!(
                "wire_dtype is {code}, expected 0, EP_DTYPE_F32 or EP_DTYPE_BF16"
            ))),
        }
    }
}

/// `ep_dispatch_inputs_t`, not yet checked.
#[derive(Clone, Copy, Debug)]
pub struct DispatchInputs {
    /// How many of `payloads` count.
    pub num_payloads: u32,
    /// `[tokens, cols]` each.
    pub payloads: [RawTensor; MAX_PAYLOADS],
    /// `[tokens, topk]` fp32, or absent.
    pub topk_weights: RawTensor,
}

impl Default for DispatchInputs {
    fn default() -> Self {
        DispatchInputs {
            num_payloads: 0,
            payloads: [RawTensor::NONE; MAX_PAYLOADS],
            topk_weights: RawTensor::NONE,
        }
    }
}

/// `ep_dispatch_outputs_t`, not yet checked. Null pointers are outputs that are not wanted.
#[derive(Clone, Copy, Debug)]
pub struct DispatchOutputs {
    /// How many of `payloads` count.
    pub num_payloads: u32,
    /// `[capacity, cols]` each.
    pub payloads: [RawTensor; MAX_PAYLOADS],
    /// Flat: `[capacity, topk]` i32 or i64.
    pub topk_idx: RawTensor,
    /// Flat: `[capacity, topk]`, expert-major: `[capacity, 1]`, fp32.
    pub topk_weights: RawTensor,
    /// `[capacity]`.
    pub src_rank: *mut i32,
    /// `[capacity]`.
    pub src_token: *mut i32,
    /// `[capacity]`, expert-major only.
    pub src_slot: *mut i32,
    /// One.
    pub num_rows: *mut i64,
    /// One.
    pub num_required: *mut i64,
    /// One.
    pub num_dropped: *mut i64,
    /// `[local experts]`.
    pub rows_per_expert: *mut i64,
    /// `[local experts + 1]`, expert-major only.
    pub expert_offsets: *mut i64,
}

impl Default for DispatchOutputs {
    fn default() -> Self {
        DispatchOutputs {
            num_payloads: 0,
            payloads: [RawTensor::NONE; MAX_PAYLOADS],
            topk_idx: RawTensor::NONE,
            topk_weights: RawTensor::NONE,
            src_rank: std::ptr::null_mut(),
            src_token: std::ptr::null_mut(),
            src_slot: std::ptr::null_mut(),
            num_rows: std::ptr::null_mut(),
            num_required: std::ptr::null_mut(),
            num_dropped: std::ptr::null_mut(),
            rows_per_expert: std::ptr::null_mut(),
            expert_offsets: std::ptr::null_mut(),
        }
    }
}

/// `ep_combine_inputs_t`, not yet checked.
#[derive(Clone, Copy, Debug)]
pub struct CombineInputs {
    /// `[rows, cols]`, as dispatched.
    pub rows: RawTensor,
    /// Flat: `[rows, topk]`, expert-major: `[rows, 1]`, fp32, or absent.
    pub row_weights: RawTensor,
    /// `[tokens, topk]` fp32, or absent; expert-major only.
    pub topk_weights: RawTensor,
    /// `[tokens, cols]` each, or absent.
    pub bias: [RawTensor; 2],
}

impl Default for CombineInputs {
    fn default() -> Self {
        CombineInputs {
            rows: RawTensor::NONE,
            row_weights: RawTensor::NONE,
            topk_weights: RawTensor::NONE,
            bias: [RawTensor::NONE; 2],
        }
    }
}

/// `ep_combine_outputs_t`, not yet checked.
#[derive(Clone, Copy, Debug)]
pub struct CombineOutputs {
    /// `[tokens, cols]`.
    pub combined: RawTensor,
    /// `[tokens, topk]` fp32, or absent.
    pub combined_weights: RawTensor,
}

impl Default for CombineOutputs {
    fn default() -> Self {
        CombineOutputs { combined: RawTensor::NONE, combined_weights: RawTensor::NONE }
    }
}

/// What `ep_plan_counts` answers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Assignments to each local expert, without padding.
    pub rows_per_expert: Vec<i64>,
    /// Rows from each rank, in the plan's layout.
    pub rows_per_source: Vec<i64>,
    /// Rows that a dispatch delivers, padding included.
    pub num_rows: i64,
    /// Distinct (source rank, token) pairs.
    pub num_tokens: i64,
}

/// `ep_peer_stats_t`: what this rank did with one peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct PeerStats {
    /// Collective calls completed with the peer.
    pub calls: u64,
    /// Dispatch rows to the peer.
    pub rows_sent: u64,
    /// Dispatch payload bytes to the peer.
    pub bytes_sent: u64,
    /// Dispatch rows from the peer.
    pub rows_received: u64,
    /// Combine payload bytes read from the peer.
    pub bytes_combined: u64,
    /// Dispatch rows to the peer that exceeded its capacity.
    pub rows_dropped: u64,
    /// Time in which the peer was the last thing missing, in dispatches and plan updates.
    pub wait_dispatch_ns: u64,
    /// The same in combines.
    pub wait_combine_ns: u64,
}

/// `ep_error_info_t`: the first error that broke a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ErrorInfo {
    /// What happened.
    pub status: Status,
    /// The rank that found it.
    pub rank: usize,
    /// The rank it is about.
    pub peer: Option<usize>,
    /// The lane it happened in.
    pub lane: Option<usize>,
    /// The number of the call in its lane.
    pub epoch: u64,
    /// The sentence.
    pub text: String,
}

/// `ep_group_info_t`: sizes, limits and choices of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupInfo {
    /// This rank.
    pub rank: usize,
    /// Members of the group.
    pub num_ranks: usize,
    /// Nodes of the group.
    pub num_nodes: usize,
    /// This rank's node.
    pub node: usize,
    /// `EP_BACKEND_` in use.
    pub backend: i32,
    /// Lanes.
    pub num_lanes: usize,
    /// Default deadline of a call.
    pub timeout_ms: u32,
    /// The most experts a plan may place on one rank.
    pub max_local_experts: usize,
    /// Bytes of each staging ring.
    pub ring_bytes: usize,
    /// This rank's control words and rings.
    pub memory_bytes: u64,
    /// This rank's windows that are alive.
    pub window_bytes: u64,
    /// Why this backend.
    pub backend_reason: String,
    /// `EP_TRANSPORT_` in use: shared memory, or the network between nodes.
    pub transport: i32,
    /// `EP_ROUTE_` in use; 0 without a network.
    pub route: i32,
    /// Bytes of the largest message between nodes; 0 without a network.
    pub chunk_bytes: usize,
    /// Messages of a kind that may be on their way between two ranks; 0 without a network.
    pub chunk_window: usize,
    /// This rank's memory for messages between nodes.
    pub network_bytes: u64,
    /// Why this transport, and what the network is.
    pub transport_reason: String,
}
