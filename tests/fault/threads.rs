//! Ranks as threads of this process.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use ep_core::bootstrap::LocalBootstrap;
use ep_core::config::GroupConfig;
use ep_core::engine::{Backend, Group};
use ep_core::net::sim::{SimNetwork, SimOptions};
use ep_core::perturb::Perturb;

/// Generous: for what must succeed, on any machine.
pub(crate) const LONG: Duration = Duration::from_secs(60);

/// A config with a deadline and, for tests that fill rings, the smallest ones.
pub(crate) fn config(timeout: Duration) -> GroupConfig {
    GroupConfig {
        timeout_ms: timeout.as_millis() as u32,
        max_local_experts: 16,
        ring_bytes: 1,
        ..GroupConfig::default()
    }
}

/// Runs `body` as each rank of a group, and returns what the ranks return.
pub(crate) fn run<T: Send>(
    num_ranks: usize,
    config: &GroupConfig,
    perturb: impl Fn(usize) -> Perturb + Sync,
    body: impl Fn(&Arc<Group>) -> T + Sync,
) -> Vec<T> {
    run_on(&Backend::host(""), num_ranks, LONG, |_| *config, perturb, body)
}

/// As [`run`], on a backend and with a config for each rank.
fn run_on<T: Send>(
    backend: &Backend,
    num_ranks: usize,
    patience: Duration,
    config: impl Fn(usize) -> GroupConfig + Sync,
    perturb: impl Fn(usize) -> Perturb + Sync,
    body: impl Fn(&Arc<Group>) -> T + Sync,
) -> Vec<T> {
    let bootstraps = LocalBootstrap::group(num_ranks);
    thread::scope(|scope| {
        let (config, perturb, body) = (&config, &perturb, &body);
        let ranks: Vec<_> = bootstraps
            .into_iter()
            .enumerate()
            .map(|(rank, bootstrap)| {
                scope.spawn(move || {
                    let deadline = Instant::now() + patience;
                    let (backend, config, bootstrap) = (backend.clone(), config(rank), Box::new(bootstrap));
                    let group = Group::create_perturbed(backend, &config, bootstrap, deadline, perturb(rank));
                    body(&group.expect("the group is made"))
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().expect("no rank panics")).collect()
    })
}

/// As [`run`], without disturbances.
pub(crate) fn run_calm<T: Send>(
    num_ranks: usize,
    timeout: Duration,
    body: impl Fn(&Arc<Group>) -> T + Sync,
) -> Vec<T> {
    run(num_ranks, &config(timeout), |_| Perturb::none(), body)
}

/// Ranks on several nodes, with a simulated network between them.
pub(crate) struct Nodes {
    node_ids: Vec<u32>,
    backend: Backend,
    pub(crate) network: Arc<SimNetwork>,
    pub(crate) config: GroupConfig,
    /// For making the group.
    pub(crate) patience: Duration,
}

impl Nodes {
    /// Rank r is on node `node_ids[r]`, and its proxy has NICs of its own.
    pub(crate) fn new(node_ids: &[u32], seed: u64, timeout: Duration) -> Nodes {
        Nodes::with_proxies(node_ids, seed, timeout, node_ids.len())
    }

    /// The same with few proxies, that ranks share.
    pub(crate) fn with_proxies(node_ids: &[u32], seed: u64, timeout: Duration, num_proxies: usize) -> Nodes {
        let options = SimOptions { seed, again_one_in: 40, cq_depth: 1 << 24, ..SimOptions::default() };
        let network = Arc::new(SimNetwork::start(options, num_proxies, 2).expect("a network"));
        let backend = Backend::host("").with_network(network.clone(), "for tests");
        let config = GroupConfig { transport: 2, chunk_bytes: 16 << 10, chunk_window: 2, ..config(timeout) };
        Nodes { node_ids: node_ids.to_vec(), backend, network, config, patience: LONG }
    }

    /// Runs `body` as each rank, and returns what the ranks return.
    pub(crate) fn run<T: Send>(
        &self,
        perturb: impl Fn(usize) -> Perturb + Sync,
        body: impl Fn(&Arc<Group>) -> T + Sync,
    ) -> Vec<T> {
        let config = |rank: usize| GroupConfig { node_id: self.node_ids[rank], ..self.config };
        run_on(&self.backend, self.node_ids.len(), self.patience, config, perturb, body)
    }
}

/// Ends the process, and says where, unless it is dropped in time: a hang is a failure, not a wait.
pub(crate) struct Watchdog {
    _alive: Sender<()>,
}

impl Watchdog {
    pub(crate) fn new(what: impl Into<String>, limit: Duration) -> Watchdog {
        let (alive, dropped) = channel::<()>();
        let what = what.into();
        thread::spawn(move || {
            if dropped.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
                eprintln!("{what} hangs: it is not over after {limit:?}");
                std::process::abort();
            }
        });
        Watchdog { _alive: alive }
    }
}

#[test]
fn the_workload_is_right_in_every_layout_and_place() {
    use ep_core::config::Layout;

    use crate::work::{Member, Place, Shape};

    let _watchdog = Watchdog::new("the workload", LONG);
    for num_ranks in [1, 2, 5] {
        for layout in [Layout::Flat, Layout::ExpertMajor] {
            for place in [Place::Window, Place::Ring] {
                for shape in [Shape::small, Shape::large] {
                    run_calm(num_ranks, LONG, |group| {
                        let mut member = Member::new(group, shape(num_ranks, layout, place)).unwrap();
                        for seed in 0..3 {
                            member.round(seed).unwrap();
                        }
                    });
                }
            }
        }
    }
}
