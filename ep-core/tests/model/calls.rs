//! The steps of a call: the protocol itself, and the places where a mistake can be made.

use ep_core::proto::{DESC_SLOTS, Kind, PeerAction, PeerEvent, PeerState, Verdict};
use ep_core::proto::{has_arrived, peer_step, slot_of};

use super::{
    Action, CELLS, Call, Cell, Config, Issue, Local, Mistake, Outcome, Peer, State, Step, Violation,
};

impl Config {
    pub(crate) fn call(&self, rank: usize, lane: usize, epoch: u8) -> Option<Call> {
        self.calls[rank][lane].get(epoch as usize - 1).copied()
    }

    fn slot(&self, epoch: u8) -> usize {
        match self.slots {
            DESC_SLOTS => slot_of(epoch.into()),
            slots => epoch as usize % slots,
        }
    }

    fn peers(&self, rank: usize) -> impl Iterator<Item = usize> + use<> {
        (0..self.ranks).filter(move |&peer| peer != rank)
    }

    /// Makes the next epoch the current one, or finds that there is none.
    pub(crate) fn begin(&self, rank: usize, lane: usize, local: &mut Local) {
        local.epoch += 1;
        let Some(call) = self.call(rank, lane, local.epoch) else {
            local.over = true;
            return;
        };
        local.verdict = match self.makes(Mistake::FailedMeets) {
            true => Verdict::Ok,
            false => Verdict::at_start(call.kind),
        };
        for peer in self.peers(rank) {
            let idle = self.cells[rank][peer] == 0 && self.cells[peer][rank] == 0;
            let skipped = self.makes(Mistake::IdlePeersSkipped) && call.kind.moves_rows() && idle;
            let state = if skipped { PeerState::Closed } else { PeerState::AwaitDescriptor };
            local.peers[peer] = Peer { state, seen: false, moved: 0, told: false };
        }
    }

    /// True if it is this lane's turn: always, unless one thread serves all lanes of the rank in order.
    fn has_turn(&self, state: &State, rank: usize, lane: usize) -> bool {
        let Some(order) = &self.order[rank] else { return true };
        let ended: usize =
            state.ranks[rank].lanes[..self.lanes].iter().map(|local| local.epoch as usize - 1).sum();
        order.get(ended) == Some(&lane)
    }

    /// What the call of this lane can do now, apart from faults.
    pub(crate) fn call_steps(&self, state: &State, rank: usize, lane: usize, actions: &mut Vec<Action>) {
        let local = &state.ranks[rank].lanes[lane];
        if state.ranks[rank].stopped || local.over || local.telling.is_some() {
            return;
        }
        if !self.has_turn(state, rank, lane) {
            return;
        }
        let mut push = |step| actions.push(Action { rank, lane, step });
        if self.call(rank, lane, local.issued + 1).is_some() && self.may_issue(rank, local) {
            push(Step::Issue);
        }
        if local.issued < local.epoch {
            return;
        }
        for peer in self.peers(rank) {
            if let Some(step) = self.look(state, rank, lane, peer) {
                push(step);
            }
            for event in self.events(state, rank, lane, peer).into_iter().flatten() {
                push(Step::Peer(peer, event));
            }
            self.status_steps(state, rank, lane, peer, &mut push);
        }
        if self.can_end(rank, lane, local) {
            push(Step::End);
        }
    }

    fn may_issue(&self, rank: usize, local: &Local) -> bool {
        let read = || self.peers(rank).all(|peer| local.peers[peer].state != PeerState::AwaitDescriptor);
        match local.issued.checked_sub(local.epoch) {
            None => true,
            _ if self.makes(Mistake::IssueWithoutWaiting) => true,
            Some(0) => match self.issue {
                Issue::AfterEnd => false,
                Issue::AfterDescriptors => read(),
                Issue::OneAhead => true,
            },
            Some(_) => false,
        }
    }

    fn look(&self, state: &State, rank: usize, lane: usize, peer: usize) -> Option<Step> {
        let local = &state.ranks[rank].lanes[lane];
        let desc = &state.memory[lane][rank][peer].desc[self.slot(local.epoch)];
        let awaits = local.peers[peer].state == PeerState::AwaitDescriptor && !local.peers[peer].seen;
        (awaits && desc.word == local.epoch).then_some(Step::Look(peer))
    }

    /// The events of a peer that this rank can see now.
    fn events(&self, state: &State, rank: usize, lane: usize, peer: usize) -> [Option<PeerEvent>; 2] {
        let local = &state.ranks[rank].lanes[lane];
        let epoch = local.epoch;
        let pair = &state.memory[lane][rank][peer];
        let own = self.calls[rank][lane][epoch as usize - 1];
        let at = &local.peers[peer];
        let warned = self.makes(Mistake::ArrivalStatusDecides) && at.told;
        let rows_left = (at.moved as usize) < self.cells[peer][rank] && !warned;
        match at.state {
            PeerState::AwaitDescriptor if at.seen => {
                let theirs = pair.desc[self.slot(epoch)].call;
                let met = own.meets(theirs) || (self.makes(Mistake::FailedMeets) && own == theirs);
                [Some(if met { PeerEvent::DescriptorMet } else { PeerEvent::DescriptorDiffers }), None]
            }
            PeerState::Moving => [
                // A call with several threads may move a few more rows before all of them know.
                Some(if rows_left { PeerEvent::RowLeft } else { PeerEvent::RowsDone }),
                (local.verdict == Verdict::Mismatch && rows_left).then_some(PeerEvent::Mismatch),
            ],
            PeerState::AwaitArrival => {
                [self.arrived(pair.arrival, epoch).then_some(PeerEvent::Arrived), None]
            }
            _ => [None, None],
        }
    }

    fn arrived(&self, word: u8, epoch: u8) -> bool {
        match self.makes(Mistake::ArrivalComparedForEquality) {
            true => word == epoch,
            false => has_arrived(word.into(), epoch.into()),
        }
    }

    /// Mistake only: failed arrivals ahead of the peer's descriptor, and believing them.
    fn status_steps(
        &self,
        state: &State,
        rank: usize,
        lane: usize,
        peer: usize,
        push: &mut impl FnMut(Step),
    ) {
        if !self.makes(Mistake::ArrivalStatusDecides) {
            return;
        }
        let local = &state.ranks[rank].lanes[lane];
        let at = &local.peers[peer];
        if local.verdict == Verdict::Mismatch && at.state == PeerState::AwaitDescriptor && !at.told {
            push(Step::Warn(peer));
        }
        let pair = &state.memory[lane][rank][peer];
        let failed = pair.failed && has_arrived(pair.arrival.into(), local.epoch.into());
        if local.verdict == Verdict::Ok && failed {
            push(Step::Warned(peer));
        }
    }

    fn can_end(&self, rank: usize, lane: usize, local: &Local) -> bool {
        let kind = self.calls[rank][lane][local.epoch as usize - 1].kind;
        let without_arrivals = match self.mistake {
            Some(Mistake::MismatchEndsOnDescriptors) => local.verdict == Verdict::Mismatch,
            Some(Mistake::CombineWithoutReaders) => kind == Kind::Combine,
            _ => false,
        };
        self.peers(rank).all(|peer| match local.peers[peer].state {
            PeerState::Closed => true,
            PeerState::AwaitArrival => without_arrivals,
            _ => false,
        })
    }

    /// Takes a step that [`Config::call_steps`] offered.
    pub(crate) fn take_call_step(&self, state: &mut State, action: Action) {
        let Action { rank, lane, step } = action;
        match step {
            Step::Issue => self.issue(state, rank, lane),
            Step::Look(peer) => state.ranks[rank].lanes[lane].peers[peer].seen = true,
            Step::Peer(peer, event) => self.step_peer(state, rank, lane, peer, event),
            Step::Warn(peer) => {
                self.store_arrival(state, rank, lane, peer);
                state.ranks[rank].lanes[lane].peers[peer].told = true;
            }
            Step::Warned(_) => state.ranks[rank].lanes[lane].verdict = Verdict::Mismatch,
            Step::End => self.end(state, rank, lane),
            _ => unreachable!("a fault"),
        }
    }

    fn issue(&self, state: &mut State, rank: usize, lane: usize) {
        let local = state.ranks[rank].lanes[lane];
        let epoch = local.issued + 1;
        if local.stores == 0 {
            self.describe_memory(state, rank, lane, epoch);
        }
        let peer = self.peers(rank).nth(local.stores as usize / 2).expect("a peer");
        let word_first = self.makes(Mistake::EpochWordBeforeContent);
        if local.stores.is_multiple_of(2) != word_first {
            self.store_content(state, rank, lane, peer, epoch);
        } else {
            state.memory[lane][peer][rank].desc[self.slot(epoch)].word = epoch;
        }
        let local = &mut state.ranks[rank].lanes[lane];
        local.stores += 1;
        if local.stores as usize == 2 * (self.ranks - 1) {
            local.stores = 0;
            local.issued = epoch;
        }
    }

    fn describe_memory(&self, state: &mut State, rank: usize, lane: usize, epoch: u8) {
        let cell = match self.calls[rank][lane][epoch as usize - 1].kind {
            Kind::Dispatch => Cell::Writable(epoch),
            Kind::Combine => Cell::Readable(epoch),
            _ => return,
        };
        for peer in self.peers(rank) {
            for index in 0..self.cells[rank][peer].min(CELLS) {
                let place = &mut state.memory[lane][rank][peer].cells[epoch as usize % 2][index];
                if *place == Cell::Quarantined {
                    state.violation = Some(Violation::QuarantineReused);
                }
                *place = cell;
            }
        }
    }

    fn store_content(&self, state: &mut State, rank: usize, lane: usize, peer: usize, epoch: u8) {
        let call = self.calls[rank][lane][epoch as usize - 1];
        let reader = &state.ranks[peer].lanes[lane];
        let desc = &mut state.memory[lane][peer][rank].desc[self.slot(epoch)];
        let unread = reader.peers[rank].state == PeerState::AwaitDescriptor;
        let reads = reader.epoch == desc.stamp && (unread || self.in_place);
        if desc.stamp != 0 && !reader.over && (reader.epoch < desc.stamp || reads) {
            state.violation = Some(Violation::DescriptorOverwritten);
        }
        desc.stamp = epoch;
        desc.call = call;
    }

    fn step_peer(&self, state: &mut State, rank: usize, lane: usize, peer: usize, event: PeerEvent) {
        let epoch = state.ranks[rank].lanes[lane].epoch;
        let kind = self.calls[rank][lane][epoch as usize - 1].kind;
        let at = state.ranks[rank].lanes[lane].peers[peer];
        if self.makes(Mistake::ArrivalBeforeRows) && at.state == PeerState::Moving && !at.told {
            self.store_arrival(state, rank, lane, peer);
            state.ranks[rank].lanes[lane].peers[peer].told = true;
            return;
        }
        let unsaid = self.makes(Mistake::NoArrivalOnMismatch) && event == PeerEvent::Mismatch;
        let (action, next) = peer_step(kind, at.state, event).expect("an event of this state");
        match action {
            PeerAction::TakeCounts | PeerAction::TakeCredit | PeerAction::SetMismatch => {
                if state.memory[lane][rank][peer].desc[self.slot(epoch)].stamp != epoch {
                    state.violation = Some(Violation::DescriptorOfAnotherEpoch);
                }
                if action == PeerAction::SetMismatch {
                    state.ranks[rank].lanes[lane].verdict = Verdict::Mismatch;
                }
            }
            PeerAction::MoveRow => self.move_row(state, rank, lane, peer, kind),
            PeerAction::StoreArrival if at.told => {}
            PeerAction::StoreArrival if unsaid => {}
            PeerAction::StoreArrival => self.store_arrival(state, rank, lane, peer),
            PeerAction::EmptyRing => {}
        }
        state.ranks[rank].lanes[lane].peers[peer].state = next;
    }

    fn store_arrival(&self, state: &mut State, rank: usize, lane: usize, peer: usize) {
        let local = &state.ranks[rank].lanes[lane];
        let pair = &mut state.memory[lane][peer][rank];
        pair.arrival = local.epoch;
        pair.failed = self.makes(Mistake::ArrivalStatusDecides) && local.verdict == Verdict::Mismatch;
    }

    fn move_row(&self, state: &mut State, rank: usize, lane: usize, peer: usize, kind: Kind) {
        let local = &mut state.ranks[rank].lanes[lane];
        let epoch = local.epoch;
        let row = local.peers[peer].moved as usize;
        local.peers[peer].moved += 1;
        let cell = &mut state.memory[lane][peer][rank].cells[epoch as usize % 2][row];
        match (kind, *cell) {
            (_, Cell::Quarantined) => {}
            (Kind::Dispatch, Cell::Writable(of)) if of == epoch => *cell = Cell::Written(epoch),
            (Kind::Combine, Cell::Readable(of)) if of == epoch => {}
            (Kind::Dispatch, _) => state.violation = Some(Violation::RowStoredIntoForeignMemory),
            _ => state.violation = Some(Violation::RowReadFromForeignMemory),
        }
    }

    fn end(&self, state: &mut State, rank: usize, lane: usize) {
        let local = &mut state.ranks[rank].lanes[lane];
        let epoch = local.epoch;
        let outcome = if local.verdict == Verdict::Ok { Outcome::Ok } else { Outcome::Mismatch };
        local.outcomes[epoch as usize - 1] = outcome;
        self.begin(rank, lane, local);
        if outcome != self.expected(lane, epoch) {
            state.violation = Some(Violation::EndedDifferently);
        }
        let dispatched =
            outcome == Outcome::Ok && self.calls[rank][lane][epoch as usize - 1] == super::DISPATCH;
        for peer in self.peers(rank) {
            for index in 0..self.cells[rank][peer] {
                let cell = &mut state.memory[lane][rank][peer].cells[epoch as usize % 2][index];
                if dispatched && *cell != Cell::Written(epoch) {
                    state.violation = Some(Violation::EndedWithoutItsRows);
                }
                *cell = Cell::Callers;
            }
        }
    }
}
