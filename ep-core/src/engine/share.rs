//! Handing memory to the peers and mapping theirs: what windows and segments have in common.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Instant;

use super::device::Device;
use super::handover::hand_over;
use super::link::Link;
use super::topology::Topology;
use crate::error::{Error, Result, Status};
use crate::mem::{Mapping, Memory, SegmentId, find};

/// One rank's memory, as the ranks told each other.
#[derive(Clone, Copy)]
pub(super) struct Offer {
    /// 0: the rank has none.
    pub(super) bytes: usize,
    pub(super) id: SegmentId,
}

/// How this rank reaches its peers.
pub(super) struct Reach<'a> {
    pub(super) rank: usize,
    pub(super) topology: &'a Topology,
    /// None for ranks of this process, and for those of other nodes.
    pub(super) links: &'a [Option<Link>],
    /// None: the memory is the host's.
    pub(super) device: Option<&'a dyn Device>,
    pub(super) deadline: Instant,
}

impl Reach<'_> {
    /// Gives the peers of this node this rank's memory, by its descriptor, and returns their memory as this rank
    /// maps it. `tag` is new on every rank and the same on all. Collective.
    ///
    /// # Errors
    /// [`Status::PeerLost`], [`Status::Bootstrap`], [`Status::OutOfMemory`], or the device's.
    pub(super) fn share(
        &self,
        own: Option<Memory>,
        fd: Option<BorrowedFd<'_>>,
        offers: &[Offer],
        tag: u64,
    ) -> Result<Vec<Option<Memory>>> {
        let mut all: Vec<Option<Memory>> = vec![None; offers.len()];
        all[self.rank] = own;
        let has_memory = |peer: usize| offers[peer].bytes != 0;
        hand_over(self.links, tag, fd, has_memory, self.deadline, |peer, fd| {
            all[peer] = Some(match self.device {
                Some(device) => Memory::Device(device.import(fd, offers[peer].bytes)?),
                None => Memory::Host(Arc::new(Mapping::attach(fd, offers[peer].bytes)?)),
            });
            Ok(())
        })?;
        for peer in self.topology.locals().iter().copied().filter(|&peer| has_memory(peer)) {
            if all[peer].is_none() {
                all[peer] = Some(self.find(peer, &offers[peer].id)?);
            }
        }
        Ok(all)
    }

    /// Memory of a rank of this process.
    fn find(&self, peer: usize, id: &SegmentId) -> Result<Memory> {
        let memory = find(id).ok_or_else(|| {
            Error::new(Status::PeerLost, format!("rank {peer} left while its memory was being mapped"))
        })?;
        if let (Some(device), Memory::Device(memory)) = (self.device, &memory) {
            device.admit(&**memory)?;
        }
        Ok(memory)
    }
}
