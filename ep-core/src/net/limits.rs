//! What a port may use of the NICs, changeable while it runs.

use std::sync::atomic::{AtomicU64, Ordering};

/// Limits of one port. Every value is in effect within a turn of the proxy.
#[derive(Debug)]
pub struct Limiter {
    bytes_in_flight: AtomicU64,
    nics: AtomicU64,
}

impl Default for Limiter {
    fn default() -> Limiter {
        Limiter { bytes_in_flight: AtomicU64::new(u64::MAX), nics: AtomicU64::new(u64::MAX) }
    }
}

impl Limiter {
    /// Bytes of messages that may be posted and not completed. One message always may.
    pub fn set_bytes_in_flight(&self, bytes: u64) {
        // Relaxed: only the value counts.
        self.bytes_in_flight.store(bytes, Ordering::Relaxed);
    }

    /// The NICs to write with: bit i is NIC i. Those that a link does not have do not count; none means all. A link
    /// that may not use all of its NICs does not cut messages.
    pub fn set_nics(&self, mask: u64) {
        // Relaxed: only the value counts.
        self.nics.store(mask, Ordering::Relaxed);
    }

    /// What [`Limiter::set_bytes_in_flight`] said.
    pub fn bytes_in_flight(&self) -> u64 {
        // Relaxed: only the value counts.
        self.bytes_in_flight.load(Ordering::Relaxed)
    }

    /// What [`Limiter::set_nics`] said.
    pub fn nics(&self) -> u64 {
        // Relaxed: only the value counts.
        self.nics.load(Ordering::Relaxed)
    }
}
