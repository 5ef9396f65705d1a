//! A lane: what one rank keeps between the calls of an ordered sequence.

use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::config::PeerStats;
use crate::error::{Error, Result, Status};
use crate::host::{LaneScratch, StoreChoice};

/// One lane of one rank. One call at a time.
pub(crate) struct Lane {
    busy: AtomicBool,
    state: UnsafeCell<LaneState>,
    pub(crate) counters: Vec<Counters>,
}

// SAFETY: `state` is reached through `LaneGuard` only, and `busy` lets one guard exist at a time.
unsafe impl Sync for Lane {}

/// The private side of the lane's words.
pub(crate) struct LaneState {
    /// The number of the last call; the next one is one higher, on every rank.
    pub(crate) epoch: u64,
    /// How far this rank is in the rings it shares with each peer.
    pub(crate) rings: Vec<RingPositions>,
    /// Working memory of calls, kept so that calls do not allocate.
    pub(crate) scratch: LaneScratch,
}

/// Byte and request counts since the group was made; the words in the segments follow them.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RingPositions {
    /// Bytes put into the peer's ring for this rank.
    pub(crate) sent: u64,
    /// Bytes taken from this rank's ring for the peer.
    pub(crate) taken: u64,
    /// The stores that fill the peer's ring.
    pub(crate) stores: StoreChoice,
    /// Requests put into the peer's request ring.
    pub(crate) requested: u64,
    /// Requests taken from this rank's request ring.
    pub(crate) served: u64,
}

impl Lane {
    pub(crate) fn new(num_ranks: usize) -> Lane {
        let state = LaneState {
            epoch: 0,
            rings: vec![RingPositions::default(); num_ranks],
            scratch: LaneScratch::new(num_ranks),
        };
        Lane {
            busy: AtomicBool::new(false),
            state: UnsafeCell::new(state),
            counters: (0..num_ranks).map(|_| Counters::default()).collect(),
        }
    }

    /// Takes the lane for one call.
    ///
    /// # Errors
    /// [`Status::InvalidState`] if another thread's call is in it.
    pub(crate) fn enter(&self, lane: usize) -> Result<LaneGuard<'_>> {
        // Acquire: pairs with the release in `LaneGuard::drop`; the last call's state is visible.
        if self.busy.swap(true, Ordering::Acquire) {
            return Err(Error::new(
                Status::InvalidState,
                format!(
                    "another call is in progress in lane {lane}; order the calls of a lane by one stream or \
                     thread, or use another lane"
                ),
            ));
        }
        Ok(LaneGuard { lane: self })
    }
}

/// Exclusive use of a lane.
pub(crate) struct LaneGuard<'a> {
    lane: &'a Lane,
}

impl Deref for LaneGuard<'_> {
    type Target = LaneState;

    fn deref(&self) -> &LaneState {
        // SAFETY: `busy` was taken by this guard, so no other reference exists.
        unsafe { &*self.lane.state.get() }
    }
}

impl DerefMut for LaneGuard<'_> {
    fn deref_mut(&mut self) -> &mut LaneState {
        // SAFETY: as in `deref`, and `self` is borrowed mutably.
        unsafe { &mut *self.lane.state.get() }
    }
}

impl Drop for LaneGuard<'_> {
    fn drop(&mut self) {
        // Release: pairs with the acquire in `Lane::enter`.
        self.lane.busy.store(false, Ordering::Release);
    }
}

/// What a lane did with one peer. Written by the lane's call, read by any thread.
#[derive(Default)]
pub(crate) struct Counters {
    calls: AtomicU64,
    rows_sent: AtomicU64,
    bytes_sent: AtomicU64,
    rows_received: AtomicU64,
    bytes_combined: AtomicU64,
    rows_dropped: AtomicU64,
    wait_dispatch_ns: AtomicU64,
    wait_combine_ns: AtomicU64,
}

impl Counters {
    fn pairs<'a>(&'a self, stats: &'a mut PeerStats) -> [(&'a AtomicU64, &'a mut u64); 8] {
        [
            (&self.calls, &mut stats.calls),
            (&self.rows_sent, &mut stats.rows_sent),
            (&self.bytes_sent, &mut stats.bytes_sent),
            (&self.rows_received, &mut stats.rows_received),
            (&self.bytes_combined, &mut stats.bytes_combined),
            (&self.rows_dropped, &mut stats.rows_dropped),
            (&self.wait_dispatch_ns, &mut stats.wait_dispatch_ns),
            (&self.wait_combine_ns, &mut stats.wait_combine_ns),
        ]
    }

    /// Adds what one call did.
    pub(crate) fn add(&self, call: &PeerStats) {
        let mut call = *call;
        for (counter, value) in self.pairs(&mut call) {
            // Relaxed: statistics order nothing.
            counter.fetch_add(*value, Ordering::Relaxed);
        }
    }

    /// Adds everything so far to `sum`.
    pub(crate) fn add_to(&self, sum: &mut PeerStats) {
        for (counter, value) in self.pairs(sum) {
            // Relaxed: statistics order nothing.
            *value += counter.load(Ordering::Relaxed);
        }
    }
}
