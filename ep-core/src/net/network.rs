//! The seam between groups and the network of a process.

use std::time::Instant;

use super::port::{Port, PortSpec};
use crate::error::Result;

/// The network that this process has.
pub trait Network: Send + Sync {
    /// What and which it is, such as `libfabric 1.17, provider tcp, 2 NICs`.
    fn describe(&self) -> String;

    /// Opens one rank's ends of the links of one group, not yet connected.
    ///
    /// # Errors
    /// [`crate::Status::OutOfMemory`], [`crate::Status::OutOfRange`], or another status naming the call that was
    /// refused; [`crate::Status::Timeout`] at the deadline.
    fn open(&self, spec: PortSpec, deadline: Instant) -> Result<Port>;
}
