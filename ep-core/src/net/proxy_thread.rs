//! The thread that turns a proxy.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::mailbox::{Mailbox, Request};
use super::port::{Port, PortSpec};
use super::transport::Transport;
use crate::error::Result;

/// How a proxy's thread behaves.
#[derive(Clone, Debug)]
pub struct ProxyOptions {
    /// How long it looks for work before it sleeps.
    pub spin: Duration,
    /// After how long a write that no NIC takes fails its link.
    pub stuck_after: Duration,
}

impl Default for ProxyOptions {
    fn default() -> ProxyOptions {
        ProxyOptions { spin: Duration::from_micros(50), stuck_after: Duration::from_secs(5) }
    }
}

/// A running proxy. Its thread ends when the last handle and the last port are gone.
#[derive(Clone, Debug)]
pub struct ProxyHandle {
    inner: Arc<Running>,
}

#[derive(Debug)]
struct Running {
    mailbox: Arc<Mailbox>,
    nics: Vec<String>,
}

impl ProxyHandle {
    /// Starts the thread that serves `nics`.
    ///
    /// # Errors
    /// Those of [`super::Proxy::new`]; [`crate::Status::System`] if there can be no thread.
    pub fn start(nics: Vec<Box<dyn Transport>>, options: ProxyOptions) -> Result<ProxyHandle> {
        let _ = (nics, options);
        Err(crate::Error::new(crate::Status::Unsupported, "the proxy is being built"))
    }

    /// Opens a port for one rank of a group.
    ///
    /// # Errors
    /// Those of [`super::Proxy::open`]; [`crate::Status::Timeout`] at the deadline.
    pub fn open(&self, spec: PortSpec, deadline: Instant) -> Result<Port> {
        self.inner.mailbox.ask(|reply| Request::Open { spec, reply }).wait(deadline, "opening a port")
    }

    /// The NICs, as [`super::transport::Limits::name`] says.
    pub fn nics(&self) -> &[String] {
        &self.inner.nics
    }
}
