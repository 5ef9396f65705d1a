//! One token on its way to one rank of this node: stored into its windows, and put into its ring. The token is this
//! rank's own, or lies in a message from another node.

use super::copy::{RowEnd, copy_row};
use super::dispatch::Dispatch;
use super::scratch::Sending;
use super::store::Filling;
use crate::config::Layout;
use crate::plan::NO_ROW;
use crate::tensor::Tensor;

/// A token on its way, and where it is. There are two kinds, and each has its own code: what one of them does not have
/// costs it nothing.
pub(super) trait Item {
    /// The token's rank, where that is not the one that sends it.
    fn source(&self) -> Option<usize>;

    /// Its number there.
    fn token(&self) -> u32;

    /// Flat: how many earlier tokens of its rank go to the same rank.
    fn position(&self) -> u32;

    /// `[topk]`: the expert of each slot, -1 for none.
    fn experts(&self) -> &[i32];

    /// `[topk]`: how many earlier slots of its rank name the same expert.
    fn slot_pos(&self) -> &[u32];

    /// The weight of slot 0, and how far apart weights are.
    fn weights(&self) -> Option<RowEnd>;

    /// The first rows of the token's rank at the destination: in all, and of each of its experts.
    fn tail(&self) -> *const u32;

    /// True if all payloads are here, false if one piece is.
    fn is_whole(&self) -> bool;

    /// Byte `start` of the row of payload `i`. None: it is not here. `piece` is its number among all pieces of the
    /// token.
    fn row(&self, i: usize, start: usize, piece: usize) -> Option<RowEnd>;
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
#[inline]
pub(super) fn send_item(
    dispatch: &Dispatch<'_>,
    peer: &Sending,
    rank: usize,
    item: &impl Item,
    filling: &mut Filling<'_>,
    pieces: &mut usize,
    tally: &mut Tally,
) -> Sent {
    let call = dispatch.call;
    let relayed = item.source().is_some();
    if *pieces == 0 {
        if peer.meta || (relayed && peer.messages) {
            let bytes = dispatch.head_bytes(relayed, peer.meta);
            let Some(piece) = filling.reserve(bytes) else { return Sent::Full };
            // SAFETY: the piece has these bytes, is 64-byte aligned, and is this writer's.
            let words = unsafe { std::slice::from_raw_parts_mut(piece.cast(), bytes / 4) };
            write_head(dispatch, rank, peer.meta, item, words);
        }
        for_each_row(dispatch, peer, rank, item, tally, |row| {
            for (i, (input, direct)) in call.inputs.iter().zip(&peer.direct).enumerate() {
                let (Some(input), Some(direct), true) = (input, direct, item.is_whole()) else { continue };
                let Some(from) = item.row(i, 0, 0) else { continue };
                // SAFETY: `row` is below the capacity that the place was checked to hold, and this token's alone by
                // the prefix sums; the input row is readable by the caller's word, or lies in a landed message.
                unsafe { copy_row(direct.at(row, 0), from, input.dtype.bytes(), input.cols, true) };
            }
        });
        // Nothing of it goes through the ring.
        if item.is_whole() && !peer.messages {
            return Sent::Done;
        }
        *pieces = 1;
    }
    let mut index = 1;
    for (i, input) in call.inputs.iter().enumerate() {
        let Some(input) = input else { continue };
        let direct = &peer.direct[i];
        if direct.is_some() && item.is_whole() {
            continue;
        }
        let element = input.dtype.bytes();
        for piece in 0..dispatch.num_pieces(input) {
            if index == *pieces {
                let start = piece * dispatch.piece_bytes;
                let bytes = dispatch.piece_bytes.min(input.row_bytes() - start);
                let Some(from) = item.row(i, start, index - 1) else { return Sent::Part };
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
#[inline(always)]
fn for_each_row(
    dispatch: &Dispatch<'_>,
    peer: &Sending,
    rank: usize,
    item: &impl Item,
    tally: &mut Tally,
    mut store: impl FnMut(usize),
) {
    let shape = dispatch.shape;
    if shape.layout == Layout::Flat {
        // SAFETY: the tail outlives the call: its writer uses the slot again only after this epoch.
        let base = unsafe { *item.tail() } as usize;
        store(base + item.position() as usize);
        tally.rows += 1;
        return;
    }
    for (&expert, &position) in item.experts().iter().zip(item.slot_pos()) {
        if expert < 0 || shape.experts.owner(expert) != rank {
            continue;
        }
        let local = (expert as u32 - shape.experts.first(rank)) as usize;
        // SAFETY: as above; the tail has a word per local expert of the rank.
        let row = unsafe { *item.tail().add(1 + local) } as usize + position as usize;
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
fn write_head(dispatch: &Dispatch<'_>, rank: usize, meta: bool, item: &impl Item, mut words: &mut [u32]) {
    if let Some(source) = item.source() {
        words[..2].copy_from_slice(&[source as u32, item.position()]);
        words = &mut words[2..];
    }
    if !meta {
        return;
    }
    let shape = dispatch.shape;
    let topk = shape.topk;
    words[0] = item.token();
    for (k, &expert) in item.experts().iter().enumerate() {
        let here = expert >= 0 && shape.experts.owner(expert) == rank;
        words[1 + k] = if here { expert as u32 - shape.experts.first(rank) } else { NO_ROW };
        words[1 + topk + k] = item.slot_pos()[k];
        if let Some(weights) = item.weights() {
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
