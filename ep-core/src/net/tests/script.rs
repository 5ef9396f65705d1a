//! A NIC whose every answer the test decides.

use std::collections::HashSet;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex};

use super::cluster::{STUCK, bells, shape};
use crate::error::Result;
use crate::net::connect::{LinkOffer, NicOffer, Offer};
use crate::net::transport::{
    Completion, Limits, PeerId, Posted, Region, RegionId, Registered, RemoteRegion, Transport, Write,
};
use crate::net::{Port, PortSpec, Proxy};

#[derive(Default)]
pub(super) struct State {
    pub(super) writes: Vec<Write>,
    /// To be polled.
    pub(super) completions: Vec<Completion>,
    /// Peers for which every post says "again".
    pub(super) busy: HashSet<u32>,
    pub(super) polled: Option<crate::Error>,
    peers: u32,
}

#[derive(Clone, Default)]
pub(super) struct Script(Arc<Mutex<State>>);

impl Script {
    pub(super) fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }

    /// Completes the write at `index`.
    pub(super) fn complete(&self, index: usize) {
        let mut state = self.lock();
        let context = state.writes[index].context;
        state.completions.push(Completion::Sent { context });
    }

    pub(super) fn arrive(&self, immediate: u32) {
        self.lock().completions.push(Completion::Arrived { immediate });
    }
}

impl Transport for Script {
    fn address(&self) -> Vec<u8> {
        vec![1, 2, 3]
    }

    fn limits(&self) -> Limits {
        Limits { max_write: 1 << 20, tx_depth: 1024, cq_depth: 4096, name: "script".into() }
    }

    fn register(&mut self, _: &Region<'_>) -> Result<Registered> {
        Ok(Registered { id: RegionId(0), remote: RemoteRegion::default() })
    }

    fn deregister(&mut self, _: RegionId) -> Result<()> {
        Ok(())
    }

    fn connect(&mut self, _: &[u8]) -> Result<PeerId> {
        let mut state = self.lock();
        state.peers += 1;
        Ok(PeerId(state.peers - 1))
    }

    fn disconnect(&mut self, _: PeerId) {}

    fn write(&mut self, write: &Write) -> Result<Posted> {
        let mut state = self.lock();
        if state.busy.contains(&write.peer.0) {
            return Ok(Posted::Again);
        }
        state.writes.push(*write);
        Ok(Posted::Yes)
    }

    fn poll(&mut self, out: &mut Vec<Completion>) -> Result<()> {
        let mut state = self.lock();
        out.append(&mut state.completions);
        state.polled.take().map_or(Ok(()), Err)
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn may_sleep(&mut self) -> bool {
        false
    }
}

/// What a peer would offer to rank 0: its number for the link is 100 + its rank.
fn offer_of(peer: usize, num_nics: usize, port: &Port) -> Vec<u8> {
    let region = RemoteRegion { key: 0, base: 0, bytes: 1 << 40 };
    let nic = NicOffer { address: vec![9], region, max_write: 1 << 20 };
    let link = LinkOffer { peer: 0, number: 100 + peer as u16, incarnation: 2, landing: 0 };
    let offer = Offer {
        rank: peer as u32,
        fingerprint: port.layout().fingerprint(),
        nics: vec![nic; num_nics],
        links: vec![link],
    };
    offer.encode()
}

/// Rank 0 of a group, connected to ranks 1 and up over these NICs, which nobody is behind. Its own numbers of the
/// links are 1 and up, of incarnation 0.
pub(super) fn rank_0(nics: &[Script], num_links: usize) -> (Proxy, Port) {
    let transports = nics.iter().map(|nic| Box::new(nic.clone()) as Box<dyn Transport>).collect();
    let mut proxy = Proxy::new(transports, STUCK).unwrap();
    let peers: Vec<usize> = (1..=num_links).collect();
    let (_, bells) = bells(1);
    let spec = PortSpec { shape: shape(num_links, 1), rank: 0, peers: peers.clone(), bells };
    let port = proxy.open(spec).unwrap();
    let offers = peers.iter().map(|&peer| offer_of(peer, nics.len(), &port)).collect();
    let mut pending = port.begin_connect(offers);
    proxy.turn(0);
    pending.try_take().expect("connected in one turn").unwrap();
    (proxy, port)
}
