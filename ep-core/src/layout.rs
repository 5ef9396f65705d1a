//! Every offset of a rank's segment and of a plan's memory, once.

use crate::config::GroupConfig;
use crate::wire::{DEPTH, DESC_BYTES, ERROR_BYTES, LINE_BYTES, REQUESTS};

const LINE: usize = LINE_BYTES;

/// Where things lie in a rank's segment. The same on every rank of a group.
///
/// ```text
/// header: alive word, error record
/// per lane: doorbell line | a line per peer | descriptors [peer][depth] | request rings [peer]
///           | staging rings [peer]
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentLayout {
    num_ranks: usize,
    num_lanes: usize,
    desc_stride: usize,
    ring_bytes: usize,
    lane_bytes: usize,
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

/// Ring size for a group: the caller's, rounded up to pages, or a share of the default by rank count.
pub fn ring_bytes(asked: u32, num_ranks: usize) -> usize {
    let bytes = match asked as usize {
        0 => (DEFAULT_RINGS_BYTES / num_ranks).min(DEFAULT_RING_MAX),
        bytes => bytes,
    };
    bytes.clamp(RING_MIN, RING_MAX).next_multiple_of(4096)
}

impl SegmentLayout {
    /// The layout for a checked config (no zero defaults left).
    pub fn new(config: &GroupConfig, num_ranks: usize) -> SegmentLayout {
        let tail = 4 * (1 + config.max_local_experts as usize);
        let desc_stride = (DESC_BYTES + tail).next_multiple_of(LINE);
        let ring_bytes = config.ring_bytes as usize;
        let per_peer = LINE + DEPTH as usize * desc_stride + 4 * REQUESTS;
        let lane_bytes = (LINE + num_ranks * per_peer).next_multiple_of(4096) + num_ranks * ring_bytes;
        SegmentLayout { num_ranks, num_lanes: config.num_lanes as usize, desc_stride, ring_bytes, lane_bytes }
    }

    /// Size of the segment.
    pub fn bytes(&self) -> usize {
        HEADER_BYTES + self.num_lanes * self.lane_bytes
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

    /// The line of words that `peer` writes; add an offset of [`crate::wire::line`].
    pub fn line(&self, lane: usize, peer: usize) -> usize {
        self.lane(lane) + LINE + peer * LINE
    }

    /// The descriptor that `peer` writes for `epoch`.
    pub fn desc(&self, lane: usize, peer: usize, epoch: u64) -> usize {
        let slot = peer * DEPTH as usize + (epoch % DEPTH) as usize;
        self.lane(lane) + LINE * (1 + self.num_ranks) + slot * self.desc_stride
    }

    /// The request ring that `peer` writes.
    pub fn requests(&self, lane: usize, peer: usize) -> usize {
        let descs = LINE * (1 + self.num_ranks) + self.num_ranks * DEPTH as usize * self.desc_stride;
        self.lane(lane) + descs + peer * 4 * REQUESTS
    }

    /// The staging ring that `peer` writes.
    pub fn ring(&self, lane: usize, peer: usize) -> usize {
        self.lane(lane + 1) - (self.num_ranks - peer) * self.ring_bytes
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
        for (num_ranks, num_lanes, max_local_experts) in [(1, 1, 1), (3, 2, 256), (5, 3, 7), (72, 2, 64)] {
            let config = GroupConfig {
                num_lanes,
                max_local_experts,
                ring_bytes: ring_bytes(0, num_ranks) as u32,
                ..GroupConfig::default()
            };
            let layout = SegmentLayout::new(&config, num_ranks);
            let mut areas = vec![(0, HEADER_BYTES)];
            for lane in 0..num_lanes as usize {
                areas.push((layout.doorbell(lane), LINE));
                for peer in 0..num_ranks {
                    areas.push((layout.line(lane, peer), LINE));
                    for epoch in 7..7 + DEPTH {
                        areas.push((layout.desc(lane, peer, epoch), layout.desc_stride));
                    }
                    areas.push((layout.requests(lane, peer), 4 * REQUESTS));
                    areas.push((layout.ring(lane, peer), layout.ring_bytes));
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
