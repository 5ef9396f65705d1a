//! Input that every entry must refuse, and what must be left afterwards.

mod combine;
mod dispatch;
pub(crate) mod fixture;
mod group;
mod handles;
mod plan;
mod stream;
mod structs;
mod update;
mod window;
