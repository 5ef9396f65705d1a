//! The protocol between the ranks of one node, as tables: the words in shared memory, and what a rank
//! does with a peer when it sees them. Pure: the engine stores and loads, `tests/model_check.rs` explores
//! every interleaving of these functions. `docs/PROTOCOL.md` tells the same at length, with the reasons.
//!
//! # Words
//!
//! One set per lane and ordered pair (writer `p`, reader `r`), in memory that `r` owns and only `p` writes;
//! but one `error` per rank. [`crate::wire`] has their places. `e` is the epoch, the number of the call in its
//! lane, from 1; `D` is [`DESC_SLOTS`]. A word that is released by its writer is acquired by its reader.
//!
//! | word | owner, reader | writer | store | reuse |
//! |---|---|---|---|---|
//! | `desc[e % D]` body, tail | `r` | `p` | plain, before its epoch word | as its epoch word |
//! | `desc[e % D].epoch` | `r` | `p` | release; acquired until it is `e` | by `e + D` |
//! | `arrival` | `r` | `p` | release; acquired until [`has_arrived`] | only grows |
//! | `ring_head` | `r`, consumer | `p`, source | release, after the bytes | only grows |
//! | `ring_tail` | `r`, source | `p`, consumer | release, after the bytes were read | only grows |
//! | `request_head` | `r`, holder | `p`, owner of tokens | release, after the entries | only grows |
//! | `request_tail` | `r`, owner of tokens | `p`, holder | release, after they were read | only grows |
//! | `error.state` | each rank, all | any rank | CAS 0 to 1; release of 2, after the record | never |
//!
//! What they prove to the reader, and when they are written:
//!
//! - `desc.epoch` is stored when `p` issues `e`, to every peer, in success and failure alike. Body and tail
//!   are there. `p` has ended `e - 1`, so it is through with everything of `e - 1` and before. `r` may act on
//!   the memory that the descriptor names until `r` stores `arrival(e)`.
//!   *Reuse:* `p` issues `e + D` after its `e + D - 1` ended. That took `desc(e + D - 1)` of `r`, so `r` had
//!   ended `e + D - 2`, which is not before `e`.
//! - `arrival` is stored once per epoch in which the two met and rows move, when `p`'s last store or load in
//!   `r`'s memory is done. `p` touches nothing any more that `r`'s `desc(e)` named. If the epoch ends Ok, all
//!   of `p`'s rows are there (dispatch), or `p` has read all that it needs (combine).
//! - `ring_head`: the bytes below it may be taken. The last one of `e` precedes `arrival(e)`.
//! - `ring_tail`: the bytes below it may be overwritten. In a failed epoch the consumer skips to the head,
//!   after it saw `arrival(e)`.
//! - `request_head`, `request_tail`: the same for the requests of a combine, which are stored only after all
//!   descriptors were read and met, so never in an epoch that fails.
//! - `error.state` not 0: the group is broken. 2: the record says why.
//!
//! # A call
//!
//! | state | event | action | next |
//! |---|---|---|---|
//! | Start | own error is not 0 | none; return the record | Broken |
//! | Start | - | store `desc(e)` to every peer, epoch word last | Run |
//! | Run | an event of a peer | [`peer_step`]; never stay with one peer while another has an event | Run |
//! | Run | all peers are [`PeerState::Closed`] | the caller has its memory back; return the verdict | Ended |
//! | Run | own error is 2 | stop; what `desc(e)` named stays quarantined | Broken |
//! | Run | the deadline passed | record it, see below; then as above | Broken |
//! | Broken | any further call | none; return the record | Broken |
//!
//! Recording: if a peer has a record, take that, else make one that names a peer without an event. Set it
//! as the own error, then, or whatever was there before it, as each peer's, where there is none. A claim (1)
//! whose rank stopped breaks the group too: who finds one waits on to its own deadline.
//!
//! # A peer within a call
//!
//! [`peer_step`] is this table. Two descriptors *meet* if their signatures are equal and neither is of a call
//! that failed by itself. Apart from those this is equality, hence transitive: either all ranks meet, or
//! every rank has a peer it does not meet. So who has read all descriptors knows how the epoch ends everywhere.
//!
//! | state | event | action | next |
//! |---|---|---|---|
//! | AwaitDescriptor | `desc(e)` is there and met; plan_update | copy the counts | Closed |
//! | AwaitDescriptor | `desc(e)` is there and met; dispatch, combine | keep the credit | Moving |
//! | AwaitDescriptor | `desc(e)` is there and not met | verdict becomes Mismatch | Closed |
//! | Moving | a row is left, verdict is Ok | store it into, or read it in, the peer's memory | Moving |
//! | Moving | no row is left, or verdict is Mismatch | store `arrival(e)` | AwaitArrival |
//! | AwaitArrival | [`has_arrived`] | take the rest of its ring; skip it if Mismatch | Closed |
//!
//! The consumer side of a ring is not a state: pieces are taken in every state of a peer, as they come.

mod link;
mod words;

pub use link::{Window, expand, has_landed};
pub use words::{DESC_SLOTS, Ring, has_arrived, slot_of};

/// What a collective call does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Exchanges counts; touches no peer's memory but the words.
    PlanUpdate,
    /// Stores rows into the peers' memory.
    Dispatch,
    /// Reads rows in the peers' memory.
    Combine,
    /// A call that failed on its own rank before its descriptor was out. It uses its epoch, so that the
    /// lane stays in step, and fails it for everyone.
    Failed,
}

impl Kind {
    /// True if a peer may touch this rank's memory on behalf of the call.
    pub const fn moves_rows(self) -> bool {
        matches!(self, Kind::Dispatch | Kind::Combine)
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
    pub const fn at_start(own: Kind) -> Verdict {
        match own {
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
    /// Its descriptor is there, and the two meet.
    DescriptorMet,
    /// Its descriptor is there, and the two do not meet.
    DescriptorDiffers,
    /// A row between the two is left, and can be moved now.
    RowLeft,
    /// All rows between the two were moved.
    RowsDone,
    /// The verdict has become Mismatch.
    Mismatch,
    /// Its arrival word says that it is done with this rank's memory.
    Arrived,
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
    StoreArrival,
    /// Take what is left in the peer's ring, whose head is final; skip it if the verdict is Mismatch.
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
        (Moving, PeerEvent::RowsDone | PeerEvent::Mismatch) => Some((StoreArrival, AwaitArrival)),
        (AwaitArrival, PeerEvent::Arrived) => Some((EmptyRing, Closed)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_that_failed_by_itself_can_only_end_in_mismatch() {
        assert_eq!(Verdict::at_start(Kind::Failed), Verdict::Mismatch);
        assert_eq!(Verdict::at_start(Kind::Combine), Verdict::Ok);
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
        assert_eq!(walk(Kind::Dispatch, &[DescriptorMet, RowLeft, RowLeft, RowsDone, Arrived]), closed);
        assert_eq!(walk(Kind::Combine, &[DescriptorMet, RowLeft, Mismatch, Arrived]), closed);
        assert_eq!(walk(Kind::Combine, &[DescriptorDiffers]), closed);
        assert_eq!(walk(Kind::Dispatch, &[DescriptorMet, Arrived]), None, "arrival waits behind the rows");
        for event in [DescriptorMet, DescriptorDiffers, RowLeft, RowsDone, Mismatch, Arrived] {
            assert_eq!(peer_step(Kind::Dispatch, PeerState::Closed, event), None);
        }
    }
}
