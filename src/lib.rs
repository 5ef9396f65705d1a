//! The C ABI of libep: thin entries over [`ep_core`].
//!
//! `include/ep.h` is the contract and the manual. Everything that may fail lives in `ep_core`; what is
//! here turns C pointers into checked Rust values, and errors and panics into statuses, and chooses the backend.
//! See [`capi`].

mod backend;
pub mod capi;
pub mod network;
