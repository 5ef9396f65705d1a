//! Which stores to fill a ring with. Where writer and reader share a cache, rows stay in it between them.
//! Where they do not (other core complex, other socket), each line of a cached store is first fetched from
//! the reader's cache, several times dearer than a store past the caches. Nothing tells the two apart
//! reliably, least of all in a virtual machine, whose cores move: so the writer measures.

use std::ops::Range;
use std::time::Instant;

use super::exchange::Exchange;
use super::ring::RingWriter;
use crate::engine::RingPositions;

/// Batches below this size say nothing.
const LEAST_BYTES: u64 = 8 << 10;
/// One batch of so many tries the stores that are not in use.
const TRIAL_EVERY: u32 = 32;

/// The stores into the ring of one peer: what each kind costs, and which is used.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct StoreChoice {
    /// Picoseconds a byte, averaged over the last batches; 0: not known.
    cached: u32,
    streaming: u32,
    /// Batches that were measured.
    batches: u32,
}

/// A batch in progress.
#[derive(Clone, Copy, Debug)]
struct Batch {
    streaming: bool,
    start: Instant,
}

impl StoreChoice {
    /// Begins a batch, and says which stores to use for it.
    fn begin(&self) -> Batch {
        let trial = self.batches % TRIAL_EVERY == TRIAL_EVERY - 1;
        Batch { streaming: self.streaming_is_cheaper() != trial, start: Instant::now() }
    }

    /// Ends a batch of `bytes` bytes, which were published.
    fn end(&mut self, batch: Batch, bytes: u64) {
        if bytes < LEAST_BYTES {
            return;
        }
        self.batches = self.batches.wrapping_add(1);
        let known = if batch.streaming { &mut self.streaming } else { &mut self.cached };
        let cost = (batch.start.elapsed().as_nanos() as u64).saturating_mul(1000) / bytes;
        // 8 ns a byte: whatever took longer was interrupted.
        let cost = cost.clamp(8, 8000) as u32;
        *known = match *known {
            0 => cost,
            // A batch during which another process had the core counts as twice as dear at most.
            known if cost > known => known + (cost.min(2 * known) - known) / 8 + 1,
            known => (known + cost) / 2,
        };
    }

    /// Cached stores save the reader a trip to memory: they may cost a quarter more.
    fn streaming_is_cheaper(&self) -> bool {
        self.streaming != 0 && self.cached > self.streaming + self.streaming / 4
    }
}

/// A ring while this rank puts a batch of pieces into it.
pub(super) struct Filling<'a> {
    writer: RingWriter<'a>,
    batch: Batch,
}

impl<'a> Filling<'a> {
    /// Goes on in the ring through `channel`, whose positions are `ring`.
    pub(super) fn begin(exchange: &Exchange<'a>, channel: usize, ring: &RingPositions) -> Filling<'a> {
        Filling { writer: exchange.ring_writer(channel, ring.sent), batch: ring.stores.begin() }
    }

    /// True if the batch is to be stored past the caches.
    pub(super) fn streaming(&self) -> bool {
        self.batch.streaming
    }

    /// Room for a piece, as [`RingWriter::reserve`].
    pub(super) fn reserve(&mut self, bytes: usize) -> Option<*mut u8> {
        self.writer.reserve(bytes)
    }

    /// Makes the batch visible and notes what it cost. Returns the positions from the first new byte to the end;
    /// None if there is nothing new.
    pub(super) fn publish(mut self, ring: &mut RingPositions) -> Option<Range<u64>> {
        let moved = ring.sent..self.writer.position();
        ring.sent = moved.end;
        if !self.writer.publish() {
            return None;
        }
        ring.stores.end(self.batch, moved.end - moved.start);
        Some(moved)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Batches as [`StoreChoice::begin`] chooses them, at these costs; how many of the last were streaming.
    fn run(choice: &mut StoreChoice, cached: u32, streaming: u32) -> usize {
        let batch = |_| {
            let batch = choice.begin();
            let cost = if batch.streaming { streaming } else { cached };
            let start = Instant::now() - std::time::Duration::from_nanos(u64::from(cost) * 1000);
            choice.end(Batch { start, ..batch }, 1 << 20);
            batch.streaming
        };
        let batches: Vec<bool> = (0..40 * TRIAL_EVERY).map(batch).collect();
        batches[batches.len() - 10 * TRIAL_EVERY as usize..].iter().filter(|&&streaming| streaming).count()
    }

    #[test]
    fn the_cheaper_stores_are_used_but_for_trials_and_a_change_is_noticed() {
        let mut choice = StoreChoice::default();
        assert_eq!(run(&mut choice, 50, 90), 10);
        assert_eq!(run(&mut choice, 300, 90), 310);
        assert_eq!(run(&mut choice, 50, 90), 10);
    }
}
