//! Rows that come through rings, piece by piece, for the rank that adds them: a piece has some columns of all rows that
//! one holder has of one token.

use super::combine::{Combine, padded};
use super::exchange::{Exchange, Missing};
use super::scratch::{DirectPlace, Fetching, Piecing};
use super::wanted::Wanted;
use crate::config::Layout;
use crate::engine::RingPositions;

/// The rows of one token on their way to the rank that adds them.
pub(super) struct Pieces<'a> {
    /// By place.
    pub(super) holders: &'a [Fetching],
    pub(super) pieces: &'a mut [Piecing],
    /// The channel of place 0.
    pub(super) first_channel: usize,
    /// Columns that were asked for: pieces begin with the first.
    pub(super) col: usize,
    pub(super) end: usize,
}

impl Pieces<'_> {
    /// Begins a token with these rows.
    pub(super) fn begin(&mut self, wanted: &[Wanted]) {
        self.pieces.fill(Piecing::default());
        wanted.iter().for_each(|want| self.pieces[want.place].rows += 1);
    }

    /// True if some rows of the token come through rings.
    pub(super) fn through_rings(&self, wanted: &[Wanted]) -> bool {
        wanted.iter().any(|want| self.holders[want.place].rows.is_none())
    }

    /// The columns of the piece that column `col` is in.
    fn piece_of(&self, combine: &Combine<'_>, col: usize) -> (usize, usize) {
        let start = col - (col - self.col) % combine.piece_cols;
        (start, self.end.min(start + combine.piece_cols))
    }

    /// Where the piece ends that column `col` is in.
    pub(super) fn piece_end(&self, combine: &Combine<'_>, col: usize) -> usize {
        self.piece_of(combine, col).1
    }

    /// Finds the pieces of the token that hold column `col`, in every holder's ring; weights come before the first
    /// piece, if they come, and go to `put_weight(place, i, bits)`. False: one is not there yet.
    pub(super) fn take(
        &mut self,
        combine: &Combine<'_>,
        exchange: &Exchange<'_>,
        rings: &mut [RingPositions],
        col: usize,
        mut put_weight: impl FnMut(usize, usize, u32),
    ) -> bool {
        let (start, _) = self.piece_of(combine, col);
        let mut complete = true;
        for (place, piecing) in self.pieces.iter_mut().enumerate() {
            if piecing.rows == 0 || self.holders[place].rows.is_some() || piecing.piece.is_some() {
                continue;
            }
            let ring = &mut rings[self.first_channel + place];
            let mut reader = exchange.ring_reader(self.first_channel + place, ring.taken);
            let weights = if self.col == 0 { piecing.rows * combine.weights_per_row() } else { 0 };
            if weights > 0 && !piecing.weights_taken {
                let Some(piece) = reader.peek(4 * weights) else {
                    complete = false;
                    continue;
                };
                for i in 0..weights {
                    // SAFETY: the piece has `weights` words, is 64-byte aligned, and stays until it is taken.
                    put_weight(place, i, unsafe { piece.cast::<u32>().add(i).read() });
                }
                reader.take(4 * weights);
                ring.taken = reader.position();
                piecing.weights_taken = true;
            }
            piecing.piece = reader.peek(piecing.rows * padded(combine.piece_bytes(start, self.end)));
            complete &= piecing.piece.is_some();
        }
        complete
    }

    /// Gives back the pieces that hold the column before `col`, if it was their last.
    pub(super) fn release(
        &mut self,
        combine: &Combine<'_>,
        exchange: &Exchange<'_>,
        rings: &mut [RingPositions],
        col: usize,
    ) {
        let (start, end) = self.piece_of(combine, col - 1);
        if col != end {
            return;
        }
        for (place, piecing) in self.pieces.iter_mut().enumerate() {
            if piecing.piece.take().is_some() {
                let channel = self.first_channel + place;
                let mut reader = exchange.ring_reader(channel, rings[channel].taken);
                reader.take(piecing.rows * padded(combine.piece_bytes(start, self.end)));
                rings[channel].taken = reader.position();
            }
        }
    }

    /// Column `col` of a row: where it lies, or in the piece that was taken.
    pub(super) fn row(&self, combine: &Combine<'_>, want: &Wanted, col: usize) -> *const u8 {
        let element = combine.call.rows.dtype.bytes();
        match (&self.holders[want.place].rows, self.pieces[want.place].piece) {
            (Some(place), _) => place.at(want.row as usize, 0).address.wrapping_add(col * element),
            (None, Some(piece)) => {
                let (start, _) = self.piece_of(combine, col);
                let row = want.ordinal * padded(combine.piece_bytes(start, self.end));
                piece.wrapping_add(row + (col - start) * element)
            }
            // Not reached: `take` found a piece for every ring holder of the token.
            (None, None) => std::ptr::null(),
        }
    }

    /// Tells holders of the room that was given back, once it is worth it.
    pub(super) fn publish_tails(&self, exchange: &mut Exchange<'_>, rings: &[RingPositions]) {
        for (place, holder) in self.holders.iter().enumerate() {
            let channel = self.first_channel + place;
            if holder.rows.is_none() {
                let mut reader = exchange.ring_reader(channel, rings[channel].taken);
                exchange.give_back(place, &mut reader, false);
            }
        }
    }
}

/// The ranks of this node whose rows of the token in progress, if there is one, are not in their rings.
pub(super) fn missing_pieces(
    exchange: &Exchange<'_>,
    opened: bool,
    holders: &[Fetching],
    pieces: &[Piecing],
) -> Missing {
    exchange.missing_locals("rows through the ring", |place| {
        let piecing = &pieces[place];
        opened && piecing.rows > 0 && holders[place].rows.is_none() && piecing.piece.is_none()
    })
}

/// The slot of the i-th weight that the rank at `place` returned for a token: in flat layout slot i, in expert-major
/// that of the rank's i-th row. None: slots of other ranks are not the rank's to tell.
pub(super) fn slot_of_weight(
    combine: &Combine<'_>,
    experts: &[i32],
    wanted: &[Wanted],
    place: usize,
    i: usize,
) -> Option<usize> {
    match combine.shape.layout {
        Layout::Flat => {
            let expert = experts[i];
            let rank = combine.group.topology.locals()[place];
            (expert >= 0 && combine.shape.experts.owner(expert) == rank).then_some(i)
        }
        Layout::ExpertMajor => {
            let found = wanted.iter().find(|want| want.place == place && want.ordinal == i);
            found.map(|want| want.slot)
        }
    }
}

/// Reads the weights of rows that are read where they lie; `put(place, i, bits)` gets them.
pub(super) fn direct_weights(
    combine: &Combine<'_>,
    holders: &[Fetching],
    wanted: &[Wanted],
    mut put: impl FnMut(usize, usize, u32),
) {
    let per_row = combine.weights_per_row();
    for want in wanted {
        let Some(place) = holders[want.place].row_weights else { continue };
        let weights = place.base.wrapping_add(want.row as usize * place.row_pitch);
        for k in 0..per_row {
            // SAFETY: the place was checked to hold `capacity` rows of `per_row` weights.
            let weight = unsafe { weights.cast::<u32>().add(k).read() };
            put(want.place, want.ordinal * per_row + k, weight);
        }
    }
}

/// This rank's own tensor as a place.
pub(super) fn own_place(tensor: &crate::tensor::Tensor) -> DirectPlace {
    let col_pitch = tensor.col_stride * tensor.dtype.bytes();
    DirectPlace { base: tensor.data, row_pitch: tensor.row_pitch(), col_pitch }
}
