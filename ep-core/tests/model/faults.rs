//! What goes wrong around a call: a rank stops, a deadline passes, the group breaks.

use ep_core::proto::PeerState;

use super::{Action, Cell, Config, Deadlines, Mistake, Outcome, Record, State, Step, Violation};

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
        if state.ranks[rank].abort.is_some() {
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
        let others_passed = ranks
            .iter()
            .filter(|rank| !rank.stopped)
            .all(|rank| rank.abort.is_some() || rank.lanes[lane].over || rank.lanes[lane].epoch >= epoch);
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
            PeerState::AwaitArrival => pair.arrival >> 8 < u16::from(local.epoch),
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
            Step::Notice => self.notice(state, rank, lane),
            Step::Deadline(peer) => self.deadline(state, rank, lane, peer),
            Step::Tell => self.tell(state, rank, lane),
            _ => return false,
        }
        true
    }

    fn deadline(&self, state: &mut State, rank: usize, lane: usize, peer: usize) {
        let own = Record { by: rank as u8, names: peer as u8 };
        let mut older = state.ranks[..self.ranks].iter().filter_map(|rank| rank.abort);
        let record = match self.makes(Mistake::TimeoutLooksNowhere) {
            true => own,
            false => older.next().unwrap_or(own),
        };
        state.ranks[rank].abort = Some(record);
        state.ranks[rank].lanes[lane].telling = Some(0);
    }

    fn tell(&self, state: &mut State, rank: usize, lane: usize) {
        let record = state.ranks[rank].abort;
        let peer = state.ranks[rank].lanes[lane].telling.expect("telling") as usize;
        let abort = &mut state.ranks[peer].abort;
        *abort = abort.or(record);
        let next = peer + 1;
        state.ranks[rank].lanes[lane].telling = (next < self.ranks).then_some(next as u8);
    }

    fn notice(&self, state: &mut State, rank: usize, lane: usize) {
        if state.ranks[rank].abort.is_none() {
            state.violation = Some(Violation::BrokenWithoutRecord);
        }
        let local = &mut state.ranks[rank].lanes[lane];
        let epoch = local.epoch;
        local.outcomes[epoch as usize - 1] = Outcome::Broken;
        let reuse = self.makes(Mistake::ReuseAfterAbort);
        for pair in &mut state.memory[lane][rank] {
            for cell in pair.cells.iter_mut().flatten().filter(|cell| **cell != Cell::Callers) {
                *cell = if reuse { Cell::Callers } else { Cell::Quarantined };
            }
        }
        if self.makes(Mistake::StartAfterAbort) {
            state.ranks[rank].abort = None;
            local.issued = local.issued.max(epoch);
            local.stores = 0;
            self.begin(rank, lane, local);
        } else {
            local.over = true;
        }
    }
}
