//! Handing memory to the peers and mapping theirs: what windows and segments have in common.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Instant;

use super::device::Device;
use super::link::Link;
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
    /// None for ranks of this process.
    pub(super) links: &'a [Option<Link>],
    /// None: the memory is the host's.
    pub(super) device: Option<&'a dyn Device>,
    pub(super) deadline: Instant,
}

impl Reach<'_> {
    /// Sends `own` to the peers of other processes, and returns every rank's memory as this rank maps it.
    /// `tag` tells what it is from what else passes the links. Collective.
    ///
    /// # Errors
    /// [`Status::PeerLost`], [`Status::Bootstrap`], [`Status::OutOfMemory`], or the device's.
    pub(super) fn share(
        &self,
        own: Option<&Memory>,
        offers: &[Offer],
        tag: u64,
    ) -> Result<Vec<Option<Memory>>> {
        let elsewhere = self.links.iter().enumerate().filter_map(|(peer, link)| Some((peer, link.as_ref()?)));
        let mut fd = None;
        for (peer, link) in elsewhere {
            let Some(own) = own else { break };
            if fd.is_none() {
                fd = own.export()?;
            }
            if let Some(fd) = &fd {
                link.send_fd(peer, tag, fd.as_fd())?;
            }
        }
        offers.iter().enumerate().map(|(peer, offer)| self.reach(own, peer, offer, tag)).collect()
    }

    fn reach(&self, own: Option<&Memory>, peer: usize, offer: &Offer, tag: u64) -> Result<Option<Memory>> {
        if peer == self.rank {
            return Ok(own.cloned());
        }
        match &self.links[peer] {
            _ if offer.bytes == 0 => Ok(None),
            None => {
                let memory = find(&offer.id).ok_or_else(|| {
                    Error::new(
                        Status::PeerLost,
                        format!("rank {peer} left while its memory was being mapped"),
                    )
                })?;
                if let (Some(device), Memory::Device(memory)) = (self.device, &memory) {
                    device.admit(&**memory)?;
                }
                Ok(Some(memory))
            }
            Some(link) => {
                let fd = link.receive_fd(peer, tag, self.deadline)?;
                match self.device {
                    Some(device) => Ok(Some(Memory::Device(device.import(fd, offer.bytes)?))),
                    None => Ok(Some(Memory::Host(Arc::new(Mapping::attach(fd, offer.bytes)?)))),
                }
            }
        }
    }
}
