//! The staging ring: pieces that are not split at its end, room that is given back by quarters, and what a
//! failed epoch leaves behind.
//!
//! Two ranks; ring `i` goes from rank `i` to the other one. The descriptors are reduced to the word that
//! grants an epoch, the arrival to the word that ends it.

use ep_core::proto::Ring;
use stateright::{Model, Property};

/// The largest capacity that a configuration can have, in bytes.
pub(crate) const CAPACITY: usize = 8;

/// The properties.
pub(crate) const COPIED: &str = "every byte is copied once, in order, in its epoch";
pub(crate) const ENDED: &str = "both ends finish all epochs";

/// A mistake that the checker must find.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mistake {
    /// `ring_head` is stored before the bytes.
    HeadBeforeBytes,
    /// `ring_tail` is stored before the bytes are copied out.
    TailBeforeCopy,
    /// Arrival is stored before the last head.
    ArrivalBeforeHead,
    /// The source believes in one byte too many.
    RoomOffByOne,
    /// A failed epoch leaves its bytes in the ring.
    NothingSkipped,
    /// A failed epoch skips without waiting for arrival.
    SkippedBeforeArrival,
    /// A source that waits for room does not learn of the failure.
    WaitsForRoomOnly,
    /// A rank empties its ring only after it has sent everything.
    SendsBeforeReceives,
}

/// What is checked.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    pub(crate) capacity: u8,
    /// The pieces of each epoch, and whether it fails.
    pub(crate) epochs: Vec<(Vec<u8>, bool)>,
    /// Ring 1 is used too.
    pub(crate) both: bool,
    pub(crate) mistake: Option<Mistake>,
}

/// Where one side of a ring is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Side {
    /// The epoch in progress, or the last one.
    epoch: u8,
    /// The next piece of it, and bytes of that piece that were stored or copied.
    piece: u8,
    bytes: u8,
    /// Behind the last whole piece.
    position: u8,
}

/// One ring, with its source and its consumer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct One {
    /// For each byte: its position, from 1, and its epoch.
    data: [(u8, u8); CAPACITY],
    head: u8,
    tail: u8,
    granted: u8,
    arrival: u8,
    source: Side,
    consumer: Side,
    /// The last epoch that the consumer has ended.
    ended: u8,
    /// The last epoch that the consumer knows to fail: it need not copy any more.
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

    pub(crate) fn ring(&self) -> Ring {
        Ring::new(self.capacity.into(), 1)
    }

    fn fails(&self, epoch: u8) -> bool {
        self.epochs[epoch as usize - 1].1
    }

    /// The next piece of a side: where it begins and ends. None: the epoch has no more.
    fn piece(&self, side: &Side) -> Option<(u8, u8)> {
        let size = *self.epochs[side.epoch as usize - 1].0.get(side.piece as usize)?;
        let (start, end) = self.ring().piece(side.position.into(), size.into());
        Some((start as u8, end as u8))
    }

    /// Counts a byte of the piece that ends at `end`.
    fn advance(side: &mut Side, start: u8, end: u8) {
        side.bytes += 1;
        if start + side.bytes == end {
            *side = Side { piece: side.piece + 1, bytes: 0, position: end, ..*side };
        }
    }

    fn source_steps(&self, one: &One, push: &mut impl FnMut(Step)) {
        let side = &one.source;
        if side.epoch == one.arrival {
            if one.granted > side.epoch {
                push(Step::Begin);
            }
            return;
        }
        let piece = self.piece(side);
        let spare = u8::from(self.makes(Mistake::RoomOffByOne));
        let room = piece.is_some_and(|(_, end)| self.ring().has_room((end - spare).into(), one.tail.into()));
        let early = self.makes(Mistake::HeadBeforeBytes);
        if room && (!early || one.head > side.position) {
            push(Step::StoreByte);
        }
        if one.head < side.position || (early && room && one.head == side.position) {
            push(Step::StoreHead);
        }
        let published = one.head == side.position;
        if piece.is_none() && (published || self.makes(Mistake::ArrivalBeforeHead)) {
            push(Step::StoreArrival);
        }
        let hears = room || !self.makes(Mistake::WaitsForRoomOnly);
        if piece.is_some() && self.fails(side.epoch) && hears && published {
            push(Step::Cut);
        }
    }

    fn consumer_steps(&self, one: &One, push: &mut impl FnMut(Step)) {
        let side = &one.consumer;
        if one.granted == one.ended {
            if (one.ended as usize) < self.epochs.len() {
                push(Step::Grant);
            }
            return;
        }
        let failed = one.heard == one.granted;
        let piece = self.piece(side);
        let there = piece.is_some_and(|(_, end)| end <= one.head);
        let early = self.makes(Mistake::TailBeforeCopy);
        if there && !failed && (!early || one.tail > side.position) {
            push(Step::CopyByte);
        }
        let worth = self.ring().worth_giving_back(side.position.max(one.tail).into(), one.tail.into());
        if if early { there && one.tail <= side.position } else { worth } {
            push(Step::StoreTail);
        }
        if !self.fails(one.granted) {
            if piece.is_none() && one.arrival >= one.granted {
                push(Step::EndOk);
            }
        } else if !failed {
            push(Step::Hear);
        } else if one.arrival >= one.granted || self.makes(Mistake::SkippedBeforeArrival) {
            push(Step::EndFailed);
        }
    }

    /// Takes a step; false if something was wrong with it.
    fn take(&self, one: &mut One, step: Step) -> bool {
        let place = |position: u8| self.ring().place(position.into()) as usize;
        match step {
            Step::Grant => {
                one.granted += 1;
                one.consumer = Side { epoch: one.granted, piece: 0, bytes: 0, ..one.consumer };
            }
            Step::Begin => {
                one.source = Side { epoch: one.source.epoch + 1, piece: 0, bytes: 0, ..one.source };
            }
            Step::StoreByte => {
                let (start, end) = self.piece(&one.source).expect("a piece");
                let position = start + one.source.bytes;
                one.data[place(position)] = (position + 1, one.source.epoch);
                Config::advance(&mut one.source, start, end);
            }
            Step::StoreHead if self.makes(Mistake::HeadBeforeBytes) && one.head == one.source.position => {
                one.head = self.piece(&one.source).expect("a piece").1;
            }
            Step::StoreHead => one.head = one.source.position,
            Step::StoreArrival | Step::Cut => one.arrival = one.source.epoch,
            Step::CopyByte => {
                let (start, end) = self.piece(&one.consumer).expect("a piece");
                let position = start + one.consumer.bytes;
                Config::advance(&mut one.consumer, start, end);
                return one.data[place(position)] == (position + 1, one.granted);
            }
            Step::StoreTail if self.makes(Mistake::TailBeforeCopy) => {
                one.tail = self.piece(&one.consumer).expect("a piece").1;
            }
            Step::StoreTail => one.tail = one.consumer.position,
            Step::Hear => one.heard = one.granted,
            Step::EndOk => {
                one.ended = one.granted;
                return one.consumer.position == one.head;
            }
            Step::EndFailed => {
                if !self.makes(Mistake::NothingSkipped) {
                    one.consumer.position = one.head;
                    one.tail = one.head;
                }
                one.ended = one.granted;
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
            let busy = self.makes(Mistake::SendsBeforeReceives) && own.source.epoch > own.arrival;
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
            Property::eventually(ENDED, |config: &Config, state: &State| {
                let all = config.epochs.len() as u8;
                state.rings[..config.used_rings()].iter().all(|one| one.ended == all && one.arrival == all)
            }),
        ]
    }
}
