//! Requests: to open, connect, test and close a port. Not the data path.

use std::sync::Arc;
use std::time::Instant;

use super::super::command::{Command, OP_SEND, UNIT};
use super::super::connect::{LinkOffer, NicOffer, Offer};
use super::super::layout::{Kind, PROBE_BYTES, Shape, Stream};
use super::super::mailbox::{Reply, Request};
use super::super::port::{Closed, Port, PortSpec, Shared};
use super::super::transport::{Region, Registered};
use super::Proxy;
use super::complete::{PATTERN, PROBE};
use super::state::{Closing, Link, NONE, PortState, Probing, Target};
use crate::error::{Error, Result, Status};

/// Writes that a NIC must be able to have in flight beside what may arrive.
const MIN_TX: usize = 64;

impl Proxy {
    pub(super) fn admit(&mut self, request: Request, now_ns: u64) {
        match request {
            // Where nobody takes the answer any more, the port in it is dropped, and so closed.
            Request::Open { spec, reply } => drop(reply.send(self.open(spec))),
            Request::Connect { port, offers, reply } => drop(reply.send(self.connect(&port, &offers))),
            Request::Probe { port, deadline, reply } => self.probe(&port, deadline, reply, now_ns),
            Request::Close { port, deadline, reply } => self.close(&port, deadline, reply),
            Request::Stop => self.stopping = true,
        }
    }

    fn find(&self, port: &Arc<Shared>) -> Option<usize> {
        let same = |state: &PortState| !state.quarantined && Arc::ptr_eq(&state.shared, port);
        self.ports.iter().position(|state| state.as_deref().is_some_and(same))
    }

    /// Opens a port.
    ///
    /// # Errors
    /// [`Status::Capacity`], with numbers, if a completion queue or the links' numbers do not suffice for it;
    /// [`Status::OutOfRange`] for an impossible shape; those of the registration.
    pub fn open(&mut self, spec: PortSpec) -> Result<Port> {
        let shared = Arc::new(Shared::new(spec, Arc::clone(&self.waker))?);
        let shape = *shared.layout.shape();
        if shape.num_links > self.routes.num_free() {
            let free = self.routes.num_free();
            let text = format!("{} links are needed and {free} are left in this process", shape.num_links);
            return Err(Error::new(Status::Capacity, text));
        }
        let incoming = shape.num_links * shared.layout.incoming_per_link();
        self.check_nics(&shape, incoming, &shared)?;
        let regions = self.register(&shared)?;
        let port_idx = self.ports.iter().position(Option::is_none).unwrap_or(self.ports.len());
        let links = self.number_links(port_idx, &shared);
        let offer = self.offer(&shared, &regions, &links).encode();
        self.change_incoming(incoming as isize);
        let state = Box::new(PortState::new(Arc::clone(&shared), links, regions));
        match self.ports.get_mut(port_idx) {
            Some(place) => *place = Some(state),
            None => self.ports.push(Some(state)),
        }
        Ok(Port::new(shared, Arc::clone(&self.mailbox), offer))
    }

    /// Every NIC must be able to hold what may arrive, and to write the largest slot.
    fn check_nics(&self, shape: &Shape, incoming: usize, shared: &Shared) -> Result<()> {
        let longest = [shape.desc, shape.rows, shape.request, shape.response].map(|slots| slots.bytes);
        let longest = u64::from(longest.into_iter().max().unwrap_or(0)).next_multiple_of(UNIT);
        for nic in &self.nics {
            let limits = nic.transport.limits();
            let needed = nic.cq_incoming + incoming + MIN_TX.min(limits.tx_depth);
            if needed > limits.cq_depth {
                let per_link = shared.layout.incoming_per_link();
                let text = format!(
                    "NIC {}: its completion queue has {} entries and {needed} are needed: {} links of {per_link} \
                     messages and credits each, {} for other groups, {} for own writes; use fewer lanes or smaller \
                     windows, or a larger queue",
                    nic.name,
                    limits.cq_depth,
                    shape.num_links,
                    nic.cq_incoming,
                    MIN_TX.min(limits.tx_depth),
                );
                return Err(Error::new(Status::Capacity, text));
            }
            if longest > limits.max_write {
                let text = format!(
                    "NIC {}: messages of {longest} bytes are needed and its largest write has {}",
                    nic.name, limits.max_write
                );
                return Err(Error::new(Status::Capacity, text));
            }
            if nic.dead {
                return Err(Error::new(Status::System, format!("NIC {} is lost", nic.name)));
            }
        }
        Ok(())
    }

    /// Own writes get what peers' writes leave of each completion queue.
    fn change_incoming(&mut self, by: isize) {
        for nic in &mut self.nics {
            let limits = nic.transport.limits();
            nic.cq_incoming = nic.cq_incoming.saturating_add_signed(by);
            nic.tx_limit = limits.tx_depth.min(limits.cq_depth.saturating_sub(nic.cq_incoming)).max(1);
        }
    }

    fn register(&mut self, shared: &Shared) -> Result<Vec<Registered>> {
        let mut regions: Vec<Registered> = Vec::with_capacity(self.nics.len());
        for nic in 0..self.nics.len() {
            // SAFETY: the mapping lives in `shared`, which the proxy keeps until it has deregistered the region or
            // has dropped the NIC. Peers store into landing slots only, which are read by pointer once they landed.
            let region = unsafe { Region::new(shared.region.base(), shared.region.bytes() as u64, None) };
            match self.nics[nic].transport.register(&region) {
                Ok(registered) => regions.push(registered),
                Err(error) => {
                    for (nic, region) in self.nics.iter_mut().zip(&regions) {
                        // Nothing was written yet; what cannot be undone here ends with the NIC.
                        let _ = nic.transport.deregister(region.id);
                    }
                    let text = format!("NIC {}: {}", self.nics[nic].name, error.message);
                    return Err(Error::new(error.status, text));
                }
            }
        }
        Ok(regions)
    }

    fn number_links(&mut self, port_idx: usize, shared: &Shared) -> Vec<Link> {
        let numbers = (0..shared.peers.len()).map_while(|link| self.routes.take(port_idx, link));
        numbers
            .map(|(number, incarnation)| Link {
                number,
                incarnation,
                remote_number: 0,
                remote_incarnation: 0,
                landing: 0,
                targets: Vec::new(),
                failed: false,
                waiting_first: NONE,
                waiting_last: NONE,
                waiting_since_ns: 0,
                queued: false,
                owes_credit: false,
                probes_missing: 0,
                probes_arrived: 0,
            })
            .collect()
    }

    fn offer(&self, shared: &Shared, regions: &[Registered], links: &[Link]) -> Offer {
        let nics = self.nics.iter().zip(regions).map(|(nic, region)| NicOffer {
            address: nic.transport.address(),
            region: region.remote,
            max_write: nic.transport.limits().max_write,
        });
        let links = links.iter().zip(&shared.peers).enumerate().map(|(link, (state, &peer))| LinkOffer {
            peer: peer as u32,
            number: state.number,
            incarnation: state.incarnation,
            landing: shared.layout.landing_base(link),
        });
        Offer {
            rank: shared.rank as u32,
            fingerprint: shared.layout.fingerprint(),
            nics: nics.collect(),
            links: links.collect(),
        }
    }

    fn connect(&mut self, port: &Arc<Shared>, offers: &[Vec<u8>]) -> Result<Option<String>> {
        let Some(port_idx) = self.find(port) else { return Err(closed()) };
        let num_links = port.peers.len();
        if offers.len() != num_links {
            return Err(Error::invalid(format!("{num_links} links were given {} offers", offers.len())));
        }
        let mut note = None;
        for (link, offer) in offers.iter().enumerate() {
            let peer = port.peers[link];
            let named = |error: Error| Error::new(error.status, format!("rank {peer}: {}", error.message));
            let offer = Offer::decode(offer).and_then(|offer| fits(offer, port, peer)).map_err(named)?;
            let (theirs, own) = (offer.nics.len(), self.nics.len());
            if theirs != own {
                note.get_or_insert_with(|| {
                    let used = theirs.min(own);
                    format!(
                        "rank {peer} has {theirs} NICs and this rank has {own}: links between them use {used}"
                    )
                });
            }
            self.connect_link(port_idx, link, &offer).map_err(named)?;
        }
        if let Some(state) = self.ports[port_idx].as_deref_mut() {
            state.connected = true;
        }
        Ok(note)
    }

    fn connect_link(&mut self, port_idx: usize, link: usize, offer: &Offer) -> Result<()> {
        let Some(state) = self.ports[port_idx].as_deref_mut() else { return Err(closed()) };
        let rank = state.shared.rank;
        let end = offer.link_for(rank).ok_or_else(|| no_link(rank))?;
        let ours = &mut state.links[link];
        if !ours.targets.is_empty() {
            return Err(Error::new(Status::InvalidState, "links are connected once"));
        }
        let landing_bytes = state.shared.layout.link_bytes();
        if offer.nics.iter().any(|nic| nic.region.bytes < end.landing + landing_bytes) {
            let text = format!("its region ends before the {landing_bytes} bytes at {}", end.landing);
            return Err(Error::new(Status::Bootstrap, text));
        }
        (ours.remote_number, ours.remote_incarnation) = (end.number, end.incarnation);
        ours.landing = end.landing;
        for (nic, remote) in self.nics.iter_mut().zip(&offer.nics) {
            let connected = nic.transport.connect(&remote.address);
            let peer =
                connected.map_err(|e| Error::new(e.status, format!("NIC {}: {}", nic.name, e.message)))?;
            // One by one, so that a port which fails half connected disconnects them when it is closed.
            ours.targets.push(Target { peer, remote: remote.region });
        }
        ours.probes_missing = 2 * ours.targets.len() as u8;
        state.probes_missing += ours.probes_missing as usize;
        Ok(())
    }

    /// Sends a pattern over every NIC of every link; [`Proxy::attend`] sees the end.
    fn probe(&mut self, port: &Arc<Shared>, deadline: Instant, reply: Reply<()>, now_ns: u64) {
        let Some(port_idx) = self.find(port) else { return drop(reply.send(Err(closed()))) };
        let Some(mut poster) = self.poster(port_idx, now_ns) else { return };
        if !poster.port.connected || poster.port.probed {
            let text = "links are tested once, after they were connected";
            return drop(reply.send(Err(Error::new(Status::InvalidState, text))));
        }
        poster.port.probed = true;
        poster.port.probing = Some(Probing { deadline, reply });
        for link in 0..port.peers.len() {
            for nic in 0..poster.port.links[link].targets.len() as u64 {
                let source = port.layout.staging(link, PROBE, nic);
                fill(port.at(source).cast(), PATTERN ^ nic as u32);
                let Some(slot) = port.layout.slot(link, PROBE, nic) else { continue };
                let command = Command {
                    op: OP_SEND,
                    link: link as u16,
                    stream: PROBE.id() as u8,
                    seq: nic as u16,
                    bytes: PROBE_BYTES,
                    source,
                    target: port.layout.offset_in_link(PROBE, nic),
                };
                poster.start(link, PROBE, nic, slot, &command);
            }
        }
    }

    fn close(&mut self, port: &Arc<Shared>, deadline: Instant, reply: Option<Reply<Closed>>) {
        match self.find(port) {
            Some(port_idx) => {
                if let Some(state) = self.ports[port_idx].as_deref_mut() {
                    // A port that is closed and then dropped: the first one's deadline and answer stay.
                    state.closing.get_or_insert(Closing { deadline, reply });
                }
            }
            None => drop(reply.map(|reply| reply.send(Err(closed())))),
        }
    }

    /// Looks whether a test or the end of a port is complete, or late. True if something ended.
    pub(super) fn attend(&mut self, port_idx: usize, now: Instant) -> bool {
        let Some(port) = self.ports[port_idx].as_deref_mut() else { return false };
        if let Some(probing) = &port.probing
            && let Some(answer) = port.probe_answer(now >= probing.deadline)
            && let Some(probing) = port.probing.take()
        {
            let named = |(status, text): (Status, String)| {
                let names: Vec<&str> = self.nics.iter().map(|nic| nic.name.as_str()).collect();
                Error::new(status, format!("{text}; the NICs here are {}", names.join(", ")))
            };
            drop(probing.reply.send(answer.map_err(named)));
            return true;
        }
        let (drained, is_empty) = (port.writes_in_flight == 0, port.is_empty());
        let Some(closing) = &mut port.closing else { return false };
        let late = now >= closing.deadline;
        if drained && (port.quarantined || late || is_empty) {
            let reply = closing.reply.take();
            let answer = self.free(port_idx).map(|()| Closed::Drained);
            drop(reply.map(|reply| reply.send(answer)));
            return true;
        }
        if late && !port.quarantined {
            port.quarantined = true;
            port.queue.clear();
            let writes = port.writes_in_flight;
            drop(closing.reply.take().map(|reply| reply.send(Ok(Closed::Quarantined { writes }))));
            return true;
        }
        false
    }

    /// Ends a port that has nothing in flight.
    fn free(&mut self, port_idx: usize) -> Result<()> {
        let Some(port) = self.ports[port_idx].take() else { return Ok(()) };
        let shared = Arc::clone(&port.shared);
        self.change_incoming(-((port.links.len() * shared.layout.incoming_per_link()) as isize));
        for link in &port.links {
            self.routes.give_back(link.number);
            for (nic, target) in self.nics.iter_mut().zip(&link.targets) {
                nic.transport.disconnect(target.peer);
            }
        }
        let mut result = Ok(());
        for (nic, region) in self.nics.iter_mut().zip(&port.regions) {
            if let Err(error) = nic.transport.deregister(region.id) {
                // The NIC may still write there: the memory is never used again.
                std::mem::forget(Arc::clone(&shared.region));
                result = Err(Error::new(error.status, format!("NIC {}: {}", nic.name, error.message)));
            }
        }
        result
    }
}

impl PortState {
    /// The result of the test, once there is one: all arrived, a link failed, or `late`.
    fn probe_answer(&self, late: bool) -> Option<std::result::Result<(), (Status, String)>> {
        if self.num_failed > 0 {
            let failure = self.shared.failures.iter().find_map(|failure| failure.get())?;
            return Some(Err((Status::PeerLost, failure.text.clone())));
        }
        if self.probes_missing == 0 {
            return Some(Ok(()));
        }
        let link = late.then(|| self.links.iter().position(|link| link.probes_missing > 0)).flatten()?;
        let (state, peer) = (&self.links[link], self.shared.peers[link]);
        let silent = (0..state.targets.len()).find(|nic| state.probes_arrived >> nic & 1 == 0);
        let text = match silent {
            Some(nic) => format!("rank {peer}: nothing came over its NIC {nic} until the deadline"),
            None => format!("rank {peer}: a write to it was not complete at the deadline"),
        };
        Some(Err((Status::Timeout, text)))
    }

    /// True if no command and no message waits.
    fn is_empty(&self) -> bool {
        self.queue.is_empty() && !self.has_commands()
    }
}

fn fill(slot: *mut u32, value: u32) {
    for word in 0..PROBE_BYTES as usize / 4 {
        // SAFETY: a probe's slot has these bytes, aligned to 64, and nothing of it is in flight.
        unsafe { slot.add(word).write(value) };
    }
}

fn fits(offer: Offer, port: &Shared, peer: usize) -> Result<Offer> {
    if offer.rank as usize != peer {
        let text = format!("what came in its place is of rank {}", offer.rank);
        return Err(Error::new(Status::Bootstrap, text));
    }
    if offer.fingerprint != port.layout.fingerprint() {
        let text = "its lanes, windows or message sizes between nodes differ from this rank's";
        return Err(Error::new(Status::Mismatch, text));
    }
    let longest = Kind::WITH_SLOTS.map(|kind| port.layout.max_bytes(Stream::new(0, kind)));
    let longest = longest.into_iter().max().unwrap_or(0);
    match offer.nics.iter().find(|nic| nic.max_write < longest) {
        None => Ok(offer),
        Some(nic) => {
            let text = format!("its NIC takes {} bytes at once, and messages have {longest}", nic.max_write);
            Err(Error::new(Status::Capacity, text))
        }
    }
}

fn no_link(rank: usize) -> Error {
    Error::new(Status::Mismatch, format!("it has no link to rank {rank}: the ranks disagree about the nodes"))
}

fn closed() -> Error {
    Error::new(Status::InvalidState, "the port was closed")
}
