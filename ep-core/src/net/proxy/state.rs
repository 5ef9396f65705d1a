//! What the proxy knows of NICs, ports and links: dense arrays, made when a port opens.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use super::super::immediate::MAX_LINKS;
use super::super::layout::{Kind, MAX_NICS, Stream};
use super::super::mailbox::Reply;
use super::super::port::{Closed, Shared};
use super::super::transport::{PeerId, RegionId, Registered, RemoteRegion, Transport};

/// The end of a list of slots.
pub(super) const NONE: u32 = u32::MAX;

/// One NIC.
pub(super) struct Nic {
    pub(super) transport: Box<dyn Transport>,
    pub(super) name: String,
    /// Writes without completion.
    pub(super) in_flight: usize,
    /// The most that may be: the queue's depth, or what the completion queue has left.
    pub(super) tx_limit: usize,
    /// Completions of peers' writes that may be there at once, of all ports.
    pub(super) cq_incoming: usize,
    pub(super) dead: bool,
}

impl Nic {
    /// Room for a write of data: the last writes are kept for credits, which let others go on.
    pub(super) fn has_room(&self) -> bool {
        self.in_flight + (self.tx_limit / 8).min(64) < self.tx_limit
    }

    /// Room for a credit.
    pub(super) fn has_room_for_credit(&self) -> bool {
        self.in_flight < self.tx_limit
    }
}

/// Whose link a number is, for immediates.
#[derive(Clone, Copy)]
pub(super) struct Route {
    /// Index of the port; [`Route::FREE`] if the number is not in use.
    pub(super) port: u16,
    pub(super) link: u16,
    pub(super) incarnation: u8,
}

impl Route {
    pub(super) const FREE: u16 = u16::MAX;
}

/// All numbers of links.
pub(super) struct Routes {
    pub(super) table: Box<[Route]>,
    /// Numbers not in use, the longest unused first.
    free: VecDeque<u16>,
}

impl Routes {
    pub(super) fn new() -> Routes {
        let free = Route { port: Route::FREE, link: 0, incarnation: 0 };
        Routes { table: vec![free; MAX_LINKS].into(), free: (1..MAX_LINKS as u16).collect() }
    }

    pub(super) fn num_free(&self) -> usize {
        self.free.len()
    }

    /// Takes a number; there must be one.
    pub(super) fn take(&mut self, port: usize, link: usize) -> Option<(u16, u8)> {
        let number = self.free.pop_front()?;
        let route = &mut self.table[number as usize];
        (route.port, route.link) = (port as u16, link as u16);
        Some((number, route.incarnation))
    }

    /// Gives a number back. What still comes for it carries the incarnation that ends here.
    pub(super) fn give_back(&mut self, number: u16) {
        let route = &mut self.table[number as usize];
        route.port = Route::FREE;
        route.incarnation = (route.incarnation + 1) % super::super::immediate::INCARNATIONS;
        self.free.push_back(number);
    }
}

/// A message on its way out, kept at its slot.
#[derive(Clone, Copy, Default)]
pub(super) struct Outgoing {
    pub(super) seq: u64,
    pub(super) source: u64,
    pub(super) target: u64,
    pub(super) bytes: u64,
    pub(super) immediate: u32,
    /// The next of its link that waits to be posted, or [`NONE`].
    pub(super) next: u32,
    pub(super) link: u32,
    /// Writes that make the message.
    pub(super) pieces: u8,
    /// Writes posted so far.
    pub(super) posted: u8,
    /// Writes posted and not completed.
    pub(super) in_flight: u8,
    /// Where a whole message goes.
    pub(super) nic: u8,
    pub(super) lane: u8,
}

/// Where writes over one NIC of one link go.
#[derive(Clone, Copy)]
pub(super) struct Target {
    pub(super) peer: PeerId,
    pub(super) remote: RemoteRegion,
}

/// One link.
pub(super) struct Link {
    /// This rank's number of it.
    pub(super) number: u16,
    pub(super) incarnation: u8,
    /// What the peer calls it, with the incarnation, as the base of immediates.
    pub(super) remote_number: u16,
    pub(super) remote_incarnation: u8,
    /// Where this rank's messages land, in the peer's region.
    pub(super) landing: u64,
    /// By NIC; as many as both ranks have.
    pub(super) targets: Vec<Target>,
    pub(super) failed: bool,
    /// Messages that wait to be posted, from the first to the last.
    pub(super) waiting_first: u32,
    pub(super) waiting_last: u32,
    /// Since when the first of them, or a credit, could not be posted.
    pub(super) waiting_since_ns: u64,
    /// In the port's queue of links to try again.
    pub(super) queued: bool,
    /// Some lane owes the peer credit that could not be posted.
    pub(super) owes_credit: bool,
    /// Probes sent and not completed, and probes not arrived.
    pub(super) probes_missing: u8,
    /// Bit i: the peer's probe over NIC i has arrived, perhaps before this rank sent its own.
    pub(super) probes_arrived: u8,
}

/// How far a stream of a link is.
#[derive(Clone, Copy, Default)]
pub(super) struct Frontier {
    /// The next message out.
    pub(super) out: u64,
    /// One more than the highest message that came.
    pub(super) incoming: u64,
}

/// A command ring's other end.
pub(super) struct RingEnd {
    pub(super) stream: Stream,
    pub(super) taken: u64,
}

/// Who waits for the port's end, or nobody.
pub(super) struct Closing {
    pub(super) deadline: Instant,
    pub(super) reply: Option<Reply<Closed>>,
}

/// Who waits for the test of the links.
pub(super) struct Probing {
    pub(super) deadline: Instant,
    pub(super) reply: Reply<()>,
}

/// One port.
pub(super) struct PortState {
    pub(super) shared: Arc<Shared>,
    pub(super) rings: Vec<RingEnd>,
    pub(super) first_ring: usize,
    pub(super) links: Vec<Link>,
    pub(super) outgoing: Box<[Outgoing]>,
    /// Writes of a cut message that have arrived, by slot.
    pub(super) arrived: Box<[u8]>,
    /// By link and stream.
    pub(super) frontiers: Box<[Frontier]>,
    /// Credit that could not be posted, `[link][lane]`.
    pub(super) owed: Box<[u32]>,
    /// Links that have something to post again. Each is in it at most once, so it never grows.
    pub(super) queue: VecDeque<u32>,
    /// By NIC.
    pub(super) regions: Vec<Registered>,
    pub(super) bytes_in_flight: u64,
    pub(super) writes_in_flight: u64,
    /// Bit i: lane i has news.
    pub(super) news: u32,
    pub(super) num_failed: usize,
    pub(super) connected: bool,
    /// Of all links.
    pub(super) probes_missing: usize,
    pub(super) probed: bool,
    pub(super) probing: Option<Probing>,
    pub(super) closing: Option<Closing>,
    /// The caller has gone; only completions are waited for.
    pub(super) quarantined: bool,
}

impl PortState {
    pub(super) fn new(shared: Arc<Shared>, links: Vec<Link>, regions: Vec<Registered>) -> PortState {
        let layout = &shared.layout;
        let (num_links, num_lanes) = (layout.shape().num_links, layout.shape().num_lanes);
        // Credits first: they let others go on.
        let kinds = [Kind::Credit, Kind::Error, Kind::Desc, Kind::Response, Kind::Request, Kind::Rows];
        let streams = kinds.iter().flat_map(|&kind| (0..num_lanes).map(move |lane| Stream::new(lane, kind)));
        let rings: Vec<RingEnd> = streams
            .filter(|&stream| layout.ring(stream).is_some())
            .map(|stream| RingEnd { stream, taken: 0 })
            .collect();
        PortState {
            first_ring: shared.rank % rings.len().max(1),
            rings,
            links,
            outgoing: vec![Outgoing::default(); layout.num_slots()].into(),
            arrived: vec![0; layout.num_slots()].into(),
            frontiers: vec![Frontier::default(); num_links * layout.streams_per_link()].into(),
            owed: vec![0; num_links * num_lanes].into(),
            queue: VecDeque::with_capacity(num_links),
            regions,
            bytes_in_flight: 0,
            writes_in_flight: 0,
            news: 0,
            num_failed: 0,
            connected: false,
            probes_missing: 0,
            probed: false,
            probing: None,
            closing: None,
            quarantined: false,
            shared,
        }
    }

    pub(super) fn region(&self, nic: usize) -> RegionId {
        self.regions[nic].id
    }

    /// The frontier of a stream that exists.
    pub(super) fn frontier(&mut self, link: usize, stream: Stream) -> &mut Frontier {
        let layout = &self.shared.layout;
        &mut self.frontiers[link * layout.streams_per_link() + layout.stream_index(stream)]
    }
}

/// What a completion's context says: a port's write of a piece, or of a credit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Context {
    pub(super) port: usize,
    /// A link instead of a slot.
    pub(super) is_credit: bool,
    pub(super) piece: usize,
    /// The slot, or the link of a credit.
    pub(super) index: usize,
}

const _: () = assert!(MAX_NICS <= 128);

impl Context {
    pub(super) fn encode(self) -> u64 {
        (self.port as u64) << 40
            | u64::from(self.is_credit) << 39
            | (self.piece as u64) << 32
            | self.index as u64
    }

    pub(super) fn decode(bits: u64) -> Context {
        Context {
            port: (bits >> 40) as usize,
            is_credit: bits >> 39 & 1 != 0,
            piece: (bits >> 32 & 0x7F) as usize,
            index: (bits & 0xFFFF_FFFF) as usize,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contexts_come_back() {
        for context in [
            Context { port: 0, is_credit: false, piece: 7, index: 0 },
            Context { port: 65534, is_credit: true, piece: 0, index: 8190 },
            Context { port: 3, is_credit: false, piece: 127, index: u32::MAX as usize },
        ] {
            assert_eq!(Context::decode(context.encode()), context);
        }
    }

    #[test]
    fn numbers_come_again_as_late_as_possible_and_with_another_incarnation() {
        let mut routes = Routes::new();
        assert_eq!(routes.take(0, 0), Some((1, 0)));
        assert_eq!(routes.take(0, 1), Some((2, 0)));
        routes.give_back(1);
        assert_eq!(routes.take(1, 0), Some((3, 0)), "1 is the last now");
        while routes.num_free() > 1 {
            routes.take(1, 0);
        }
        assert_eq!(routes.take(2, 0), Some((1, 1)));
        assert_eq!(routes.take(2, 0), None);
    }
}
