//! Which provider is used, on which NICs, and why.

use std::net::{IpAddr, UdpSocket};
use std::sync::Arc;

use ep_core::{Error, Result, Status};

use crate::info::{Info, Needs};
use crate::settings::Settings;
use crate::sys::{Library, newer};

/// Bytes of an immediate that the protocol needs.
const IMMEDIATE_BYTES: usize = 4;

/// The kinds of provider that are chosen without being named, the best first. Others have RMA too, but reach
/// ranks of the same machine only (`shm`), or serve no endpoint of one thread well (`sockets`, `udp;ofi_rxd`).
/// `net` is what 1.17 has for the `tcp` of 2.x. It comes last because it cannot be slept on: where processes share
/// cores, spinning for it took up to ten times as long.
const RANK: [&str; 5] = ["efa-direct", "efa", "tcp", "tcp;ofi_rxm", "net"];

/// What a process on this machine would use, for people: the choice and its reason, and the NICs.
///
/// # Errors
/// As [`Library::open`], [`Settings::from_env`] and [`Selection::make`].
pub fn survey() -> Result<(String, Vec<String>)> {
    let library = Library::open()?;
    let selection = Selection::make(&library, &Settings::from_env()?, false)?;
    Ok((format!("{}; {library}", selection.reason()), selection.nics()))
}

/// What the choice looks at.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Offer {
    /// The provider, or `efa-direct`.
    kind: String,
    domain: String,
    ip: Option<IpAddr>,
    immediate_bytes: usize,
}

impl Offer {
    fn of(info: &Info) -> Offer {
        let (provider, fabric) = (info.provider(), info.fabric());
        let kind = if provider == "efa" && fabric == "efa-direct" { fabric } else { provider };
        Offer { kind, domain: info.domain(), ip: info.ip(), immediate_bytes: info.immediate_bytes() }
    }

    /// Whether the user's word for a NIC means this one.
    fn is_named(&self, name: &str) -> bool {
        self.domain == name || self.ip.is_some_and(|ip| name.parse() == Ok(ip))
    }
}

/// The provider and NICs that a process uses.
pub struct Selection {
    library: Arc<Library>,
    kind: String,
    nics: Vec<Info>,
    reason: String,
}

impl Selection {
    /// Chooses. With `device_memory`, a provider that can register memory of a device is preferred to one that
    /// cannot.
    ///
    /// # Errors
    /// [`Status::Unsupported`] if no provider, or not the one asked for, has what is needed;
    /// [`Status::InvalidArgument`] for a NIC that is not there. The sentence lists what there is.
    pub fn make(library: &Arc<Library>, settings: &Settings, device_memory: bool) -> Result<Selection> {
        let low_latency = settings.low_latency;
        let mut infos = Vec::new();
        if device_memory {
            infos = Info::query(library, Needs { device_memory, low_latency }, None)?;
        }
        infos.extend(Info::query(library, Needs { device_memory: false, low_latency }, None)?);
        let offers: Vec<Offer> = infos.iter().map(Offer::of).collect();
        let (kind, mut reason) = choose(&offers, settings.provider.as_deref())?;
        let mut nics = Vec::new();
        if settings.nics.is_empty() {
            let (positions, why) = default_nics(&offers, &kind);
            nics = take(infos, &positions);
            reason += &why;
        } else {
            for name in &settings.nics {
                let needs = Needs { device_memory: false, low_latency };
                nics.push(named_nic(library, needs, &infos, &offers, &kind, name)?);
            }
            reason += ", on the NICs of EP_FABRIC_NICS";
        }
        if kind.starts_with("efa") && library.raw_version() < newer::EFA_SINCE {
            reason += "; for EFA, libfabric 2.4 or newer is better";
        }
        if let Ok(filter) = std::env::var("FI_PROVIDER") {
            reason += &format!("; libfabric was told FI_PROVIDER={filter}");
        }
        Ok(Selection { library: Arc::clone(library), kind, nics, reason })
    }

    /// The library in use.
    pub fn library(&self) -> &Arc<Library> {
        &self.library
    }

    /// The provider, or `efa-direct`.
    pub fn kind(&self) -> &str {
        &self.kind
    }

    /// Why this provider on these NICs, as a sentence without its full stop.
    pub fn reason(&self) -> &str {
        &self.reason
    }

    /// Names and addresses of the NICs, in the order of their indices.
    pub fn nics(&self) -> Vec<String> {
        let name = |info: &Info| match info.ip() {
            Some(ip) => format!("{} {ip}", info.domain()),
            None => info.domain(),
        };
        self.nics.iter().map(name).collect()
    }

    /// What to open a NIC with.
    pub(crate) fn info(&self, nic_idx: usize) -> Result<&Info> {
        self.nics.get(nic_idx).ok_or_else(|| {
            let count = self.nics.len();
            Error::new(Status::OutOfRange, format!("NIC {nic_idx} of {count}; see EP_FABRIC_NICS"))
        })
    }
}

/// The kind of provider and the reason for it.
fn choose(offers: &[Offer], asked: Option<&str>) -> Result<(String, String)> {
    let unsupported = |message: String| Err(Error::new(Status::Unsupported, message));
    let mut kinds: Vec<&str> = Vec::new();
    for offer in offers.iter().filter(|offer| offer.immediate_bytes >= IMMEDIATE_BYTES) {
        if !kinds.contains(&offer.kind.as_str()) {
            kinds.push(&offer.kind);
        }
    }
    let there_is = if kinds.is_empty() { String::from("none") } else { kinds.join(", ") };
    let needs = "remote writes with 32 bits of immediate data on reliable datagrams";
    if let Some(asked) = asked {
        // The `tcp` of 1.17 has no reliable datagrams of its own.
        let names: &[&str] = if asked == "tcp" { &["tcp", "tcp;ofi_rxm", "net"] } else { &[asked] };
        return match names.iter().find(|name| kinds.contains(name)) {
            Some(&kind) if kind == asked => Ok((String::from(kind), format!("{kind}: asked for"))),
            Some(&kind) => {
                Ok((String::from(kind), format!("{kind}: what this libfabric has for the {asked} asked for")))
            }
            None => unsupported(format!(
                "EP_FABRIC_PROVIDER={asked} is not there or lacks {needs}; there is: {there_is}"
            )),
        };
    }
    match RANK.iter().find(|kind| kinds.contains(kind)) {
        Some(&kind) => {
            let rest: Vec<&str> = kinds.into_iter().filter(|&other| other != kind).collect();
            let over = if rest.is_empty() { String::new() } else { format!(", before {}", rest.join(", ")) };
            Ok((String::from(kind), format!("{kind}: the best that has {needs}{over}")))
        }
        None => unsupported(format!(
            "libfabric has no provider for {needs} between machines, expected one of {}; there is: {there_is}; \
             name one in EP_FABRIC_PROVIDER to use it nevertheless",
            RANK.join(", ")
        )),
    }
}

/// The NICs without a word of the user, and why these.
fn default_nics(offers: &[Offer], kind: &str) -> (Vec<usize>, String) {
    let mut found: Vec<usize> = Vec::new();
    for (at, offer) in offers.iter().enumerate().filter(|(_, offer)| offer.kind == kind) {
        if !found.iter().any(|&known| offers[known].domain == offer.domain && offers[known].ip == offer.ip) {
            found.push(at);
        }
    }
    if kind.starts_with("efa") {
        found.sort_by(|&a, &b| offers[a].domain.cmp(&offers[b].domain));
        let why = format!(", on all {} NICs", found.len());
        return (found, why);
    }
    // The address that other machines most likely reach, first: IPv4 before IPv6, loopback last.
    let score = |&at: &usize| match offers[at].ip {
        Some(IpAddr::V4(ip)) if ip.is_loopback() => 3,
        Some(IpAddr::V4(ip)) => u8::from(ip.is_link_local()) * 2,
        Some(IpAddr::V6(ip)) if ip.is_loopback() => 4,
        Some(IpAddr::V6(ip)) => 1 + u8::from(ip.is_unicast_link_local()) * 4,
        None => 2,
    };
    found.sort_by_key(score);
    let why = match found.len() {
        0 | 1 => String::from(", on its only NIC"),
        len => format!(", on one of {len} addresses (EP_FABRIC_NICS chooses others)"),
    };
    found.truncate(1);
    (found, why)
}

/// The NIC with this name or address; an address that no interface lists is asked for.
fn named_nic(
    library: &Arc<Library>,
    needs: Needs,
    infos: &[Info],
    offers: &[Offer],
    kind: &str,
    name: &str,
) -> Result<Info> {
    let here = |offer: &Offer| offer.kind == kind && offer.is_named(name);
    let mut fitting: Vec<usize> = (0..offers.len()).filter(|&at| here(&offers[at])).collect();
    // An interface has several addresses: the IPv4 one is meant.
    fitting.sort_by_key(|&at| offers[at].ip.is_some_and(|ip| ip.is_ipv6()));
    if let Some(&at) = fitting.first() {
        return infos[at].duplicate();
    }
    // libfabric takes any address for one of this machine's; a socket does not.
    if let Ok(address) = name.parse::<IpAddr>()
        && UdpSocket::bind((address, 0)).is_ok()
        && let Some(info) = Info::query(library, needs, Some(address))?
            .into_iter()
            .find(|info| Offer::of(info).kind == kind && info.ip() == Some(address))
    {
        return Ok(info);
    }
    let mut there: Vec<String> = Vec::new();
    for offer in offers.iter().filter(|offer| offer.kind == kind) {
        let text = offer.ip.map_or_else(|| offer.domain.clone(), |ip| format!("{} ({ip})", offer.domain));
        if !there.contains(&text) {
            there.push(text);
        }
    }
    Err(Error::invalid(format!(
        "EP_FABRIC_NICS names {name}, and {kind} has no such NIC; it has {}",
        there.join(", ")
    )))
}

/// The elements at these positions, in the order of the positions.
fn take(infos: Vec<Info>, positions: &[usize]) -> Vec<Info> {
    let mut infos: Vec<Option<Info>> = infos.into_iter().map(Some).collect();
    positions.iter().filter_map(|&at| infos[at].take()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer(kind: &str, domain: &str, ip: Option<&str>) -> Offer {
        let ip = ip.map(|ip| ip.parse().expect("an address"));
        Offer { kind: kind.to_string(), domain: domain.to_string(), ip, immediate_bytes: 8 }
    }

    fn machine() -> Vec<Offer> {
        vec![
            offer("shm", "shm", None),
            offer("tcp;ofi_rxm", "lo", Some("127.0.0.1")),
            offer("tcp", "lo", Some("127.0.0.1")),
            offer("tcp", "eth0", Some("fd00::7")),
            offer("tcp", "eth0", Some("10.0.0.7")),
            offer("tcp", "eth0", Some("10.0.0.7")),
            offer("sockets", "lo", Some("127.0.0.1")),
        ]
    }

    #[test]
    fn the_best_kind_is_chosen_whatever_the_order() {
        let mut offers = machine();
        assert_eq!(choose(&offers, None).unwrap().0, "tcp");
        offers.push(offer("efa", "rdmap1", None));
        assert_eq!(choose(&offers, None).unwrap().0, "efa");
        offers.push(offer("efa-direct", "rdmap1", None));
        let (kind, reason) = choose(&offers, None).unwrap();
        assert_eq!(kind, "efa-direct");
        assert!(reason.contains("before") && reason.contains("tcp"), "{reason}");
    }

    #[test]
    fn a_provider_with_short_immediates_is_no_candidate() {
        let mut offers = vec![offer("tcp", "eth0", Some("10.0.0.7"))];
        offers[0].immediate_bytes = 2;
        let error = choose(&offers, None).unwrap_err();
        assert_eq!(error.status, Status::Unsupported);
        assert!(error.message.contains("there is: none"), "{error}");
        assert!(choose(&offers, Some("tcp")).is_err());
    }

    #[test]
    fn shared_memory_is_used_only_where_it_is_named() {
        let offers = [offer("shm", "shm", None)];
        assert!(choose(&offers, None).unwrap_err().message.contains("there is: shm"));
        assert_eq!(choose(&offers, Some("shm")).unwrap().0, "shm");
    }

    #[test]
    fn tcp_means_what_the_library_has_for_it() {
        let old = [offer("net", "lo", None), offer("tcp;ofi_rxm", "lo", None)];
        let (kind, reason) = choose(&old, Some("tcp")).unwrap();
        assert_eq!(kind, "tcp;ofi_rxm");
        assert!(reason.contains("for the tcp asked for"), "{reason}");
        let error = choose(&old, Some("efa")).unwrap_err();
        assert!(error.message.contains("EP_FABRIC_PROVIDER=efa") && error.message.contains("net"), "{error}");
    }

    #[test]
    fn the_address_that_others_reach_is_taken_once() {
        let offers = machine();
        let (found, why) = default_nics(&offers, "tcp");
        assert_eq!(found, [4]);
        assert!(why.contains("one of 3"), "{why}");
        assert_eq!(default_nics(&offers[..3], "tcp").0, [2]);
    }

    #[test]
    fn efa_gets_all_its_nics_in_the_order_of_their_names() {
        let offers = [
            offer("efa-direct", "rdmap9", None),
            offer("tcp", "eth0", None),
            offer("efa-direct", "rdmap1", None),
        ];
        assert_eq!(default_nics(&offers, "efa-direct").0, [2, 0]);
    }
}
