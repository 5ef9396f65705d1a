//! Between a group and NICs: slots and words in memory, commands, the proxy that moves them, and the seam to a
//! network. The protocol is in `docs/FABRIC.md`; who sends what when is the host device's concern.
//!
//! | module | duty |
//! | --- | --- |
//! | [`transport`] | the seam: one NIC |
//! | `layout` | streams, slots, offsets |
//! | [`command`] | the 16-byte command and its ring |
//! | [`immediate`] | the 32 bits that come with a write |
//! | `port` | what a rank sees: stage, send, landed, credit, failures |
//! | `proxy`, `proxy_thread` | the loop that serves ports and NICs, and the thread that runs it |
//! | `connect` | what ranks tell each other at connection |
//! | [`sim`] | a network in this process that does everything an unordered network may do |

pub mod command;
mod connect;
mod counters;
pub mod immediate;
mod layout;
mod limits;
mod mailbox;
mod port;
mod proxy;
mod proxy_thread;
mod shard;
pub mod sim;
#[cfg(test)]
mod tests;
pub mod transport;
mod waker;

pub use counters::LinkStats;
pub use layout::{Kind, MAX_LANES, MAX_NICS, PortLayout, Shape, Slots, Stream};
pub use limits::Limiter;
pub use mailbox::Pending;
pub use port::{Bell, Closed, LinkFailure, Port, PortSpec};
pub use proxy::Proxy;
pub use proxy_thread::{ProxyHandle, ProxyOptions};
pub use shard::CUT_BYTES;
pub use transport::Transport;
