//! The id by which the ranks of one group find each other.

use std::env;
use std::fmt;
use std::io::ErrorKind;
use std::net::{
    IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6, TcpListener, ToSocketAddrs,
};

use bytemuck::{Pod, Zeroable};
use sha2::{Digest, Sha256};

use super::root::{self, RootHandle, RootOptions};
use super::wire;
use crate::error::{Error, Result};

/// The environment variable that names this host to the other ranks.
const ADDRESS_VARIABLE: &str = "EP_BOOTSTRAP_ADDR";

const MAGIC: [u8; 4] = *b"EPID";
const VERSION: u8 = 1;

/// What the ranks of one group need to meet: the address of the root and a secret. 128 bytes without
/// padding, to be copied to the other ranks by any means that others cannot read.
///
/// An id serves one group at a time. [`UniqueId::create`] makes one whose root lives in this process;
/// [`UniqueId::from_address`] makes one that every rank can work out alone, whose root rank 0 hosts.
#[derive(Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct UniqueId {
    magic: [u8; 4],
    version: u8,
    /// 4 or 6.
    family: u8,
    /// A [`Hosting`] as a number.
    hosting: u8,
    reserved: u8,
    /// Little endian, as all numbers here.
    port: [u8; 2],
    padding: [u8; 2],
    /// Of an IPv6 link-local address.
    scope: [u8; 4],
    /// IPv4: the first four bytes.
    address: [u8; 16],
    secret: [u8; 32],
    tail: [u8; 64],
}

const _: () = assert!(size_of::<UniqueId>() == 128 && align_of::<UniqueId>() == 1);

/// Who runs the root of an id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hosting {
    /// The process that created the id has been listening since then.
    Creator = 0,
    /// Rank 0 listens at the address when it connects.
    Rank0 = 1,
    /// As `Rank0`, but at every address of the host: a name may resolve to loopback on its own host.
    Rank0Anywhere = 2,
}

impl UniqueId {
    /// Makes a new id and starts its root in this process: the listener is bound at once, and one
    /// thread serves it. Any rank may join from any process; this process need not be a rank.
    ///
    /// The root listens at `EP_BOOTSTRAP_ADDR` (`ip`, `host` or either with `:port`; bracket an IPv6
    /// address that has a port) and at 127.0.0.1 when that is not set, so a group over several hosts
    /// must set it. Without a port the system chooses one. An address that is not this host's but leads here
    /// by translation, as a Kubernetes Service does, needs the port; the root then listens at all addresses
    /// of this host. The root ends by itself when all ranks have
    /// left, when the ranks' deadline passes, or when no rank joins within ten minutes.
    ///
    /// # Errors
    /// [`crate::Status::InvalidArgument`] when `EP_BOOTSTRAP_ADDR` names no address, or another host's without
    /// a port, and [`crate::Status::System`] when it does not resolve, cannot be listened at, or the system has no
    /// random bytes or threads left.
    pub fn create() -> Result<UniqueId> {
        UniqueId::create_with(RootOptions::default())
    }

    /// As [`UniqueId::create`], with a root that behaves as `options` say.
    pub(super) fn create_with(options: RootOptions) -> Result<UniqueId> {
        let address = match env::var(ADDRESS_VARIABLE) {
            Ok(text) if !text.trim().is_empty() => {
                resolve(text.trim(), Some(0)).map_err(|error| in_variable(&error))?.address
            }
            Ok(_) | Err(env::VarError::NotPresent) => SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
            Err(error) => return Err(in_variable(&Error::invalid(error.to_string()))),
        };
        UniqueId::create_at(address, options).map(|(id, _)| id)
    }

    /// Makes an id whose root listens at `address`.
    pub(super) fn create_at(address: SocketAddr, options: RootOptions) -> Result<(UniqueId, RootHandle)> {
        if address.ip().is_unspecified() {
            let text = format!("{address} names no host; give an address that the other ranks can reach");
            return Err(in_variable(&Error::invalid(text)));
        }
        let listener = bind(address, false).map_err(|error| match error.kind() {
            ErrorKind::AddrNotAvailable => in_variable(&Error::invalid(format!(
                "{} is not an address of this host; if it leads here by translation, as a Kubernetes Service does, \
                 give the port that leads here as well",
                address.ip()
            ))),
            _ => Error::system("bind of the root's address", format!("{address}: {error}")),
        })?;
        let port = listener.local_addr().map_err(|error| Error::system("getsockname", error))?.port();
        let mut secret = [0; 32];
        getrandom::fill(&mut secret).map_err(|error| Error::system("getrandom", error))?;
        let mut public = address;
        public.set_port(port);
        let id = UniqueId::new(public, secret, Hosting::Creator);
        let handle = root::start(listener, public, secret, options)?;
        Ok((id, handle))
    }

    /// Makes the id of a group from an address and a secret that all ranks know, without a message
    /// between them: the ranks of a launcher that sets `MASTER_ADDR` and `MASTER_PORT` pass those.
    /// Rank 0 listens there when it connects, so `address` must be rank 0's host. Groups that exist at
    /// the same time need different ports; one after another they may share a port.
    ///
    /// A host name is resolved here, and then rank 0 listens at all addresses of its host.
    ///
    /// # Errors
    /// [`crate::Status::InvalidArgument`] when `address` is not `host:port`, and
    /// [`crate::Status::System`] when the name does not resolve.
    pub fn from_address(address: &str, secret: &str) -> Result<UniqueId> {
        if secret.is_empty() {
            return Err(Error::invalid(
                "the secret is empty: anyone could join; give every rank the same secret text",
            ));
        }
        let resolved = resolve(address, None)?;
        if resolved.address.ip().is_unspecified() {
            let text = format!("\"{address}\" must name a host and a port that all ranks can reach");
            return Err(Error::invalid(text));
        }
        let mut hash = Sha256::new();
        hash.update(b"libep bootstrap secret 1\0");
        hash.update(secret.as_bytes());
        let hosting = if resolved.is_name { Hosting::Rank0Anywhere } else { Hosting::Rank0 };
        Ok(UniqueId::new(resolved.address, hash.finalize().into(), hosting))
    }

    fn new(address: SocketAddr, secret: [u8; 32], hosting: Hosting) -> UniqueId {
        let mut id = UniqueId {
            magic: MAGIC,
            version: VERSION,
            hosting: hosting as u8,
            port: address.port().to_le_bytes(),
            secret,
            ..UniqueId::zeroed()
        };
        match address {
            SocketAddr::V4(v4) => {
                id.family = 4;
                id.address[..4].copy_from_slice(&v4.ip().octets());
            }
            SocketAddr::V6(v6) => {
                id.family = 6;
                id.address = v6.ip().octets();
                id.scope = v6.scope_id().to_le_bytes();
            }
        }
        id
    }

    /// The address of the root.
    ///
    /// # Errors
    /// [`crate::Status::InvalidArgument`] when the bytes are not an id of this version.
    pub fn address(&self) -> Result<SocketAddr> {
        if self.magic != MAGIC {
            return Err(Error::invalid("the bytes are not a unique id of libep"));
        }
        if self.version != VERSION {
            return Err(Error::invalid(format!(
                "the unique id has version {}, this library makes version {VERSION}; use one libep everywhere",
                self.version
            )));
        }
        let port = u16::from_le_bytes(self.port);
        let [a, b, c, d, ..] = self.address;
        match self.family {
            4 => Ok(SocketAddrV4::new(Ipv4Addr::new(a, b, c, d), port).into()),
            6 => {
                let scope = u32::from_le_bytes(self.scope);
                Ok(SocketAddrV6::new(Ipv6Addr::from(self.address), port, 0, scope).into())
            }
            other => Err(Error::invalid(format!("the unique id has the unknown address family {other}"))),
        }
    }

    pub(super) fn hosting(&self) -> Result<Hosting> {
        match self.hosting {
            0 => Ok(Hosting::Creator),
            1 => Ok(Hosting::Rank0),
            2 => Ok(Hosting::Rank0Anywhere),
            other => Err(Error::invalid(format!("the unique id has the unknown kind {other}"))),
        }
    }

    pub(super) fn secret(&self) -> &[u8; 32] {
        &self.secret
    }
}

/// Leaves the secret out.
impl fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UniqueId")
            .field("address", &self.address())
            .field("hosting", &self.hosting())
            .finish_non_exhaustive()
    }
}

/// Listens at `address`; at every address of the host when `anywhere`, or when the address is not one
/// of this host's own but has a port, as behind address translation.
pub(super) fn bind(address: SocketAddr, anywhere: bool) -> std::io::Result<TcpListener> {
    let wildcard: IpAddr = match address {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let wildcard = SocketAddr::from((wildcard, address.port()));
    let listener = match TcpListener::bind(if anywhere { wildcard } else { address }) {
        Err(error) if error.kind() == ErrorKind::AddrNotAvailable && address.port() != 0 => {
            TcpListener::bind(wildcard)?
        }
        result => result?,
    };
    // The standard library's queue of 128 is short for a large group that starts at once.
    rustix::net::listen(&listener, wire::LISTEN_BACKLOG)?;
    Ok(listener)
}

struct Resolved {
    address: SocketAddr,
    is_name: bool,
}

/// Resolves `host:port`, or `host` where there is a `default_port`. IPv4 goes first, so that all hosts
/// choose alike where a name has addresses of both families.
fn resolve(text: &str, default_port: Option<u16>) -> Result<Resolved> {
    let (host, port) = split_port(text);
    let malformed = || {
        let form = if default_port.is_some() { "host or host:port" } else { "host:port" };
        Error::invalid(format!("\"{text}\" is not {form}"))
    };
    let port = match port {
        Some(digits) => digits.parse().map_err(|_| malformed())?,
        None => default_port.ok_or_else(malformed)?,
    };
    if host.is_empty() || (port == 0 && default_port.is_none()) {
        return Err(malformed());
    }
    if let Ok(ip) = host.parse::<IpAddr>() {
        return Ok(Resolved { address: SocketAddr::from((ip, port)), is_name: false });
    }
    let found = (host, port).to_socket_addrs().map_err(|error| {
        Error::system("getaddrinfo", format!("the host \"{host}\" does not resolve: {error}"))
    })?;
    let address = found
        .min_by_key(SocketAddr::is_ipv6)
        .ok_or_else(|| Error::invalid(format!("the host \"{host}\" has no address")))?;
    Ok(Resolved { address, is_name: true })
}

/// Parts `host:port`, `[v6]:port`, `[v6]`, a bare IPv6 address, or `host`.
fn split_port(text: &str) -> (&str, Option<&str>) {
    if let Some((host, rest)) = text.strip_prefix('[').and_then(|inner| inner.split_once(']')) {
        return match rest.strip_prefix(':') {
            Some(port) => (host, Some(port)),
            None if rest.is_empty() => (host, None),
            None => ("", None),
        };
    }
    match text.split_once(':') {
        Some((host, port)) if !port.contains(':') => (host, Some(port)),
        _ => (text, None),
    }
}

fn in_variable(error: &Error) -> Error {
    Error::new(error.status, format!("{ADDRESS_VARIABLE}: {}", error.message))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Status;

    #[test]
    fn address_survives_the_bytes() {
        for text in ["10.1.2.3:4567", "[2001:db8::7]:80", "127.0.0.1:65535"] {
            let id = UniqueId::from_address(text, "s").unwrap();
            let copy: UniqueId = bytemuck::pod_read_unaligned(bytemuck::bytes_of(&id));
            assert_eq!(copy, id);
            assert_eq!(copy.address().unwrap().to_string(), text);
            assert_eq!(copy.hosting().unwrap(), Hosting::Rank0);
        }
    }

    #[test]
    fn id_from_address_depends_on_the_secret_alone_besides() {
        let id = |secret| UniqueId::from_address("10.0.0.1:9", secret).unwrap();
        assert_eq!(id("a"), id("a"));
        assert_ne!(id("a"), id("b"));
        assert!(!format!("{:?}", id("a")).contains("secret"));
    }

    #[test]
    fn names_resolve_and_are_listened_at_anywhere() {
        let id = UniqueId::from_address("localhost:77", "s").unwrap();
        assert!(id.address().unwrap().ip().is_loopback());
        assert_eq!(id.hosting().unwrap(), Hosting::Rank0Anywhere);
    }

    #[test]
    fn malformed_addresses_are_refused() {
        for text in
            ["", "10.0.0.1", ":80", "10.0.0.1:x", "10.0.0.1:70000", "0.0.0.0:80", "h:0", "[::1]x:8", "::1"]
        {
            let error = UniqueId::from_address(text, "s").unwrap_err();
            assert_eq!(error.status, Status::InvalidArgument, "{text}: {error}");
        }
        assert_eq!(resolve("::1", Some(5)).unwrap().address.to_string(), "[::1]:5");
        assert_eq!(resolve("[::1]", Some(5)).unwrap().address.to_string(), "[::1]:5");
        assert_eq!(resolve("1.2.3.4:6", Some(5)).unwrap().address.to_string(), "1.2.3.4:6");
    }

    #[test]
    fn address_of_another_host_needs_a_port_and_is_then_listened_at_anywhere() {
        // 192.0.2.0/24 is for documentation: no host has it.
        let create = |port| {
            let address = SocketAddr::from(([192, 0, 2, 1], port));
            UniqueId::create_at(address, RootOptions::default())
        };
        let error = create(0).unwrap_err();
        assert_eq!(error.status, Status::InvalidArgument);
        assert!(error.message.contains("EP_BOOTSTRAP_ADDR: 192.0.2.1 is not"), "{error}");
        let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let (id, root) = create(free).unwrap();
        assert_eq!(id.address().unwrap().to_string(), format!("192.0.2.1:{free}"));
        assert!(std::net::TcpStream::connect(("127.0.0.1", free)).is_ok());
        root.stop();
    }

    #[test]
    fn arbitrary_bytes_are_refused_not_trusted() {
        assert!(UniqueId::zeroed().address().is_err());
        let id = UniqueId::from_address("10.0.0.1:9", "s").unwrap();
        assert!(UniqueId { version: 9, ..id }.address().unwrap_err().message.contains("version 9"));
        assert!(UniqueId { family: 9, ..id }.address().is_err());
        assert!(UniqueId { hosting: 9, ..id }.hosting().is_err());
    }
}
