//! The protocol between the ranks of one node, as tables: the words in shared memory, and what a rank
//! does with a peer when it sees them. Pure; the engine stores and loads, `tests/model_check.rs` explores
//! every interleaving of these very functions. `docs/PROTOCOL.md` tells the same story at length.
//!
//! # Words
//!
//! One set per lane and per ordered pair (writer `p`, reader `r`), in memory that `r` owns and only `p`
//! writes, but for `abort`, which is one word per rank that any rank may set. Every word is 8 bytes,
//! aligned, accessed atomically. "e" is the epoch: the count of collective calls in the lane, from 1.
//!
//! | word | owner | writer | reader | written | order, partner | proves | reuse |
//! |---|---|---|---|---|---|---|---|
//! | `desc[e % D]` content | `r` | `p` | `r` | before its epoch word | plain; ordered by the epoch word | - | as its epoch word |
//! | `desc[e % D].epoch` | `r` | `p` | `r` | when `p` issues `e`, to every peer, in success and failure alike | release; acquired by `r` until it equals `e` | the content is there; `p` has ended `e - 1`, so `p` is through with everything of `e - 1` and before; `r` may act on the memory it describes until it stores `arrival(e)` | `p` overwrites it with `e + D` after its own `e + D - 1` ended: that took `desc(e + D - 1)` of `r`, so `r` had ended `e + D - 2 >= e` |
//! | `arrival` | `r` | `p` | `r` | once per epoch, after `desc(e)` of `r` was read and met `p`'s, when `p`'s last store or load there is done | release (orders also the loads before it); acquired until it covers `e` | `p` touches nothing any more that `r`'s `desc(e)` described; in an epoch that ends Ok all of `p`'s rows are there (dispatch) or all were read (combine) | monotonic, never reset |
//! | `ring_head` | `r` | `p`, source of the ring | `r` | after the bytes, and before `arrival(e)` | release; acquired by `r` | bytes below it may be copied out | monotonic count of bytes |
//! | `ring_tail` | `r` | `p`, consumer of `r`'s bytes | `r`, the source | after the copy out; in a failed epoch after `arrival(e)`, when the rest is skipped | release; acquired by `r` before it stores over those bytes | bytes below it may be overwritten | monotonic count of bytes |
//! | `abort` | any rank | its owner or a peer | its owner, and a peer about to record a timeout | first error only | CAS from 0, acquire and release; loaded with acquire by every wait | the group is broken, and why | never reset |
//!
//! # A call
//!
//! | state | event | action | next |
//! |---|---|---|---|
//! | Start | own abort word is set | nothing: return the record | Broken |
//! | Start | - | store `desc(e)` to every peer, content then epoch word | Run |
//! | Run | an event of a peer | [`peer_step`] with that peer; never stay with one peer while another has an event | Run |
//! | Run | every peer is [`PeerState::Closed`] | the memory described by `desc(e)` is the caller's again; return the verdict | Ended, `e` is used |
//! | Run | own abort word is set | stop; memory described by `desc(e)` stays quarantined | Broken |
//! | Run | deadline passed | look for a record in the abort words of the peers, else make one that names a peer with no event; CAS it into the own abort word, then into each peer's | Broken |
//! | Broken | any further call | nothing: return the record | Broken |
//!
//! # A peer within a call
//!
//! [`peer_step`] is this table. "met" is [`Signature::meets`].
//!
//! | state | event | plan_update | dispatch, combine | next |
//! |---|---|---|---|---|
//! | AwaitDescriptor | `desc(e)` is there and met | copy the counts | keep the credit | Closed; Moving |
//! | AwaitDescriptor | `desc(e)` is there and not met | verdict is Mismatch; owe and await nothing | the same | Closed |
//! | Moving | a row is left, verdict is Ok | - | move it: store it into the peer's memory, or read it there | Moving |
//! | Moving | no row is left | - | store `arrival(e)`, Complete | AwaitArrival |
//! | Moving | verdict is Mismatch | - | store `arrival(e)`, Cut | AwaitArrival |
//! | AwaitArrival | `arrival` covers `e` | - | empty the ring: copy out the rest, or skip it if the verdict is Mismatch | Closed |

mod words;

pub use words::{AbortRecord, Arrival, ArrivalStatus, DESC_SLOTS, Ring, Site, slot_of};

/// What a collective call does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Kind {
    /// Exchanges counts; touches no peer's memory but the words.
    PlanUpdate = 1,
    /// Stores rows into the peers' memory.
    Dispatch = 2,
    /// Reads rows in the peers' memory.
    Combine = 3,
    /// A call that failed on its own rank before its descriptor was out. It uses its epoch, so that the
    /// lane stays in step, and fails it for everyone.
    Failed = 4,
}

impl Kind {
    /// The kind with this number; any other number is [`Kind::Failed`], which meets nothing.
    pub const fn from_code(code: u8) -> Kind {
        match code {
            1 => Kind::PlanUpdate,
            2 => Kind::Dispatch,
            3 => Kind::Combine,
            _ => Kind::Failed,
        }
    }

    /// True if a peer may touch this rank's memory on behalf of the call.
    pub const fn moves_rows(self) -> bool {
        matches!(self, Kind::Dispatch | Kind::Combine)
    }
}

/// What all ranks must agree on before a row moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Signature {
    /// The operation.
    pub kind: Kind,
    /// The epoch of the update that gave the plan its routing; of an update, its own.
    pub update: u64,
    /// A hash of everything else that must be the same: layout, top-k, experts, dtypes, columns, order.
    pub shape: u64,
}

impl Signature {
    /// True if the two calls are the same collective call. Apart from failed calls, which meet nothing,
    /// this is equality, hence transitive: either all ranks meet, or every rank has a peer it does not
    /// meet. So each rank that has seen all descriptors knows how the epoch ends on all ranks, and no
    /// further message is needed to agree.
    pub fn meets(&self, other: &Signature) -> bool {
        self == other && self.kind != Kind::Failed
    }
}

/// How an epoch ends, as far as the descriptors read so far tell. Mismatch is final; Ok is once all are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// All that were read met.
    Ok,
    /// One did not, or this rank's own call failed.
    Mismatch,
}

impl Verdict {
    /// The verdict before any descriptor was read.
    pub const fn at_start(own: &Signature) -> Verdict {
        match own.kind {
            Kind::Failed => Verdict::Mismatch,
            _ => Verdict::Ok,
        }
    }
}

/// How far a call has come with one peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PeerState {
    /// Its descriptor of this epoch was not read yet.
    AwaitDescriptor,
    /// Rows are moving between this rank and it.
    Moving,
    /// This rank is done with its memory; it may not be done with this rank's.
    AwaitArrival,
    /// Neither touches the other's memory any more on behalf of this epoch.
    Closed,
}

/// What a call can see about one peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PeerEvent {
    /// Its descriptor is there and its signature meets.
    DescriptorMet,
    /// Its descriptor is there and its signature does not meet.
    DescriptorDiffers,
    /// A row between the two is left, and can be moved now.
    RowLeft,
    /// All rows between the two were moved.
    RowsDone,
    /// The verdict has become Mismatch.
    Mismatch,
    /// Its arrival word covers the epoch.
    Arrival,
}

/// What a call does on an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PeerAction {
    /// Copy the counts out of the descriptor: its slot is used again.
    TakeCounts,
    /// Copy the credit out of the descriptor; the peer's memory may be touched from now on.
    TakeCredit,
    /// The verdict becomes Mismatch.
    SetMismatch,
    /// Move one row.
    MoveRow,
    /// Release-store the arrival word. Nothing of the peer is touched behind it.
    StoreArrival(ArrivalStatus),
    /// Bring the tail of the peer's ring up to its head, which is final: copied out if the verdict is Ok,
    /// skipped otherwise.
    EmptyRing,
}

/// The table of the module's documentation. None: the event has no meaning in that state and the call
/// leaves it where it is.
pub const fn peer_step(kind: Kind, state: PeerState, event: PeerEvent) -> Option<(PeerAction, PeerState)> {
    use PeerAction::*;
    use PeerState::*;
    match (state, event) {
        (AwaitDescriptor, PeerEvent::DescriptorMet) if kind.moves_rows() => Some((TakeCredit, Moving)),
        (AwaitDescriptor, PeerEvent::DescriptorMet) => Some((TakeCounts, Closed)),
        (AwaitDescriptor, PeerEvent::DescriptorDiffers) => Some((SetMismatch, Closed)),
        (Moving, PeerEvent::RowLeft) => Some((MoveRow, Moving)),
        (Moving, PeerEvent::RowsDone) => Some((StoreArrival(ArrivalStatus::Complete), AwaitArrival)),
        (Moving, PeerEvent::Mismatch) => Some((StoreArrival(ArrivalStatus::Cut), AwaitArrival)),
        (AwaitArrival, PeerEvent::Arrival) => Some((EmptyRing, Closed)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn signature(kind: Kind) -> Signature {
        Signature { kind, update: 7, shape: 9 }
    }

    #[test]
    fn signatures_meet_only_when_all_of_them_is_equal() {
        let own = signature(Kind::Dispatch);
        assert!(own.meets(&own));
        assert!(!own.meets(&signature(Kind::Combine)));
        assert!(!own.meets(&Signature { update: 8, ..own }));
        assert!(!own.meets(&Signature { shape: 8, ..own }));
    }

    #[test]
    fn a_failed_call_meets_nothing_and_ends_in_mismatch() {
        let failed = signature(Kind::Failed);
        assert!(!failed.meets(&failed));
        assert_eq!(Verdict::at_start(&failed), Verdict::Mismatch);
        assert_eq!(Verdict::at_start(&signature(Kind::Combine)), Verdict::Ok);
        for code in 0..=u8::MAX {
            let kind = Kind::from_code(code);
            assert!(kind as u8 == code || kind == Kind::Failed);
        }
    }

    #[test]
    fn a_peer_closes_by_the_table_and_nothing_leads_back() {
        use PeerEvent::*;
        let walk = |kind, events: &[PeerEvent]| {
            events.iter().try_fold(PeerState::AwaitDescriptor, |state, &event| {
                peer_step(kind, state, event).map(|(_, next)| next)
            })
        };
        let closed = Some(PeerState::Closed);
        assert_eq!(walk(Kind::PlanUpdate, &[DescriptorMet]), closed);
        assert_eq!(walk(Kind::Dispatch, &[DescriptorMet, RowLeft, RowLeft, RowsDone, Arrival]), closed);
        assert_eq!(walk(Kind::Combine, &[DescriptorMet, RowLeft, Mismatch, Arrival]), closed);
        assert_eq!(walk(Kind::Combine, &[DescriptorDiffers]), closed);
        assert_eq!(walk(Kind::Dispatch, &[DescriptorMet, Arrival]), None, "arrival waits behind the rows");
        for event in [DescriptorMet, DescriptorDiffers, RowLeft, RowsDone, Mismatch, Arrival] {
            assert_eq!(peer_step(Kind::Dispatch, PeerState::Closed, event), None);
        }
    }
}
