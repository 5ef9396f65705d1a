//! Time that all processes of the machine share.

use rustix::time::{ClockId, clock_gettime};

/// When something began and ended, in nanoseconds of the system's monotonic clock.
pub(crate) type Span = (u64, u64);

/// Now.
pub(crate) fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// From the first beginning to the last end, in nanoseconds.
pub(crate) fn whole(spans: impl Iterator<Item = Span> + Clone) -> u64 {
    let start = spans.clone().map(|span| span.0).min().unwrap_or(0);
    spans.map(|span| span.1).max().unwrap_or(0).saturating_sub(start)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_collective_takes_from_its_first_start_to_its_last_end() {
        assert_eq!(whole([(5, 9), (3, 7), (8, 10)].into_iter()), 7);
        assert_eq!(whole([].into_iter()), 0);
        assert!(now_ns() > 0);
    }
}
