//! What goes wrong around a call: a rank stops, a deadline passes, the group breaks.

use ep_core::proto::PeerState;

use super::{Action, Cell, Config, Deadlines, Fault, Mistake, Outcome, Record, State, Step};

impl Config {
    /// The faults, and what waiting calls do about them.
    pub(crate) fn fault_steps(&self, state: &State, actions: &mut Vec<Action>) {
        let quiet = actions.is_empty();
        for rank in 0..self.ranks {
            let at = &state.ranks[rank];
            let running = at.lanes[..self.lanes].iter().any(|local| !local.over);
            if at.stopped {
                if at.may_resume {
                    actions.push(Action { rank, lane: 0, step: Step::Resume });
                }
                continue;
            }
            if at.may_stop && running {
                actions.push(Action { rank, lane: 0, step: Step::Stop });
                actions.push(Action { rank, lane: 0, step: Step::Pause });
            }
            for lane in 0..self.lanes {
                self.abort_steps(state, rank, lane, quiet, actions);
            }
        }
    }

    fn abort_steps(&self, state: &State, rank: usize, lane: usize, quiet: bool, actions: &mut Vec<Action>) {
        let local = &state.ranks[rank].lanes[lane];
        let mut push = |step| actions.push(Action { rank, lane, step });
        if local.over {
            return;
        }
        if local.telling.is_some() {
            return push(Step::Tell);
        }
        if matches!(state.ranks[rank].fault, Fault::Set(_)) {
            if !self.makes(Mistake::AbortNotChecked) {
                push(Step::Notice);
            }
            return;
        }
        if local.issued < local.epoch || !self.may_pass(state, rank, lane, quiet) {
            return;
        }
        for peer in (0..self.ranks).filter(|&peer| peer != rank) {
            if self.waits_for(state, rank, lane, peer) {
                push(Step::Deadline(peer));
            }
        }
    }

    /// True if the deadline of this call may pass now.
    fn may_pass(&self, state: &State, rank: usize, lane: usize, quiet: bool) -> bool {
        let epoch = state.ranks[rank].lanes[lane].epoch;
        let ranks = &state.ranks[..self.ranks];
        let others_passed = ranks.iter().filter(|rank| !rank.stopped).all(|rank| {
            rank.fault.record().is_some() || rank.lanes[lane].over || rank.lanes[lane].epoch >= epoch
        });
        let long = quiet && others_passed && ranks.iter().any(|rank| rank.stopped);
        match self.deadlines {
            Deadlines::None => false,
            Deadlines::Long => long,
            Deadlines::Spurious(impatient) => rank < impatient || long,
        }
    }

    fn waits_for(&self, state: &State, rank: usize, lane: usize, peer: usize) -> bool {
        let local = &state.ranks[rank].lanes[lane];
        let pair = &state.memory[lane][rank][peer];
        match local.peers[peer].state {
            PeerState::AwaitDescriptor => {
                !local.peers[peer].seen && !pair.desc.iter().any(|desc| desc.word == local.epoch)
            }
            PeerState::AwaitArrival => pair.arrival < local.epoch,
            _ => false,
        }
    }

    /// Takes the step if it is one of [`Config::fault_steps`].
    pub(crate) fn take_fault_step(&self, state: &mut State, action: Action) -> bool {
        let Action { rank, lane, step } = action;
        match step {
            Step::Stop | Step::Pause => {
                state.ranks[rank].stopped = true;
                state.ranks[rank].may_stop = false;
                state.ranks[rank].may_resume = step == Step::Pause;
            }
            Step::Resume => {
                state.ranks[rank].stopped = false;
                state.ranks[rank].may_resume = false;
            }
            Step::Notice => self.break_call(state, rank, lane),
            Step::Deadline(peer) => self.deadline(state, rank, lane, peer),
            Step::Tell => self.tell(state, rank, lane),
            _ => return false,
        }
        true
    }

    fn deadline(&self, state: &mut State, rank: usize, lane: usize, peer: usize) {
        let own = Record { by: rank as u8, names: peer as u8 };
        let mut older = state.ranks[..self.ranks].iter().filter_map(|rank| rank.fault.record());
        let record = match self.makes(Mistake::TimeoutLooksNowhere) {
            true => own,
            false => older.next().unwrap_or(own),
        };
        state.ranks[rank].lanes[lane].telling = Some((record, 0));
    }

    /// Claims an error, or sets it, or finds it taken; the own one first, then those of the others.
    fn tell(&self, state: &mut State, rank: usize, lane: usize) {
        let (mut record, told) = state.ranks[rank].lanes[lane].telling.expect("telling");
        let target = match told as usize {
            0 => rank,
            others => (0..self.ranks).filter(|&peer| peer != rank).nth(others - 1).expect("a peer"),
        };
        let claim = Fault::Claimed(rank as u8, lane as u8);
        let fault = &mut state.ranks[target].fault;
        if *fault == Fault::None {
            *fault = claim;
            return;
        }
        if *fault == claim {
            *fault = Fault::Set(record);
        } else if told == 0 {
            record = fault.record().unwrap_or(record);
        }
        let last = told as usize + 1 == self.ranks;
        state.ranks[rank].lanes[lane].telling = (!last).then_some((record, told + 1));
        if last {
            self.break_call(state, rank, lane);
        }
    }

    fn break_call(&self, state: &mut State, rank: usize, lane: usize) {
        let unset = state.ranks[rank].fault.record().is_none();
        let local = &mut state.ranks[rank].lanes[lane];
        let epoch = local.epoch;
        local.outcomes[epoch as usize - 1] = Outcome::Broken;
        let reuse = self.makes(Mistake::ReuseAfterAbort);
        for pair in &mut state.memory[lane][rank] {
            for cell in pair.cells.iter_mut().flatten().filter(|cell| **cell != Cell::Callers) {
                *cell = if reuse { Cell::Callers } else { Cell::Quarantined };
            }
        }
        let starts =
            self.makes(Mistake::StartAfterAbort) || (self.makes(Mistake::ClaimDoesNotBreak) && unset);
        if starts {
            if self.makes(Mistake::StartAfterAbort) {
                state.ranks[rank].fault = Fault::None;
            }
            local.issued = local.issued.max(epoch);
            local.stores = 0;
            self.begin(rank, lane, local);
        } else {
            local.over = true;
        }
    }
}
