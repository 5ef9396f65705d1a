//! The seam to devices other than the host. A group on the host has none of this; a group on a device
//! keeps its host segments besides, for meeting, the error record and the signs of life.

use std::ffi::c_void;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use crate::config::{Counts, ErrorInfo, GroupConfig, MAX_PAYLOADS, Options};
use crate::error::Result;
use crate::host::{CombineCall, DispatchCall, UpdateCall};
use crate::layout::SegmentLayout;
use crate::mem::{DeviceMemory, Memory};
use crate::plan::PlanShape;
use crate::wire::Place;

/// A stream of the device, as the caller gave it.
pub type DeviceStream = *mut c_void;

/// Where a group's calls run, and why there.
#[derive(Clone)]
pub struct Backend {
    /// None: on the host.
    pub device: Option<Arc<dyn Device>>,
    /// A sentence for `ep_group_query`.
    pub reason: String,
}

impl Backend {
    /// The host.
    pub fn host(reason: impl Into<String>) -> Backend {
        Backend { device: None, reason: reason.into() }
    }

    /// A device.
    pub fn on(device: Arc<dyn Device>, reason: impl Into<String>) -> Backend {
        Backend { device: Some(device), reason: reason.into() }
    }
}

/// Memory and membership on a device.
pub trait Device: Send + Sync {
    /// What and which it is, such as `CUDA device 0 (NVIDIA H200)`.
    fn describe(&self) -> String;

    /// The most ranks of a group.
    fn max_ranks(&self) -> usize;

    /// Bytes of a staging ring when the caller does not choose.
    fn ring_bytes(&self, num_ranks: usize) -> usize;

    /// Zeroed memory that peers can map.
    ///
    /// # Errors
    /// [`crate::Status::OutOfMemory`] or another status, naming the call that was refused.
    fn allocate(&self, bytes: usize) -> Result<Arc<dyn DeviceMemory>>;

    /// Maps memory that came from another process. `bytes` is what its [`DeviceMemory::bytes`] said.
    ///
    /// # Errors
    /// [`crate::Status::Unsupported`] if this device cannot reach it.
    fn import(&self, fd: OwnedFd, bytes: usize) -> Result<Arc<dyn DeviceMemory>>;

    /// Lets this device use memory of another rank of this process.
    ///
    /// # Errors
    /// [`crate::Status::Unsupported`] if it cannot reach it.
    fn admit(&self, memory: &dyn DeviceMemory) -> Result<()>;

    /// Becomes a member of a group.
    ///
    /// # Errors
    /// Those of the device.
    fn join(&self, membership: Membership) -> Result<Box<dyn DeviceGroup>>;
}

/// What a device learns about a group.
pub struct Membership {
    /// This rank.
    pub rank: usize,
    /// Ranks of the group.
    pub num_ranks: usize,
    /// No zero defaults are left in it.
    pub config: GroupConfig,
    /// Where things lie in a segment.
    pub layout: SegmentLayout,
    /// The node of each rank.
    pub node_of: Vec<usize>,
    /// Every rank's segment on its device, as this rank's device maps it.
    pub segments: Vec<Memory>,
}

/// A group as its rank's device sees it. Dropping it frees what no call uses any more.
pub trait DeviceGroup: Send + Sync {
    /// Announces window `id` (from 1), a part per rank, to later calls; None forgets it.
    ///
    /// # Errors
    /// Those of the device.
    fn set_window(&self, id: u32, parts: Option<&[Option<Memory>]>) -> Result<()>;

    /// Bytes of device memory that [`DeviceGroup::create_plan`] needs.
    ///
    /// # Errors
    /// [`crate::Status::Unsupported`] for a shape that the kernels do not have.
    fn plan_bytes(&self, shape: &PlanShape) -> Result<usize>;

    /// Makes a plan in `memory` (address, bytes) of the device, or in memory of its own.
    ///
    /// # Errors
    /// [`crate::Status::InvalidArgument`], [`crate::Status::Capacity`] and those of the device.
    fn create_plan(&self, shape: &PlanShape, memory: Option<(u64, usize)>) -> Result<Box<dyn DevicePlan>>;

    /// The first error of a call that breaks the group. Lock-free while there is none.
    fn error(&self) -> Option<ErrorInfo>;

    /// An error that failed one call and not the group, found after the call was queued. Told once.
    fn take_call_error(&self) -> Option<ErrorInfo>;

    /// Makes calls in progress end, here and on the peers, because of `info`. Never waits.
    fn abort(&self, info: &ErrorInfo);

    /// True when no call of this rank is queued or running.
    ///
    /// # Errors
    /// [`crate::Status::DeviceLost`], of a device that runs nothing any more.
    fn is_idle(&self) -> Result<bool>;
}

/// A plan in a device's memory. One call at a time.
pub trait DevicePlan: Send + Sync {
    /// Queues an update.
    ///
    /// # Errors
    /// Those of the device, and of a stream or tensor that is not this device's; nothing was queued.
    ///
    /// # Safety
    /// The tensor belongs to the call until the stream has run it, and `stream` is a stream.
    unsafe fn update(&self, call: &UpdateCall, how: &How) -> Result<()>;

    /// Queues a dispatch. `places` says where the outputs lie for peers.
    ///
    /// # Errors
    /// As [`DevicePlan::update`].
    ///
    /// # Safety
    /// As [`DevicePlan::update`].
    unsafe fn dispatch(&self, call: &DispatchCall, places: &[Place; MAX_PAYLOADS], how: &How) -> Result<()>;

    /// Queues a combine. `places` says where rows and row weights lie for peers.
    ///
    /// # Errors
    /// As [`DevicePlan::update`].
    ///
    /// # Safety
    /// As [`DevicePlan::update`].
    unsafe fn combine(&self, call: &CombineCall, places: &[Place; 2], how: &How) -> Result<()>;

    /// The counts of the last update that was queued: None until it is done. Never waits.
    ///
    /// # Errors
    /// [`crate::Status::Mismatch`] if that update failed.
    fn counts(&self) -> Result<Option<Counts>>;
}

/// How a call is carried out.
#[derive(Clone, Copy, Debug)]
pub struct How {
    /// The caller's choices.
    pub options: Options,
    /// Waits end after this time on the device.
    pub timeout: Duration,
    /// The stream that orders the call.
    pub stream: DeviceStream,
}
