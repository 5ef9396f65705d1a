//! The bit layout of the protocol words, and the arithmetic on epochs and rings.
//!
//! Everything here is a pure function of numbers. Where the words live, who writes them and in which
//! memory order is told by the table in [`super`].

use crate::error::Status;

/// Descriptor slots of a (writer, reader) pair in a lane: epoch `e` uses slot `e % DESC_SLOTS`.
///
/// Two are enough while a lane issues `e` only after its `e - 1` ended. Three also allow issuing `e` once
/// the descriptors of `e - 1` were read, as the halves of a low-latency call do, while kernels still use
/// the credits of `e - 1` in their slots. `tests/model_check.rs` shows that one fewer fails in each case.
pub const DESC_SLOTS: usize = 3;

/// The slot of an epoch's descriptor.
pub const fn slot_of(epoch: u64) -> usize {
    (epoch % DESC_SLOTS as u64) as usize
}

/// How the writer of an arrival word left its part of the epoch. For people and flight recorders: no
/// decision may rest on it, because the descriptors alone decide how an epoch ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum ArrivalStatus {
    /// All rows of the pair were stored (dispatch) or read (combine).
    Complete = 0,
    /// The writer knows that the epoch fails and left out the rest of the rows.
    Cut = 1,
}

/// The arrival word: `epoch << 8 | status`. It only grows. From `p` to `r` it says: "`p` touches nothing
/// any more of what `r` described in its descriptors up to `epoch`".
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Arrival {
    /// The epoch that the writer has finished toward the reader.
    pub epoch: u64,
    /// How it finished.
    pub status: ArrivalStatus,
}

impl Arrival {
    /// The largest epoch the word can hold: at a million calls a second it lasts two thousand years.
    pub const MAX_EPOCH: u64 = (1 << 56) - 1;

    /// The word to store. Epochs start at 1, so no word that was stored is 0.
    pub const fn pack(self) -> u64 {
        debug_assert!(self.epoch >= 1 && self.epoch <= Self::MAX_EPOCH);
        self.epoch << 8 | self.status as u64
    }

    /// What a loaded word says; None for 0, the word of a writer that has finished nothing yet.
    pub const fn unpack(word: u64) -> Option<Arrival> {
        let status = if word & 0xff == 0 { ArrivalStatus::Complete } else { ArrivalStatus::Cut };
        match word >> 8 {
            0 => None,
            epoch => Some(Arrival { epoch, status }),
        }
    }

    /// True if a loaded word proves that its writer has finished `epoch`. A later epoch proves it too.
    pub const fn covers(word: u64, epoch: u64) -> bool {
        word >> 8 >= epoch
    }
}

/// Which wait or check made the record in an abort word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Site {
    /// No wait: the caller's abort, or a defect that was caught.
    Call = 0,
    /// Waiting for `desc(e)` of the peer.
    Descriptor = 1,
    /// Waiting for `arrival(e)` of the peer.
    Arrival = 2,
    /// Waiting for space in the ring the peer consumes.
    RingSpace = 3,
    /// Waiting for bytes in the ring the peer fills.
    RingBytes = 4,
    /// Found dead while no call waited for it.
    Health = 5,
}

/// The first error of a rank: the content of its abort word. All of it fits in one word, so that whoever
/// loads the word has the whole record and the CAS from 0 can have only one winner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AbortRecord {
    /// `Timeout`, `PeerLost`, `Aborted`, `Internal` or `DeviceLost`.
    pub cause: Status,
    /// Where it was noticed.
    pub site: Site,
    /// The rank that noticed it.
    pub rank: usize,
    /// The rank it is blamed on; `rank` itself if on no peer.
    pub peer: usize,
    /// The lane of the call that noticed it.
    pub lane: usize,
    /// The epoch of that call, its low 28 bits.
    pub epoch: u64,
}

impl AbortRecord {
    const EPOCH_MASK: u64 = (1 << 28) - 1;

    /// The word to CAS in: cause 4 bits (never 0), site 4, rank 12, peer 12, lane 4, epoch 28.
    pub fn pack(self) -> u64 {
        debug_assert!(self.rank < 4096 && self.peer < 4096 && self.lane < 16);
        let cause = match self.cause {
            Status::Timeout => 1,
            Status::PeerLost => 2,
            Status::Aborted => 3,
            Status::DeviceLost => 4,
            _ => 5,
        };
        cause
            | (self.site as u64) << 4
            | (self.rank as u64) << 8
            | (self.peer as u64) << 20
            | (self.lane as u64) << 32
            | (self.epoch & Self::EPOCH_MASK) << 36
    }

    /// What a loaded word says; None for 0. A word that no rank can have written counts as `Internal`,
    /// because the words lie in memory that other processes can reach.
    pub fn unpack(word: u64) -> Option<AbortRecord> {
        let cause = match word & 0xf {
            0 if word == 0 => return None,
            1 => Status::Timeout,
            2 => Status::PeerLost,
            3 => Status::Aborted,
            4 => Status::DeviceLost,
            _ => Status::Internal,
        };
        let site = match word >> 4 & 0xf {
            1 => Site::Descriptor,
            2 => Site::Arrival,
            3 => Site::RingSpace,
            4 => Site::RingBytes,
            5 => Site::Health,
            _ => Site::Call,
        };
        Some(AbortRecord {
            cause,
            site,
            rank: (word >> 8 & 0xfff) as usize,
            peer: (word >> 20 & 0xfff) as usize,
            lane: (word >> 32 & 0xf) as usize,
            epoch: word >> 36,
        })
    }
}

/// The arithmetic of a staging ring: `head` and `tail` count bytes since the group was made and never
/// wrap in practice; only offsets into the ring wrap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ring {
    capacity: u64,
}

impl Ring {
    /// A ring of `capacity` bytes, which is not 0.
    pub const fn new(capacity: u64) -> Ring {
        assert!(capacity > 0);
        Ring { capacity }
    }

    /// Bytes published and not yet given back. None if the counts cannot belong together (the peer's
    /// process scribbled): the group is then broken, with `Internal`.
    pub const fn used(self, head: u64, tail: u64) -> Option<u64> {
        match head.checked_sub(tail) {
            Some(used) if used <= self.capacity => Some(used),
            _ => None,
        }
    }

    /// Bytes the source may store behind `head`.
    pub const fn free(self, head: u64, tail: u64) -> Option<u64> {
        match self.used(head, tail) {
            Some(used) => Some(self.capacity - used),
            None => None,
        }
    }

    /// Where the byte of this count lies.
    pub const fn offset(self, count: u64) -> u64 {
        count % self.capacity
    }

    /// How many of `want` bytes from `count` on lie in one piece, before the ring wraps.
    pub const fn contiguous(self, count: u64, want: u64) -> u64 {
        let room = self.capacity - self.offset(count);
        if want < room { want } else { room }
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
    fn arrival_words_grow_and_come_back() {
        assert_eq!(Arrival::unpack(0), None);
        let mut last = 0;
        for epoch in [1, 2, 3, 255, 256, Arrival::MAX_EPOCH] {
            for status in [ArrivalStatus::Complete, ArrivalStatus::Cut] {
                let arrival = Arrival { epoch, status };
                let word = arrival.pack();
                assert!(word > last, "the word only grows");
                assert_eq!(Arrival::unpack(word), Some(arrival));
                assert!(Arrival::covers(word, epoch) && Arrival::covers(word, epoch - 1));
                assert!(!Arrival::covers(word, epoch + 1));
                last = word;
            }
        }
        assert!(!Arrival::covers(0, 1));
    }

    #[test]
    fn abort_records_fit_in_a_word() {
        assert_eq!(AbortRecord::unpack(0), None);
        let causes =
            [Status::Timeout, Status::PeerLost, Status::Aborted, Status::Internal, Status::DeviceLost];
        let sites =
            [Site::Call, Site::Descriptor, Site::Arrival, Site::RingSpace, Site::RingBytes, Site::Health];
        for cause in causes {
            for site in sites {
                for (rank, peer, lane, epoch) in [(0, 0, 0, 0), (4095, 4094, 15, (1 << 28) - 1)] {
                    let record = AbortRecord { cause, site, rank, peer, lane, epoch };
                    assert_ne!(record.pack(), 0);
                    assert_eq!(AbortRecord::unpack(record.pack()), Some(record));
                }
            }
        }
        let long = AbortRecord {
            cause: Status::Timeout,
            site: Site::Arrival,
            rank: 1,
            peer: 2,
            lane: 3,
            epoch: 5 << 28 | 7,
        };
        assert_eq!(AbortRecord::unpack(long.pack()).map(|record| record.epoch), Some(7));
        assert_eq!(AbortRecord::unpack(0xffff_0000).map(|record| record.cause), Some(Status::Internal));
    }

    #[test]
    fn ring_space_counts_and_wraps() {
        let ring = Ring::new(10);
        assert_eq!(ring.free(0, 0), Some(10));
        assert_eq!(ring.free(25, 18), Some(3));
        assert_eq!(ring.free(25, 15), Some(0));
        assert_eq!(ring.used(25, 14), None, "more than the ring holds");
        assert_eq!(ring.used(14, 25), None, "tail before head");
        assert_eq!(ring.offset(25), 5);
        assert_eq!(ring.contiguous(25, 4), 4);
        assert_eq!(ring.contiguous(25, 8), 5);
        assert_eq!(ring.contiguous(30, 10), 10);
    }
}
