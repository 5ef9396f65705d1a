//! Conformance: every call of the C ABI against the reference, bit for bit.
//!
//! A *job* is made from its id (`kind:seed`) alone: [`job`] says what kinds there are, [`generate`] makes
//! the data and, with `ep_core::reference`, all expected outputs. A *cell* runs jobs: ranks as threads or
//! as processes ([`cell`]). What a rank does with a job is the same in each ([`rank`]). Outputs are
//! poisoned first and every byte is compared, also those that must not change ([`memory`]).
//!
//! `EP_TEST_SEED=kind:seed` runs one job only; `EP_TEST_CASES` is the number of random jobs (400) and scales
//! the other kinds with them.

#![expect(unreachable_pub, reason = "a test binary exports nothing")]

mod abi;
mod calls;
mod case;
mod cell;
mod cuda;
mod generate;
mod invariants;
mod job;
mod memory;
mod rank;
mod rng;
mod run;
mod stats;
mod strides;
mod trace;
mod world;

use std::path::Path;

use cell::processes::{Meeting, On, Processes, worker};
use cell::run_all;
use cell::threads::{HostNodes, HostThreads};
use cuda::Cuda;
use job::{JobId, Kind};

/// Random jobs of a default run.
const RANDOM_JOBS: usize = 400;

/// `count` jobs of a kind in a default run, more or fewer as the environment says.
fn jobs(kind: Kind, count: usize) -> Vec<JobId> {
    if let Ok(text) = std::env::var("EP_TEST_SEED") {
        let id: JobId = text.parse().unwrap_or_else(|e| panic!("EP_TEST_SEED: {e}"));
        return if id.kind == kind { vec![id] } else { Vec::new() };
    }
    let random = match std::env::var("EP_TEST_CASES") {
        Ok(text) => text.parse().unwrap_or_else(|e| panic!("EP_TEST_CASES: {e}")),
        Err(_) => RANDOM_JOBS,
    };
    let count = (count * random).div_ceil(RANDOM_JOBS);
    (1..=count as u64).map(|seed| JobId { kind, seed, networked: false }).collect()
}

/// As [`jobs`], in worlds with a network between nodes.
fn networked_jobs(kind: Kind, count: usize) -> Vec<JobId> {
    let mut networked = jobs(kind, count);
    if std::env::var("EP_TEST_SEED").is_err() {
        networked.iter_mut().for_each(|job| job.networked = true);
    }
    networked.retain(|job| job.networked);
    networked
}

#[test]
fn random_cases() {
    run_all(&HostThreads, &jobs(Kind::Random, RANDOM_JOBS));
}

#[test]
fn patterns_in_every_world() {
    run_all(&HostThreads, &jobs(Kind::Pattern, job::PATTERN_TURNS));
}

#[test]
fn orders_dtypes_and_wires() {
    run_all(&HostThreads, &jobs(Kind::Order, 2 * job::ORDER_TURNS));
}

#[test]
fn payload_sets() {
    run_all(&HostThreads, &jobs(Kind::Payload, 3 * job::PAYLOAD_TURNS));
}

#[test]
fn rows_larger_than_the_rings() {
    run_all(&HostThreads, &jobs(Kind::Large, 12));
}

#[test]
fn several_plans_alive_in_one_lane() {
    run_all(&HostThreads, &jobs(Kind::Plans, 36));
}

#[test]
fn two_lanes_on_two_streams_in_each_ranks_own_order() {
    run_all(&HostThreads, &jobs(Kind::Lanes, 60));
}

#[test]
fn groups_of_different_members_at_the_same_time() {
    run_all(&HostThreads, &jobs(Kind::Groups, 48));
}

#[test]
fn recorded_routing() {
    run_all(&HostThreads, &jobs(Kind::Trace, job::TRACE_TURNS));
}

#[test]
fn payloads_side_by_side_in_records() {
    run_all(&HostThreads, &jobs(Kind::Records, 24));
}

#[test]
fn stats_of_dropped_rows() {
    run_all(&HostThreads, &jobs(Kind::Stats, 40));
}

#[test]
fn processes_that_meet_through_a_file() {
    let mut all = jobs(Kind::Random, 48);
    all.extend(jobs(Kind::Groups, 8));
    all.extend(jobs(Kind::Lanes, 12));
    all.extend(jobs(Kind::Large, 2));
    run_all(&Processes { meeting: Meeting::File, on: On::Host, libfabric: None }, &all);
}

#[test]
fn processes_that_meet_through_an_id() {
    let mut all = jobs(Kind::Payload, 12);
    all.extend(jobs(Kind::Groups, 4));
    all.extend(jobs(Kind::Trace, 3));
    run_all(&Processes { meeting: Meeting::UniqueId, on: On::Host, libfabric: None }, &all);
}

#[test]
fn networked_random_cases() {
    run_all(&HostNodes::new(1), &networked_jobs(Kind::Random, 200));
}

#[test]
fn networked_patterns_in_every_world() {
    run_all(&HostNodes::new(2), &networked_jobs(Kind::Pattern, job::PATTERN_TURNS));
}

#[test]
fn networked_orders_dtypes_and_wires() {
    run_all(&HostNodes::new(3), &networked_jobs(Kind::Order, 12 * job::ORDER_TURNS));
}

#[test]
fn networked_payload_sets() {
    run_all(&HostNodes::new(4), &networked_jobs(Kind::Payload, 2 * job::PAYLOAD_TURNS));
}

#[test]
fn networked_rows_larger_than_messages() {
    run_all(&HostNodes::new(5), &networked_jobs(Kind::Large, 8));
}

#[test]
fn networked_plans_and_lanes_and_groups() {
    let mut all = networked_jobs(Kind::Plans, 24);
    all.extend(networked_jobs(Kind::Lanes, 36));
    all.extend(networked_jobs(Kind::Groups, 24));
    all.extend(networked_jobs(Kind::Records, 12));
    run_all(&HostNodes::new(6), &all);
}

#[test]
fn networked_recorded_routing() {
    run_all(&HostNodes::new(7), &networked_jobs(Kind::Trace, job::TRACE_TURNS));
}

#[test]
fn networked_processes_over_the_loaders_libfabric() {
    if let Err(missing) = ep_fabric::Library::open() {
        return skip(&missing.message);
    }
    run_over(String::new());
}

#[test]
fn networked_processes_over_a_newer_libfabric() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("build/fabric/libfabric.so.1");
    if !path.exists() {
        return skip("run scripts/fabric.sh");
    }
    run_over(path.to_string_lossy().into_owned());
}

fn skip(why: &str) {
    assert!(std::env::var_os("CI").is_none(), "promised in CI, but could not run: {why}");
    println!("skipped: {why}");
}

/// Runs jobs between nodes over libfabric on this machine.
fn run_over(libfabric: String) {
    let mut all = networked_jobs(Kind::Random, 40);
    all.extend(networked_jobs(Kind::Order, 9));
    all.extend(networked_jobs(Kind::Large, 2));
    all.extend(networked_jobs(Kind::Lanes, 6));
    all.extend(networked_jobs(Kind::Groups, 4));
    run_all(&Processes { meeting: Meeting::UniqueId, on: On::Host, libfabric: Some(libfabric) }, &all);
}

/// Runs jobs on CUDA.
fn run_on_cuda(jobs: Vec<JobId>) {
    if let Some(why) = Cuda::missing() {
        panic!("this test needs a GPU: {why}");
    }
    run_all(&Processes { meeting: Meeting::UniqueId, on: On::Cuda, libfabric: None }, &Cuda::able(jobs));
}

#[test]
#[ignore = "needs a GPU: scripts/gpu.sh conformance"]
fn cuda_random_cases() {
    run_on_cuda(jobs(Kind::Random, 120));
}

#[test]
#[ignore = "needs a GPU: scripts/gpu.sh conformance"]
fn cuda_patterns_orders_and_payloads() {
    let mut all = jobs(Kind::Pattern, job::PATTERN_TURNS);
    all.extend(jobs(Kind::Order, job::ORDER_TURNS));
    all.extend(jobs(Kind::Payload, job::PAYLOAD_TURNS));
    run_on_cuda(all);
}

#[test]
#[ignore = "needs a GPU: scripts/gpu.sh conformance"]
fn cuda_plans_and_lanes_and_groups() {
    let mut all = jobs(Kind::Plans, 12);
    all.extend(jobs(Kind::Lanes, 20));
    all.extend(jobs(Kind::Groups, 16));
    all.extend(jobs(Kind::Records, 12));
    run_on_cuda(all);
}

/// Not a test: the entry of the processes of the process cell.
#[test]
fn worker_of_the_process_cell() {
    worker();
}
