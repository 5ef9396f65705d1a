//! The rows of a token that ranks of this node hold: which they are, and the order in which a sum takes them.

use super::combine::Combine;
use super::scratch::Fetching;
use crate::config::{Layout, MAX_TOPK};
use crate::plan::NO_ROW;

/// One row, before its address is known.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Wanted {
    pub(super) rank: usize,
    /// The rank's place.
    pub(super) place: usize,
    /// The token's slot, from 0.
    pub(super) slot: usize,
    pub(super) row: u32,
    /// How many earlier rows of the token the same rank has.
    pub(super) ordinal: usize,
}

/// Rows of one token.
pub(super) type WantedRows = [Wanted; MAX_TOPK];

/// No rows yet.
pub(super) const NONE_WANTED: WantedRows =
    [Wanted { rank: 0, place: 0, slot: 0, row: 0, ordinal: 0 }; MAX_TOPK];

/// Where a token goes: an expert and a position per slot.
#[derive(Clone, Copy)]
pub(super) struct Slots<'a> {
    pub(super) experts: &'a [i32],
    /// Within (source, expert), or in flat layout within (source, rank), [`NO_ROW`] behind the first of each rank.
    pub(super) positions: &'a [u32],
}

impl Combine<'_> {
    /// The slots of a token of this rank.
    pub(super) fn slots_of(&self, token: usize) -> Slots<'_> {
        let slots = token * self.shape.topk..(token + 1) * self.shape.topk;
        let positions = match self.shape.layout {
            Layout::Flat => &self.state.rank_pos[slots.clone()],
            Layout::ExpertMajor => &self.state.slot_pos[slots.clone()],
        };
        Slots { experts: &self.state.expert[slots], positions }
    }

    /// The rows of a token at ranks of this node, in slot order, without those that were dropped. `holders` knows the
    /// ranks, `tail` where the rows of the token's rank begin at each place.
    pub(super) fn wanted(
        &self,
        holders: &[Fetching],
        slots: Slots<'_>,
        tail: impl Fn(usize) -> *const u32,
        wanted: &mut WantedRows,
    ) -> usize {
        let mut count = 0;
        for (slot, (&expert, &position)) in slots.experts.iter().zip(slots.positions).enumerate() {
            if expert < 0 || position == NO_ROW {
                continue;
            }
            let rank = self.shape.experts.owner(expert);
            let Some(place) = self.group.topology.place(rank) else { continue };
            let word = match self.shape.layout {
                Layout::Flat => 0,
                Layout::ExpertMajor => 1 + (expert as u32 - self.shape.experts.first(rank)) as usize,
            };
            // SAFETY: the holder's tail has this word, and outlives the call.
            let row = u64::from(unsafe { *tail(place).add(word) }) + u64::from(position);
            if row < holders[place].capacity {
                let ordinal = wanted[..count].iter().filter(|earlier| earlier.rank == rank).count();
                wanted[count] = Wanted { rank, place, slot, row: row as u32, ordinal };
                count += 1;
            }
        }
        count
    }
}

/// Orders terms by `key`; those of one key keep their order. There are at most `topk`, and few of them are out of
/// order: insertion is fast enough and does not allocate.
pub(super) fn sort<T>(terms: &mut [T], key: impl Fn(&T) -> (usize, usize)) {
    for i in 1..terms.len() {
        let mut j = i;
        while j > 0 && key(&terms[j - 1]) > key(&terms[j]) {
            terms.swap(j - 1, j);
            j -= 1;
        }
    }
}
