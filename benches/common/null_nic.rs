//! A network that costs nothing: every write completes at once, and comes back as if the peer had sent the same.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use ep_core::Result;
use ep_core::mem::{Mapping, Words};
use ep_core::net::transport::{
    Completion, Limits, PeerId, Posted, Region, RegionId, Registered, RemoteRegion, Transport, Write,
};
use ep_core::net::{Bell, Kind, Port, PortSpec, Proxy, Shape, Slots, Stream};

/// The stream whose messages are counted. Its window is larger than what is in flight, so nothing waits.
pub(crate) const DESC: Stream = Stream::new(0, Kind::Desc);

/// A number's place in an immediate.
const LINK_AT: u32 = 19;

struct NullNic {
    peers: u32,
    completions: Vec<Completion>,
    echo: bool,
}

impl Transport for NullNic {
    fn address(&self) -> Vec<u8> {
        vec![0]
    }

    fn limits(&self) -> Limits {
        Limits { max_write: 1 << 30, tx_depth: 1 << 16, cq_depth: 1 << 20, name: "null".into() }
    }

    fn register(&mut self, region: &Region<'_>) -> Result<Registered> {
        let remote = RemoteRegion { key: 0, base: 0, bytes: region.bytes() };
        Ok(Registered { id: RegionId(0), remote })
    }

    fn deregister(&mut self, _: RegionId) -> Result<()> {
        Ok(())
    }

    fn connect(&mut self, _: &[u8]) -> Result<PeerId> {
        self.peers += 1;
        Ok(PeerId(self.peers - 1))
    }

    fn disconnect(&mut self, _: PeerId) {}

    fn write(&mut self, write: &Write) -> Result<Posted> {
        self.completions.push(Completion::Sent { context: write.context });
        if self.echo {
            // The first port's link to the peer has the peer's number, from 1.
            let number = write.immediate & ((1 << LINK_AT) - 1);
            self.completions.push(Completion::Arrived { immediate: (write.peer.0 + 1) << LINK_AT | number });
        }
        Ok(Posted::Yes)
    }

    fn poll(&mut self, out: &mut Vec<Completion>) -> Result<()> {
        let count = (out.capacity() - out.len()).min(self.completions.len());
        out.extend(self.completions.drain(..count));
        Ok(())
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn may_sleep(&mut self) -> bool {
        false
    }
}

fn open(rank: usize, peers: Vec<usize>, echo: bool) -> (Proxy, Port) {
    let nic = NullNic { peers: 0, completions: Vec::with_capacity(1 << 12), echo };
    let mut proxy = Proxy::new(vec![Box::new(nic)], Duration::from_secs(1)).expect("one NIC is enough");
    let slots = Slots { window: 4, bytes: 64 };
    let shape = Shape {
        num_links: peers.len(),
        num_lanes: 1,
        desc: slots,
        rows: slots,
        request: slots,
        response: slots,
        error_bytes: 64,
    };
    let (mapping, _) = Mapping::create(4096).expect("a page");
    let bells = vec![Bell { segment: Words::new(Arc::new(mapping)), bell: 0, sleeping: 4 }];
    let port = proxy.open(PortSpec { shape, rank, peers, bells }).expect("a port");
    (proxy, port)
}

/// Rank 0 with so many peers, none of which exists.
pub(crate) fn rank_0(num_links: usize, echo: bool) -> (Proxy, Port) {
    let (mut proxy, port) = open(0, (1..=num_links).collect(), echo);
    let offer = |peer| open(peer, vec![0], false).1.offer().to_vec();
    let mut pending = port.begin_connect((1..=num_links).map(offer).collect());
    proxy.turn(0);
    pending.try_take().expect("answered in a turn").expect("connected");
    (proxy, port)
}

/// Sends message `seq` on every link and turns the proxy until the slots are free again.
pub(crate) fn round(proxy: &mut Proxy, port: &Port, num_links: usize, seq: u64) {
    for link in 0..num_links {
        port.send(link, DESC, seq, 64).expect("there is room");
    }
    while proxy.turn(seq) {}
    assert!(port.can_stage(num_links - 1, DESC, seq + 4), "the last message of {seq} was not sent");
}
