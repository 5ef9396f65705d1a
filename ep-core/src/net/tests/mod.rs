//! Ports, proxies and the simulated network together.

mod cluster;
mod faults;
mod protocol;
mod script;
mod sim;
mod threads;
mod traffic;

/// Seeds of random tests: `count` from 1, or the one that `EP_TEST_SEED` gives.
fn seeds(count: u64) -> Vec<u64> {
    match std::env::var("EP_TEST_SEED").ok().and_then(|seed| seed.parse().ok()) {
        Some(seed) => vec![seed],
        None => (1..=count).collect(),
    }
}
