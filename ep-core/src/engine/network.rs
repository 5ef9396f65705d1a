//! A rank's ends of the links between nodes: how they are made, and the errors that travel over them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::defaults::{CHUNK_MAX, CHUNK_MIN};
use super::fault;
use super::topology::Topology;
use crate::config::{ErrorInfo, GroupConfig};
use crate::error::Result;
use crate::layout::SegmentLayout;
use crate::mem::Words;
use crate::net::{Bell, Kind, LinkFailure, Network, Port, PortSpec, Shape, Slots, Stream};
use crate::wire::{DEPTH, ErrorBody, RELAY_DESC_BYTES};

/// Messages of a kind on their way between two ranks, when the caller does not choose.
const DEFAULT_WINDOW: u32 = 4;
/// Memory for messages of a rank when the caller does not choose their size: an even split among the links.
const DEFAULT_BYTES: usize = 256 << 20;
/// Sizes of messages when the caller does not choose: below, a network is limited by their number; above, nothing
/// is gained.
const DEFAULT_CHUNK: std::ops::RangeInclusive<usize> = 32 << 10..=256 << 10;
/// A request is small beside its response, but not smaller than this: a record of 256 slots.
const REQUEST_MIN: u32 = 3200;
/// How long a rank that leaves waits for its last messages to be gone.
const LINGER: Duration = Duration::from_secs(1);

const ERRORS: Stream = Stream::new(0, Kind::Error);

/// The links of one rank.
pub(crate) struct Net {
    pub(crate) port: Port,
    description: String,
    /// What is not as it might be, from the making of the links.
    remark: Option<String>,
    error_sent: AtomicBool,
}

/// Fills in the sizes of messages, alike on all ranks.
pub(super) fn with_chunks(config: &mut GroupConfig, topology: &Topology) {
    if config.chunk_window == 0 {
        config.chunk_window = DEFAULT_WINDOW;
    }
    if config.chunk_bytes == 0 {
        // Landing and staging; rows, responses, and requests of an eighth.
        let slots = topology.usual_links() * (config.num_lanes * config.chunk_window) as usize * 2 * 17 / 8;
        let share = (DEFAULT_BYTES / slots.max(1)) & !4095;
        config.chunk_bytes = share.clamp(*DEFAULT_CHUNK.start(), *DEFAULT_CHUNK.end()) as u32;
    }
    config.chunk_bytes = config.chunk_bytes.clamp(CHUNK_MIN as u32, CHUNK_MAX as u32).next_multiple_of(64);
}

fn shape(config: &GroupConfig, topology: &Topology) -> Shape {
    let cell_ranks = if topology.is_direct() { 1 } else { topology.largest_node() };
    let desc = RELAY_DESC_BYTES + cell_ranks * 4 * (2 + config.max_local_experts as usize);
    let (window, bytes) = (config.chunk_window, config.chunk_bytes);
    Shape {
        num_links: topology.links().len(),
        num_lanes: config.num_lanes as usize,
        desc: Slots { window: DEPTH as u32, bytes: desc.next_multiple_of(64) as u32 },
        rows: Slots { window, bytes },
        request: Slots { window, bytes: (bytes / 8).max(REQUEST_MIN).min(bytes).next_multiple_of(64) },
        response: Slots { window, bytes },
        error_bytes: size_of::<ErrorBody>().next_multiple_of(16) as u32,
    }
}

impl Net {
    /// Opens this rank's ends, not yet connected. The words are those of its segment.
    pub(super) fn open(
        network: &dyn Network,
        config: &GroupConfig,
        rank: usize,
        topology: &Topology,
        segment: (&Words, &SegmentLayout),
        deadline: Instant,
    ) -> Result<Net> {
        let (words, layout) = segment;
        let bell = |lane| Bell {
            segment: words.clone(),
            bell: layout.doorbell(lane),
            sleeping: layout.sleeping(lane),
        };
        let spec = PortSpec {
            shape: shape(config, topology),
            rank,
            peers: topology.links().to_vec(),
            bells: (0..config.num_lanes as usize).map(bell).collect(),
        };
        let port = network.open(spec, deadline)?;
        let error_sent = AtomicBool::new(false);
        Ok(Net { port, description: network.describe(), remark: None, error_sent })
    }

    /// Connects to the ranks at the other ends; `offers` are those of all ranks.
    pub(super) fn connect(
        &mut self,
        topology: &Topology,
        offers: &[Vec<u8>],
        deadline: Instant,
    ) -> Result<()> {
        let of_links = topology.links().iter().map(|&peer| offers[peer].clone()).collect();
        self.remark = self.port.connect(of_links, deadline)?;
        Ok(())
    }

    /// Bytes of the largest message of a kind.
    pub(crate) fn chunk_bytes(&self, kind: Kind) -> usize {
        self.port.layout().max_bytes(Stream::new(0, kind)) as usize
    }

    /// What the network is, for a person.
    pub(super) fn describe(&self) -> String {
        match &self.remark {
            None => self.description.clone(),
            Some(remark) => format!("{}; {remark}", self.description),
        }
    }

    /// Bytes of slots, words and rings.
    pub(super) fn bytes(&self) -> u64 {
        self.port.layout().region_bytes() + self.port.layout().control_bytes()
    }

    /// Tells the ranks at the other ends, the first time.
    pub(super) fn send_error(&self, info: &ErrorInfo) {
        // AcqRel: whoever comes first alone uses the error stream; nobody reads what the others did.
        if self.error_sent.swap(true, Ordering::AcqRel) {
            return;
        }
        let body = fault::body_of(info);
        for link in 0..self.port.layout().shape().num_links {
            let slot = self.port.slot_staging(link, ERRORS, 0);
            // SAFETY: the slot has room for a record, and this is its only use, by the only thread that got here.
            unsafe { slot.cast::<ErrorBody>().write_unaligned(body) };
            // The group is broken: a link that takes nothing any more changes nothing.
            let _ = self.port.send(link, ERRORS, 0, size_of::<ErrorBody>());
        }
    }

    /// An error that came over a link.
    pub(super) fn received_error(&self) -> Option<ErrorInfo> {
        let links = 0..self.port.layout().shape().num_links;
        let slot = links.into_iter().find_map(|link| self.port.landed(link, ERRORS, 0))?;
        // SAFETY: a landed error is a whole record, and there is no second one.
        Some(fault::info_of(&unsafe { slot.cast::<ErrorBody>().read_unaligned() }))
    }

    /// Why nothing goes to or comes from `rank` any more, if that is so; it is at the end of a link or of none.
    pub(super) fn failure(&self, topology: &Topology, rank: usize) -> Option<&LinkFailure> {
        let link = topology.links().binary_search(&rank).ok()?;
        self.port.failure(link)
    }

    /// This rank sends nothing more. Waits a little until what it sent is gone.
    pub(super) fn leave(&self) {
        let deadline = Instant::now() + LINGER;
        // What is still on its way then stays with the proxy, memory and all.
        let _ = self.port.begin_close(deadline).wait(deadline, "leaving the links between nodes");
    }
}
