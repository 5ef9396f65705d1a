//! Memory that peers may use, of the host or of a device.

use std::fmt::Debug;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};

use super::Mapping;
use crate::error::Result;

/// Memory of a device, mapped where this rank's device reaches it. Dropping it unmaps it.
pub trait DeviceMemory: Debug + Send + Sync {
    /// First address, valid on the device.
    fn base(&self) -> u64;

    /// Size in bytes, a multiple of what the device maps.
    fn bytes(&self) -> usize;

    /// A descriptor with which another process maps the memory. None on memory received from one.
    ///
    /// # Errors
    /// [`crate::Status::Unsupported`] or [`crate::Status::System`] naming the call.
    fn export(&self) -> Result<Option<OwnedFd>>;
}

/// Either kind.
#[derive(Clone, Debug)]
pub enum Memory {
    /// Memory of the host.
    Host(Arc<Mapping>),
    /// Memory of a device.
    Device(Arc<dyn DeviceMemory>),
}

impl Memory {
    /// First address; of a device's memory, valid there only.
    pub fn base(&self) -> *mut u8 {
        match self {
            Memory::Host(mapping) => mapping.base(),
            Memory::Device(memory) => memory.base() as *mut u8,
        }
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        match self {
            Memory::Host(mapping) => mapping.bytes(),
            Memory::Device(memory) => memory.bytes(),
        }
    }

    /// The host mapping, if it is one.
    pub fn host(&self) -> Option<&Arc<Mapping>> {
        match self {
            Memory::Host(mapping) => Some(mapping),
            Memory::Device(_) => None,
        }
    }

    /// A descriptor for peers in other processes, of a device's memory. That of a host mapping came with it.
    ///
    /// # Errors
    /// Those of [`DeviceMemory::export`].
    pub fn export(&self) -> Result<Option<OwnedFd>> {
        match self {
            Memory::Host(_) => Ok(None),
            Memory::Device(memory) => memory.export(),
        }
    }

    pub(super) fn downgrade(&self) -> WeakMemory {
        match self {
            Memory::Host(mapping) => WeakMemory::Host(Arc::downgrade(mapping)),
            Memory::Device(memory) => WeakMemory::Device(Arc::downgrade(memory)),
        }
    }
}

/// What the registry keeps.
pub(super) enum WeakMemory {
    Host(Weak<Mapping>),
    Device(Weak<dyn DeviceMemory>),
}

impl WeakMemory {
    pub(super) fn is_alive(&self) -> bool {
        match self {
            WeakMemory::Host(mapping) => mapping.strong_count() > 0,
            WeakMemory::Device(memory) => memory.strong_count() > 0,
        }
    }

    pub(super) fn upgrade(&self) -> Option<Memory> {
        match self {
            WeakMemory::Host(mapping) => mapping.upgrade().map(Memory::Host),
            WeakMemory::Device(memory) => memory.upgrade().map(Memory::Device),
        }
    }
}
