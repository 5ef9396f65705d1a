//! The CUDA device of libep: the driver API, opened at run time, and kernels compiled ahead of time.
//!
//! | module | duty |
//! | --- | --- |
//! | [`driver`] | opens the driver once; every call checked, with its name in the error |
//! | [`context`] | a device's primary context, current for the time of a call |
//! | [`memory`], [`pool`], [`pinned`] | memory that peers map, memory of this rank, memory of the host |
//! | [`stream`] | streams and events |
//! | [`images`], [`module`] | the embedded kernels, and their functions on a device |
//! | [`args`], [`launch`] | what a kernel is given, and in which shape it runs |
//! | [`device`], [`group`], [`plan`] | the seam of the engine: `Device`, `DeviceGroup`, `DevicePlan` |
//! | [`check`] | whose memory and stream an argument is |
//! | [`report`] | what a kernel wrote about its error, as a sentence |
//!
//! Nothing here is linked against CUDA: a machine without a driver gets an error that says so.

pub mod args;
#[cfg(test)]
mod args_tests;
mod check;
pub mod context;
pub mod device;
pub mod driver;
mod group;
mod images;
mod launch;
pub mod memory;
mod module;
pub mod pinned;
mod plan;
pub mod pool;
mod report;
pub mod stream;

pub use context::Context;
pub use device::CudaDevice;
pub use images::{Image, kernels};
