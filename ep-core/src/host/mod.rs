//! The host device: runs the stages of a call on the calling thread, over shared memory.
//!
//! `exchange` is what every call does: publish a descriptor to each peer, read theirs, agree. `update`,
//! `dispatch` and `combine` are the calls. `copy`, `ring` and `reduce` move and add bytes.

mod blame;
mod call;
mod combine;
mod copy;
mod dispatch;
mod element;
mod exchange;
mod rank_set;
mod receive;
mod reduce;
mod ring;
mod scratch;
mod send;
mod serve;
mod store;
mod update;
mod wait;

pub use call::{CombineCall, DispatchCall, UpdateCall};
pub(crate) use combine::combine;
pub use copy::copy_bytes;
pub(crate) use dispatch::dispatch;
pub use reduce::{Close, Reduction, Term, reduce};
pub use ring::{RingReader, RingWriter};
pub(crate) use scratch::LaneScratch;
pub(crate) use store::StoreChoice;
pub(crate) use update::{Updated, refuse, update};
pub use wait::{Doorbell, Patience};
