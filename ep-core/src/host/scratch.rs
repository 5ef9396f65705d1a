//! Working memory that a lane keeps, so that its calls do not allocate.

use super::copy::RowEnd;
use super::gather::Gathering;
use super::item::Tally;
use crate::config::{MAX_PAYLOADS, MAX_TOPK};
use crate::engine::Topology;

/// Per lane.
pub(crate) struct LaneScratch {
    /// Per place, as destination of rows.
    pub(crate) sending: Vec<Sending>,
    /// Per channel, as source of rows.
    pub(crate) receiving: Vec<Receiving>,
    /// Per place, as holder of rows that this rank combines.
    pub(crate) fetching: Vec<Fetching>,
    /// Per channel, as owner of tokens whose rows this rank holds, or as relay of one.
    pub(crate) serving: Vec<Serving>,
    /// Per place, how far this rank's token in progress is.
    pub(super) piecing: Vec<Piecing>,
    /// What this rank gathers for owners of other nodes.
    pub(super) gathering: Gathering,
    /// Per rank, rows that a combine has read.
    pub(super) rows_read: Vec<u64>,
}

impl LaneScratch {
    pub(crate) fn new(topology: &Topology) -> LaneScratch {
        let (locals, channels) = (topology.locals().len(), topology.neighbours().num_channels());
        LaneScratch {
            sending: (0..locals).map(|_| Sending::default()).collect(),
            receiving: (0..channels).map(|_| Receiving::default()).collect(),
            fetching: (0..locals).map(|_| Fetching::default()).collect(),
            serving: (0..channels).map(|_| Serving::default()).collect(),
            piecing: vec![Piecing::default(); locals],
            gathering: Gathering::new(topology),
            rows_read: vec![0; topology.node_of().len()],
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

impl DirectPlace {
    /// Element (row, col).
    pub(super) fn at(&self, row: usize, col: usize) -> RowEnd {
        let address = self.base.wrapping_add(row * self.row_pitch + col * self.col_pitch);
        RowEnd { address, col_pitch: self.col_pitch }
    }
}

/// How far a dispatch is with one destination.
#[derive(Clone, Copy)]
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
    pub(super) tally: Tally,
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
            tally: Tally::default(),
        }
    }
}

// SAFETY: the addresses are of shared mappings that live as long as the group; one call uses them.
unsafe impl Send for Sending {}

/// How far a dispatch is with one source.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Receiving {
    /// The rank whose message is in progress.
    pub(crate) source: usize,
    /// Messages that come through the ring, and how many were taken.
    pub(crate) expected: usize,
    pub(crate) taken: usize,
    /// All messages were taken, of both channels of the place, and the rank there has said that it is done.
    pub(crate) finished: bool,
    /// Inside a message: how many of its pieces were taken.
    pub(crate) pieces: usize,
    /// Rows here of the message in progress.
    pub(crate) rows: [u32; MAX_TOPK],
    pub(crate) num_rows: usize,
}

impl Default for Receiving {
    fn default() -> Self {
        Receiving {
            source: 0,
            expected: 0,
            taken: 0,
            finished: false,
            pieces: 0,
            rows: [0; MAX_TOPK],
            num_rows: 0,
        }
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
        }
    }
}

// SAFETY: as for `Sending`.
unsafe impl Send for Fetching {}

/// How far the token that is added is with one holder.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Piecing {
    /// The weights were taken from the ring.
    pub(super) weights_taken: bool,
    /// Rows that the holder has.
    pub(super) rows: usize,
    /// Where the piece of the ring with the current columns is.
    pub(super) piece: Option<*const u8>,
}

// SAFETY: as for `Sending`.
unsafe impl Send for Piecing {}

/// How far a combine is with one owner of tokens.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Serving {
    /// Rows of the request in progress; it ends with the token's last row.
    pub(crate) rows: [u32; MAX_TOPK],
    pub(crate) num_rows: usize,
    /// Its columns.
    pub(crate) col: usize,
    pub(crate) end: usize,
    /// Pieces of the request that are in the ring: weights, then columns.
    pub(crate) pieces: usize,
}

impl Default for Serving {
    fn default() -> Self {
        Serving { rows: [0; MAX_TOPK], num_rows: 0, col: 0, end: 0, pieces: 0 }
    }
}
