//! Ranks with a proxy each over one simulated network, all in the thread of the test.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::mem::{Mapping, Words};
use crate::net::sim::{SimNet, SimOptions};
use crate::net::{Bell, Pending, Port, PortSpec, Proxy, Shape, Slots, Transport};

/// When a link counts as stuck, in virtual time.
pub(super) const STUCK: Duration = Duration::from_millis(500);

pub(super) struct Rank {
    pub(super) proxy: Proxy,
    /// None once it was closed.
    pub(super) port: Option<Port>,
    /// The numbers of its NICs.
    pub(super) nics: Vec<usize>,
}

pub(super) struct Cluster {
    pub(super) net: SimNet,
    pub(super) ranks: Vec<Rank>,
}

/// A shape in which messages of rows are cut over NICs.
pub(super) fn shape(num_links: usize, num_lanes: usize) -> Shape {
    Shape {
        num_links,
        num_lanes,
        desc: Slots { window: 3, bytes: 700 },
        rows: Slots { window: 8, bytes: 80_000 },
        request: Slots { window: 4, bytes: 512 },
        response: Slots { window: 4, bytes: 20_000 },
        error_bytes: 288,
    }
}

pub(super) fn far() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

/// Doorbells in a segment of their own: lane i has the line i.
pub(super) fn bells(num_lanes: usize) -> (Words, Vec<Bell>) {
    let (mapping, _) = Mapping::create(4096).unwrap();
    let segment = Words::new(Arc::new(mapping));
    let bell = |lane| Bell { segment: segment.clone(), bell: 128 * lane, sleeping: 128 * lane + 4 };
    let bells = (0..num_lanes).map(bell).collect();
    (segment, bells)
}

/// The links of `rank`: to every other one.
pub(super) fn peers_of(rank: usize, num_ranks: usize) -> Vec<usize> {
    (0..num_ranks).filter(|&peer| peer != rank).collect()
}

/// The link of `rank` to `peer`.
pub(super) fn link_to(rank: usize, peer: usize) -> usize {
    if peer < rank { peer } else { peer - 1 }
}

/// A proxy over `num_nics` new NICs.
pub(super) fn proxy(net: &SimNet, num_nics: usize) -> (Proxy, Vec<usize>) {
    let nics: Vec<_> = (0..num_nics).map(|_| net.nic()).collect();
    let ids = nics.iter().map(|nic| nic.id()).collect();
    let nics = nics.into_iter().map(|nic| Box::new(nic) as Box<dyn Transport>).collect();
    (Proxy::new(nics, STUCK).unwrap(), ids)
}

impl Cluster {
    /// Opened ports, not connected: `num_nics` by rank.
    pub(super) fn open(options: SimOptions, num_nics: &[usize], num_lanes: usize) -> Cluster {
        let net = SimNet::stepped(options);
        let num_ranks = num_nics.len();
        let ranks = (0..num_ranks).map(|rank| {
            let (mut proxy, nics) = proxy(&net, num_nics[rank]);
            let (_, bells) = bells(num_lanes);
            let shape = shape(num_ranks - 1, num_lanes);
            let spec = PortSpec { shape, rank, peers: peers_of(rank, num_ranks), bells };
            let port = Some(proxy.open(spec).unwrap());
            Rank { proxy, port, nics }
        });
        let ranks = ranks.collect();
        Cluster { net, ranks }
    }

    /// Ports that are ready for messages.
    pub(super) fn connected(options: SimOptions, num_nics: &[usize], num_lanes: usize) -> Cluster {
        let mut cluster = Cluster::open(options, num_nics, num_lanes);
        cluster.connect().unwrap();
        cluster.probe().into_iter().collect::<Result<Vec<()>>>().unwrap();
        cluster
    }

    pub(super) fn port(&self, rank: usize) -> &Port {
        self.ranks[rank].port.as_ref().expect("open")
    }

    /// What the links of `rank` are offered.
    pub(super) fn offers_for(&self, rank: usize) -> Vec<Vec<u8>> {
        peers_of(rank, self.ranks.len()).iter().map(|&peer| self.port(peer).offer().to_vec()).collect()
    }

    /// The ranks' notes.
    pub(super) fn connect(&mut self) -> Result<Vec<Option<String>>> {
        let num_ranks = self.ranks.len();
        let pending: Vec<_> =
            (0..num_ranks).map(|rank| self.port(rank).begin_connect(self.offers_for(rank))).collect();
        self.answers(pending).into_iter().collect()
    }

    pub(super) fn probe(&mut self) -> Vec<Result<()>> {
        let pending = (0..self.ranks.len()).map(|rank| self.port(rank).begin_probe(far())).collect();
        self.answers(pending)
    }

    /// Lets time go on until every answer is there.
    pub(super) fn answers<T>(&mut self, mut pending: Vec<Pending<T>>) -> Vec<Result<T>> {
        let mut answers: Vec<Option<Result<T>>> = pending.iter().map(|_| None).collect();
        for _ in 0..1_000_000 {
            self.round();
            for (answer, pending) in answers.iter_mut().zip(&mut pending) {
                if answer.is_none() {
                    *answer = pending.try_take();
                }
            }
            if answers.iter().all(Option::is_some) {
                return answers.into_iter().flatten().collect();
            }
        }
        let missing = answers.iter().position(Option::is_none);
        vec![Err(Error::invalid(format!("no answer for rank {missing:?}")))]
    }

    /// A turn of every proxy and one thing on the network; where nothing moves, time does. True if anything moved.
    pub(super) fn round(&mut self) -> bool {
        let now = self.net.now_ns();
        let mut moved = false;
        for rank in &mut self.ranks {
            moved |= rank.proxy.turn(now);
        }
        moved |= self.net.step();
        if !moved {
            self.net.pass(1_000_000);
        }
        moved
    }
}
