//! Every offset of a rank's segment and of a plan's memory, once.

use crate::config::GroupConfig;
use crate::wire::{DEPTH, DESC_BYTES, ERROR_BYTES, LINE_BYTES, REQUESTS};

const LINE: usize = LINE_BYTES;

/// Where things lie in a rank's segment. The same on every rank of a group.
///
/// ```text
/// header: alive word, error record
/// per lane: doorbell line | a line per channel | descriptors [rank][depth] | request rings [channel]
///           | relay tails [source][place][depth] | staging rings [channel]
/// ```
///
/// A *place* is that of a rank among those that share memory. Channel `place` is for what the rank at that place
/// sends by itself, channel `num_locals + place` for what it passes on between nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentLayout {
    num_ranks: usize,
    num_lanes: usize,
    neighbours: Neighbours,
    desc_stride: usize,
    relay_tail_stride: usize,
    ring_bytes: usize,
    lane_bytes: usize,
}

/// Who writes into a rank's segment. The same on all ranks of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Neighbours {
    /// Ranks that share memory.
    pub num_locals: usize,
    /// There are ranks of other nodes.
    pub has_remotes: bool,
    /// The most remote ranks whose messages one rank takes for the others of its node.
    pub max_relayed: usize,
}

impl Neighbours {
    /// All ranks share memory.
    pub fn of_one_memory(num_ranks: usize) -> Neighbours {
        Neighbours { num_locals: num_ranks, has_remotes: false, max_relayed: 0 }
    }

    /// Channels from the ranks of the node.
    pub fn num_channels(&self) -> usize {
        if self.has_remotes { 2 * self.num_locals } else { self.num_locals }
    }

    fn num_relay_tails(&self) -> usize {
        self.max_relayed * self.num_locals * DEPTH as usize
    }
}

/// Offset of the word that says whether the rank is a member (1) or has left (2).
pub const ALIVE: usize = 0;
/// Offset of the error record.
pub const ERROR: usize = LINE;
const HEADER_BYTES: usize = 4096;
const _: () = assert!(ERROR + ERROR_BYTES <= HEADER_BYTES);

/// Staging memory of a lane, all rings together, when the caller does not choose: what a rank hands over in a
/// turn is worth the change of process, and the rings of four ranks stay in a shared cache of 16 MiB.
const DEFAULT_RINGS_BYTES: usize = 4 << 20;
/// The largest default ring.
const DEFAULT_RING_MAX: usize = 1 << 20;
/// The smallest ring: a quarter holds a piece of a token's 256 rows, 64 bytes each.
pub const RING_MIN: usize = 64 << 10;
/// The largest ring.
pub const RING_MAX: usize = 1 << 30;

/// Ring size for a group: the caller's, rounded up to pages, or a share of the default by the ranks of a node.
pub fn ring_bytes(asked: u32, num_locals: usize) -> usize {
    let bytes = match asked as usize {
        0 => (DEFAULT_RINGS_BYTES / num_locals).min(DEFAULT_RING_MAX),
        bytes => bytes,
    };
    bytes.clamp(RING_MIN, RING_MAX).next_multiple_of(4096)
}

impl SegmentLayout {
    /// The layout for a checked config (no zero defaults left).
    pub fn new(config: &GroupConfig, num_ranks: usize, neighbours: Neighbours) -> SegmentLayout {
        let tail = 4 * (1 + config.max_local_experts as usize);
        let mut layout = SegmentLayout {
            num_ranks,
            num_lanes: config.num_lanes as usize,
            neighbours,
            desc_stride: (DESC_BYTES + tail).next_multiple_of(LINE),
            relay_tail_stride: tail.next_multiple_of(64),
            ring_bytes: config.ring_bytes as usize,
            lane_bytes: 0,
        };
        let rings = neighbours.num_channels() * layout.ring_bytes;
        layout.lane_bytes = layout.words_bytes().next_multiple_of(4096) + rings;
        layout
    }

    /// Bytes of a lane before its rings.
    fn words_bytes(&self) -> usize {
        self.relay_tails_start() + self.neighbours.num_relay_tails() * self.relay_tail_stride
    }

    fn descs_start(&self) -> usize {
        LINE * (1 + self.neighbours.num_channels())
    }

    fn requests_start(&self) -> usize {
        self.descs_start() + self.num_ranks * DEPTH as usize * self.desc_stride
    }

    fn relay_tails_start(&self) -> usize {
        self.requests_start() + self.neighbours.num_channels() * 4 * REQUESTS
    }

    /// Size of the segment.
    pub fn bytes(&self) -> usize {
        HEADER_BYTES + self.num_lanes * self.lane_bytes
    }

    /// Who writes into the segment.
    pub fn neighbours(&self) -> &Neighbours {
        &self.neighbours
    }

    fn lane(&self, lane: usize) -> usize {
        HEADER_BYTES + lane * self.lane_bytes
    }

    /// The word that every publisher bumps after it wrote something of this lane here.
    pub fn doorbell(&self, lane: usize) -> usize {
        self.lane(lane)
    }

    /// The word that is 1 while the owner sleeps on the doorbell.
    pub fn sleeping(&self, lane: usize) -> usize {
        self.lane(lane) + 4
    }

    /// The word that says whom the owner waits for; the owner writes it, peers read it at a deadline.
    pub fn waiting(&self, lane: usize) -> usize {
        self.lane(lane) + 8
    }

    /// The line of words that comes by `channel`; add an offset of [`crate::wire::line`].
    pub fn line(&self, lane: usize, channel: usize) -> usize {
        self.lane(lane) + LINE + channel * LINE
    }

    /// The descriptor of `rank` for `epoch`, which it writes itself, or for it the rank that takes its messages.
    pub fn desc(&self, lane: usize, rank: usize, epoch: u64) -> usize {
        let slot = rank * DEPTH as usize + (epoch % DEPTH) as usize;
        self.lane(lane) + self.descs_start() + slot * self.desc_stride
    }

    /// The request ring of `channel`.
    pub fn requests(&self, lane: usize, channel: usize) -> usize {
        self.lane(lane) + self.requests_start() + channel * 4 * REQUESTS
    }

    /// Where the rank at `place` says to which of its rows the rows of a remote rank go, the `source`-th that the
    /// owner of the segment serves.
    pub fn relay_tail(&self, lane: usize, source: usize, place: usize, epoch: u64) -> usize {
        let slot = (source * self.neighbours.num_locals + place) * DEPTH as usize + (epoch % DEPTH) as usize;
        self.lane(lane) + self.relay_tails_start() + slot * self.relay_tail_stride
    }

    /// The staging ring of `channel`.
    pub fn ring(&self, lane: usize, channel: usize) -> usize {
        self.lane(lane + 1) - (self.neighbours.num_channels() - channel) * self.ring_bytes
    }

    /// Bytes of each staging ring.
    pub fn ring_bytes(&self) -> usize {
        self.ring_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn areas_do_not_overlap_and_fill_the_segment() {
        let one = Neighbours::of_one_memory;
        let nodes = |num_locals, max_relayed| Neighbours { num_locals, has_remotes: true, max_relayed };
        for (num_ranks, neighbours, num_lanes, max_local_experts) in [
            (1, one(1), 1, 1),
            (3, one(3), 2, 256),
            (5, one(5), 3, 7),
            (72, one(72), 2, 64),
            (4, nodes(2, 1), 2, 16),
            (9, nodes(1, 8), 1, 300),
            (24, nodes(8, 2), 3, 1),
            (6, nodes(2, 0), 1, 5),
        ] {
            let config = GroupConfig {
                num_lanes,
                max_local_experts,
                ring_bytes: ring_bytes(0, neighbours.num_locals) as u32,
                ..GroupConfig::default()
            };
            let layout = SegmentLayout::new(&config, num_ranks, neighbours);
            let mut areas = vec![(0, HEADER_BYTES)];
            for lane in 0..num_lanes as usize {
                areas.push((layout.doorbell(lane), LINE));
                for channel in 0..neighbours.num_channels() {
                    areas.push((layout.line(lane, channel), LINE));
                    areas.push((layout.requests(lane, channel), 4 * REQUESTS));
                    areas.push((layout.ring(lane, channel), layout.ring_bytes));
                }
                for epoch in 7..7 + DEPTH {
                    areas.extend(
                        (0..num_ranks).map(|rank| (layout.desc(lane, rank, epoch), layout.desc_stride)),
                    );
                    for source in 0..neighbours.max_relayed {
                        areas.extend((0..neighbours.num_locals).map(|place| {
                            (layout.relay_tail(lane, source, place, epoch), layout.relay_tail_stride)
                        }));
                    }
                }
            }
            areas.sort_unstable();
            for pair in areas.windows(2) {
                assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{pair:?} overlap for {num_ranks} ranks");
            }
            let (start, bytes) = areas[areas.len() - 1];
            assert_eq!(start + bytes, layout.bytes());
        }
    }
}
