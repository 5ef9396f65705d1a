//! Memory of the device that peers map, in this process and in others, by virtual memory management.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use cudarc::driver::sys::{self, CUdevice_attribute, CUmemAllocationProp};
use ep_core::mem::DeviceMemory;
use ep_core::{Error, Result, Status};

use crate::context::Context;
use crate::driver::check;

const POSIX_FD: sys::CUmemAllocationHandleType =
    sys::CUmemAllocationHandleType_enum::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// A range of device addresses with memory behind it: this rank's own, or a peer's.
#[derive(Debug)]
pub struct Mapped {
    context: Arc<Context>,
    /// 0: not reserved.
    base: u64,
    bytes: usize,
    handle: Option<sys::CUmemGenericAllocationHandle>,
    mapped: bool,
    /// Allocated here, so that it can be exported.
    own: bool,
}

impl Mapped {
    /// Allocates memory on the context's device, rounded up to what it maps. Its content is undefined.
    ///
    /// # Errors
    /// [`Status::OutOfMemory`], or another status naming the call.
    pub fn allocate(context: &Arc<Context>, bytes: usize) -> Result<Mapped> {
        let _entered = context.enter()?;
        let prop = properties(context)?;
        let granularity = granularity(&prop)?;
        let bytes = bytes.max(1).checked_next_multiple_of(granularity).ok_or_else(|| {
            Error::new(Status::OutOfMemory, format!("{bytes} bytes do not fit the address space"))
        })?;
        let mut handle = 0;
        // SAFETY: `prop` is complete, `bytes` a multiple of the granularity.
        let code = unsafe { sys::cuMemCreate(&mut handle, bytes, &prop, 0) };
        check(code, format_args!("cuMemCreate of {bytes} bytes on device {}", context.ordinal()))?;
        Mapped::holding(context, handle, bytes, true).map(granularity)
    }

    /// Maps memory that another process exported as `fd`; `bytes` is what it says of itself.
    ///
    /// # Errors
    /// [`Status::Unsupported`] if this device cannot reach the memory's device.
    pub fn import(context: &Arc<Context>, fd: OwnedFd, bytes: usize) -> Result<Mapped> {
        let _entered = context.enter()?;
        let mut handle = 0;
        // The driver takes the descriptor's number in the place of a pointer, and does not keep it.
        let number = fd.as_raw_fd() as usize as *mut std::ffi::c_void;
        // SAFETY: the descriptor is open; whatever it names, the driver checks.
        let code = unsafe { sys::cuMemImportFromShareableHandle(&mut handle, number, POSIX_FD) };
        check(code, "cuMemImportFromShareableHandle of a peer's memory")?;
        let granularity = granularity(&properties(context)?)?;
        Mapped::holding(context, handle, bytes, false).map(granularity)
    }

    fn holding(
        context: &Arc<Context>,
        handle: sys::CUmemGenericAllocationHandle,
        bytes: usize,
        own: bool,
    ) -> Mapped {
        Mapped { context: context.clone(), base: 0, bytes, handle: Some(handle), mapped: false, own }
    }

    /// Reserves addresses, maps the memory there, and lets the context's device use it. What was done
    /// before a failure is undone by `drop`.
    fn map(mut self, alignment: usize) -> Result<Mapped> {
        let bytes = self.bytes;
        // SAFETY: a context is current; a hint of 0 lets the driver choose.
        let code = unsafe { sys::cuMemAddressReserve(&mut self.base, bytes, alignment, 0, 0) };
        check(code, format_args!("cuMemAddressReserve of {bytes} bytes"))?;
        let handle = self.handle.unwrap_or_default();
        // SAFETY: the range is reserved and free, and as long as the memory.
        let code = unsafe { sys::cuMemMap(self.base, bytes, 0, handle, 0) };
        check(code, format_args!("cuMemMap of {bytes} bytes"))?;
        self.mapped = true;
        admit(&self.context, self.base, bytes)?;
        Ok(self)
    }
}

/// Lets the context's device read and write a mapped range, whatever device the memory is on.
///
/// # Errors
/// [`Status::Unsupported`] if the device cannot reach it.
pub fn admit(context: &Context, base: u64, bytes: usize) -> Result<()> {
    let _entered = context.enter()?;
    let access = sys::CUmemAccessDesc {
        location: location(context),
        flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    };
    // SAFETY: the range is mapped; the driver checks that the device reaches it.
    let code = unsafe { sys::cuMemSetAccess(base, bytes, &access, 1) };
    check(code, format_args!("cuMemSetAccess for device {}, which must reach its peers", context.ordinal()))
}

fn location(context: &Context) -> sys::CUmemLocation {
    sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: context.ordinal() }
}

fn properties(context: &Context) -> Result<CUmemAllocationProp> {
    let rdma = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED;
    Ok(CUmemAllocationProp {
        type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: POSIX_FD,
        location: location(context),
        win32HandleMetaData: std::ptr::null_mut(),
        allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            // So that a NIC can be given the memory later.
            gpuDirectRDMACapable: u8::from(context.attribute(rdma)? != 0),
            usage: 0,
            reserved: [0; 4],
        },
    })
}

fn granularity(prop: &CUmemAllocationProp) -> Result<usize> {
    let mut granularity = 0;
    let option = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
    // SAFETY: `prop` is complete.
    let code = unsafe { sys::cuMemGetAllocationGranularity(&mut granularity, prop, option) };
    check(code, "cuMemGetAllocationGranularity")?;
    Ok(granularity.max(1))
}

impl DeviceMemory for Mapped {
    fn base(&self) -> u64 {
        self.base
    }

    fn bytes(&self) -> usize {
        self.bytes
    }

    fn export(&self) -> Result<Option<OwnedFd>> {
        let (true, Some(handle)) = (self.own, self.handle) else { return Ok(None) };
        let mut fd: RawFd = -1;
        // SAFETY: for this type the driver writes one int, the number of a new descriptor.
        let code = unsafe { sys::cuMemExportToShareableHandle((&raw mut fd).cast(), handle, POSIX_FD, 0) };
        check(code, "cuMemExportToShareableHandle")?;
        // SAFETY: the driver made the descriptor for this call.
        Ok(Some(unsafe { OwnedFd::from_raw_fd(fd) }))
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        let Ok(_entered) = self.context.enter() else { return };
        // SAFETY: each step undoes one that was done, once, in reverse order; whoever drops the last
        // reference says that no call uses the range any more.
        unsafe {
            if self.mapped {
                let _ = sys::cuMemUnmap(self.base, self.bytes);
            }
            if self.base != 0 {
                let _ = sys::cuMemAddressFree(self.base, self.bytes);
            }
            if let Some(handle) = self.handle {
                let _ = sys::cuMemRelease(handle);
            }
        }
    }
}
