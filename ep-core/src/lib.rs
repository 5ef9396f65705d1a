//! The part of libep that needs neither CUDA nor libfabric.
//!
//! | module | duty |
//! | --- | --- |
//! | [`error`], [`config`], [`tensor`] | what crosses the C ABI, checked |
//! | [`bootstrap`] | how ranks meet |
//! | [`plan`] | a routing as counts, prefix sums and rows; pure arithmetic |
//! | [`wire`], [`layout`] | what ranks write into each other's memory, and where |
//! | [`mem`] | shared memory and the words in it |
//! | [`net`] | between nodes: links over NICs, and the proxy that serves them |
//! | [`host`] | the host device: the stages of a call, over shared memory |
//! | [`engine`] | groups, windows, plans and streams: the Rust API |
//! | [`reference`](mod@reference) | the oracle of dispatch and combine |
//! | [`proto`] | the words and their transitions as tables, model-checked |
//! | [`perturb`] | seeded delays and failures, for tests |

pub mod bootstrap;
pub mod config;
pub mod engine;
pub mod error;
pub mod host;
pub mod layout;
pub mod mem;
pub mod net;
pub mod perturb;
pub mod plan;
pub mod proto;
pub mod reference;
pub mod tensor;
pub mod wire;

pub use error::{Error, Result, Status};
