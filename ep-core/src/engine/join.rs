//! Making a group: the ranks compare their configs, find out who shares memory, map each other's segments, and
//! connect to the ranks of other nodes.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::defaults::with_defaults;
use super::device::{Backend, DeviceGroup, Membership};
use super::device_segment::DeviceSegment;
use super::group::ALIVE;
use super::handover::hand_over;
use super::hello::{self, Hello};
use super::link::{Link, Listener};
use super::network::{Net, with_chunks};
use super::nodes::{self, Nodes};
use super::share::{Offer, Reach};
use super::topology::Topology;
use crate::bootstrap::Bootstrap;
use crate::config::{GroupConfig, MAX_RANKS};
use crate::error::{Error, Result, Status};
use crate::layout::{self, SegmentLayout};
use crate::mem::{Mapping, Memory, SegmentId, Words, find, publish};

/// What a rank has once it is a member.
pub(super) struct Joined {
    pub(super) config: GroupConfig,
    pub(super) layout: SegmentLayout,
    /// By place among the ranks that share memory.
    pub(super) segments: Vec<Words>,
    /// By rank.
    pub(super) links: Vec<Option<Link>>,
    pub(super) device: Option<Box<dyn DeviceGroup>>,
    pub(super) topology: Topology,
    /// None: all ranks share memory.
    pub(super) net: Option<Net>,
    pub(super) transport_reason: String,
    /// Ranks that share this machine's cores.
    pub(super) ranks_here: usize,
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
    let mut config = with_defaults(config, backend, num_ranks)?;
    let mut socket = SegmentId::default();
    getrandom::fill(&mut socket).map_err(|e| Error::system("getrandom", e))?;
    let listener = Listener::new(socket)?;
    let hello = Hello::new(&config, backend, socket)?;
    let hellos = hello::exchange(bootstrap, &hello, deadline)?;
    hello::compare(&hellos, backend)?;
    let found = nodes::find(&config, backend, bootstrap, &listener, &hellos, deadline);
    let own = found.and_then(|nodes| Prepared::new(&mut config, backend, rank, nodes, deadline));
    let offers = exchange_offers(bootstrap, &own, deadline)?;
    let own = own?;

    let layout = own.layout;
    let Prepared { topology, asking, reason, words, fd, device, mut net, .. } = own;
    let asking = ask_peers(rank, &listener, asking, &topology, &hellos);
    let mapped = asking
        .and_then(|asking| {
            let own = (rank, &words, &fd);
            map_peers(own, listener, asking, &topology, &offers, layout.bytes(), deadline)
        })
        .and_then(|(segments, links)| {
            let reach = Reach {
                rank,
                topology: &topology,
                links: &links,
                device: backend.device.as_deref(),
                deadline,
            };
            let node_of = topology.node_of().to_vec();
            let membership = Membership { rank, num_ranks, config, layout, node_of, segments: Vec::new() };
            let device = device.join(backend, &reach, &offers.device, membership)?;
            if let Some(net) = &mut net {
                net.connect(&topology, &offers.ports, deadline)?;
            }
            Ok((segments, links, device))
        });
    let (segments, links, device) = settle(bootstrap, mapped, deadline)?;
    if let Some(net) = &net {
        settle(bootstrap, net.port.probe(deadline), deadline)?;
    }
    let ranks_here = topology.locals().len();
    Ok(Joined {
        config,
        layout,
        segments,
        links,
        device,
        topology,
        net,
        transport_reason: reason,
        ranks_here,
    })
}

/// Ends a part of joining that each rank did by itself: all go on, or none.
pub(super) fn settle<T>(bootstrap: &mut dyn Bootstrap, own: Result<T>, deadline: Instant) -> Result<T> {
    let answer = own.as_ref().err().map_or(READY.to_vec(), refusal);
    let answers = match bootstrap.all_gather(&answer, deadline) {
        Ok(answers) => answers,
        // Whom this rank waited for until the deadline says more than who was then late for the answers.
        Err(error) => {
            return Err(own.err().filter(|own| own.status == Status::Bootstrap).unwrap_or(error));
        }
    };
    if let Some(refused) = root_cause(&answers).filter(|&refused| refused != bootstrap.rank()) {
        return Err(could_not_join(refused, &answers[refused]));
    }
    own
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

/// What a rank has made by itself, before its peers have it.
struct Prepared {
    topology: Topology,
    asking: Vec<(usize, OwnedFd)>,
    reason: String,
    layout: SegmentLayout,
    words: Words,
    fd: OwnedFd,
    id: SegmentId,
    device: DeviceSegment,
    net: Option<Net>,
}

impl Prepared {
    fn new(
        config: &mut GroupConfig,
        backend: &Backend,
        rank: usize,
        nodes: Nodes,
        deadline: Instant,
    ) -> Result<Prepared> {
        let Nodes { topology, asking, reason } = nodes;
        config.ring_bytes = layout::ring_bytes(config.ring_bytes, topology.largest_node()) as u32;
        let layout = SegmentLayout::new(config, topology.node_of().len(), topology.neighbours());
        let (mapping, fd) = Mapping::create(layout.bytes())?;
        let own = Arc::new(mapping);
        let id = publish(&Memory::Host(own.clone()))?;
        let device = DeviceSegment::allocate(backend, layout.bytes())?;
        let words = Words::new(own);
        // Release: pairs with the acquire in `Group::has_left`.
        words.u32(layout::ALIVE).store(ALIVE, Ordering::Release);
        let net = match &backend.network {
            Some(network) if topology.is_networked() => {
                if let Some(device) = &backend.device {
                    let text =
                        format!("{} has no transport between nodes; use EP_BACKEND_HOST", device.describe());
                    return Err(Error::new(Status::Unsupported, text));
                }
                with_chunks(config, &topology);
                Some(Net::open(&**network, config, rank, &topology, (&words, &layout), deadline)?)
            }
            _ => None,
        };
        Ok(Prepared { topology, asking, reason, layout, words, fd, id, device, net })
    }

    /// What the others need to know.
    fn offer(&self) -> Vec<u8> {
        let device = self.device.offer();
        let port = self.net.as_ref().map_or(&[][..], |net| net.port.offer());
        [&[OFFER][..], &self.id, &device.id, &(device.bytes as u64).to_le_bytes(), port].concat()
    }
}

/// What the ranks told, by rank.
struct Offers {
    host: Vec<SegmentId>,
    device: Vec<Offer>,
    ports: Vec<Vec<u8>>,
}

/// First byte of a rank's message; then the segment's id, the device's id and size, and how to connect to the port.
const OFFER: u8 = 0xFF;
const OFFER_BYTES: usize = 1 + 2 * size_of::<SegmentId>() + 8;

/// Tells the others of this rank's segment, or why there is none.
fn exchange_offers(
    bootstrap: &mut dyn Bootstrap,
    own: &Result<Prepared>,
    deadline: Instant,
) -> Result<Offers> {
    let blob = match own {
        Ok(own) => own.offer(),
        Err(error) => refusal(error),
    };
    let blobs = bootstrap.all_gather(&blob, deadline)?;
    let is_offer = |blob: &Vec<u8>| blob.first() == Some(&OFFER) && blob.len() >= OFFER_BYTES;
    let refused = blobs.iter().enumerate().filter(|(_, blob)| !is_offer(blob));
    if let Some((rank, why)) = refused.min_by_key(|(_, blob)| blob.first().copied()) {
        return Err(match own {
            Err(error) if rank == bootstrap.rank() => error.clone(),
            _ => could_not_join(rank, why),
        });
    }
    let mut offers = Offers { host: Vec::new(), device: Vec::new(), ports: Vec::new() };
    for blob in &blobs {
        let (mut id, mut device_id) = (SegmentId::default(), SegmentId::default());
        id.copy_from_slice(&blob[1..17]);
        device_id.copy_from_slice(&blob[17..33]);
        let bytes = blob[33..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes)) as usize;
        offers.host.push(id);
        offers.device.push(Offer { bytes, id: device_id });
        offers.ports.push(blob[OFFER_BYTES..].to_vec());
    }
    Ok(offers)
}

fn could_not_join(rank: usize, refusal: &[u8]) -> Error {
    let why = String::from_utf8_lossy(refusal.get(1..).unwrap_or_default());
    Error::new(Status::Bootstrap, format!("rank {rank} could not join: {why}"))
}

/// Connects to the ranks of other processes that share memory with this one, where that was not done before.
fn ask_peers(
    rank: usize,
    listener: &Listener,
    mut asking: Vec<(usize, OwnedFd)>,
    topology: &Topology,
    hellos: &[Hello],
) -> Result<Vec<(usize, OwnedFd)>> {
    let of_before = asking.len();
    for &peer in topology.locals() {
        let asked = asking[..of_before].iter().any(|(other, _)| *other == peer);
        if !asked && hellos[peer].process != hellos[rank].process {
            asking.push((peer, listener.ask(rank, peer, &hellos[peer].socket)?));
        }
    }
    Ok(asking)
}

/// Maps the segments of the ranks that share memory: those of this process are found in its registry, the others
/// come as descriptors. Returns segments by place, and links by rank.
fn map_peers(
    own: (usize, &Words, &OwnedFd),
    listener: Listener,
    asking: Vec<(usize, OwnedFd)>,
    topology: &Topology,
    offers: &Offers,
    bytes: usize,
    deadline: Instant,
) -> Result<(Vec<Words>, Vec<Option<Link>>)> {
    let ((rank, words, fd), ids) = (own, &offers.host);
    let mut links: Vec<Option<Link>> = ids.iter().map(|_| None).collect();
    for (peer, link) in listener.connect(asking, deadline)? {
        links[peer] = Some(link);
    }
    let mut segments: Vec<Option<Words>> = ids.iter().map(|_| None).collect();
    for &peer in topology.locals() {
        if links[peer].is_none() {
            let host = find(&ids[peer]).and_then(|memory| memory.host().cloned());
            segments[peer] = host.map(Words::new);
        }
    }
    segments[rank] = Some(words.clone());
    hand_over(
        &links,
        SEGMENT_TAG,
        Some(fd.as_fd()),
        |_| true,
        deadline,
        |peer, fd| {
            segments[peer] = Some(Words::new(Arc::new(Mapping::attach(fd, bytes)?)));
            Ok(())
        },
    )?;
    let by_place = |&peer: &usize| {
        let absent = || Error::new(Status::Bootstrap, format!("rank {peer} did not connect"));
        segments[peer].take().ok_or_else(absent)
    };
    let mapped: Vec<Words> = topology.locals().iter().map(by_place).collect::<Result<_>>()?;
    Ok((mapped, links))
}

/// Tag of a descriptor that is a segment; windows use their number.
const SEGMENT_TAG: u64 = 0;
