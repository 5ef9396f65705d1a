//! The loop body between ports and NICs. Nothing in a turn grows with the number of peers: commands, completions
//! and links that wait come to it, it does not look for them.

mod admit;
mod complete;
mod post;
mod state;

use std::sync::Arc;
use std::time::{Duration, Instant};

use self::post::Poster;
use self::state::{Nic, PortState, Routes};
use super::layout::MAX_NICS;
use super::mailbox::Mailbox;
use super::transport::{Completion, Transport};
use super::waker::Waker;
use crate::error::{Error, Result};

/// Completions taken from one NIC in a turn.
const BATCH: usize = 32;

/// Serves the ports of a process over its NICs. One thread turns it; a test may turn it itself.
pub struct Proxy {
    // Before the ports: a NIC that is closed writes and reads no memory any more.
    nics: Vec<Nic>,
    ports: Vec<Option<Box<PortState>>>,
    routes: Routes,
    mailbox: Arc<Mailbox>,
    waker: Arc<Waker>,
    stuck_after_ns: u64,
    batch: Vec<Completion>,
    stopping: bool,
}

impl Proxy {
    /// A proxy over these NICs, which it owns from now on. A link none of whose writes is taken for `stuck_after`
    /// fails.
    ///
    /// # Errors
    /// [`crate::Status::InvalidArgument`] for none or too many NICs.
    pub fn new(nics: Vec<Box<dyn Transport>>, stuck_after: Duration) -> Result<Proxy> {
        if nics.is_empty() || nics.len() > MAX_NICS {
            return Err(Error::invalid(format!("{} NICs, and a process uses 1 to {MAX_NICS}", nics.len())));
        }
        let waker = Arc::new(Waker::new()?);
        let nics = nics.into_iter().map(|transport| {
            let limits = transport.limits();
            let tx_limit = limits.tx_depth.min(limits.cq_depth);
            Nic { transport, name: limits.name, in_flight: 0, tx_limit, cq_incoming: 0, dead: false }
        });
        Ok(Proxy {
            nics: nics.collect(),
            ports: Vec::new(),
            routes: Routes::new(),
            mailbox: Arc::new(Mailbox::new(Arc::clone(&waker))),
            waker,
            stuck_after_ns: u64::try_from(stuck_after.as_nanos()).unwrap_or(u64::MAX),
            batch: Vec::with_capacity(BATCH),
            stopping: false,
        })
    }

    /// One turn, at this time in nanoseconds on any steady clock: requests, commands, completions, words, bells.
    /// Returns true if anything moved.
    pub fn turn(&mut self, now_ns: u64) -> bool {
        let mut moved = false;
        while let Some(request) = self.mailbox.take() {
            self.admit(request, now_ns);
            moved = true;
        }
        for port_idx in 0..self.ports.len() {
            let Some(mut poster) = self.poster(port_idx, now_ns) else { continue };
            if !poster.port.queue.is_empty() {
                moved |= poster.post_waiting();
            }
            if !poster.port.quarantined {
                moved |= poster.take_commands();
            }
        }
        for nic_idx in 0..self.nics.len() {
            moved |= self.complete(nic_idx);
        }
        for port_idx in 0..self.ports.len() {
            if let Some(port) = self.ports[port_idx].as_deref_mut() {
                port.ring_bells();
                if port.probing.is_some() || port.closing.is_some() || port.quarantined {
                    moved |= self.attend(port_idx, Instant::now());
                }
            }
        }
        moved
    }

    fn poster(&mut self, port_idx: usize, now_ns: u64) -> Option<Poster<'_>> {
        let port = self.ports[port_idx].as_deref_mut()?;
        let stuck_after_ns = self.stuck_after_ns;
        Some(Poster { port, port_idx, nics: &mut self.nics, now_ns, stuck_after_ns })
    }

    /// True if a turn would find something to take: asked before sleeping.
    pub(super) fn has_work(&self) -> bool {
        let waits = |port: &PortState| !port.quarantined && port.has_commands() && self.has_room(port);
        self.mailbox.is_filled() || self.ports.iter().flatten().any(|port| waits(port))
    }

    /// True if a command could be taken: otherwise a completion comes first.
    fn has_room(&self, port: &PortState) -> bool {
        let limit = port.shared.limiter.bytes_in_flight();
        port.writes_in_flight == 0 || (port.bytes_in_flight < limit && self.nics.iter().any(Nic::has_room))
    }

    /// How long a sleep may be: something waits that no descriptor announces.
    pub(super) fn longest_sleep(&self) -> Duration {
        let ports = || self.ports.iter().flatten();
        if ports().any(|port| !port.queue.is_empty() || port.has_commands()) {
            Duration::from_millis(1)
        } else if ports().any(|port| port.probing.is_some() || port.closing.is_some() || port.quarantined) {
            Duration::from_millis(5)
        } else {
            Duration::from_secs(1)
        }
    }

    /// True when nobody will ask for anything any more.
    pub(super) fn is_done(&self) -> bool {
        self.stopping && self.ports.iter().flatten().all(|port| port.quarantined)
    }

    pub(super) fn mailbox(&self) -> &Arc<Mailbox> {
        &self.mailbox
    }

    pub(super) fn waker(&self) -> &Arc<Waker> {
        &self.waker
    }

    pub(super) fn transports(&mut self) -> impl Iterator<Item = &mut Box<dyn Transport>> {
        self.nics.iter_mut().filter(|nic| !nic.dead).map(|nic| &mut nic.transport)
    }

    /// The NICs' names.
    pub fn nic_names(&self) -> Vec<String> {
        self.nics.iter().map(|nic| nic.name.clone()).collect()
    }

    /// Ports that are open, or whose memory is kept.
    #[cfg(test)]
    pub(super) fn num_ports(&self) -> usize {
        self.ports.iter().flatten().count()
    }

    /// Ends every port because of `reason`: for a thread that cannot go on.
    #[cold]
    pub(super) fn abandon(&mut self, reason: &str) {
        self.mailbox.end(reason);
        for port in self.ports.iter_mut().flatten() {
            for link in 0..port.links.len() {
                port.fail(link, super::transport::FaultClass::Other, reason);
            }
        }
    }
}

impl PortState {
    /// Rings the bell of each lane that has news.
    fn ring_bells(&mut self) {
        while self.news != 0 {
            let lane = self.news.trailing_zeros() as usize;
            self.news &= self.news - 1;
            self.shared.bells[lane].ring();
        }
    }

    /// True if a command was pushed and not taken.
    fn has_commands(&self) -> bool {
        let waits = |end: &state::RingEnd| {
            self.shared.ring(end.stream).is_some_and(|ring| ring.peek(end.taken).is_some())
        };
        self.rings.iter().any(waits)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.mailbox.end("it was told to stop");
    }
}
