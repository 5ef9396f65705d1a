//! One link between two nodes over a network without any order: slots, words, credits, and answers as credit.
//!
//! A message is cut into pieces. Of each piece the network stores the bytes, then notifies the receiver's proxy, then
//! completes at the sender's; between pieces nothing is ordered. What a piece stores is what its staging slot
//! holds at that moment, and what a receiver reads is what its landing slot holds then, so a slot that is used
//! again too early shows as a wrong message.

use ep_core::proto::{Window, expand, has_landed};
use stateright::{Model, Property};

/// The most messages of a flow, and pieces of a message.
const MESSAGES: usize = 7;
const PIECES: usize = 2;

/// The properties.
pub(crate) const CONTENT: &str = "every message is read whole, once, and as it was sent";
pub(crate) const ENDED: &str = "every message is read";

/// A mistake that the checker must find.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mistake {
    /// A message is there when its first piece is.
    LandsWithOnePiece,
    /// A message is there when its bytes may not be: the notice is believed to precede nothing.
    NoticeBeforeBytes,
    /// The staging slot is free when the message was posted.
    SentWhenPosted,
    /// Credit is given for what has landed and was not read.
    CreditWhenLanded,
    /// Credit counts what was read, whatever lies before it.
    CreditWithGaps,
    /// A credit says how many were read in all, and the last one to come is believed.
    CreditIsTotal,
    /// A credit is given only for a whole window and one more.
    CreditTooLate,
    /// Numbers have one bit less.
    NumberTooShort,
    /// A request is sent when the answer a window earlier has landed and was not read.
    RequestWhenAnswerLanded,
}

/// What is checked: rows with credits one way, or requests and their answers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Config {
    pub(crate) window: u64,
    pub(crate) messages: usize,
    pub(crate) pieces: usize,
    /// Bits of a number.
    pub(crate) bits: u32,
    /// A second flow answers the first one, and is its credit.
    pub(crate) answers: bool,
    pub(crate) mistake: Option<Mistake>,
}

/// Where a piece is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Piece {
    #[default]
    NotSent,
    Posted,
    /// Its bytes are there.
    Stored,
    /// The receiver's proxy knows.
    Noticed,
    /// The sender's proxy knows.
    Completed,
}

/// One direction: rows, requests, or answers. Numbers in slots are 1 + the message's; 0 is nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Flow {
    pieces: [[Piece; PIECES]; MESSAGES],
    staging: [u8; MESSAGES],
    sent: [u8; MESSAGES],
    landing: [[u8; PIECES]; MESSAGES],
    /// Pieces of the message that is landing.
    arrived: [u8; MESSAGES],
    landed: [u8; MESSAGES],
    /// One more than the highest number that came.
    frontier: u8,
    /// Bit i: message i was read.
    read: u8,
    given: u8,
    credit: u8,
    /// Credits on their way, sorted.
    credits: [u8; MESSAGES],
}

/// Both flows; the second one answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct State {
    flows: [Flow; 2],
    violated: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Step {
    Post(u8),
    Store(u8, u8),
    Notice(u8, u8),
    Complete(u8, u8),
    Read(u8),
    GiveCredit,
    /// The credit at this place comes.
    TakeCredit(u8),
}

impl Flow {
    /// Messages before this one were all read.
    fn read_frontier(&self) -> u64 {
        self.read.trailing_ones().into()
    }

    fn was_read(&self, seq: u64) -> bool {
        self.read >> seq & 1 != 0
    }
}

impl Config {
    fn makes(&self, mistake: Mistake) -> bool {
        self.mistake == Some(mistake)
    }

    fn rules(&self) -> Window {
        Window::new(self.window)
    }

    fn slot(&self, seq: u8) -> usize {
        self.rules().slot_of(seq.into()) as usize
    }

    /// True if message `seq` may be sent: both its slots are free.
    fn may_send(&self, flows: &[Flow; 2], index: usize, seq: u8) -> bool {
        let (flow, seq_long) = (&flows[index], u64::from(seq));
        let landing_is_free = match (self.answers, index) {
            (false, _) => self.rules().has_credit(flow.credit.into(), seq_long),
            (true, 0) if seq_long < self.window => true,
            (true, 0) => {
                let before = seq_long - self.window;
                let landed = has_landed(flows[1].landed[self.slot(seq)].into(), before);
                flows[1].was_read(before) || (self.makes(Mistake::RequestWhenAnswerLanded) && landed)
            }
            (true, _) => flows[0].was_read(seq_long),
        };
        landing_is_free && self.rules().may_stage(flow.sent[self.slot(seq)].into(), seq_long)
    }

    fn steps(&self, flows: &[Flow; 2], index: usize, push: &mut impl FnMut(Step)) {
        let flow = &flows[index];
        for seq in 0..self.messages as u8 {
            let pieces = &flow.pieces[seq as usize][..self.pieces];
            // Rows and requests are sent in order, answers as the questions are read.
            let is_next = index == 1 || seq == 0 || flow.pieces[seq as usize - 1][0] != Piece::NotSent;
            if pieces[0] == Piece::NotSent && is_next && self.may_send(flows, index, seq) {
                push(Step::Post(seq));
            }
            for (piece, at) in pieces.iter().enumerate() {
                match at {
                    Piece::Posted => {
                        push(Step::Store(seq, piece as u8));
                        if self.makes(Mistake::NoticeBeforeBytes) {
                            push(Step::Notice(seq, piece as u8));
                        }
                    }
                    Piece::Stored => push(Step::Notice(seq, piece as u8)),
                    Piece::Noticed => push(Step::Complete(seq, piece as u8)),
                    Piece::NotSent | Piece::Completed => {}
                }
            }
            let landed = has_landed(flow.landed[self.slot(seq)].into(), seq.into());
            if landed && !flow.was_read(seq.into()) {
                push(Step::Read(seq));
            }
        }
        if !self.answers {
            if self.credit(flow).is_some() {
                push(Step::GiveCredit);
            }
            (0..MESSAGES as u8)
                .filter(|&at| flow.credits[at as usize] != 0)
                .for_each(|at| push(Step::TakeCredit(at)));
        }
    }

    /// The credit that is due: how much, and what is then given in all.
    fn credit(&self, flow: &Flow) -> Option<(u8, u8)> {
        let consumed = match self.mistake {
            Some(Mistake::CreditWhenLanded) => flow.frontier.into(),
            Some(Mistake::CreditWithGaps) => flow.read.count_ones().into(),
            _ => flow.read_frontier(),
        };
        let freed = self.rules().credit_due(consumed, flow.given.into())? as u8;
        let total = flow.given + freed;
        match self.mistake {
            Some(Mistake::CreditTooLate) if u64::from(freed) <= self.window => None,
            Some(Mistake::CreditIsTotal) => Some((total, total)),
            _ => Some((freed, total)),
        }
    }

    /// Takes a step; false if something was wrong with it.
    fn take(&self, flow: &mut Flow, step: Step) -> bool {
        match step {
            Step::Post(seq) => {
                // Until a write completes, its source is the network's, even where its bytes have come.
                let before =
                    u64::from(seq).checked_sub(self.window).map(|before| flow.pieces[before as usize]);
                if before.is_some_and(|pieces| pieces[..self.pieces].iter().any(|&at| at != Piece::Completed))
                {
                    return false;
                }
                flow.staging[self.slot(seq)] = seq + 1;
                flow.pieces[seq as usize][..self.pieces].fill(Piece::Posted);
                if self.makes(Mistake::SentWhenPosted) {
                    flow.sent[self.slot(seq)] = seq + 1;
                }
            }
            Step::Store(seq, piece) => {
                let content = flow.staging[self.slot(seq)];
                flow.landing[self.slot(seq)][piece as usize] = content;
                // Where the notice came first, nothing more is to happen.
                let at = &mut flow.pieces[seq as usize][piece as usize];
                *at = (*at).max(Piece::Stored);
            }
            Step::Notice(seq, piece) => {
                let early = flow.pieces[seq as usize][piece as usize] == Piece::Posted;
                flow.pieces[seq as usize][piece as usize] = Piece::Noticed;
                if early {
                    // The bytes come some time, which is after whatever is read next.
                    flow.landing[self.slot(seq)][piece as usize] = 0;
                }
                return self.notice(flow, seq);
            }
            Step::Complete(seq, piece) => {
                flow.pieces[seq as usize][piece as usize] = Piece::Completed;
                let pieces = &flow.pieces[seq as usize][..self.pieces];
                if pieces.iter().all(|&piece| piece == Piece::Completed) {
                    flow.sent[self.slot(seq)] = flow.sent[self.slot(seq)].max(seq + 1);
                }
            }
            Step::Read(seq) => {
                flow.read |= 1 << seq;
                let landing = &flow.landing[self.slot(seq)][..self.pieces];
                return landing.iter().all(|&content| content == seq + 1);
            }
            Step::GiveCredit => {
                let Some((credit, total)) = self.credit(flow) else { return false };
                flow.given = total;
                flow.credits[0] = credit;
                flow.credits.sort_unstable();
                // Zeros first: the place is free again, or there were too many credits at once.
                return flow.credits[0] == 0;
            }
            Step::TakeCredit(at) => {
                let credit = std::mem::take(&mut flow.credits[at as usize]);
                flow.credits.sort_unstable();
                flow.credit = if self.makes(Mistake::CreditIsTotal) { credit } else { flow.credit + credit };
            }
        }
        true
    }

    /// The receiver's proxy gets a number, and finds the message.
    fn notice(&self, flow: &mut Flow, seq: u8) -> bool {
        let bits = self.bits - u32::from(self.makes(Mistake::NumberTooShort));
        let number = u64::from(seq) & ((1 << bits) - 1);
        let Some(found) = expand(number, bits, flow.frontier.into()) else { return false };
        let slot = self.rules().slot_of(found) as usize;
        if !self.rules().may_land(flow.landed[slot].into(), found) {
            return false;
        }
        flow.arrived[slot] += 1;
        if (flow.arrived[slot] as usize) < self.pieces && !self.makes(Mistake::LandsWithOnePiece) {
            return true;
        }
        flow.arrived[slot] = 0;
        flow.landed[slot] = found as u8 + 1;
        flow.frontier = flow.frontier.max(found as u8 + 1);
        true
    }

    fn flows(&self) -> usize {
        1 + usize::from(self.answers)
    }
}

impl Model for Config {
    type State = State;
    type Action = (usize, Step);

    fn init_states(&self) -> Vec<State> {
        assert!(self.messages <= MESSAGES && self.pieces <= PIECES && self.window as usize <= MESSAGES);
        vec![State::default()]
    }

    fn actions(&self, state: &State, actions: &mut Vec<(usize, Step)>) {
        if !state.violated {
            for index in 0..self.flows() {
                self.steps(&state.flows, index, &mut |step| actions.push((index, step)));
            }
        }
    }

    fn next_state(&self, last: &State, (index, step): (usize, Step)) -> Option<State> {
        let mut state = *last;
        state.violated = !self.take(&mut state.flows[index], step);
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(CONTENT, |_, state: &State| !state.violated),
            Property::eventually(ENDED, |config: &Config, state: &State| {
                let all = (1u8 << config.messages) - 1;
                state.flows[..config.flows()].iter().all(|flow| flow.read == all)
            }),
        ]
    }
}
