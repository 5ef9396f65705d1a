//! The loop body between ports and NICs.

use std::sync::Arc;

use super::mailbox::{Mailbox, Request};
use super::port::{Port, PortSpec};
use super::transport::Transport;
use super::waker::Waker;
use crate::error::Result;

/// Serves the ports of a process over its NICs. One thread turns it; a test may turn it itself.
pub struct Proxy {
    nics: Vec<Box<dyn Transport>>,
    mailbox: Arc<Mailbox>,
}

impl Proxy {
    /// A proxy over these NICs, which it owns from now on. A write that no NIC takes for `stuck_after_ns` fails its
    /// link.
    ///
    /// # Errors
    /// [`crate::Status::InvalidArgument`] for none or too many NICs.
    pub fn new(nics: Vec<Box<dyn Transport>>, stuck_after_ns: u64) -> Result<Proxy> {
        let _ = stuck_after_ns;
        let waker = Arc::new(Waker::new()?);
        Ok(Proxy { nics, mailbox: Arc::new(Mailbox::new(waker)) })
    }

    /// Opens a port.
    ///
    /// # Errors
    /// [`crate::Status::Capacity`], with numbers, if the completion queue or the links' numbers do not suffice for
    /// it; those of the registration.
    pub fn open(&mut self, spec: PortSpec) -> Result<Port> {
        let _ = (spec, &self.nics);
        Err(crate::Error::new(crate::Status::Unsupported, "the proxy is being built"))
    }

    /// One turn, at this time in nanoseconds on any steady clock: requests, commands, completions, words, bells.
    /// Returns true if anything moved.
    pub fn turn(&mut self, now_ns: u64) -> bool {
        let _ = now_ns;
        while let Some(request) = self.mailbox.take() {
            match request {
                Request::Open { spec, reply } => {
                    let _ = reply.send(self.open(spec));
                }
                _ => {}
            }
        }
        false
    }
}
