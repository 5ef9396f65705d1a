//! Several nodes on one machine, or on hosts that a launcher reaches: what the user asked for, and the network for it.

use std::time::Duration;

use anyhow::{Result, ensure};
use clap::Args;
use ep_fabric::Settings;

use crate::bench::fabric::Network;
use crate::place::Placement;

/// Arguments of several nodes.
#[derive(Clone, Debug, Args)]
pub(crate) struct BetweenArgs {
    /// Nodes, over which ranks are spread evenly; ranks of different nodes share no memory
    #[arg(long, default_value_t = 1)]
    pub(crate) nodes: usize,
    /// Between nodes: `fabric`, or `fabric:PROVIDER`; NICs by EP_FABRIC_NICS, 127.0.0.1 when that is not set
    #[arg(long, value_parser = transport)]
    pub(crate) transport: Option<Transport>,
    /// Words before the command of each process, such as "nsenter --net=/run/netns/host{node}"; {rank} and {node} are
    /// replaced
    #[arg(long, value_name = "WORDS")]
    pub(crate) launch: Option<String>,
}

/// What is between nodes: libfabric, with this provider or with the best.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Transport {
    provider: Option<String>,
}

/// Providers that take any interface; the others choose their NICs themselves.
const OVER_IP: [&str; 3] = ["tcp", "net", "tcp;ofi_rxm"];

fn transport(text: &str) -> Result<Transport, String> {
    match text.split_once(':') {
        None if text == "fabric" => Ok(Transport { provider: None }),
        Some(("fabric", provider)) if !provider.is_empty() => {
            Ok(Transport { provider: Some(provider.to_string()) })
        }
        _ => Err(String::from("expected fabric or fabric:PROVIDER, such as fabric:tcp")),
    }
}

impl BetweenArgs {
    /// Where ranks run, and the network if there are several nodes.
    ///
    /// # Errors
    /// If the arguments contradict each other, or there is no such network.
    pub(crate) fn placement(
        &self,
        num_ranks: usize,
        timeout: Duration,
    ) -> Result<(Placement, Option<Network>)> {
        ensure!(
            (1..=num_ranks).contains(&self.nodes),
            "--nodes {} of {num_ranks} ranks: expected 1 to {num_ranks}",
            self.nodes
        );
        if self.nodes == 1 {
            ensure!(
                self.transport.is_none() && self.launch.is_none(),
                "--transport and --launch are for several nodes: give --nodes too"
            );
            return Ok((Placement::here(), None));
        }
        let mut settings = Settings::from_env()?;
        if let Some(provider) = self.transport.as_ref().and_then(|transport| transport.provider.clone()) {
            settings.provider = Some(provider);
        }
        let placement = Placement::on(self.nodes, self.launch.as_deref());
        let chosen = !settings.nics.is_empty() || !placement.is_local();
        let (mut network, _) = Network::find(settings.clone(), timeout)?;
        if !chosen && OVER_IP.contains(&network.provider.as_str()) {
            settings.nics = vec![String::from("127.0.0.1")];
            network = Network::find(settings, timeout)?.0;
        }
        let mut placement = placement.with("EP_FABRIC_PROVIDER", &network.provider);
        if !network.addresses.is_empty() {
            placement = placement.with("EP_FABRIC_NICS", &network.addresses.join(","));
        }
        Ok((placement, Some(network)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transport_is_libfabric_with_or_without_a_provider() {
        assert_eq!(transport("fabric"), Ok(Transport { provider: None }));
        let named = Transport { provider: Some(String::from("tcp;ofi_rxm")) };
        assert_eq!(transport("fabric:tcp;ofi_rxm"), Ok(named));
        for text in ["", "shm", "fabric:", "tcp"] {
            assert!(transport(text).is_err(), "{text}");
        }
    }

    #[test]
    fn contradictions_are_refused() {
        let args = BetweenArgs { nodes: 1, transport: None, launch: None };
        let refused = |args: BetweenArgs| args.placement(2, Duration::from_secs(1)).is_err();
        assert!(!refused(args.clone()));
        assert!(refused(BetweenArgs { nodes: 3, ..args.clone() }));
        assert!(refused(BetweenArgs { nodes: 0, ..args.clone() }));
        assert!(refused(BetweenArgs { launch: Some(String::from("sh")), ..args }));
    }
}
