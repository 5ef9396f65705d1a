//! An explicit-state model of the protocol: what a configuration is, what a state is, and what must hold.
//!
//! A step is one store or load of shared memory, or one thing a rank does by itself. Words of one writer
//! become visible in program order: that is what release and acquire give, and the mistakes that drop it
//! swap the steps. Memory that rows live in is tracked by what may be done with it, so that touching it
//! too early or too late is seen at the moment it happens.

mod calls;
mod config;
mod faults;
mod hashing;
pub(crate) mod link;
pub(crate) mod proxy;
pub(crate) mod reuse;
pub(crate) mod ring;

pub(crate) use config::{COMBINE, Call, Config, DISPATCH, Deadlines, FAILED, Issue, Mistake, UPDATE};

use ep_core::proto::{PeerEvent, PeerState, Verdict};
use stateright::{Model, Property};

/// The most ranks, lanes, slots, epochs, and cells between two ranks that a configuration can have.
pub(crate) const RANKS: usize = 3;
pub(crate) const LANES: usize = 2;
pub(crate) const SLOTS: usize = 4;
pub(crate) const EPOCHS: usize = 5;
pub(crate) const CELLS: usize = 2;

/// The properties.
pub(crate) const MEMORY: &str = "no descriptor or row is touched too early or too late";
pub(crate) const RESULT: &str = "a call ends as the descriptors say, and with its rows";
pub(crate) const AGREED: &str = "no rank ends an epoch Ok that another ends with Mismatch";
pub(crate) const NAMED: &str = "a long deadline names the rank that stopped";
pub(crate) const ENDED: &str = "every rank that runs ends all its calls";

/// One descriptor slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Desc {
    /// The epoch word.
    pub(crate) word: u8,
    /// The epoch that the content was stored for.
    pub(crate) stamp: u8,
    /// The content.
    pub(crate) call: Call,
}

/// What may be done with a cell of row memory. It belongs to one rank and is described to one peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Cell {
    /// The owner's caller uses it; no peer may touch it.
    Callers,
    /// Dispatch: the peer may store into it, for this epoch.
    Writable(u8),
    /// Dispatch: the peer stored its row of this epoch.
    Written(u8),
    /// Combine: holds a row of this epoch, which the peer may read.
    Readable(u8),
    /// A late peer may still touch it; nobody may use it again.
    Quarantined,
}

/// The words and rows that one rank owns and one peer touches. Consecutive epochs use different cells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pair {
    pub(crate) desc: [Desc; SLOTS],
    pub(crate) arrival: u8,
    /// The status of the arrival; mistakes only.
    pub(crate) failed: bool,
    pub(crate) cells: [[Cell; CELLS]; 2],
}

/// How a call ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Outcome {
    NotYet,
    Ok,
    Mismatch,
    Broken,
}

/// Where a call is with one peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Peer {
    pub(crate) state: PeerState,
    /// The epoch word was acquired, the content not yet loaded.
    pub(crate) seen: bool,
    pub(crate) moved: u8,
    /// The arrival word is out already; mistakes only.
    pub(crate) told: bool,
}

/// Where a rank is in one lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Local {
    /// The call in progress, from 1.
    pub(crate) epoch: u8,
    /// The last epoch whose descriptors are all out.
    pub(crate) issued: u8,
    /// Stores done for the next one.
    pub(crate) stores: u8,
    pub(crate) verdict: Verdict,
    pub(crate) peers: [Peer; RANKS],
    pub(crate) outcomes: [Outcome; EPOCHS],
    /// The record that this call is setting, and how many ranks' errors it is through with, its own first.
    pub(crate) telling: Option<(Record, u8)>,
    /// No further call will be made.
    pub(crate) over: bool,
}

/// A timeout's record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Record {
    pub(crate) by: u8,
    pub(crate) names: u8,
}

/// A rank's error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Fault {
    None,
    /// Claimed by a call of this rank in this lane.
    Claimed(u8, u8),
    Set(Record),
}

impl Fault {
    pub(crate) fn record(self) -> Option<Record> {
        match self {
            Fault::Set(record) => Some(record),
            _ => None,
        }
    }
}

/// A rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Rank {
    pub(crate) stopped: bool,
    pub(crate) may_stop: bool,
    pub(crate) may_resume: bool,
    pub(crate) fault: Fault,
    pub(crate) lanes: [Local; LANES],
}

/// What went wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Violation {
    DescriptorOverwritten,
    DescriptorOfAnotherEpoch,
    RowStoredIntoForeignMemory,
    RowReadFromForeignMemory,
    EndedWithoutItsRows,
    EndedDifferently,
    QuarantineReused,
}

impl Violation {
    fn of_memory(self) -> bool {
        !matches!(self, Violation::EndedWithoutItsRows | Violation::EndedDifferently)
    }
}

/// Everything.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct State {
    /// `memory[lane][owner][peer]`.
    pub(crate) memory: [[[Pair; RANKS]; RANKS]; LANES],
    pub(crate) ranks: [Rank; RANKS],
    pub(crate) violation: Option<Violation>,
}

/// A step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Action {
    pub(crate) rank: usize,
    pub(crate) lane: usize,
    pub(crate) step: Step,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Step {
    /// The next store of the next epoch's descriptors.
    Issue,
    /// Acquire the epoch word of the peer's descriptor.
    Look(usize),
    /// The table's step with a peer.
    Peer(usize, PeerEvent),
    /// Store a failed arrival to a peer whose descriptor was not read; mistakes only.
    Warn(usize),
    /// Load a failed arrival of a peer; mistakes only.
    Warned(usize),
    /// The call ends.
    End,
    /// A wait finds the rank's error set.
    Notice,
    /// The deadline passes while waiting for a peer.
    Deadline(usize),
    /// Claim the next rank's error, or set it.
    Tell,
    /// The rank makes no further step.
    Stop,
    /// The rank makes no further step for a while.
    Pause,
    Resume,
}

impl Config {
    fn fresh_local(&self, rank: usize, lane: usize) -> Local {
        let peer = Peer { state: PeerState::Closed, seen: false, moved: 0, told: false };
        let mut local = Local {
            epoch: 0,
            issued: 0,
            stores: 0,
            verdict: Verdict::Ok,
            peers: [peer; RANKS],
            outcomes: [Outcome::NotYet; EPOCHS],
            telling: None,
            over: false,
        };
        self.begin(rank, lane, &mut local);
        local
    }
}

impl Model for Config {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let desc = Desc { word: 0, stamp: 0, call: FAILED };
        let pair =
            Pair { desc: [desc; SLOTS], arrival: 0, failed: false, cells: [[Cell::Callers; CELLS]; 2] };
        let rank = |rank| Rank {
            stopped: false,
            may_stop: self.stopper == Some(rank),
            may_resume: false,
            fault: Fault::None,
            lanes: std::array::from_fn(|lane| self.fresh_local(rank, lane)),
        };
        vec![State {
            memory: [[[pair; RANKS]; RANKS]; LANES],
            ranks: std::array::from_fn(rank),
            violation: None,
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        if state.violation.is_some() {
            return;
        }
        for rank in 0..self.ranks {
            for lane in 0..self.lanes {
                self.call_steps(state, rank, lane, actions);
            }
        }
        self.fault_steps(state, actions);
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut state = last.clone();
        if !self.take_fault_step(&mut state, action) {
            self.take_call_step(&mut state, action);
        }
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(MEMORY, |_, state: &State| !state.violation.is_some_and(Violation::of_memory)),
            Property::always(RESULT, |_, state: &State| state.violation.is_none_or(Violation::of_memory)),
            Property::always(AGREED, |config: &Config, state: &State| config.agreed(state)),
            Property::always(NAMED, |config: &Config, state: &State| config.named(state)),
            // No step leads back to an earlier state, so this fails exactly at a state without a further
            // step in which a rank still waits.
            Property::eventually(ENDED, |config: &Config, state: &State| config.all_over(state)),
        ]
    }
}

impl Config {
    fn agreed(&self, state: &State) -> bool {
        (0..self.lanes).all(|lane| {
            (0..EPOCHS).all(|epoch| {
                let ended = |outcome| {
                    state.ranks[..self.ranks].iter().any(|rank| rank.lanes[lane].outcomes[epoch] == outcome)
                };
                !(ended(Outcome::Ok) && ended(Outcome::Mismatch))
            })
        })
    }

    fn named(&self, state: &State) -> bool {
        let mut records = state.ranks[..self.ranks].iter().filter_map(|rank| rank.fault.record());
        self.deadlines != Deadlines::Long || records.all(|record| self.stopper == Some(record.names as usize))
    }

    /// Holds only in states without a further step, as the checker's `eventually` needs: a rank that pauses
    /// is not through.
    fn all_over(&self, state: &State) -> bool {
        state.ranks[..self.ranks].iter().all(|rank| {
            let gone = rank.stopped && !rank.may_resume;
            gone || rank.lanes[..self.lanes].iter().all(|local| local.over)
        })
    }
}
