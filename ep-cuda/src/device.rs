//! A CUDA device as the engine sees it.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, Weak};

use cudarc::driver::sys::CUdevice_attribute;
use ep_core::engine::{Device, DeviceGroup, Membership};
use ep_core::mem::DeviceMemory;
use ep_core::{Error, Result};

use crate::args::MAX_RANKS;
use crate::context::{Context, named};
use crate::driver::{self, dotted};
use crate::group::CudaGroup;
use crate::images::archs;
use crate::legacy::{self, Legacy};
use crate::memory::{Mapped, admit};
use crate::module::Kernels;
use crate::pinned::PinnedPool;
use crate::pool::Pool;

/// Staging rings of a lane, all together. Ranks that put rows into smaller ones wait for room; these still lie in
/// the L2 cache of an H200 for the most part.
const RINGS_BYTES: usize = 16 << 20;

/// One device, with its kernels loaded. Groups on one device share it.
#[derive(Debug)]
pub struct CudaDevice {
    pub(crate) context: Arc<Context>,
    pub(crate) kernels: Kernels,
    pub(crate) pool: Arc<Pool>,
    pub(crate) pinned: Arc<PinnedPool>,
    pub(crate) num_sms: usize,
    driver: u32,
    /// Peers map this device's memory by legacy IPC.
    legacy: bool,
}

/// Devices of this process that are open, by ordinal.
static OPEN: Mutex<Vec<(i32, Weak<CudaDevice>)>> = Mutex::new(Vec::new());

impl CudaDevice {
    /// Opens a device by its ordinal.
    ///
    /// # Errors
    /// [`ep_core::Status::Unsupported`] saying what is missing.
    pub fn open(ordinal: i32) -> Result<Arc<CudaDevice>> {
        let mut open = OPEN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        open.retain(|(_, device)| device.strong_count() > 0);
        let found = open.iter().find(|(have, _)| *have == ordinal).and_then(|(_, device)| device.upgrade());
        if let Some(device) = found {
            return Ok(device);
        }
        let device = Arc::new(CudaDevice::open_new(ordinal)?);
        open.push((ordinal, Arc::downgrade(&device)));
        Ok(device)
    }

    fn open_new(ordinal: i32) -> Result<CudaDevice> {
        let driver = driver::open()?;
        let context = Context::retain(ordinal)?;
        let sms = context.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        Ok(CudaDevice {
            kernels: Kernels::load(&context)?,
            pool: Pool::new(&context)?,
            pinned: PinnedPool::new(&context),
            num_sms: most_sms()?.min(usize::try_from(sms).unwrap_or(1)).max(1),
            driver: driver.version,
            legacy: legacy::asked_for()? || !has_descriptors(&context)?,
            context,
        })
    }

    /// The device's primary context.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Memory of this rank alone.
    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// Multiprocessors that a call may use.
    pub fn num_sms(&self) -> usize {
        self.num_sms
    }
}

/// `EP_CUDA_MAX_SMS`: ranks that share a device must leave room for each other's blocks.
///
/// # Errors
/// [`ep_core::Status::InvalidArgument`] if the variable is no number above 0.
fn most_sms() -> Result<usize> {
    match std::env::var("EP_CUDA_MAX_SMS") {
        Err(_) => Ok(usize::MAX),
        Ok(text) => {
            text.trim().parse().ok().filter(|&sms| sms > 0).ok_or_else(|| {
                Error::invalid(format!("EP_CUDA_MAX_SMS is '{text}', expected a number above 0"))
            })
        }
    }
}

/// Driver, kernels and devices, for a person. Starts the driver and makes no context.
///
/// # Errors
/// [`ep_core::Status::Unsupported`] saying what is missing.
pub fn survey() -> Result<String> {
    let driver = driver::open()?;
    let names = (0..driver.num_devices).map(|ordinal| {
        named(i32::try_from(ordinal).unwrap_or(i32::MAX)).map(|(_, name)| format!("{ordinal} {name}"))
    });
    let names = names.collect::<Result<Vec<String>>>()?.join(", ");
    let (version, archs) = (dotted(driver.version), archs().join(", "));
    Ok(format!("driver for CUDA {version}, kernels for {archs}; devices: {names}"))
}

/// True if the driver gives out descriptors for memory.
fn has_descriptors(context: &Context) -> Result<bool> {
    use CUdevice_attribute as A;
    let both = [
        A::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
        A::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
    ];
    for attribute in both {
        if context.attribute(attribute)? == 0 {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The device that a group of this thread uses: that of the current context, else `EP_CUDA_DEVICE`, else 0.
///
/// # Errors
/// [`ep_core::Status::InvalidArgument`] if the variable is no number.
pub fn default_ordinal() -> Result<i32> {
    if let Some(ordinal) = Context::current_ordinal() {
        return Ok(ordinal);
    }
    match std::env::var("EP_CUDA_DEVICE") {
        Err(_) => Ok(0),
        Ok(text) => text
            .trim()
            .parse()
            .map_err(|_| Error::invalid(format!("EP_CUDA_DEVICE is '{text}', expected a device's number"))),
    }
}

impl Device for CudaDevice {
    fn describe(&self) -> String {
        let (ordinal, name) = (self.context.ordinal(), self.context.name());
        let note = if self.legacy { format!("; {}", legacy::NOTE) } else { String::new() };
        format!("CUDA device {ordinal} ({name}, driver for CUDA {}{note})", dotted(self.driver))
    }

    fn max_ranks(&self) -> usize {
        MAX_RANKS
    }

    fn ring_bytes(&self, num_ranks: usize) -> usize {
        RINGS_BYTES / num_ranks.max(1)
    }

    fn allocate(&self, bytes: usize) -> Result<Arc<dyn DeviceMemory>> {
        let memory: Arc<dyn DeviceMemory> = match self.legacy {
            true => Arc::new(Legacy::allocate(&self.context, bytes)?),
            false => Arc::new(Mapped::allocate(&self.context, bytes)?),
        };
        self.pool.zero(memory.base(), memory.bytes())?;
        Ok(memory)
    }

    fn import(&self, fd: OwnedFd, bytes: usize) -> Result<Arc<dyn DeviceMemory>> {
        match Legacy::import(&self.context, fd, bytes)? {
            Ok(memory) => Ok(Arc::new(memory)),
            Err(fd) => Ok(Arc::new(Mapped::import(&self.context, fd, bytes)?)),
        }
    }

    fn admit(&self, memory: &dyn DeviceMemory) -> Result<()> {
        match memory.owner() {
            Some(owner) => legacy::admit(&self.context, owner),
            None => admit(&self.context, memory.base(), memory.bytes()),
        }
    }

    fn join(&self, membership: Membership) -> Result<Box<dyn DeviceGroup>> {
        // The group keeps the device alive: take the reference that `open` handed out.
        let device = CudaDevice::open(self.context.ordinal())?;
        Ok(Box::new(CudaGroup::new(device, membership)?))
    }
}
