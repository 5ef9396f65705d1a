//! A sender that stops and goes on while its receiver's group ends at a deadline: its late writes, the receiver's
//! memory and number of the link, which the next group uses, and the sender's own memory.

use stateright::{Model, Property};

/// Writes of the first group.
const WRITES: usize = 2;

/// The property.
pub(crate) const SAFE: &str = "nothing of a group that ended touches memory or streams that are in use again";

/// A mistake that the checker must find.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mistake {
    /// The receiver's memory goes back before the NIC was told.
    FreedBeforeDeregistered,
    /// Immediates are believed whatever their incarnation.
    IncarnationIgnored,
    /// The sender's memory goes back with writes in flight.
    FreedWithWritesInFlight,
}

/// What is checked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Config {
    pub(crate) mistake: Option<Mistake>,
}

/// Where a write is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
enum Write {
    #[default]
    NotPosted,
    Posted,
    Stored,
    /// Noticed, refused or dropped: it completes.
    Over,
    Completed,
}

/// The receiver's group, or the next one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
enum Group {
    #[default]
    First,
    /// Its deadline passed.
    Broken,
    Closed,
    /// Another one has the link's number, with the next incarnation.
    Second,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct State {
    writes: [Write; WRITES],
    group: Group,
    deregistered: bool,
    /// The receiver's memory has another use.
    landing_reused: bool,
    /// The sender wants to end, and its memory has another use.
    sender_ends: bool,
    staging_reused: bool,
    violated: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Step {
    Post(u8),
    Store(u8),
    Notice(u8),
    Complete(u8),
    Break,
    Deregister,
    ReuseLanding,
    Reopen,
    EndSender,
    ReuseStaging,
}

impl Config {
    fn makes(&self, mistake: Mistake) -> bool {
        self.mistake == Some(mistake)
    }
}

impl Model for Config {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        vec![State::default()]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Step>) {
        if state.violated {
            return;
        }
        for (index, write) in state.writes.iter().enumerate() {
            let index = index as u8;
            match write {
                // The sender stops before any post and goes on at any later time.
                Write::NotPosted if !state.sender_ends => actions.push(Step::Post(index)),
                Write::Posted => actions.push(Step::Store(index)),
                Write::Stored => actions.push(Step::Notice(index)),
                Write::Over => actions.push(Step::Complete(index)),
                Write::NotPosted | Write::Completed => {}
            }
        }
        match state.group {
            Group::First => actions.push(Step::Break),
            Group::Broken => actions.push(Step::Deregister),
            Group::Closed => actions.push(Step::Reopen),
            Group::Second => {}
        }
        let may_reuse = state.deregistered || self.makes(Mistake::FreedBeforeDeregistered);
        if state.group != Group::First && may_reuse && !state.landing_reused {
            actions.push(Step::ReuseLanding);
        }
        let in_flight =
            state.writes.iter().any(|write| !matches!(write, Write::NotPosted | Write::Completed));
        if !state.sender_ends {
            actions.push(Step::EndSender);
        } else if !state.staging_reused && (!in_flight || self.makes(Mistake::FreedWithWritesInFlight)) {
            actions.push(Step::ReuseStaging);
        }
    }

    fn next_state(&self, last: &State, step: Step) -> Option<State> {
        let mut state = *last;
        match step {
            Step::Post(write) => state.writes[write as usize] = Write::Posted,
            Step::Store(write) if state.deregistered => state.writes[write as usize] = Write::Over,
            Step::Store(write) => {
                state.violated = state.landing_reused || state.staging_reused;
                state.writes[write as usize] = Write::Stored;
            }
            Step::Notice(write) => {
                state.writes[write as usize] = Write::Over;
                let believed = state.group == Group::Second && self.makes(Mistake::IncarnationIgnored);
                state.violated = believed;
            }
            Step::Complete(write) => state.writes[write as usize] = Write::Completed,
            Step::Break => state.group = Group::Broken,
            Step::Deregister => {
                state.deregistered = true;
                state.group = Group::Closed;
            }
            Step::ReuseLanding => state.landing_reused = true,
            Step::Reopen => state.group = Group::Second,
            Step::EndSender => state.sender_ends = true,
            Step::ReuseStaging => state.staging_reused = true,
        }
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![Property::always(SAFE, |_, state: &State| !state.violated)]
    }
}
