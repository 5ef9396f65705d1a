//! Seeded delays, reorderings and failures at the protocol's steps, for tests.
//!
//! The product carries it because the steps it disturbs are the product's: a simulated copy of them
//! would prove nothing. When it is off, a step costs one predictable branch.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// What a test wants to happen on one rank.
#[derive(Clone, Copy, Debug)]
pub struct Disturbance {
    /// Different on each rank, printed by the test.
    pub seed: u64,
    /// One step in this many is delayed; 0: none.
    pub delay_one_in: u64,
    /// The longest delay.
    pub delay_max: Duration,
    /// The rank stops answering for ever at this step; 0: never.
    pub stop_at_step: u64,
}

/// The disturbances of one rank's group.
#[derive(Debug)]
pub struct Perturb {
    what: Option<Disturbance>,
    steps: AtomicU64,
}

/// The rank shall stop here, as a process that died would.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stop;

impl Perturb {
    /// No disturbance.
    pub const fn none() -> Perturb {
        Perturb { what: None, steps: AtomicU64::new(0) }
    }

    /// With disturbances.
    pub const fn new(what: Disturbance) -> Perturb {
        Perturb { what: Some(what), steps: AtomicU64::new(0) }
    }

    /// One step of the protocol: before a word is published, a message is sent or a row is read.
    ///
    /// # Errors
    /// [`Stop`] if the rank shall stop here.
    #[inline]
    pub fn step(&self) -> Result<(), Stop> {
        match &self.what {
            None => Ok(()),
            Some(what) => self.disturb(what),
        }
    }

    #[cold]
    fn disturb(&self, what: &Disturbance) -> Result<(), Stop> {
        // Relaxed: only the value counts, it orders nothing.
        let step = self.steps.fetch_add(1, Ordering::Relaxed) + 1;
        if what.stop_at_step != 0 && step >= what.stop_at_step {
            return Err(Stop);
        }
        let random = mix(what.seed ^ step.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        if what.delay_one_in != 0 && random.is_multiple_of(what.delay_one_in) {
            let longest = what.delay_max.as_nanos().max(1) as u64;
            std::thread::sleep(Duration::from_nanos(mix(random) % longest));
        }
        Ok(())
    }

    /// Where a loop over `num_peers` peers begins: `default`, or anywhere.
    #[inline]
    pub fn first_peer(&self, default: usize, num_peers: usize) -> usize {
        match &self.what {
            None => default,
            // Relaxed: only the value counts.
            Some(what) => mix(what.seed ^ self.steps.load(Ordering::Relaxed)) as usize % num_peers,
        }
    }
}

/// splitmix64's output function.
fn mix(mut value: u64) -> u64 {
    value = (value ^ (value >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    value ^ (value >> 31)
}
