//! A proxy with one command ring, one send queue and peers of which one may be dead: its writes are refused or
//! never complete. The others must get all of theirs.

use stateright::{Model, Property};

/// The most commands.
const COMMANDS: usize = 6;

/// The property.
pub(crate) const SERVED: &str = "every message to a living peer is sent";

/// A mistake that the checker must find.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mistake {
    /// A command whose write is refused stays at the head of the ring.
    WaitsInTheRing,
    /// Refused writes wait in one queue for all peers, of which the first is tried.
    OneQueue,
    /// The producer pushes without credit, so that a dead peer's writes fill the send queue.
    NoCredit,
}

/// What is checked.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    /// The peer of each command, in the order in which they are pushed where there is credit.
    pub(crate) commands: Vec<u8>,
    /// Writes that may be posted and not completed.
    pub(crate) tx_depth: u8,
    /// Messages that may be sent to a peer and not consumed.
    pub(crate) window: u8,
    /// It takes posts or refuses them, as it likes, and completes none.
    pub(crate) dead: Option<u8>,
    pub(crate) mistake: Option<Mistake>,
}

/// Where a command is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
enum At {
    #[default]
    NotPushed,
    Ring,
    /// Refused once; it waits at its link.
    Waiting,
    Posted,
    Sent,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct State {
    commands: [At; COMMANDS],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Step {
    Push(u8),
    /// The NIC takes it.
    Post(u8),
    /// The NIC refuses it.
    Refuse(u8),
    Complete(u8),
}

impl Config {
    fn makes(&self, mistake: Mistake) -> bool {
        self.mistake == Some(mistake)
    }

    fn is_dead(&self, command: usize) -> bool {
        self.dead == Some(self.commands[command])
    }

    /// Messages of the same peer that were pushed and not sent: sent is consumed, here.
    fn outstanding(&self, state: &State, command: usize) -> usize {
        let same = |other: &usize| self.commands[*other] == self.commands[command];
        let open = |other: &usize| !matches!(state.commands[*other], At::NotPushed | At::Sent);
        (0..self.commands.len()).filter(same).filter(open).count()
    }

    fn may_push(&self, state: &State, command: usize) -> bool {
        let credit = self.outstanding(state, command) < self.window as usize;
        // A peer's messages are pushed in order; between peers, whoever has credit goes first.
        let earlier = (0..command).filter(|&other| self.commands[other] == self.commands[command]);
        let in_order = earlier.into_iter().all(|other| state.commands[other] != At::NotPushed);
        state.commands[command] == At::NotPushed && in_order && (credit || self.makes(Mistake::NoCredit))
    }

    /// True if the proxy may try to post it now.
    fn may_try(&self, state: &State, command: usize) -> bool {
        let first = |at: At| (0..self.commands.len()).find(|&other| state.commands[other] == at);
        match state.commands[command] {
            At::Ring => first(At::Ring) == Some(command),
            At::Waiting if self.makes(Mistake::OneQueue) => first(At::Waiting) == Some(command),
            At::Waiting => true,
            At::NotPushed | At::Posted | At::Sent => false,
        }
    }

    fn command_steps(&self, state: &State, command: usize, push: &mut impl FnMut(Step)) {
        let number = command as u8;
        if self.may_push(state, command) {
            push(Step::Push(number));
        }
        let in_flight = state.commands.iter().filter(|&&at| at == At::Posted).count();
        let has_room = in_flight < self.tx_depth as usize;
        if self.may_try(state, command) {
            // Behind a message of its link that waits, and in a single queue behind every one.
            let waits = (0..self.commands.len()).any(|other| {
                let same = self.commands[other] == self.commands[command] || self.makes(Mistake::OneQueue);
                same && state.commands[other] == At::Waiting
            });
            let from_ring = state.commands[command] == At::Ring;
            if from_ring && (waits || !has_room || self.is_dead(command)) {
                push(Step::Refuse(number));
            }
            if has_room && !(from_ring && waits) {
                push(Step::Post(number));
            }
        }
        if state.commands[command] == At::Posted && !self.is_dead(command) {
            push(Step::Complete(number));
        }
    }
}

impl Model for Config {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        assert!(self.commands.len() <= COMMANDS);
        vec![State::default()]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Step>) {
        for command in 0..self.commands.len() {
            self.command_steps(state, command, &mut |step| {
                // What is done with a dead peer's posts is its choice: it may also go on refusing them.
                let refuses = matches!(step, Step::Refuse(_)) && self.makes(Mistake::WaitsInTheRing);
                let takes_dead =
                    matches!(step, Step::Post(_)) && self.is_dead(command) && self.refuses_always();
                if !refuses && !takes_dead {
                    actions.push(step);
                }
            });
        }
    }

    fn next_state(&self, last: &State, step: Step) -> Option<State> {
        let mut state = *last;
        let (command, at) = match step {
            Step::Push(command) => (command, At::Ring),
            Step::Post(command) => (command, At::Posted),
            Step::Refuse(command) => (command, At::Waiting),
            Step::Complete(command) => (command, At::Sent),
        };
        state.commands[command as usize] = at;
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![Property::eventually(SERVED, |config: &Config, state: &State| {
            let all = 0..config.commands.len();
            all.filter(|&command| !config.is_dead(command)).all(|command| state.commands[command] == At::Sent)
        })]
    }
}

impl Config {
    /// The dead peer's connection is never made, so that every post is refused.
    fn refuses_always(&self) -> bool {
        matches!(self.mistake, Some(Mistake::WaitsInTheRing | Mistake::OneQueue))
    }
}
