//! The simulated network as groups see it: a few proxies, each with NICs of its own, that ranks share.

use std::time::Instant;

use super::{SimNet, SimOptions};
use crate::error::Result;
use crate::net::{Network, Port, PortSpec, ProxyHandle, ProxyOptions, Transport};

/// A network for groups whose ranks are threads of this process.
pub struct SimNetwork {
    net: SimNet,
    proxies: Vec<ProxyHandle>,
    seed: u64,
    num_nics: usize,
}

impl SimNetwork {
    /// A network with a thread of its own, and `num_proxies` proxies of `num_nics` NICs each. Rank `r` of a group uses
    /// proxy `r mod num_proxies`.
    ///
    /// # Errors
    /// Those of [`ProxyHandle::start`].
    pub fn start(options: SimOptions, num_proxies: usize, num_nics: usize) -> Result<SimNetwork> {
        let net = SimNet::threaded(options);
        let start = |_| {
            let nics = (0..num_nics).map(|_| Box::new(net.nic()) as Box<dyn Transport>).collect();
            ProxyHandle::start(nics, ProxyOptions::default())
        };
        let proxies = (0..num_proxies).map(start).collect::<Result<_>>()?;
        Ok(SimNetwork { net, proxies, seed: options.seed, num_nics })
    }

    /// The network below, to cut links and kill NICs: those of proxy `p` are `p * num_nics` and following.
    pub fn net(&self) -> &SimNet {
        &self.net
    }
}

impl Network for SimNetwork {
    fn describe(&self) -> String {
        format!("simulated network with seed {}, {} NICs a rank", self.seed, self.num_nics)
    }

    fn open(&self, spec: PortSpec, deadline: Instant) -> Result<Port> {
        self.proxies[spec.rank % self.proxies.len()].open(spec, deadline)
    }
}
