//! Ports, proxies and the simulated network together.

mod cluster;
mod faults;
mod protocol;
mod script;
mod sim;
mod threads;
mod traffic;

/// Seeds of random tests: `count` of them, or as many as `EP_TEST_CASES` says; or the one that `EP_TEST_SEED` gives.
fn seeds(count: u64) -> Vec<u64> {
    let number = |name| std::env::var(name).ok().and_then(|text| text.parse().ok());
    match number("EP_TEST_SEED") {
        Some(seed) => vec![seed],
        None => (1..=number("EP_TEST_CASES").unwrap_or(count)).collect(),
    }
}
