//! The entries of `include/ep.h` and what they need.
//!
//! | module | duty |
//! |---|---|
//! | `types` | the structs and constants of the header |
//! | `guard` | no panic crosses; a caught one breaks its group |
//! | `last_error` | the sentence behind `ep_last_error` |
//! | `handle` | tables of live objects; what a caller passes as a handle is never dereferenced |
//! | `copy_in` | structs, arrays and strings in, by the size rule of the header |
//! | `copy_out` | structs and single values out, only on success |
//! | `version`, `status`, `bootstrap`, `group`, `stream`, `window`, `plan`, `dispatch`, `combine` | the entries |
//!
//! Every entry has the same shape: `guard` around a closure that pins its handles, copies its structs
//! in, checks where its outputs go, calls the engine, and writes the outputs last. `plan_update`,
//! `dispatch` and `combine` take no lock and allocate nothing here.

#![expect(clippy::missing_safety_doc, reason = "include/ep.h states what each entry asks of its caller")]

mod bootstrap;
mod combine;
mod copy_in;
mod copy_out;
mod dispatch;
mod group;
mod guard;
mod handle;
mod last_error;
mod plan;
mod status;
mod stream;
mod types;
mod version;
mod window;

pub use bootstrap::{ep_unique_id_create, ep_unique_id_from_address};
pub use combine::ep_combine;
pub use dispatch::ep_dispatch;
pub use group::{
    ep_group_abort, ep_group_create_versioned, ep_group_destroy, ep_group_health, ep_group_query,
    ep_group_stats,
};
pub use last_error::ep_last_error;
pub use plan::{ep_plan_bytes, ep_plan_counts, ep_plan_create, ep_plan_destroy, ep_plan_update};
pub use status::{ep_status_name, ep_status_scope};
pub use stream::{ep_stream_create, ep_stream_destroy, ep_stream_synchronize};
pub use types::*;
pub use version::ep_version;
pub use window::{ep_window_allocate, ep_window_data, ep_window_register, ep_window_release};
