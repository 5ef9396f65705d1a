//! What went over a link, counted by the proxy.

use std::sync::atomic::{AtomicU64, Ordering};

/// The counters of one link. The proxy is their only writer.
#[derive(Debug, Default)]
pub(super) struct LinkCounters {
    pub(super) messages: Counter,
    pub(super) writes: Counter,
    pub(super) bytes: Counter,
    pub(super) credits: Counter,
    pub(super) arrived: Counter,
    pub(super) credits_arrived: Counter,
    pub(super) again: Counter,
}

/// What went over one link, since it was connected. Messages are counted when the proxy takes them from their ring,
/// or when they have landed; the rest when it is posted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkStats {
    /// Messages with a slot that were sent.
    pub messages: u64,
    /// Writes that carried them: more where messages were cut over NICs.
    pub writes: u64,
    /// Their bytes, in multiples of 16.
    pub bytes: u64,
    /// Credits sent; several may have become one write.
    pub credits: u64,
    /// Messages with a slot that have landed.
    pub arrived: u64,
    /// Credits that have come.
    pub credits_arrived: u64,
    /// Posts that the NIC did not take at once.
    pub again: u64,
}

/// A number with one writer.
#[derive(Debug, Default)]
pub(super) struct Counter(AtomicU64);

impl Counter {
    pub(super) fn add(&self, value: u64) {
        // Relaxed: the proxy is the only writer, and the number orders nothing.
        let before = self.0.load(Ordering::Relaxed);
        // Relaxed: as above.
        self.0.store(before + value, Ordering::Relaxed);
    }

    fn read(&self) -> u64 {
        // Relaxed: the number orders nothing.
        self.0.load(Ordering::Relaxed)
    }
}

impl LinkCounters {
    pub(super) fn read(&self) -> LinkStats {
        LinkStats {
            messages: self.messages.read(),
            writes: self.writes.read(),
            bytes: self.bytes.read(),
            credits: self.credits.read(),
            arrived: self.arrived.read(),
            credits_arrived: self.credits_arrived.read(),
            again: self.again.read(),
        }
    }
}
