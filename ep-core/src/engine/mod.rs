//! Groups, windows, plans and streams: the Rust API under the C ABI.

mod check;
mod device;
mod device_plan;
mod device_segment;
mod fault;
#[cfg(test)]
mod fault_tests;
mod group;
mod handover;
mod join;
mod lane;
mod link;
mod peer;
mod plan;
mod share;
mod stream;
mod window;

pub use device::{Backend, Device, DeviceGroup, DevicePlan, DeviceStream, How, Membership};
pub use fault::body_of;
pub use group::{Group, timeout_or_default};
pub(crate) use lane::{LaneState, RingPositions};
pub use plan::Plan;
pub use stream::Stream;
pub use window::Window;
pub(crate) use window::WindowTable;
