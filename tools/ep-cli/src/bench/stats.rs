//! Times of calls, and their percentiles.

use std::time::Duration;

/// Times in nanoseconds.
#[derive(Clone, Debug, Default)]
pub(crate) struct Samples {
    ns: Vec<u64>,
}

impl Samples {
    /// These times.
    pub(crate) fn new(ns: Vec<u64>) -> Samples {
        Samples { ns }
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.ns.len()
    }

    /// Their sum.
    pub(crate) fn total(&self) -> Duration {
        Duration::from_nanos(self.ns.iter().sum())
    }

    /// Adds more.
    pub(crate) fn extend(&mut self, more: Samples) {
        self.ns.extend(more.ns);
    }

    /// The time that `percent` of the calls do not exceed; zero if there are none.
    pub(crate) fn percentile(&self, percent: f64) -> Duration {
        let mut sorted = self.ns.clone();
        sorted.sort_unstable();
        let place = (percent / 100.0 * sorted.len() as f64).ceil() as usize;
        let ns = sorted.get(place.saturating_sub(1)).or(sorted.last());
        Duration::from_nanos(ns.copied().unwrap_or(0))
    }
}

/// A time in microseconds.
pub(crate) fn micros(time: Duration) -> f64 {
    time.as_nanos() as f64 / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_times_that_were_measured() {
        let samples = Samples::new((1..=100).rev().collect());
        let ns = |percent| samples.percentile(percent).as_nanos();
        assert_eq!((ns(0.0), ns(50.0), ns(99.0), ns(100.0)), (1, 50, 99, 100));
        assert_eq!(Samples::default().percentile(50.0), Duration::ZERO);
    }
}
