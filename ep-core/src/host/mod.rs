//! The host device: runs the stages of a call on the calling thread, over shared memory.
//!
//! `exchange` is what every call does: publish a descriptor to each peer, read theirs, agree. `update`,
//! `dispatch` and `combine` are the calls. `copy`, `ring` and `reduce` move and add bytes.

mod ask;
mod between;
mod blame;
mod call;
mod combine;
mod copy;
mod difference;
mod dispatch;
mod element;
mod exchange;
mod forward;
mod gather;
mod item;
mod owner;
mod pack;
mod pieces;
mod rank_set;
mod receive;
mod reduce;
mod request;
mod response;
mod ring;
mod scratch;
mod scratch_between;
mod send;
mod serve;
mod store;
mod update;
mod wait;
mod wanted;

pub(crate) use between::BetweenState;
pub use call::{CombineCall, DispatchCall, UpdateCall};
pub(crate) use combine::combine;
pub use copy::copy_bytes;
pub use difference::{dtypes_differ, op_name};
pub(crate) use dispatch::dispatch;
pub use reduce::{Close, Reduction, Term, Values, reduce};
pub use ring::{RingReader, RingWriter};
pub(crate) use scratch::LaneScratch;
pub(crate) use store::StoreChoice;
pub(crate) use update::{Updated, refuse, update};
pub use wait::{Doorbell, Patience};
