//! From completions to words.

use std::sync::atomic::Ordering;

use super::super::immediate::{Immediate, NUMBER_BITS};
use super::super::layout::{Kind, PROBE_BYTES, Stream};
use super::super::shard::piece;
use super::super::transport::{Completion, FaultClass};
use super::Proxy;
use super::state::{Context, PortState, Route};
use crate::proto::expand;

/// What a probe's slot is filled with.
pub(super) const PATTERN: u32 = 0xA5A5_5A5A;

impl Proxy {
    /// Takes what one NIC has to tell. True if there was anything.
    pub(super) fn complete(&mut self, nic_idx: usize) -> bool {
        if self.nics[nic_idx].dead {
            return false;
        }
        let mut batch = std::mem::take(&mut self.batch);
        let polled = self.nics[nic_idx].transport.poll(&mut batch);
        let any = !batch.is_empty();
        for completion in batch.drain(..) {
            match completion {
                Completion::Sent { context } => self.sent(nic_idx, context),
                Completion::Arrived { immediate } => self.arrived(nic_idx, immediate),
                Completion::Failed { context, class, text } => self.failed(nic_idx, context, class, &text),
            }
        }
        self.batch = batch;
        if let Err(error) = polled {
            self.lose_nic(nic_idx, &error.message);
            return true;
        }
        any
    }

    /// The port of a completed write, and the write's bytes taken off what is in flight.
    fn settle(&mut self, nic_idx: usize, context: u64) -> Option<(&mut PortState, Context)> {
        let context = Context::decode(context);
        let nic = &mut self.nics[nic_idx];
        nic.in_flight = nic.in_flight.saturating_sub(1);
        let port = self.ports.get_mut(context.port)?.as_deref_mut()?;
        port.writes_in_flight = port.writes_in_flight.saturating_sub(1);
        if !context.is_credit {
            let message = port.outgoing.get_mut(context.index)?;
            message.in_flight = message.in_flight.saturating_sub(1);
            port.bytes_in_flight -= piece(message.bytes, message.pieces.into(), context.piece).1;
        }
        Some((port, context))
    }

    fn sent(&mut self, nic_idx: usize, context: u64) {
        let Some((port, context)) = self.settle(nic_idx, context) else { return };
        if context.is_credit {
            return;
        }
        let message = &port.outgoing[context.index];
        if message.in_flight != 0
            || message.posted != message.pieces
            || port.links[message.link as usize].failed
        {
            return;
        }
        let word = port.shared.layout.sent_word(context.index);
        // Release: pairs with the acquire in `Port::can_stage`; the NIC has read the slot.
        port.shared.control.u64(word).store(message.seq + 1, Ordering::Release);
        port.news |= 1 << message.lane;
        if port.probing.is_some() && Immediate::decode(message.immediate).stream as usize == PROBE.id() {
            let link = message.link as usize;
            port.probe_step(link);
        }
    }

    fn arrived(&mut self, nic_idx: usize, immediate: u32) {
        let immediate = Immediate::decode(immediate);
        let route = self.routes.table[immediate.link as usize];
        if immediate.link == 0 {
            let text =
                "an immediate came without its upper half: this version of the network's library is broken";
            return self.fail_links_of(nic_idx, FaultClass::Other, text);
        }
        let port = match self.ports.get_mut(route.port as usize) {
            Some(Some(port)) if route.incarnation == immediate.incarnation => port,
            // From before the number's owner left.
            _ => return,
        };
        debug_assert!(route.port != Route::FREE, "a free number has no port");
        let link = route.link as usize;
        let accepted = match Stream::from_id(immediate.stream.into()) {
            Some(stream) if stream.kind() == Kind::Credit => {
                port.credit(link, stream.lane(), immediate.number)
            }
            Some(stream) => port.arrive(link, stream, immediate),
            None => false,
        };
        if !accepted {
            let name = &self.nics[nic_idx].name;
            port.fail(link, FaultClass::Protocol, &format!("NIC {name}: {immediate:?} was not expected"));
        }
    }

    #[cold]
    fn failed(&mut self, nic_idx: usize, context: Option<u64>, class: FaultClass, text: &str) {
        let text = format!("NIC {}: {text}", self.nics[nic_idx].name);
        match context {
            Some(context) => {
                let Some((port, context)) = self.settle(nic_idx, context) else { return };
                let link = match context.is_credit {
                    true => context.index,
                    false => port.outgoing[context.index].link as usize,
                };
                port.fail(link, class, &text);
            }
            // A peer died while it wrote to this rank. Nobody knows which; those who wait for it will see.
            None if class == FaultClass::PeerDead => {}
            None => self.fail_links_of(nic_idx, class, &text),
        }
    }

    /// Every link that uses the NIC fails.
    #[cold]
    fn fail_links_of(&mut self, nic_idx: usize, class: FaultClass, text: &str) {
        for port in self.ports.iter_mut().flatten() {
            for link in 0..port.links.len() {
                if nic_idx < port.links[link].targets.len() {
                    port.fail(link, class, text);
                }
            }
        }
    }

    #[cold]
    fn lose_nic(&mut self, nic_idx: usize, reason: &str) {
        self.nics[nic_idx].dead = true;
        let text = format!("NIC {} is lost: {reason}", self.nics[nic_idx].name);
        self.fail_links_of(nic_idx, FaultClass::Ours, &text);
    }
}

/// The stream of probes.
pub(super) const PROBE: Stream = Stream::new(0, Kind::Probe);

impl PortState {
    /// A write of a message has come. False if the protocol excludes it.
    fn arrive(&mut self, link: usize, stream: Stream, immediate: Immediate) -> bool {
        let layout = &self.shared.layout;
        if layout.window(stream) == 0 {
            return false;
        }
        let frontier =
            self.frontiers[link * layout.streams_per_link() + layout.stream_index(stream)].incoming;
        let Some(seq) = expand(immediate.number.into(), NUMBER_BITS, frontier) else { return false };
        let Some(slot) = layout.slot(link, stream, seq) else { return false };
        let word = self.shared.control.u64(layout.landed_word(slot));
        // Relaxed: the proxy is the word's only writer.
        if !layout.rules(stream).may_land(word.load(Ordering::Relaxed), seq) {
            return false;
        }
        let count = if immediate.cut { self.links[link].targets.len() as u8 } else { 1 };
        self.arrived[slot] += 1;
        if self.arrived[slot] < count {
            return true;
        }
        if self.arrived[slot] > count {
            return false;
        }
        self.arrived[slot] = 0;
        if stream.kind() == Kind::Probe && !self.probe_arrived(link, seq) {
            return false;
        }
        // Release: pairs with the acquire in `Port::landed`; the NIC has stored the message.
        self.shared.control.u64(self.shared.layout.landed_word(slot)).store(seq + 1, Ordering::Release);
        self.shared.counters[link].arrived.add(1);
        self.news |= 1 << stream.lane();
        let frontier = self.frontier(link, stream);
        frontier.incoming = frontier.incoming.max(seq + 1);
        true
    }

    /// The peer has freed so many messages of (lane, Rows). False if it cannot have.
    fn credit(&mut self, link: usize, lane: usize, freed: u16) -> bool {
        let rows = Stream::new(lane, Kind::Rows);
        if self.shared.layout.window(rows) == 0 {
            return false;
        }
        let sent = self.frontier(link, rows).out;
        let word = self.shared.control.u64(self.shared.layout.credit_word(link, lane));
        // Relaxed: the proxy is the word's only writer.
        let credit = word.load(Ordering::Relaxed) + u64::from(freed);
        if credit > sent {
            return false;
        }
        // Release: pairs with the acquire in `Port::credit`; the peer was done with the slots before it said so.
        word.store(credit, Ordering::Release);
        self.shared.counters[link].credits_arrived.add(1);
        self.news |= 1 << lane;
        true
    }

    fn probe_arrived(&mut self, link: usize, seq: u64) -> bool {
        let landed = self.shared.at(self.shared.layout.landing(link, PROBE, seq)).cast_const().cast::<u32>();
        for word in 0..PROBE_BYTES as usize / 4 {
            // SAFETY: the slot has these words, aligned; its message has landed and is the last one in it.
            if unsafe { landed.add(word).read() } != PATTERN ^ seq as u32 {
                return false;
            }
        }
        self.links[link].probes_arrived |= 1 << seq;
        self.probe_step(link);
        true
    }

    /// One probe of `link` less to wait for, out or in.
    fn probe_step(&mut self, link: usize) {
        self.links[link].probes_missing = self.links[link].probes_missing.saturating_sub(1);
        self.probes_missing = self.probes_missing.saturating_sub(1);
    }
}
