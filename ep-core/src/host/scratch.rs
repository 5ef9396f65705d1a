//! Working memory that a lane keeps, so that its calls do not allocate.

use crate::config::{MAX_PAYLOADS, MAX_TOPK};

/// Per lane.
pub(crate) struct LaneScratch {
    /// Per peer, as destination of rows.
    pub(crate) sending: Vec<Sending>,
    /// Per peer, as source of rows.
    pub(crate) receiving: Vec<Receiving>,
    /// Per peer, as holder of rows that this rank combines.
    pub(crate) fetching: Vec<Fetching>,
    /// Per peer, as owner of tokens whose rows this rank holds.
    pub(crate) serving: Vec<Serving>,
}

impl LaneScratch {
    pub(crate) fn new(num_ranks: usize) -> LaneScratch {
        LaneScratch {
            sending: (0..num_ranks).map(|_| Sending::default()).collect(),
            receiving: (0..num_ranks).map(|_| Receiving::default()).collect(),
            fetching: (0..num_ranks).map(|_| Fetching::default()).collect(),
            serving: (0..num_ranks).map(|_| Serving::default()).collect(),
        }
    }
}

/// A matrix of a peer that this rank writes or reads directly.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DirectPlace {
    pub(crate) base: *mut u8,
    pub(crate) row_pitch: usize,
    pub(crate) col_pitch: usize,
}

/// How far a dispatch is with one destination.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sending {
    /// The peer's credit was read.
    pub(crate) credited: bool,
    /// All rows are sent and the peer was told so; or it is owed none.
    pub(crate) done: bool,
    /// The peer's signature differs: neither touches the other's memory in this call.
    pub(crate) differs: bool,
    /// The last attempt met a full ring.
    pub(crate) blocked: bool,
    /// Rows that fit there.
    pub(crate) capacity: u64,
    /// The tail of the peer's descriptor: this rank's first rows there.
    pub(crate) tail: *const u32,
    /// Rows go here directly; None: through the ring.
    pub(crate) direct: [Option<DirectPlace>; MAX_PAYLOADS],
    /// Each token sends a message through the ring.
    pub(crate) messages: bool,
    /// Messages begin with the row's origin, ids and weights.
    pub(crate) meta: bool,
    /// The next token, an index into the plan's list for the peer.
    pub(crate) next: usize,
    /// Where the list ends for this call.
    pub(crate) end: usize,
    /// Inside a message: how many of its pieces are in the ring.
    pub(crate) pieces: usize,
    /// Rows sent so far, and rows dropped for want of capacity.
    pub(crate) rows: u64,
    pub(crate) dropped: u64,
}

impl Default for Sending {
    fn default() -> Self {
        Sending {
            credited: false,
            done: false,
            differs: false,
            blocked: false,
            capacity: 0,
            tail: std::ptr::null(),
            direct: [None; MAX_PAYLOADS],
            messages: false,
            meta: false,
            next: 0,
            end: 0,
            pieces: 0,
            rows: 0,
            dropped: 0,
        }
    }
}

// SAFETY: the addresses are of shared mappings that live as long as the group; one call uses them.
unsafe impl Send for Sending {}

/// How far a dispatch is with one source.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Receiving {
    /// Messages that come through the ring, and how many were taken.
    pub(crate) expected: usize,
    pub(crate) taken: usize,
    /// All messages were taken and the source has said that it is done.
    pub(crate) finished: bool,
    /// Inside a message: how many of its pieces were taken.
    pub(crate) pieces: usize,
    /// Rows here of the message in progress.
    pub(crate) rows: [u32; MAX_TOPK],
    pub(crate) num_rows: usize,
}

impl Default for Receiving {
    fn default() -> Self {
        Receiving { expected: 0, taken: 0, finished: false, pieces: 0, rows: [0; MAX_TOPK], num_rows: 0 }
    }
}

/// How far a combine is with one holder of rows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fetching {
    /// The holder's descriptor was read.
    pub(crate) known: bool,
    /// The holder was told that this rank reads its rows no more; or it is owed nothing.
    pub(crate) arrived: bool,
    /// The holder's signature differs: neither touches the other's memory in this call.
    pub(crate) differs: bool,
    /// The tail of the holder's descriptor: this rank's first rows there.
    pub(crate) tail: *const u32,
    /// Rows that the holder has.
    pub(crate) capacity: u64,
    /// Rows are read here; None: through the ring.
    pub(crate) rows: Option<DirectPlace>,
    pub(crate) row_weights: Option<DirectPlace>,
    /// The next token to request rows of, an index into the plan's list for the holder.
    pub(crate) next_request: usize,
    /// The weights of the token in progress were taken from the ring.
    pub(crate) weights_taken: bool,
    /// Rows that this holder had so far.
    pub(crate) rows_read: u64,
    /// Rows of the token in progress that this holder has.
    pub(crate) rows_of_token: usize,
    /// Where the piece of the ring with the current columns is.
    pub(crate) piece: Option<*const u8>,
}

impl Default for Fetching {
    fn default() -> Self {
        Fetching {
            known: false,
            arrived: false,
            differs: false,
            tail: std::ptr::null(),
            capacity: 0,
            rows: None,
            row_weights: None,
            next_request: 0,
            weights_taken: false,
            rows_read: 0,
            rows_of_token: 0,
            piece: None,
        }
    }
}

// SAFETY: as for `Sending`.
unsafe impl Send for Fetching {}

/// How far a combine is with one owner of tokens.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Serving {
    /// Rows of the request in progress; it ends with the token's last row.
    pub(crate) rows: [u32; MAX_TOPK],
    pub(crate) num_rows: usize,
    /// Pieces of the request that are in the ring: weights, then columns.
    pub(crate) pieces: usize,
}

impl Default for Serving {
    fn default() -> Self {
        Serving { rows: [0; MAX_TOPK], num_rows: 0, pieces: 0 }
    }
}
