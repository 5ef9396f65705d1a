//! One token on its way to one rank of this node: stored into its windows, and put into its ring. The token is this
//! rank's own, or lies in a message from another node.

use super::copy::{RowEnd, copy_row};
use super::dispatch::Dispatch;
use super::scratch::Sending;
use super::store::Filling;
use crate::config::{Layout, MAX_PAYLOADS};
use crate::plan::NO_ROW;
use crate::tensor::Tensor;

/// A token, and where it is.
pub(super) struct Item<'a> {
    /// None: this rank's own.
    pub(super) origin: Option<Origin>,
    pub(super) token: u32,
    /// Flat: how many earlier tokens of its rank go to the same rank.
    pub(super) position: u32,
    /// `[topk]`: the expert of each slot, -1 for none.
    pub(super) experts: &'a [i32],
    /// `[topk]`: how many earlier slots of its rank name the same expert.
    pub(super) slot_pos: &'a [u32],
    /// The weight of slot 0, and how far apart weights are.
    pub(super) weights: Option<RowEnd>,
    /// The first rows of the token's rank at the destination: in all, and of each of its experts.
    pub(super) tail: *const u32,
    pub(super) payloads: Payloads,
}

/// What messages of tokens of other nodes say besides.
#[derive(Clone, Copy)]
pub(super) struct Origin {
    pub(super) rank: usize,
}

/// The rows of an item's payloads.
pub(super) enum Payloads {
    /// All of them.
    Whole([RowEnd; MAX_PAYLOADS]),
    /// One piece, by its number among all pieces of the token.
    Piece { number: usize, data: *const u8 },
}

/// How far an item came.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Sent {
    /// All of it is sent.
    Done,
    /// Its next piece has not come yet.
    Part,
    /// The ring is full.
    Full,
}

/// Rows stored or put into rings, and rows that did not fit.
#[derive(Clone, Copy, Default)]
pub(super) struct Tally {
    pub(super) rows: u64,
    pub(super) dropped: u64,
}

/// Sends an item to `rank`, or goes on with it. `pieces` counts what is done: the head, then each piece.
pub(super) fn send_item(
    dispatch: &Dispatch<'_>,
    peer: &Sending,
    rank: usize,
    item: &Item<'_>,
    filling: &mut Filling<'_>,
    pieces: &mut usize,
    tally: &mut Tally,
) -> Sent {
    let call = dispatch.call;
    let relayed = item.origin.is_some();
    if *pieces == 0 {
        if peer.meta || (relayed && peer.messages) {
            let bytes = dispatch.head_bytes(relayed, peer.meta);
            let Some(piece) = filling.reserve(bytes) else { return Sent::Full };
            // SAFETY: the piece has these bytes, is 64-byte aligned, and is this writer's.
            let words = unsafe { std::slice::from_raw_parts_mut(piece.cast(), bytes / 4) };
            write_head(dispatch, rank, peer.meta, item, words);
        }
        let whole = match &item.payloads {
            Payloads::Whole(rows) => Some(rows),
            Payloads::Piece { .. } => None,
        };
        for_each_row(dispatch, peer, rank, item, tally, |row| {
            let Some(rows) = whole else { return };
            for ((input, direct), from) in call.inputs.iter().zip(&peer.direct).zip(rows) {
                let (Some(input), Some(direct)) = (input, direct) else { continue };
                // SAFETY: `row` is below the capacity that the place was checked to hold, and this token's alone by
                // the prefix sums; the input row is readable by the caller's word, or lies in a landed message.
                unsafe { copy_row(direct.at(row, 0), *from, input.dtype.bytes(), input.cols, true) };
            }
        });
        *pieces = 1;
    }
    let mut index = 1;
    for (i, input) in call.inputs.iter().enumerate() {
        let Some(input) = input else { continue };
        let direct = &peer.direct[i];
        if let (Some(_), Payloads::Whole(_)) = (direct, &item.payloads) {
            continue;
        }
        let element = input.dtype.bytes();
        for piece in 0..dispatch.num_pieces(input) {
            if index == *pieces {
                let start = piece * dispatch.piece_bytes;
                let bytes = dispatch.piece_bytes.min(input.row_bytes() - start);
                let from = match &item.payloads {
                    Payloads::Whole(rows) => RowEnd {
                        address: rows[i].address.wrapping_add(start / element * rows[i].col_pitch),
                        col_pitch: rows[i].col_pitch,
                    },
                    Payloads::Piece { number, data } if *number + 1 == index => {
                        RowEnd { address: data.cast_mut(), col_pitch: element }
                    }
                    Payloads::Piece { .. } => return Sent::Part,
                };
                if let Some(direct) = direct {
                    for_each_row(dispatch, peer, rank, item, &mut Tally::default(), |row| {
                        // SAFETY: as above; the piece's columns are columns of the row.
                        unsafe {
                            copy_row(direct.at(row, start / element), from, element, bytes / element, true)
                        };
                    });
                } else {
                    let Some(address) = filling.reserve(bytes) else { return Sent::Full };
                    // SAFETY: the ring's piece has `bytes` bytes; the other side is as above.
                    unsafe {
                        copy_row(
                            RowEnd { address, col_pitch: element },
                            from,
                            element,
                            bytes / element,
                            filling.streaming(),
                        )
                    };
                }
                *pieces += 1;
            }
            index += 1;
        }
    }
    *pieces = 0;
    Sent::Done
}

/// Calls `store` for every row that the item has at `rank` and that fits there.
fn for_each_row(
    dispatch: &Dispatch<'_>,
    peer: &Sending,
    rank: usize,
    item: &Item<'_>,
    tally: &mut Tally,
    mut store: impl FnMut(usize),
) {
    let shape = dispatch.shape;
    if shape.layout == Layout::Flat {
        // SAFETY: the tail outlives the call: its writer uses the slot again only after this epoch.
        let base = unsafe { *item.tail } as usize;
        store(base + item.position as usize);
        tally.rows += 1;
        return;
    }
    for (&expert, &position) in item.experts.iter().zip(item.slot_pos) {
        if expert < 0 || shape.experts.owner(expert) != rank {
            continue;
        }
        let local = (expert as u32 - shape.experts.first(rank)) as usize;
        // SAFETY: as above; the tail has a word per local expert of the rank.
        let row = unsafe { *item.tail.add(1 + local) } as usize + position as usize;
        if (row as u64) < peer.capacity {
            store(row);
            tally.rows += 1;
        } else {
            tally.dropped += 1;
        }
    }
}

/// For a token of another node, its rank and its position; then, if wanted, the origin, local expert per slot,
/// position per slot, weight per slot.
fn write_head(dispatch: &Dispatch<'_>, rank: usize, meta: bool, item: &Item<'_>, mut words: &mut [u32]) {
    if let Some(origin) = item.origin {
        words[..2].copy_from_slice(&[origin.rank as u32, item.position]);
        words = &mut words[2..];
    }
    if !meta {
        return;
    }
    let shape = dispatch.shape;
    let topk = shape.topk;
    words[0] = item.token;
    for (k, &expert) in item.experts.iter().enumerate() {
        let here = expert >= 0 && shape.experts.owner(expert) == rank;
        words[1 + k] = if here { expert as u32 - shape.experts.first(rank) } else { NO_ROW };
        words[1 + topk + k] = item.slot_pos[k];
        if let Some(weights) = &item.weights {
            // SAFETY: a weight per slot, in the caller's tensor or in a landed message.
            let weight = unsafe { weights.address.add(k * weights.col_pitch).cast::<u32>().read() };
            words[1 + 2 * topk + k] = if here { weight } else { 0 };
        }
    }
}

/// Element (row, col) of a tensor as the end of a row copy.
pub(super) fn row_end(tensor: &Tensor, row: usize, col: usize) -> RowEnd {
    let element = row * tensor.row_stride + col * tensor.col_stride;
    RowEnd {
        address: tensor.data.wrapping_add(element * tensor.dtype.bytes()),
        col_pitch: tensor.col_stride * tensor.dtype.bytes(),
    }
}
