//! Registered memory.

use std::ffi::c_void;
use std::os::fd::AsRawFd;
use std::ptr::{self, NonNull};
use std::rc::Rc;

use ep_core::{Error, Result, Status};

use crate::fabric::{Domain, nothing};
use crate::sys::newer::{DMABUF_SINCE, FI_MR_DMABUF, MrAttr, MrDmabuf};
use crate::sys::{self, fid_mr, iovec, op};
use crate::transport::{DmaBuf, Region, RemoteRegion};

/// `FI_HMEM_CUDA`.
const CUDA: u32 = 1;
/// `FI_KEY_NOTAVAIL`.
const NO_KEY: u64 = u64::MAX;

/// What the provider demands of registrations.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MrMode {
    /// Peers name a byte by its address here, not by its offset.
    pub(crate) virtual_addresses: bool,
    /// The provider chooses keys.
    pub(crate) provider_keys: bool,
    /// Memory of a device can be registered.
    pub(crate) device_memory: bool,
}

impl MrMode {
    pub(crate) fn new(bits: u32, device_memory: bool) -> MrMode {
        MrMode {
            virtual_addresses: bits & sys::FI_MR_VIRT_ADDR != 0,
            provider_keys: bits & sys::FI_MR_PROV_KEY != 0,
            device_memory,
        }
    }
}

/// A registration.
pub(crate) struct MemoryRegion {
    raw: NonNull<fid_mr>,
    address: u64,
    bytes: u64,
    remote: RemoteRegion,
    domain: Rc<Domain>,
}

impl MemoryRegion {
    /// Registers `region` for own writes and peers' writes, under `key` if keys are chosen here.
    ///
    /// # Errors
    /// [`Status::Unsupported`] for memory of a device where the provider or library has no way for it; what
    /// libfabric says otherwise. Nothing stays registered.
    pub(crate) fn register(
        domain: Rc<Domain>,
        mode: MrMode,
        region: &Region<'_>,
        key: u64,
    ) -> Result<MemoryRegion> {
        // SAFETY: the domain is open.
        let register = op!(unsafe { (*domain.raw()).mr }, fi_ops_mr::regattr)
            .ok_or_else(|| sys::missing("fi_mr_regattr"))?;
        let (address, bytes) = (region.address(), region.bytes());
        let what = format!("fi_mr_regattr of {bytes} bytes");
        let len =
            usize::try_from(bytes).map_err(|_| Error::invalid(format!("{what}: more than memory has")))?;
        let memory = iovec { iov_base: address.cast(), iov_len: len };
        let exported =
            region.dmabuf().map(|export| dmabuf(&domain, mode, export, address.cast(), len)).transpose()?;
        // SAFETY: integers and pointers that may be null.
        let mut attr: MrAttr = unsafe { std::mem::zeroed() };
        // With FI_MR_DMABUF, the first field points to the export; later headers have a union there.
        attr.base.mr_iov = exported.as_ref().map_or(&raw const memory, |export| ptr::from_ref(export).cast());
        attr.base.iov_count = 1;
        attr.base.access =
            u64::from(sys::FI_WRITE | sys::FI_READ | sys::FI_REMOTE_WRITE | sys::FI_REMOTE_READ);
        attr.base.requested_key = if mode.provider_keys { 0 } else { key };
        attr.base.iface = if exported.is_some() { CUDA } else { 0 };
        let flags = if exported.is_some() { FI_MR_DMABUF } else { 0 };
        let mut raw = ptr::null_mut();
        // SAFETY: domain, attributes and what they point to outlive the call, which writes the object's address.
        // That the memory stays is the word of whoever made the region.
        let code = unsafe { register(&raw mut (*domain.raw()).fid, &raw const attr.base, flags, &mut raw) };
        sys::check(domain.library(), code as isize, &what)?;
        let raw = NonNull::new(raw).ok_or_else(|| nothing("fi_mr_regattr"))?;
        // SAFETY: open.
        let key = unsafe { (*raw.as_ptr()).key };
        let base = if mode.virtual_addresses { address.addr() as u64 } else { 0 };
        let remote = RemoteRegion { key, base, bytes };
        let registered = MemoryRegion { raw, address: address.addr() as u64, bytes, remote, domain };
        match key {
            NO_KEY => Err(Error::new(Status::System, format!("{what}: the provider gave it no key"))),
            _ => Ok(registered),
        }
    }

    pub(crate) fn remote(&self) -> RemoteRegion {
        self.remote
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    /// What own writes name it by, where the provider demands it.
    pub(crate) fn descriptor(&self) -> *mut c_void {
        // SAFETY: open.
        unsafe { (*self.raw.as_ptr()).mem_desc }
    }

    /// Ends the registration.
    ///
    /// # Errors
    /// What libfabric says; the memory must not be freed then.
    pub(crate) fn close(self) -> Result<()> {
        let library = std::sync::Arc::clone(self.domain.library());
        // SAFETY: open; `self` is forgotten below, so it is closed once.
        let fid = unsafe { &raw mut (*self.raw.as_ptr()).fid };
        // SAFETY: open.
        let close = op!(unsafe { (*fid).ops }, fi_ops::close).ok_or_else(|| sys::missing("fi_close"))?;
        // SAFETY: as above.
        let code = unsafe { close(fid) };
        // The domain's count goes down only after the region is closed; the region itself is not closed again.
        let region = std::mem::ManuallyDrop::new(self);
        // SAFETY: read once, and `region` is not dropped.
        drop(unsafe { ptr::read(&region.domain) });
        sys::check(&library, code as isize, "fi_close of a memory region")
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        // SAFETY: open. A refusal leaks it.
        unsafe { sys::close(&raw mut (*self.raw.as_ptr()).fid) }
    }
}

/// The export of a device's driver in the form that libfabric takes.
fn dmabuf(
    domain: &Domain,
    mode: MrMode,
    export: DmaBuf<'_>,
    address: *mut c_void,
    len: usize,
) -> Result<MrDmabuf> {
    let library = domain.library();
    if library.raw_version() < DMABUF_SINCE {
        let message =
            format!("{library} cannot register memory of a device by dma-buf, expected 1.20 or newer");
        return Err(Error::new(Status::Unsupported, message));
    }
    if !mode.device_memory {
        let message = "this provider cannot register memory of a device; stage it in host memory, or use EFA";
        return Err(Error::new(Status::Unsupported, message));
    }
    Ok(MrDmabuf { fd: export.fd.as_raw_fd(), offset: export.offset, len, base_addr: address })
}
