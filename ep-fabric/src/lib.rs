//! The network of libep: libfabric, opened at run time.
//!
//! | module | duty |
//! | --- | --- |
//! | [`sys`] | the C interface: bindings, the library, checked tables of operations |
//! | [`settings`] | environment variables |
//! | `info`, [`select`] | what libfabric offers, and which provider and NICs are used |
//! | `fabric`, `endpoint`, `cq`, `av`, `mr` | one owner per object of libfabric; each holds what it stands on |
//! | `options` | what an EFA endpoint is told and asked |
//! | `peers`, `slots` | ids of peers, contexts of writes in flight |
//! | `fault` | what errors mean |
//! | [`nic`], `self_test` | the transport, and its proof at start |
//! | [`network`] | the NICs and their proxy, as groups see them |
//!
//! Nothing here is linked against libfabric: a machine without it gets an error that says so.

mod av;
mod cq;
mod endpoint;
mod fabric;
mod fault;
mod info;
mod mr;
pub mod network;
pub mod nic;
mod options;
mod peers;
pub mod select;
mod self_test;
pub mod settings;
mod slots;
pub mod sys;
#[cfg(test)]
mod tests;

pub use ep_core::net::transport;
pub use network::FabricNetwork;
pub use nic::Nic;
pub use select::Selection;
pub use settings::Settings;
pub use sys::Library;
