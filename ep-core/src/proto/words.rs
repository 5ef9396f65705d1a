//! Arithmetic on the protocol's words: pure functions of numbers.

use crate::wire::DEPTH;

/// Descriptor slots of a (writer, reader) pair in a lane.
///
/// Two are enough while a lane issues `e` only after its `e - 1` ended. Three also allow issuing `e` once
/// the descriptors of `e - 1` were read, as the halves of a low-latency call do, while kernels still use
/// the credits of `e - 1` in their slots. `tests/model_check.rs` shows that one fewer fails in each case.
pub const DESC_SLOTS: usize = DEPTH as usize;

/// The slot of an epoch's descriptor.
pub const fn slot_of(epoch: u64) -> usize {
    (epoch % DESC_SLOTS as u64) as usize
}

/// True if a loaded arrival word proves that its writer is done with this rank's memory of `epoch`. A later
/// epoch proves it too: with low-latency halves the next arrival may overwrite one that was not seen yet.
pub const fn has_arrived(word: u64, epoch: u64) -> bool {
    word >= epoch
}

/// The arithmetic of a staging ring. Positions count bytes since the group was made; only places wrap.
/// What goes through is cut into pieces whose sizes both sides know beforehand, and a piece is never
/// split at the ring's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ring {
    bytes: u64,
    align: u64,
}

impl Ring {
    /// A ring of `bytes` bytes, whose pieces begin at multiples of `align`: a divisor, at most a quarter.
    pub const fn new(bytes: u64, align: u64) -> Ring {
        assert!(align > 0 && bytes >= 4 * align && bytes.is_multiple_of(align));
        Ring { bytes, align }
    }

    /// The largest piece with which a ring cannot get stuck: up to a piece may be lost before the ring's
    /// end, and up to a quarter of the ring not yet be given back.
    pub const fn max_piece(self) -> u64 {
        self.bytes / 4 / self.align * self.align
    }

    /// Where a piece of `bytes` begins that follows `position`, and the position behind it.
    pub const fn piece(self, position: u64, bytes: u64) -> (u64, u64) {
        let bytes = bytes.next_multiple_of(self.align);
        let left = self.bytes - position % self.bytes;
        let start = if bytes > left { position + left } else { position };
        (start, start + bytes)
    }

    /// True if the source may store up to `end` when the consumer has given back up to `tail`.
    pub const fn has_room(self, end: u64, tail: u64) -> bool {
        end - tail <= self.bytes
    }

    /// True once the bytes from `tail` to `taken` are worth a store to give them back.
    pub const fn worth_giving_back(self, taken: u64, tail: u64) -> bool {
        taken - tail >= self.bytes / 4
    }

    /// Where the byte at `position` lies.
    pub const fn place(self, position: u64) -> u64 {
        position % self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn consecutive_epochs_use_different_slots() {
        for epoch in 1..20 {
            let slots: Vec<_> = (epoch..epoch + DESC_SLOTS as u64).map(slot_of).collect();
            for (i, slot) in slots.iter().enumerate() {
                assert!(*slot < DESC_SLOTS && !slots[..i].contains(slot));
            }
            assert_eq!(slot_of(epoch), slot_of(epoch + DESC_SLOTS as u64));
        }
    }

    #[test]
    fn an_arrival_covers_its_epoch_and_all_before() {
        assert!(!has_arrived(0, 1));
        assert!(has_arrived(3, 3) && has_arrived(4, 3) && !has_arrived(2, 3));
    }

    #[test]
    fn pieces_are_aligned_and_not_split() {
        let ring = Ring::new(256, 64);
        assert_eq!(ring.piece(0, 1), (0, 64));
        assert_eq!(ring.piece(64, 64), (64, 128));
        assert_eq!(ring.piece(192, 65), (256, 384), "jumps over the end");
        assert_eq!(ring.piece(448, 64), (448, 512), "ends at the end");
        assert_eq!(ring.place(448), 192);
        assert_eq!(ring.max_piece(), 64);
    }

    #[test]
    fn room_and_giving_back_count_from_the_tail() {
        let ring = Ring::new(256, 64);
        assert!(ring.has_room(384, 128) && !ring.has_room(448, 128));
        assert!(ring.worth_giving_back(128, 64) && !ring.worth_giving_back(128, 128));
    }

    #[test]
    fn the_largest_piece_always_finds_room_in_a_ring_that_was_emptied() {
        let ring = Ring::new(1024, 64);
        for position in (0..4096).step_by(64) {
            // The consumer has taken everything and kept just too little to give back.
            let tail = position - (ring.max_piece() - 64).min(position);
            assert!(!ring.worth_giving_back(position, tail));
            assert!(ring.has_room(ring.piece(position, ring.max_piece()).1, tail));
        }
    }
}
