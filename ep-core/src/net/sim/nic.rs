//! A simulated NIC behind the seam.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use super::super::transport::{
    Completion, Limits, PeerId, Posted, Region, RegionId, Registered, RemoteRegion, Transport, Write,
};
use super::SimNet;
use super::world::Address;
use crate::error::{Error, Result, Status};

/// One NIC of a [`SimNet`]. Dropping it kills it.
pub struct SimNic {
    net: SimNet,
    id: usize,
    event: Arc<OwnedFd>,
}

impl SimNic {
    pub(super) fn new(net: SimNet, id: usize, event: Arc<OwnedFd>) -> SimNic {
        SimNic { net, id, event }
    }

    /// Its number, for [`SimNet::kill`] and the like.
    pub fn id(&self) -> usize {
        self.id
    }
}

impl Drop for SimNic {
    fn drop(&mut self) {
        self.net.kill(self.id);
    }
}

impl Transport for SimNic {
    fn address(&self) -> Vec<u8> {
        let generation = self.net.shared().lock().nics[self.id].generation;
        [(self.id as u64).to_le_bytes().as_slice(), &generation.to_le_bytes()].concat()
    }

    fn limits(&self) -> Limits {
        let options = self.net.shared().lock().options;
        Limits {
            max_write: options.max_write,
            tx_depth: options.tx_depth,
            cq_depth: options.cq_depth,
            name: format!("sim {}", self.id),
        }
    }

    fn register(&mut self, region: &Region<'_>) -> Result<Registered> {
        let id = self.net.shared().lock().register(self.id, region.address(), region.bytes());
        Ok(Registered {
            id: RegionId(id),
            remote: RemoteRegion { key: id.into(), base: 0, bytes: region.bytes() },
        })
    }

    fn deregister(&mut self, id: RegionId) -> Result<()> {
        // A killed NIC has lost its regions already.
        self.net.shared().lock().deregister(self.id, id.0);
        Ok(())
    }

    fn connect(&mut self, address: &[u8]) -> Result<PeerId> {
        let mut world = self.net.shared().lock();
        let parsed = address.split_first_chunk::<8>().and_then(|(nic, generation)| {
            let generation = u32::from_le_bytes(generation.try_into().ok()?);
            let nic = usize::try_from(u64::from_le_bytes(*nic)).ok()?;
            (nic < world.nics.len()).then_some(Address { nic, generation })
        });
        let Some(address) = parsed else {
            let text = format!("{} bytes are no address of the simulated network", address.len());
            return Err(Error::new(Status::Bootstrap, text));
        };
        let peers = &mut world.nics[self.id].peers;
        let peer = peers.iter().position(Option::is_none).unwrap_or(peers.len());
        match peers.get_mut(peer) {
            Some(place) => *place = Some(address),
            None => peers.push(Some(address)),
        }
        Ok(PeerId(peer as u32))
    }

    fn disconnect(&mut self, peer: PeerId) {
        if let Some(place) = self.net.shared().lock().nics[self.id].peers.get_mut(peer.0 as usize) {
            *place = None;
        }
    }

    fn write(&mut self, write: &Write) -> Result<Posted> {
        let posted = self.net.shared().lock().post(self.id, write);
        self.net.shared().work.notify_all();
        posted
    }

    fn poll(&mut self, out: &mut Vec<Completion>) -> Result<()> {
        self.net.shared().lock().poll(self.id, out)
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.event.as_fd())
    }

    fn may_sleep(&mut self) -> bool {
        let mut world = self.net.shared().lock();
        if world.check_nic(self.id).is_err() || !world.nics[self.id].completions.is_empty() {
            return false;
        }
        let mut count = [0; 8];
        // Empty unless it woke somebody before.
        let _ = rustix::io::read(&self.event, &mut count);
        world.nics[self.id].armed = true;
        true
    }
}
