//! Groups, windows, plans and streams: the Rust API under the C ABI.

mod check;
mod defaults;
mod device;
mod device_plan;
mod device_segment;
mod fault;
#[cfg(test)]
mod fault_tests;
mod group;
mod handover;
mod hello;
mod join;
mod lane;
mod link;
mod network;
mod nodes;
mod peer;
mod plan;
mod rounds;
mod share;
mod stream;
mod topology;
mod window;

pub(crate) use defaults::WINDOW_MAX;
pub use device::{Backend, Device, DeviceGroup, DevicePlan, DeviceStream, How, Membership};
pub use fault::body_of;
pub use group::{Group, timeout_or_default};
pub(crate) use lane::{LaneState, RingPositions};
pub(crate) use network::Net;
pub use plan::Plan;
pub use stream::Stream;
pub(crate) use topology::{Cell, Source, Topology};
pub use window::Window;
pub(crate) use window::WindowTable;
