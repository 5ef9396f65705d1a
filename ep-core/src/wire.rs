//! Mirrors of `kernels/include/ep/wire.h`; a test of the `ep` package compares the two.

use bytemuck::{Pod, Zeroable};

/// Version of everything in this file; ranks of one group must agree.
pub const WIRE_VERSION: u32 = 3;
/// Descriptors in flight per (lane, pair).
pub const DEPTH: u64 = 3;
/// Size of a peer's line of words.
pub const LINE_BYTES: usize = 128;
/// Payload tensors of a dispatch.
pub const MAX_PAYLOADS: usize = 4;
/// Entries of a request ring.
pub const REQUESTS: usize = 1024;
/// Bytes of an error's sentence.
pub const ERROR_TEXT: usize = 256;

/// `EP_WIRE_OP_PLAN`.
pub const OP_PLAN: u32 = 1;
/// `EP_WIRE_OP_DISPATCH`.
pub const OP_DISPATCH: u32 = 2;
/// `EP_WIRE_OP_COMBINE`.
pub const OP_COMBINE: u32 = 3;

/// `EP_WIRE_OP_FAILED`: the call failed before it began; equal to nothing.
pub const OP_FAILED: u32 = 4;

/// `EP_WIRE_FLAG_TOPK_WEIGHTS`: dispatch carries weights.
pub const FLAG_TOPK_WEIGHTS: u32 = 1;
/// `EP_WIRE_FLAG_ROW_WEIGHTS`: combine returns weights.
pub const FLAG_ROW_WEIGHTS: u32 = 2;
/// `EP_WIRE_FLAG_ORDER_SHIFT`: combine's reduce order.
pub const FLAG_ORDER_SHIFT: u32 = 4;
/// `EP_WIRE_FLAG_WIRE_BF16`: combine rounds node partials to bf16.
pub const FLAG_WIRE_BF16: u32 = 64;
/// `EP_WIRE_WANTS_META`: dispatch sends each row's origin, ids and weights.
pub const WANTS_META: u32 = 1;

/// `ep_wire_place_t`: where a matrix lies for a peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Place {
    /// Window number, from 1; 0: not in a window.
    pub window: u32,
    /// Zero.
    pub reserved: u32,
    /// Bytes into the owner's part.
    pub offset: u64,
    /// Bytes between rows.
    pub row_pitch: u64,
    /// Bytes between elements.
    pub col_pitch: u64,
}

/// `ep_wire_desc_t` without its first word, `epoch`, which is written last and by itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct DescBody {
    /// The call that updated the plan; 0 in a plan update.
    pub plan_epoch: u64,
    /// Hash of the plan's config.
    pub plan_hash: u64,
    /// `OP_`.
    pub op: u32,
    /// `FLAG_`.
    pub flags: u32,
    /// A dtype code per payload, one byte each.
    pub dtypes: u32,
    /// Payloads of the call.
    pub num_payloads: u32,
    /// Bytes of a row, per payload.
    pub row_bytes: [u32; MAX_PAYLOADS],
    /// `WANTS_`.
    pub wants: u32,
    /// `topk`, `num_experts`, `layout`, `expert_alignment`, for the text about hashes that differ.
    pub plan_fields: [u32; 4],
    /// Zero.
    pub reserved: [u32; 11],
    /// Rows that fit.
    pub capacity: u64,
    /// Where the payloads lie.
    pub places: [Place; MAX_PAYLOADS],
}

/// Bytes of a descriptor before its tail.
pub const DESC_BYTES: usize = 8 + size_of::<DescBody>();

/// `ep_wire_relay_desc_t`: a descriptor on its way to the ranks of another node. Behind it lie the words of each
/// rank's tail, one number per rank, then the tails.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct RelayDesc {
    /// The call in its lane.
    pub epoch: u64,
    /// The descriptor.
    pub body: DescBody,
    /// Messages of rows that the writer has sent on this link and lane before this call.
    pub rows_first: u64,
    /// Requests that it has sent before this call.
    pub requests_first: u64,
    /// Tokens that it sends to these ranks, or asks them for.
    pub num_tokens: u32,
    /// Ranks that the descriptor is for.
    pub num_ranks: u32,
    /// Zero.
    pub reserved: [u32; 2],
}

/// Bytes of a relayed descriptor before the words of its tails.
pub const RELAY_DESC_BYTES: usize = size_of::<RelayDesc>();

/// `ep_wire_chunk_t`: what a message of rows, a request and a response begin with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Chunk {
    /// The call in its lane.
    pub epoch: u64,
    /// The first token, by its place among those that go to these ranks.
    pub first: u32,
    /// Tokens.
    pub records: u32,
    /// Rows: the piece of the one token's payloads that is here, or [`WHOLE`].
    pub piece: u32,
    /// Requests and responses: the first column.
    pub col: u32,
    /// Requests and responses: columns.
    pub cols: u32,
    /// Zero.
    pub reserved: [u32; 9],
}

/// In [`Chunk::piece`]: all payloads of every token.
pub const WHOLE: u32 = u32::MAX;
/// Bytes of a message's header.
pub const CHUNK_BYTES: usize = size_of::<Chunk>();
/// Records and rows in messages begin at multiples of this.
pub const RECORD_ALIGN: usize = 16;

/// Offsets of the words in `ep_wire_line_t`.
pub mod line {
    /// The last call in which the peer is done with this rank's memory.
    pub const ARRIVAL: usize = 0;
    /// Bytes put into the ring here.
    pub const RING_HEAD: usize = 8;
    /// Bytes taken from the ring there.
    pub const RING_TAIL: usize = 16;
    /// Requests put into the request ring here.
    pub const REQUEST_HEAD: usize = 24;
    /// Requests taken from the request ring there.
    pub const REQUEST_TAIL: usize = 32;
}

/// `ep_wire_error_t` without its first word, `state`; packed, since it begins four bytes in.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C, packed(4))]
pub struct ErrorBody {
    /// Status code.
    pub status: i32,
    /// The rank that found it.
    pub rank: i32,
    /// The rank it is about, or -1.
    pub peer: i32,
    /// Its lane, or -1.
    pub lane: i32,
    /// Zero.
    pub reserved: u32,
    /// The call in its lane.
    pub epoch: u64,
    /// UTF-8, zero-filled.
    pub text: [u8; ERROR_TEXT],
}

/// Bytes of an error record.
pub const ERROR_BYTES: usize = 288;

const _: () = assert!(DESC_BYTES == 256);
const _: () = assert!(size_of::<ErrorBody>() + 4 == ERROR_BYTES);
const _: () = assert!(size_of::<Place>() == 32);
const _: () = assert!(RELAY_DESC_BYTES == 288);
const _: () = assert!(CHUNK_BYTES == 64);
