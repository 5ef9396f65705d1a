//! The staging ring: bytes that wrap, credit that comes back, and what a failed epoch leaves behind.
//!
//! Two ranks; ring `i` goes from rank `i` to the other one. The descriptors are reduced to the word that
//! grants an epoch, the arrival to the word that ends it.

use ep_core::proto::Ring;
use stateright::{Model, Property};

/// The largest capacity that a configuration can have, in bytes.
pub(crate) const CAPACITY: usize = 4;

/// The properties.
pub(crate) const COPIED: &str = "every byte is copied once, in order, in its epoch";
pub(crate) const BOUNDED: &str = "the ring never holds more than it can";
pub(crate) const ENDED: &str = "both ends finish all epochs";

/// A mistake that the checker must find.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mistake {
    /// `ring_head` is stored before the bytes.
    HeadBeforeBytes,
    /// `ring_tail` is stored before the copy out.
    TailBeforeCopy,
    /// Arrival is stored before the last head.
    ArrivalBeforeHead,
    /// The source believes in one byte too many.
    SpaceOffByOne,
    /// A failed epoch leaves its bytes in the ring.
    NothingSkipped,
    /// A failed epoch skips without waiting for arrival.
    SkippedBeforeArrival,
    /// A source that learns of the failure while it waits for space goes on waiting.
    WaitsForSpaceOnly,
    /// A rank empties its ring only after it has sent everything.
    SendsBeforeReceives,
}

/// What is checked.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    pub(crate) capacity: u8,
    /// Bytes of each epoch, and whether it fails.
    pub(crate) epochs: Vec<(u8, bool)>,
    /// Ring 1 is used too.
    pub(crate) both: bool,
    pub(crate) mistake: Option<Mistake>,
}

/// One ring, with its source and its consumer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct One {
    /// For each byte: its count, from 1, and its epoch.
    bytes: [(u8, u8); CAPACITY],
    head: u8,
    tail: u8,
    granted: u8,
    arrival: u8,
    /// The source's epoch, the bytes it has stored since the beginning, and where the epoch ends.
    epoch: u8,
    stored: u8,
    goal: u8,
    /// The consumer's epoch, the bytes it has copied, and where its epoch ends if it does not fail.
    reads: u8,
    copied: u8,
    wants: u8,
    /// The last epoch that it knows to fail: it need not copy any more.
    heard: u8,
}

/// Both rings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct State {
    rings: [One; 2],
    violated: bool,
}

/// A step, of the ring with this number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Step {
    Grant,
    Begin,
    StoreByte,
    StoreHead,
    StoreArrival,
    /// The source stops early in an epoch that fails.
    Cut,
    CopyByte,
    StoreTail,
    /// The consumer learns that the epoch fails.
    Hear,
    EndOk,
    EndFailed,
}

impl Config {
    fn makes(&self, mistake: Mistake) -> bool {
        self.mistake == Some(mistake)
    }

    fn ring(&self) -> Ring {
        Ring::new(self.capacity.into())
    }

    fn offset(&self, count: u8) -> usize {
        self.ring().offset(count.into()) as usize
    }

    fn has_space(&self, one: &One) -> bool {
        let extra = u8::from(self.makes(Mistake::SpaceOffByOne));
        match self.ring().free(one.stored.into(), one.tail.into()) {
            Some(free) => free + u64::from(extra) > 0,
            None => false,
        }
    }

    fn fails(&self, epoch: u8) -> bool {
        self.epochs.get(epoch as usize - 1).is_some_and(|&(_, fails)| fails)
    }

    fn sends(&self, one: &One) -> bool {
        one.epoch > one.arrival
    }

    fn source_steps(&self, one: &One, push: &mut impl FnMut(Step)) {
        if one.epoch == one.arrival && one.granted > one.epoch {
            return push(Step::Begin);
        }
        if !self.sends(one) {
            return;
        }
        let space = one.stored < one.goal && self.has_space(one);
        if space && (!self.makes(Mistake::HeadBeforeBytes) || one.stored < one.head) {
            push(Step::StoreByte);
        }
        let ready = match self.mistake {
            Some(Mistake::HeadBeforeBytes) => space && one.head == one.stored,
            _ => one.head < one.stored,
        };
        if ready {
            push(Step::StoreHead);
        }
        let published = one.head == one.stored || self.makes(Mistake::ArrivalBeforeHead);
        if one.stored == one.goal && published {
            push(Step::StoreArrival);
        }
        let hears = !self.makes(Mistake::WaitsForSpaceOnly) || self.has_space(one);
        if one.stored < one.goal && self.fails(one.epoch) && hears && one.head == one.stored {
            push(Step::Cut);
        }
    }

    fn consumer_steps(&self, one: &One, push: &mut impl FnMut(Step)) {
        if one.granted == one.reads {
            if (one.reads as usize) < self.epochs.len() {
                push(Step::Grant);
            }
            return;
        }
        let early = self.makes(Mistake::TailBeforeCopy);
        let failed = one.heard == one.granted;
        if one.copied < one.head && !failed && (!early || one.copied < one.tail) {
            push(Step::CopyByte);
        }
        if one.tail < if early { one.head } else { one.copied } {
            push(Step::StoreTail);
        }
        let arrived = one.arrival >= one.granted;
        if self.fails(one.granted) && !failed {
            push(Step::Hear);
        } else if failed {
            if arrived || self.makes(Mistake::SkippedBeforeArrival) {
                push(Step::EndFailed);
            }
        } else if arrived && one.copied == one.head && one.tail == one.copied {
            push(Step::EndOk);
        }
    }

    fn take(&self, one: &mut One, step: Step) -> bool {
        match step {
            Step::Grant => {
                one.granted += 1;
                one.wants = one.copied + self.epochs[one.reads as usize].0;
            }
            Step::Begin => {
                one.epoch += 1;
                one.goal = one.stored + self.epochs[one.epoch as usize - 1].0;
            }
            Step::StoreByte => {
                one.bytes[self.offset(one.stored)] = (one.stored + 1, one.epoch);
                one.stored += 1;
            }
            Step::StoreHead if self.makes(Mistake::HeadBeforeBytes) => one.head += 1,
            Step::StoreHead => one.head = one.stored,
            Step::StoreArrival | Step::Cut => one.arrival = one.epoch,
            Step::CopyByte => {
                one.copied += 1;
                return one.bytes[self.offset(one.copied - 1)] == (one.copied, one.granted);
            }
            Step::StoreTail if self.makes(Mistake::TailBeforeCopy) => one.tail = one.head,
            Step::StoreTail => one.tail = one.copied,
            Step::Hear => one.heard = one.granted,
            Step::EndOk => {
                one.reads = one.granted;
                return one.copied == one.wants;
            }
            Step::EndFailed => {
                if !self.makes(Mistake::NothingSkipped) {
                    one.copied = one.head;
                    one.tail = one.head;
                }
                one.reads = one.granted;
            }
        }
        true
    }

    fn used_rings(&self) -> usize {
        1 + usize::from(self.both)
    }
}

impl Model for Config {
    type State = State;
    type Action = (usize, Step);

    fn init_states(&self) -> Vec<State> {
        vec![State::default()]
    }

    fn actions(&self, state: &State, actions: &mut Vec<(usize, Step)>) {
        if state.violated {
            return;
        }
        for index in 0..self.used_rings() {
            let one = &state.rings[index];
            let mut push = |step| actions.push((index, step));
            self.source_steps(one, &mut push);
            let own = &state.rings[1 - index];
            let busy = self.makes(Mistake::SendsBeforeReceives) && self.sends(own);
            if !busy {
                self.consumer_steps(one, &mut push);
            }
        }
    }

    fn next_state(&self, last: &State, (index, step): (usize, Step)) -> Option<State> {
        let mut state = *last;
        state.violated = !self.take(&mut state.rings[index], step);
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(COPIED, |_, state: &State| !state.violated),
            Property::always(BOUNDED, |config: &Config, state: &State| {
                let ring = config.ring();
                state.rings.iter().all(|one| ring.used(one.head.into(), one.tail.into()).is_some())
            }),
            Property::eventually(ENDED, |config: &Config, state: &State| {
                let all = config.epochs.len() as u8;
                state.rings[..config.used_rings()].iter().all(|one| one.reads == all && one.arrival == all)
            }),
        ]
    }
}
