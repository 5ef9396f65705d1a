//! Which stores to fill a ring with. Where writer and reader share a cache, rows stay in it between them.
//! Where they do not (other core complex, other socket), each line of a cached store is first fetched from
//! the reader's cache, several times dearer than a store past the caches. Nothing tells the two apart
//! reliably, least of all in a virtual machine, whose cores move: so the writer measures.

use std::time::Instant;

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
pub(super) struct Batch {
    pub(super) streaming: bool,
    start: Instant,
}

impl StoreChoice {
    /// Begins a batch, and says which stores to use for it.
    pub(super) fn begin(&mut self) -> Batch {
        let trial = self.batches % TRIAL_EVERY == TRIAL_EVERY - 1;
        Batch { streaming: self.streaming_is_cheaper() != trial, start: Instant::now() }
    }

    /// Ends a batch of `bytes` bytes, which were published.
    pub(super) fn end(&mut self, batch: Batch, bytes: u64) {
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
