//! What the user of a machine may choose, by environment variables.

use std::env;

use ep_core::{Error, Result};

/// Variable, what it is without being set, for `ep info`. libfabric's own, as `FI_PROVIDER`, hold besides.
pub const SETTINGS: [(&str, &str); 6] = [
    (crate::sys::library::PATH_SETTING, "the one loaded, that of EFA, or the loader's"),
    ("EP_FABRIC_PROVIDER", "the best: efa-direct, efa, tcp, tcp;ofi_rxm, net"),
    ("EP_FABRIC_NICS", "EFA: all; else the first interface that is no loopback"),
    ("EP_FABRIC_TX_DEPTH", "the provider's, at most 4096 writes in flight"),
    ("EP_FABRIC_CQ_DEPTH", "8192 completions"),
    ("EP_FABRIC_LOW_LATENCY", "0: no traffic class is asked for"),
];

/// Completions that a queue has room for: the default of the EFA provider.
const CQ_DEPTH: usize = 8192;
const MAX_DEPTH: usize = 1 << 20;

/// The settings, checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The provider to use, or `efa-direct`; the best one without.
    pub provider: Option<String>,
    /// Names of interfaces or domains, or addresses, in this order.
    pub nics: Vec<String>,
    /// Writes in flight per NIC; the provider's own number without.
    pub tx_depth: Option<usize>,
    /// Completions that one queue may hold.
    pub cq_depth: usize,
    /// Ask for the traffic class of short messages.
    pub low_latency: bool,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings { provider: None, nics: Vec::new(), tx_depth: None, cq_depth: CQ_DEPTH, low_latency: false }
    }
}

impl Settings {
    /// Reads the environment.
    ///
    /// # Errors
    /// [`ep_core::Status::InvalidArgument`] naming the variable, its value and what is expected.
    pub fn from_env() -> Result<Settings> {
        Settings::read(|name| env::var_os(name).map(|value| value.to_string_lossy().into_owned()))
    }

    fn read(get: impl Fn(&str) -> Option<String>) -> Result<Settings> {
        let text =
            |name: &str| get(name).map(|value| value.trim().to_string()).filter(|value| !value.is_empty());
        let depth = |name: &str| match text(name) {
            None => Ok(None),
            Some(value) => match value.parse::<usize>() {
                Ok(depth @ 1..=MAX_DEPTH) => Ok(Some(depth)),
                _ => Err(Error::invalid(format!("{name}={value}, expected a number from 1 to {MAX_DEPTH}"))),
            },
        };
        let nics = text("EP_FABRIC_NICS").unwrap_or_default();
        let nics: Vec<String> =
            nics.split(',').map(|nic| nic.trim().to_string()).filter(|nic| !nic.is_empty()).collect();
        if let Some(twice) = (1..nics.len()).find(|&at| nics[..at].contains(&nics[at])) {
            return Err(Error::invalid(format!(
                "EP_FABRIC_NICS names {} twice; name each NIC once",
                nics[twice]
            )));
        }
        let low_latency = match text("EP_FABRIC_LOW_LATENCY").as_deref() {
            None | Some("0") => false,
            Some("1") => true,
            Some(value) => {
                return Err(Error::invalid(format!("EP_FABRIC_LOW_LATENCY={value}, expected 0 or 1")));
            }
        };
        Ok(Settings {
            provider: text("EP_FABRIC_PROVIDER"),
            nics,
            tx_depth: depth("EP_FABRIC_TX_DEPTH")?,
            cq_depth: depth("EP_FABRIC_CQ_DEPTH")?.unwrap_or(CQ_DEPTH),
            low_latency,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pairs: &[(&str, &str)]) -> Result<Settings> {
        Settings::read(|name| pairs.iter().find(|pair| pair.0 == name).map(|pair| pair.1.to_string()))
    }

    #[test]
    fn nothing_set_is_the_default() {
        assert_eq!(read(&[]).unwrap(), Settings::default());
        assert_eq!(
            read(&[("EP_FABRIC_PROVIDER", " "), ("EP_FABRIC_NICS", ",")]).unwrap(),
            Settings::default()
        );
    }

    #[test]
    fn every_setting_is_read() {
        let settings = read(&[
            ("EP_FABRIC_PROVIDER", "tcp"),
            ("EP_FABRIC_NICS", "127.0.0.1, eth1"),
            ("EP_FABRIC_TX_DEPTH", "64"),
            ("EP_FABRIC_CQ_DEPTH", "512"),
            ("EP_FABRIC_LOW_LATENCY", "1"),
        ]);
        let expected = Settings {
            provider: Some(String::from("tcp")),
            nics: vec![String::from("127.0.0.1"), String::from("eth1")],
            tx_depth: Some(64),
            cq_depth: 512,
            low_latency: true,
        };
        assert_eq!(settings.unwrap(), expected);
    }

    #[test]
    fn nonsense_is_refused_by_name() {
        for (name, value) in [
            ("EP_FABRIC_TX_DEPTH", "0"),
            ("EP_FABRIC_TX_DEPTH", "many"),
            ("EP_FABRIC_CQ_DEPTH", "-1"),
            ("EP_FABRIC_LOW_LATENCY", "yes"),
            ("EP_FABRIC_NICS", "lo,eth0,lo"),
        ] {
            let error = read(&[(name, value)]).unwrap_err();
            assert_eq!(error.status, ep_core::Status::InvalidArgument);
            assert!(error.message.contains(name), "{error}");
        }
    }
}
