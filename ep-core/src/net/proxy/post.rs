//! From commands to writes. A write that its NIC does not take waits at its link, and only there: other links go
//! on. What waits is bounded, because every message waits in its own slot.

use super::super::command::{Command, OP_CREDIT, OP_SEND, SEQ_BITS, UNIT, stream_of};
use super::super::immediate::{Immediate, MAX_WINDOW};
use super::super::layout::{Kind, Stream};
use super::super::shard::{pick, piece, pieces};
use super::super::transport::{FaultClass, Posted, Write};
use super::state::{Context, NONE, Nic, Outgoing, PortState};
use crate::proto::expand;

/// Commands taken from one ring, and links tried again, in one turn: others are served between them.
const BATCH: u64 = 16;

/// One port and the NICs, for the time of a turn.
pub(super) struct Poster<'a> {
    pub(super) port: &'a mut PortState,
    pub(super) port_idx: usize,
    pub(super) nics: &'a mut [Nic],
    pub(super) now_ns: u64,
    pub(super) stuck_after_ns: u64,
}

impl Poster<'_> {
    /// Takes commands from the port's rings, beginning with another ring each time. True if there were any.
    pub(super) fn take_commands(&mut self) -> bool {
        let num_rings = self.port.rings.len();
        let mut moved = false;
        for turn in 0..num_rings {
            let ring = (self.port.first_ring + turn) % num_rings;
            moved |= self.take_from(ring);
        }
        self.port.first_ring = (self.port.first_ring + 1) % num_rings.max(1);
        moved
    }

    fn take_from(&mut self, ring: usize) -> bool {
        let (stream, first) = (self.port.rings[ring].stream, self.port.rings[ring].taken);
        let mut taken = first;
        while taken - first < BATCH && self.may_take(stream) {
            let Some(command) = self.port.shared.ring(stream).and_then(|ring| ring.peek(taken)) else {
                break;
            };
            taken += 1;
            self.carry_out(stream, &command);
        }
        if taken == first {
            return false;
        }
        self.port.rings[ring].taken = taken;
        if let Some(ring) = self.port.shared.ring(stream) {
            ring.retire(taken);
        }
        true
    }

    /// Commands stay in their ring while no NIC has room, or the port has used up its share.
    fn may_take(&self, stream: Stream) -> bool {
        if stream.kind() == Kind::Credit {
            return self.nics.iter().any(Nic::has_room_for_credit);
        }
        let limit = self.port.shared.limiter.bytes_in_flight();
        let within = self.port.bytes_in_flight < limit || self.port.writes_in_flight == 0;
        within && self.nics.iter().any(Nic::has_room)
    }

    fn carry_out(&mut self, stream: Stream, command: &Command) {
        let link = command.link as usize;
        let Some(state) = self.port.links.get(link) else {
            return self.fail_all(&format!("a command names link {link} of {}", self.port.links.len()));
        };
        if state.failed {
            return;
        }
        if stream_of(command) != Some(stream) || !self.port.connected {
            return self.malformed(link, stream, command);
        }
        match command.op {
            OP_SEND => self.send(link, stream, command),
            OP_CREDIT if stream.kind() == Kind::Credit => {
                let owed = &mut self.port.owed[link * self.port.shared.bells.len() + stream.lane()];
                *owed += u32::from(command.seq);
                self.post_credit_or_wait(link, stream.lane());
            }
            _ => self.malformed(link, stream, command),
        }
    }

    fn send(&mut self, link: usize, stream: Stream, command: &Command) {
        let layout = &self.port.shared.layout;
        let frontier =
            self.port.frontiers[link * layout.streams_per_link() + layout.stream_index(stream)].out;
        let seq = expand(command.seq.into(), SEQ_BITS, frontier);
        let Some((slot, seq)) = seq.and_then(|seq| Some((layout.slot(link, stream, seq)?, seq))) else {
            return self.malformed(link, stream, command);
        };
        let inside = command.bytes <= layout.max_bytes(stream).next_multiple_of(UNIT)
            && command.source + command.bytes <= layout.region_bytes()
            && command.target + command.bytes <= layout.link_bytes();
        let before = &self.port.outgoing[slot];
        if !inside || before.in_flight != 0 || before.posted != before.pieces {
            return self.malformed(link, stream, command);
        }
        self.port.frontier(link, stream).out = frontier.max(seq + 1);
        self.start(link, stream, seq, slot, command);
    }

    /// Posts message `seq`, or lets it wait. Its command was checked.
    pub(super) fn start(&mut self, link: usize, stream: Stream, seq: u64, slot: usize, command: &Command) {
        let state = &self.port.links[link];
        let num_nics = state.targets.len();
        let (count, nic) = match stream.kind() {
            // A probe's number is its NIC's.
            Kind::Probe => (1, seq as usize),
            _ => {
                let mask = self.port.shared.limiter.nics();
                (pieces(command.bytes, num_nics, mask), pick(mask, num_nics, link as u64 + seq))
            }
        };
        let immediate = Immediate {
            link: state.remote_number,
            incarnation: state.remote_incarnation,
            stream: stream.id() as u8,
            cut: count > 1,
            number: (seq % (2 * u64::from(MAX_WINDOW))) as u16,
        };
        self.port.outgoing[slot] = Outgoing {
            seq,
            source: command.source,
            target: command.target,
            bytes: command.bytes,
            immediate: immediate.encode(),
            next: NONE,
            link: link as u32,
            pieces: count as u8,
            posted: 0,
            in_flight: 0,
            nic: nic as u8,
            lane: stream.lane() as u8,
        };
        self.port.shared.counters[link].messages.add(1);
        let waits = self.port.links[link].waiting_first != NONE;
        if waits || !self.post(slot) {
            self.wait(link, slot);
        }
    }

    /// Posts what is left of a message. False if it must wait.
    fn post(&mut self, slot: usize) -> bool {
        while self.port.outgoing[slot].posted < self.port.outgoing[slot].pieces {
            let message = self.port.outgoing[slot];
            let nic = match message.pieces {
                1 => message.nic as usize,
                _ => message.posted as usize,
            };
            if !self.nics[nic].dead && !self.nics[nic].has_room() {
                return false;
            }
            let (begin, bytes) = piece(message.bytes, message.pieces.into(), message.posted.into());
            let context =
                Context { port: self.port_idx, is_credit: false, piece: message.posted.into(), index: slot };
            let link = message.link as usize;
            let target = self.port.links[link].landing + message.target + begin;
            let source = (message.source + begin, bytes);
            match self.write(link, nic, source, target, message.immediate, context) {
                Some(Posted::Yes) => {}
                Some(Posted::Again) => return false,
                // The link has failed, and nothing of it waits any more.
                None => return true,
            }
            let message = &mut self.port.outgoing[slot];
            message.posted += 1;
            message.in_flight += 1;
            self.port.bytes_in_flight += bytes;
            self.port.shared.counters[link].writes.add(1);
            self.port.shared.counters[link].bytes.add(bytes);
        }
        true
    }

    /// One write; None if it failed, and its link with it.
    fn write(
        &mut self,
        link: usize,
        nic: usize,
        (local_offset, bytes): (u64, u64),
        remote_offset: u64,
        immediate: u32,
        context: Context,
    ) -> Option<Posted> {
        let target = &self.port.links[link].targets[nic];
        let write = Write {
            peer: target.peer,
            local: self.port.region(nic),
            local_offset,
            remote: target.remote,
            remote_offset,
            bytes,
            immediate,
            context: context.encode(),
        };
        if self.nics[nic].dead {
            self.fail(link, FaultClass::Ours, &format!("NIC {} is lost", self.nics[nic].name));
            return None;
        }
        match self.nics[nic].transport.write(&write) {
            Ok(Posted::Yes) => {
                self.nics[nic].in_flight += 1;
                self.port.writes_in_flight += 1;
                Some(Posted::Yes)
            }
            Ok(Posted::Again) => {
                self.port.shared.counters[link].again.add(1);
                Some(Posted::Again)
            }
            Err(error) => {
                let text = format!("NIC {}: write: {}", self.nics[nic].name, error.message);
                self.fail(link, FaultClass::Other, &text);
                None
            }
        }
    }

    /// Tells the peer what it is owed for `lane`. False if that must wait.
    fn post_credit(&mut self, link: usize, lane: usize) -> bool {
        let at = link * self.port.shared.bells.len() + lane;
        while self.port.owed[at] != 0 {
            let state = &self.port.links[link];
            let nic = pick(self.port.shared.limiter.nics(), state.targets.len(), link as u64);
            if !self.nics[nic].dead && !self.nics[nic].has_room_for_credit() {
                return false;
            }
            let freed = self.port.owed[at].min(MAX_WINDOW);
            let immediate = Immediate {
                link: state.remote_number,
                incarnation: state.remote_incarnation,
                stream: Stream::new(lane, Kind::Credit).id() as u8,
                cut: false,
                number: freed as u16,
            };
            let context = Context { port: self.port_idx, is_credit: true, piece: 0, index: link };
            let landing = state.landing;
            match self.write(link, nic, (0, 0), landing, immediate.encode(), context) {
                Some(Posted::Yes) => {}
                Some(Posted::Again) => return false,
                None => return true,
            }
            self.port.owed[at] -= freed;
            self.port.shared.counters[link].credits.add(1);
        }
        true
    }

    fn post_credit_or_wait(&mut self, link: usize, lane: usize) {
        if !self.post_credit(link, lane) {
            self.port.links[link].owes_credit = true;
            self.queue(link);
        }
    }

    /// Puts a message behind those of its link that wait.
    fn wait(&mut self, link: usize, slot: usize) {
        if self.port.links[link].failed {
            return;
        }
        let last = self.port.links[link].waiting_last;
        match self.port.links[link].waiting_first {
            NONE => self.port.links[link].waiting_first = slot as u32,
            _ => self.port.outgoing[last as usize].next = slot as u32,
        }
        self.port.links[link].waiting_last = slot as u32;
        self.queue(link);
    }

    fn queue(&mut self, link: usize) {
        let state = &mut self.port.links[link];
        if !state.queued {
            state.queued = true;
            state.waiting_since_ns = self.now_ns;
            self.port.queue.push_back(link as u32);
        }
    }

    /// Tries the links again whose writes wait, a bounded number of them, the longest untried first. A link none of
    /// whose writes was taken for too long fails. True if something was posted.
    pub(super) fn post_waiting(&mut self) -> bool {
        let mut moved = false;
        for _ in 0..self.port.queue.len().min(BATCH as usize) {
            let Some(link) = self.port.queue.pop_front() else { break };
            let link = link as usize;
            self.port.links[link].queued = false;
            let since = self.port.links[link].waiting_since_ns;
            let (progressed, waits) = self.try_again(link);
            moved |= progressed;
            if !waits || self.port.links[link].failed {
                continue;
            }
            self.queue(link);
            if !progressed {
                self.port.links[link].waiting_since_ns = since;
                if self.now_ns.saturating_sub(since) > self.stuck_after_ns {
                    let waited = std::time::Duration::from_nanos(self.now_ns - since);
                    self.fail(link, FaultClass::Stuck, &format!("no write was taken for {waited:.1?}"));
                }
            }
        }
        moved
    }

    /// Posts what waits at `link`. Whether anything was posted, and whether anything still waits.
    fn try_again(&mut self, link: usize) -> (bool, bool) {
        let before = self.port.writes_in_flight;
        if self.port.links[link].owes_credit {
            let num_lanes = self.port.shared.bells.len();
            self.port.links[link].owes_credit = !(0..num_lanes).all(|lane| self.post_credit(link, lane));
        }
        loop {
            let first = self.port.links[link].waiting_first;
            if first == NONE || !self.post(first as usize) {
                break;
            }
            // A failure has emptied the list.
            if self.port.links[link].waiting_first != NONE {
                self.port.links[link].waiting_first = self.port.outgoing[first as usize].next;
            }
        }
        let state = &self.port.links[link];
        (self.port.writes_in_flight != before, state.waiting_first != NONE || state.owes_credit)
    }

    #[cold]
    fn malformed(&mut self, link: usize, stream: Stream, command: &Command) {
        self.fail(
            link,
            FaultClass::Other,
            &format!("the command {command:?} on {stream:?} cannot be carried out"),
        );
    }

    #[cold]
    fn fail_all(&mut self, text: &str) {
        for link in 0..self.port.links.len() {
            self.fail(link, FaultClass::Other, text);
        }
    }

    /// The link carries nothing any more; what waited at it is dropped.
    #[cold]
    pub(super) fn fail(&mut self, link: usize, class: FaultClass, text: &str) {
        self.port.fail(link, class, text);
    }
}

impl PortState {
    /// The link carries nothing any more; what waited at it is dropped. The first reason is kept.
    #[cold]
    pub(super) fn fail(&mut self, link: usize, class: FaultClass, text: &str) {
        let state = &mut self.links[link];
        if state.failed {
            return;
        }
        state.failed = true;
        state.waiting_first = NONE;
        state.owes_credit = false;
        self.num_failed += 1;
        let peer = self.shared.peers[link];
        self.shared.fail(link, class, format!("link to rank {peer}: {}: {text}", class.describe()));
    }
}
