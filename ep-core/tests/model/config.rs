//! What a run of the checker explores: who calls what, by which rules, and what may go wrong.

use ep_core::proto::{DESC_SLOTS, Kind};

use super::{LANES, Outcome, RANKS};

/// One collective call as its rank issues it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Call {
    pub(crate) kind: Kind,
    pub(crate) shape: u8,
}

impl Call {
    /// Two calls meet if their signatures are equal and neither failed by itself.
    pub(crate) fn meets(self, other: Call) -> bool {
        self == other && self.kind != Kind::Failed
    }
}

pub(crate) const UPDATE: Call = Call { kind: Kind::PlanUpdate, shape: 0 };
pub(crate) const DISPATCH: Call = Call { kind: Kind::Dispatch, shape: 0 };
pub(crate) const COMBINE: Call = Call { kind: Kind::Combine, shape: 0 };
pub(crate) const FAILED: Call = Call { kind: Kind::Failed, shape: 0 };

/// A protocol mistake that the checker must find.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mistake {
    /// A rank issues calls without waiting for its earlier ones.
    IssueWithoutWaiting,
    /// The descriptor's epoch word is stored before its content.
    EpochWordBeforeContent,
    /// The arrival word is stored before the rows.
    ArrivalBeforeRows,
    /// A rank that learns of a mismatch leaves without arrival words.
    NoArrivalOnMismatch,
    /// A failed epoch ends when all descriptors were read, without the peers' arrival words.
    MismatchEndsOnDescriptors,
    /// Arrival words have a status. A failing rank stores a failed one to all peers at once, and who loads
    /// it fails.
    ArrivalStatusDecides,
    /// A peer to whom and from whom no row goes is left out.
    IdlePeersSkipped,
    /// Calls that failed everywhere meet.
    FailedMeets,
    /// Combine ends when its own reads are done.
    CombineWithoutReaders,
    /// A loaded arrival word must be of exactly this epoch.
    ArrivalComparedForEquality,
    /// Waits do not look at the abort word.
    AbortNotChecked,
    /// Memory described by a descriptor goes back to the caller when the group breaks.
    ReuseAfterAbort,
    /// The call after the one that broke the group starts.
    StartAfterAbort,
    /// A rank whose deadline passed does not look for an older record first.
    TimeoutLooksNowhere,
    /// A claimed error whose record is missing does not keep the next call from starting.
    ClaimDoesNotBreak,
}

/// When a deadline may pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Deadlines {
    /// Never.
    None,
    /// As a deadline much longer than any step does: when every rank that runs only waits, some rank is
    /// stopped, and the calls that wait pass theirs in the order in which they began.
    Long,
    /// Whenever a call waits for anything, on the first so many ranks; as `Long` on the others.
    Spurious(usize),
}

/// When a rank may store the descriptors of epoch `e`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Issue {
    /// When `e - 1` ended.
    AfterEnd,
    /// When `e - 2` ended and the descriptors of `e - 1` were read.
    AfterDescriptors,
    /// When `e - 2` ended.
    OneAhead,
}

/// What is checked.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    pub(crate) ranks: usize,
    pub(crate) lanes: usize,
    pub(crate) slots: usize,
    pub(crate) issue: Issue,
    /// A descriptor is needed until its epoch ends, not only until its content was copied.
    pub(crate) in_place: bool,
    /// The calls of each rank in each lane.
    pub(crate) calls: [[Vec<Call>; LANES]; RANKS],
    /// Cells between each two ranks: `cells[owner][peer]`.
    pub(crate) cells: [[usize; RANKS]; RANKS],
    /// The lanes of a rank's calls in the order of a single thread; None: a thread per lane.
    pub(crate) order: [Option<Vec<usize>>; RANKS],
    /// The rank that may stop, at any step, for ever or until any later one.
    pub(crate) stopper: Option<usize>,
    pub(crate) deadlines: Deadlines,
    pub(crate) mistake: Option<Mistake>,
}

impl Config {
    /// All ranks issue the same calls in lane 0; one cell between any two ranks; no faults.
    pub(crate) fn new(ranks: usize, calls: &[Call]) -> Config {
        let mut config = Config {
            ranks,
            lanes: 1,
            slots: DESC_SLOTS,
            issue: Issue::AfterEnd,
            in_place: false,
            calls: Default::default(),
            cells: [[1; RANKS]; RANKS],
            order: Default::default(),
            stopper: None,
            deadlines: Deadlines::None,
            mistake: None,
        };
        for rank in 0..ranks {
            config.calls[rank][0] = calls.to_vec();
        }
        config
    }

    pub(crate) fn makes(&self, mistake: Mistake) -> bool {
        self.mistake == Some(mistake)
    }

    /// How the epoch must end where the group does not break.
    pub(crate) fn expected(&self, lane: usize, epoch: u8) -> Outcome {
        let call = |rank: usize| self.calls[rank][lane][epoch as usize - 1];
        let all_met = (0..self.ranks).all(|rank| call(0).meets(call(rank)));
        if all_met { Outcome::Ok } else { Outcome::Mismatch }
    }
}
