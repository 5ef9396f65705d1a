//! Making a group: the ranks compare their configs, map each other's segments and learn who shares a node.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use bytemuck::{Pod, Zeroable};

use super::device::{Backend, DeviceGroup, Membership};
use super::device_segment::DeviceSegment;
use super::group::ALIVE;
use super::handover::hand_over;
use super::link::{Link, Listener};
use super::share::{Offer, Reach};
use crate::bootstrap::Bootstrap;
use crate::config::{DEFAULT_TIMEOUT, GroupConfig, MAX_LANES, MAX_RANKS};
use crate::error::{Error, Result, Status};
use crate::layout::{self, SegmentLayout};
use crate::mem::{Mapping, Memory, SegmentId, Words, find, publish};
use crate::wire::WIRE_VERSION;

/// What a rank has once it is a member.
pub(super) struct Joined {
    pub(super) config: GroupConfig,
    pub(super) segments: Vec<Words>,
    pub(super) links: Vec<Option<Link>>,
    pub(super) device: Option<Box<dyn DeviceGroup>>,
    pub(super) node_of: Vec<usize>,
    /// Ranks that share this machine's cores.
    pub(super) ranks_here: usize,
}

/// The first thing that ranks tell each other.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Hello {
    wire_version: u32,
    config: HelloConfig,
    node_id: u32,
    segment: SegmentId,
    /// The segment in the device's memory.
    device_bytes: u64,
    device_segment: SegmentId,
    /// Secret of the socket from which the segments' descriptors come.
    socket: SegmentId,
}

impl Hello {
    fn device_offer(&self) -> Offer {
        Offer { bytes: self.device_bytes as usize, id: self.device_segment }
    }
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
}

/// What a rank says when it has mapped its peers, or why it could not.
const READY: &[u8] = b"";

/// Joins the group. Collective.
pub(super) fn join(
    config: &GroupConfig,
    backend: &Backend,
    bootstrap: &mut dyn Bootstrap,
    deadline: Instant,
) -> Result<Joined> {
    let (rank, num_ranks) = (bootstrap.rank(), bootstrap.num_ranks());
    if num_ranks == 0 || num_ranks > MAX_RANKS || rank >= num_ranks {
        return Err(Error::invalid(format!(
            "rank {rank} of {num_ranks}: expected 1 to {MAX_RANKS} ranks and a rank below their number"
        )));
    }
    let config = with_defaults(config, backend, num_ranks)?;
    let layout = SegmentLayout::new(&config, num_ranks);
    let (mapping, fd) = Mapping::create(layout.bytes())?;
    let own = Arc::new(mapping);
    let segment = publish(&Memory::Host(own.clone()))?;
    let own_device = DeviceSegment::allocate(backend, layout.bytes())?;
    let mut socket = SegmentId::default();
    getrandom::fill(&mut socket).map_err(|e| Error::system("getrandom", e))?;
    let listener = Listener::new(socket)?;
    let words = Words::new(own);
    // Release: pairs with the acquire in `Group::has_left`.
    words.u32(layout::ALIVE).store(ALIVE, Ordering::Release);

    let hello = Hello {
        wire_version: WIRE_VERSION,
        config: agreed(&config, backend),
        node_id: config.node_id,
        segment,
        socket,
        device_segment: own_device.offer().id,
        device_bytes: own_device.offer().bytes as u64,
    };
    let hellos = exchange(bootstrap, &hello, deadline)?;
    compare(&hellos, backend)?;

    let node_of = number_nodes(&hellos);
    let mapped = map_peers(rank, words, fd, listener, &hellos, layout.bytes(), deadline).and_then(
        |(segments, links)| {
            let reach = Reach { rank, links: &links, device: backend.device.as_deref(), deadline };
            let node_of = node_of.clone();
            let membership = Membership { rank, num_ranks, config, layout, node_of, segments: Vec::new() };
            let offers: Vec<Offer> = hellos.iter().map(Hello::device_offer).collect();
            let device = own_device.join(backend, &reach, &offers, membership)?;
            Ok((segments, links, device))
        },
    );
    let answer = mapped.as_ref().err().map_or(READY.to_vec(), refusal);
    let answers = match bootstrap.all_gather(&answer, deadline) {
        Ok(answers) => answers,
        // Whom this rank waited for until the deadline says more than who was then late for the answers.
        Err(error) => {
            return Err(mapped.err().filter(|own| own.status == Status::Bootstrap).unwrap_or(error));
        }
    };
    if let Some(refused) = root_cause(&answers).filter(|&refused| refused != rank) {
        let text = String::from_utf8_lossy(&answers[refused][1..]).into_owned();
        return Err(Error::new(Status::Bootstrap, format!("rank {refused} could not join: {text}")));
    }
    let (segments, links, device) = mapped?;
    Ok(Joined { config, segments, links, device, node_of, ranks_here: num_ranks })
}

/// What a rank that failed answers: how far its error is from the cause, and the text.
fn refusal(error: &Error) -> Vec<u8> {
    let distance = match error.status {
        // Its peer is not there, which the peer may know a reason for.
        Status::Unsupported => 1,
        // Its peer gave up.
        Status::Bootstrap | Status::PeerLost => 2,
        _ => 0,
    };
    [&[distance], error.message.as_bytes()].concat()
}

/// The rank whose failure made others fail, the same on every rank.
fn root_cause(answers: &[Vec<u8>]) -> Option<usize> {
    let refused = answers.iter().enumerate().filter(|(_, answer)| *answer != READY);
    refused.min_by_key(|(_, answer)| answer[0]).map(|(rank, _)| rank)
}

fn with_defaults(config: &GroupConfig, backend: &Backend, num_ranks: usize) -> Result<GroupConfig> {
    let mut config = *config;
    let or = |value: u32, default: u32| if value == 0 { default } else { value };
    config.num_lanes = or(config.num_lanes, 2);
    config.timeout_ms = or(config.timeout_ms, DEFAULT_TIMEOUT.as_millis() as u32);
    config.max_local_experts = or(config.max_local_experts, 256);
    if config.num_lanes as usize > MAX_LANES {
        return Err(Error::invalid(format!(
            "num_lanes is {}, expected at most {MAX_LANES}; 0 means 2",
            config.num_lanes
        )));
    }
    if config.max_local_experts > 1 << 20 {
        return Err(Error::invalid(format!(
            "max_local_experts is {}, expected at most {}",
            config.max_local_experts,
            1 << 20
        )));
    }
    if config.ring_bytes as usize > layout::RING_MAX {
        return Err(Error::invalid(format!(
            "ring_bytes is {}, expected at most {}; 0 chooses",
            config.ring_bytes,
            layout::RING_MAX
        )));
    }
    match (config.backend, &backend.device) {
        (BACKEND_AUTO, _) | (BACKEND_HOST, None) | (BACKEND_CUDA, Some(_)) => {}
        (BACKEND_HOST, Some(device)) => {
            return Err(Error::invalid(format!("backend is EP_BACKEND_HOST, not {}", device.describe())));
        }
        (BACKEND_CUDA, None) => {
            return Err(Error::new(
                Status::Unsupported,
                format!(
                    "EP_BACKEND_CUDA: {}; use EP_BACKEND_HOST or EP_BACKEND_AUTO",
                    if backend.reason.is_empty() {
                        "the group is made without a device"
                    } else {
                        &backend.reason
                    }
                ),
            ));
        }
        (other, _) => {
            return Err(Error::invalid(format!("backend is {other}, expected an EP_BACKEND_ value, 0 to 2")));
        }
    }
    if let Some(device) = &backend.device {
        if num_ranks > device.max_ranks() {
            return Err(Error::new(
                Status::Unsupported,
                format!(
                    "{num_ranks} ranks, expected at most {} on {}",
                    device.max_ranks(),
                    device.describe()
                ),
            ));
        }
        if config.ring_bytes == 0 {
            config.ring_bytes = device.ring_bytes(num_ranks) as u32;
        }
    }
    config.ring_bytes = layout::ring_bytes(config.ring_bytes, num_ranks) as u32;
    Ok(config)
}

fn agreed(config: &GroupConfig, backend: &Backend) -> HelloConfig {
    HelloConfig {
        backend: config.backend,
        chosen: chosen(backend),
        num_lanes: config.num_lanes,
        timeout_ms: config.timeout_ms,
        max_local_experts: config.max_local_experts,
        ring_bytes: config.ring_bytes,
    }
}

/// The `EP_BACKEND_` of a backend.
pub(super) fn chosen(backend: &Backend) -> i32 {
    if backend.device.is_some() { BACKEND_CUDA } else { BACKEND_HOST }
}

/// `EP_BACKEND_AUTO`.
const BACKEND_AUTO: i32 = 0;
/// `EP_BACKEND_HOST`.
pub(super) const BACKEND_HOST: i32 = 1;
/// `EP_BACKEND_CUDA`.
const BACKEND_CUDA: i32 = 2;

fn exchange(bootstrap: &mut dyn Bootstrap, hello: &Hello, deadline: Instant) -> Result<Vec<Hello>> {
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
fn compare(hellos: &[Hello], backend: &Backend) -> Result<()> {
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

/// Maps the segments of all ranks: those of this process are found in its registry, the others come as
/// descriptors.
fn map_peers(
    rank: usize,
    own: Words,
    own_fd: OwnedFd,
    listener: Listener,
    hellos: &[Hello],
    bytes: usize,
    deadline: Instant,
) -> Result<(Vec<Words>, Vec<Option<Link>>)> {
    let of_host = |hello: &Hello| find(&hello.segment).and_then(|memory| memory.host().cloned());
    let here: Vec<Option<Arc<Mapping>>> = hellos.iter().map(of_host).collect();
    let elsewhere: Vec<(usize, SegmentId)> = (0..hellos.len())
        .filter(|&peer| here[peer].is_none())
        .map(|peer| (peer, hellos[peer].socket))
        .collect();
    let mut links: Vec<Option<Link>> = hellos.iter().map(|_| None).collect();
    for (peer, link) in listener.connect(rank, &elsewhere, deadline)? {
        links[peer] = Some(link);
    }
    let mut segments: Vec<Option<Words>> = here.into_iter().map(|mapping| mapping.map(Words::new)).collect();
    segments[rank] = Some(own);
    hand_over(
        &links,
        SEGMENT_TAG,
        Some(own_fd.as_fd()),
        |_| true,
        deadline,
        |peer, fd| {
            segments[peer] = Some(Words::new(Arc::new(Mapping::attach(fd, bytes)?)));
            Ok(())
        },
    )?;
    let absent = |peer| Error::new(Status::Bootstrap, format!("rank {peer} did not connect"));
    let segments =
        segments.into_iter().enumerate().map(|(peer, segment)| segment.ok_or_else(|| absent(peer)));
    Ok((segments.collect::<Result<Vec<Words>>>()?, links))
}

/// Tag of a descriptor that is a segment; windows use their number.
const SEGMENT_TAG: u64 = 0;

/// Nodes by id, numbered from 0 in order of first appearance. All ranks mapped each other, so without
/// ids there is one node.
fn number_nodes(hellos: &[Hello]) -> Vec<usize> {
    let mut ids: Vec<u32> = Vec::new();
    let number = |hello: &Hello| match ids.iter().position(|&id| id == hello.node_id) {
        Some(node) => node,
        None => {
            ids.push(hello.node_id);
            ids.len() - 1
        }
    };
    hellos.iter().map(number).collect()
}
