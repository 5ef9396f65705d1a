//! This rank's segment in its device's memory, while the group is made.

use std::os::fd::{AsFd, OwnedFd};

use super::device::{Backend, DeviceGroup, Membership};
use super::share::{Offer, Reach};
use crate::error::{Error, Result, Status};
use crate::mem::{Memory, SegmentId, publish};

/// None on the host.
pub(super) struct DeviceSegment {
    memory: Option<Memory>,
    id: SegmentId,
}

/// Tag of its descriptor; windows count up from 1.
const TAG: u64 = 1 << 32;

impl DeviceSegment {
    pub(super) fn allocate(backend: &Backend, bytes: usize) -> Result<DeviceSegment> {
        let Some(device) = &backend.device else {
            return Ok(DeviceSegment { memory: None, id: SegmentId::default() });
        };
        let memory = Memory::Device(device.allocate(bytes)?);
        let id = publish(&memory)?;
        Ok(DeviceSegment { memory: Some(memory), id })
    }

    /// What the peers are told.
    pub(super) fn offer(&self) -> Offer {
        Offer { bytes: self.memory.as_ref().map_or(0, Memory::bytes), id: self.id }
    }

    /// Shares the segment with the peers and becomes a member on the device. `membership` has no segments
    /// yet.
    pub(super) fn join(
        self,
        backend: &Backend,
        reach: &Reach<'_>,
        offers: &[Offer],
        membership: Membership,
    ) -> Result<Option<Box<dyn DeviceGroup>>> {
        let (Some(device), Some(own)) = (&backend.device, self.memory) else { return Ok(None) };
        let fd = own.export()?;
        let segments = reach.share(Some(own), fd.as_ref().map(OwnedFd::as_fd), offers, TAG)?;
        let segments: Vec<Memory> = segments.into_iter().flatten().collect();
        if segments.len() != offers.len() {
            return Err(Error::new(Status::Bootstrap, "a rank has no segment in its device's memory"));
        }
        device.join(Membership { segments, ..membership }).map(Some)
    }
}
