//! The first thing that ranks tell each other: who they are and what they were asked for; and its comparison,
//! which comes out alike on every rank.

use std::sync::OnceLock;
use std::time::Instant;

use bytemuck::{Pod, Zeroable};

use super::defaults::{BACKEND_AUTO, BACKEND_HOST, chosen};
use super::device::Backend;
use crate::bootstrap::Bootstrap;
use crate::config::GroupConfig;
use crate::error::{Error, Result, Status};
use crate::mem::SegmentId;
use crate::wire::WIRE_VERSION;

/// What a rank says first.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Hello {
    wire_version: u32,
    config: HelloConfig,
    pub(super) node_id: u32,
    /// Ranks that say the same are threads of one process.
    pub(super) process: [u8; 20],
    /// Secret of the socket from which this rank's memory comes.
    pub(super) socket: SegmentId,
}

/// The part of the config on which all ranks must agree.
#[derive(Clone, Copy, Pod, Zeroable, PartialEq)]
#[repr(C)]
struct HelloConfig {
    backend: i32,
    /// `EP_BACKEND_` that was chosen.
    chosen: i32,
    num_lanes: u32,
    timeout_ms: u32,
    max_local_experts: u32,
    ring_bytes: u32,
    transport: i32,
    route: i32,
    chunk_bytes: u32,
    chunk_window: u32,
    /// 1 if this rank has a network.
    network: u32,
}

impl Hello {
    pub(super) fn new(config: &GroupConfig, backend: &Backend, socket: SegmentId) -> Result<Hello> {
        let agreed = HelloConfig {
            backend: config.backend,
            chosen: chosen(backend),
            num_lanes: config.num_lanes,
            timeout_ms: config.timeout_ms,
            max_local_experts: config.max_local_experts,
            ring_bytes: config.ring_bytes,
            transport: config.transport,
            route: config.route,
            chunk_bytes: config.chunk_bytes,
            chunk_window: config.chunk_window,
            network: u32::from(backend.network.is_some()),
        };
        let process = this_process()?;
        Ok(Hello { wire_version: WIRE_VERSION, config: agreed, node_id: config.node_id, process, socket })
    }
}

/// Random bytes of this process and its number: a child that was forked differs in the latter.
fn this_process() -> Result<[u8; 20]> {
    static RANDOM: OnceLock<SegmentId> = OnceLock::new();
    let mut fresh = SegmentId::default();
    getrandom::fill(&mut fresh).map_err(|e| Error::system("getrandom", e))?;
    let mut process = [0; 20];
    process[..16].copy_from_slice(RANDOM.get_or_init(|| fresh));
    process[16..].copy_from_slice(&std::process::id().to_le_bytes());
    Ok(process)
}

/// Tells the others and listens to them.
///
/// # Errors
/// Those of the bootstrap; [`Status::Mismatch`] naming a rank of another version.
pub(super) fn exchange(
    bootstrap: &mut dyn Bootstrap,
    hello: &Hello,
    deadline: Instant,
) -> Result<Vec<Hello>> {
    let blobs = bootstrap.all_gather(bytemuck::bytes_of(hello), deadline)?;
    let parse = |(rank, blob): (usize, &Vec<u8>)| {
        // The version comes first, so that it can be read whatever follows.
        let version = blob.first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes));
        bytemuck::try_pod_read_unaligned::<Hello>(blob)
            .ok()
            .filter(|hello| hello.wire_version == WIRE_VERSION)
            .ok_or_else(|| {
                Error::new(
                    Status::Mismatch,
                    format!(
                        "rank {rank} speaks version {version} of the memory layout, this rank version \
                         {WIRE_VERSION}; load one version of the library on all ranks"
                    ),
                )
            })
    };
    blobs.iter().enumerate().map(parse).collect()
}

/// Finds the first rank whose config differs from rank 0's, the same way on every rank.
///
/// # Errors
/// [`Status::Mismatch`] naming the rank and the field.
pub(super) fn compare(hellos: &[Hello], backend: &Backend) -> Result<()> {
    let first = &hellos[0].config;
    for (rank, hello) in hellos.iter().enumerate() {
        let config = &hello.config;
        if (config.backend, first.backend) == (BACKEND_AUTO, BACKEND_AUTO) && config.chosen != first.chosen {
            let name = |chosen| if chosen == BACKEND_HOST { "the host" } else { "CUDA" };
            return Err(Error::new(
                Status::Mismatch,
                format!(
                    "EP_BACKEND_AUTO chose {} on rank 0 and {} on rank {rank} (here: {}); ask for one backend",
                    name(first.chosen),
                    name(config.chosen),
                    backend.reason
                ),
            ));
        }
        let fields = [
            ("backend", config.backend as u32, first.backend as u32),
            ("num_lanes", config.num_lanes, first.num_lanes),
            ("timeout_ms", config.timeout_ms, first.timeout_ms),
            ("max_local_experts", config.max_local_experts, first.max_local_experts),
            ("ring_bytes", config.ring_bytes, first.ring_bytes),
            ("transport", config.transport as u32, first.transport as u32),
            ("route", config.route as u32, first.route as u32),
            ("chunk_bytes", config.chunk_bytes, first.chunk_bytes),
            ("chunk_window", config.chunk_window, first.chunk_window),
        ];
        if let Some((name, theirs, ours)) = fields.into_iter().find(|(_, theirs, ours)| theirs != ours) {
            return Err(Error::new(
                Status::Mismatch,
                format!(
                    "ranks 0 and {rank} differ in {name} ({ours} and {theirs}); give every rank the same config"
                ),
            ));
        }
        if (hello.node_id == 0) != (hellos[0].node_id == 0) {
            return Err(Error::new(
                Status::Mismatch,
                format!(
                    "ranks 0 and {rank} differ in node_id ({} and {}); give it on every rank or on none",
                    hellos[0].node_id, hello.node_id
                ),
            ));
        }
    }
    Ok(())
}

/// The first rank that has no network, if any.
pub(super) fn without_network(hellos: &[Hello]) -> Option<usize> {
    hellos.iter().position(|hello| hello.config.network == 0)
}

/// Numbers from 0 in order of first appearance: equal keys, equal numbers.
pub(super) fn number<K: PartialEq>(keys: impl Iterator<Item = K>) -> Vec<usize> {
    let mut seen: Vec<K> = Vec::new();
    keys.map(|key| match seen.iter().position(|other| *other == key) {
        Some(number) => number,
        None => {
            seen.push(key);
            seen.len() - 1
        }
    })
    .collect()
}
