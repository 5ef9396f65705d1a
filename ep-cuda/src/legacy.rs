//! Memory that peers map by legacy IPC, where the driver has no descriptors for memory.
//!
//! The handle of 64 bytes travels in a file of memory, so that to the engine it is a descriptor as any. What
//! legacy IPC lacks is a lifetime: memory that its owner frees, or loses by dying, is gone for its readers as
//! well, and a kernel that then touches it ends its context. Hence "no fault tolerance".

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUipcMemHandle};
use ep_core::mem::DeviceMemory;
use ep_core::{Error, Result, Status};
use rustix::fs::{MemfdFlags, memfd_create};

use crate::context::Context;
use crate::driver::check;

/// Begins a file that holds a handle; no descriptor of the driver's can be read at all.
const MAGIC: [u8; 8] = *b"ep-ipc-1";
const HANDLE_BYTES: usize = size_of::<CUipcMemHandle>();
/// The driver puts smaller allocations together, and a handle is of the whole.
const GRANULARITY: usize = 2 << 20;

/// Device memory of this rank or of a peer, by legacy IPC.
#[derive(Debug)]
pub struct Legacy {
    context: Arc<Context>,
    base: u64,
    bytes: usize,
    /// Allocated here, so that it can be exported and is freed here.
    own: bool,
}

impl Legacy {
    /// Allocates memory. Its content is undefined.
    ///
    /// # Errors
    /// [`Status::OutOfMemory`].
    pub fn allocate(context: &Arc<Context>, bytes: usize) -> Result<Legacy> {
        let _entered = context.enter()?;
        let bytes = bytes.max(1).checked_next_multiple_of(GRANULARITY).unwrap_or(usize::MAX);
        let mut base = 0;
        // SAFETY: a context is current.
        let code = unsafe { sys::cuMemAlloc_v2(&mut base, bytes) };
        check(code, format_args!("cuMemAlloc of {bytes} bytes on device {}", context.ordinal()))?;
        Ok(Legacy { context: context.clone(), base, bytes, own: true })
    }

    /// Maps a peer's memory, if `fd` is a file with a handle; otherwise gives `fd` back.
    ///
    /// # Errors
    /// [`Status::Unsupported`] if this device cannot reach it.
    pub fn import(
        context: &Arc<Context>,
        fd: OwnedFd,
        bytes: usize,
    ) -> Result<std::result::Result<Legacy, OwnedFd>> {
        let mut file = File::from(fd);
        let mut content = [0u8; MAGIC.len() + HANDLE_BYTES];
        let read = file.seek(SeekFrom::Start(0)).and_then(|_| file.read_exact(&mut content));
        if read.is_err() || content[..MAGIC.len()] != MAGIC {
            return Ok(Err(OwnedFd::from(file)));
        }
        let mut handle = CUipcMemHandle { reserved: [0; HANDLE_BYTES] };
        for (to, from) in handle.reserved.iter_mut().zip(&content[MAGIC.len()..]) {
            *to = from.cast_signed();
        }
        let _entered = context.enter()?;
        let mut base = 0;
        let flags = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        // SAFETY: a context is current; the driver checks the handle.
        let code = unsafe { sys::cuIpcOpenMemHandle_v2(&mut base, handle, flags) };
        check(code, "cuIpcOpenMemHandle of a peer's memory")?;
        Ok(Ok(Legacy { context: context.clone(), base, bytes, own: false }))
    }
}

/// Lets the context's device use memory that another device of this process allocated.
///
/// # Errors
/// [`Status::Unsupported`] if it cannot reach it.
pub fn admit(context: &Context, owner: i32) -> Result<()> {
    if owner == context.ordinal() {
        return Ok(());
    }
    let peer = Context::retain(owner)?;
    let _entered = context.enter()?;
    // SAFETY: both contexts exist. The peer's primary context outlives this reference: its owner holds it.
    match unsafe { sys::cuCtxEnablePeerAccess(peer.raw(), 0) } {
        sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => Ok(()),
        code => check(code, format_args!("cuCtxEnablePeerAccess of device {} to {owner}", context.ordinal())),
    }
}

impl DeviceMemory for Legacy {
    fn base(&self) -> u64 {
        self.base
    }

    fn bytes(&self) -> usize {
        self.bytes
    }

    fn owner(&self) -> Option<i32> {
        Some(self.context.ordinal())
    }

    fn export(&self) -> Result<Option<OwnedFd>> {
        if !self.own {
            return Ok(None);
        }
        let _entered = self.context.enter()?;
        let mut handle = CUipcMemHandle { reserved: [0; HANDLE_BYTES] };
        // SAFETY: the start of an allocation of this context.
        check(unsafe { sys::cuIpcGetMemHandle(&mut handle, self.base) }, "cuIpcGetMemHandle")?;
        let fd = memfd_create("ep-ipc", MemfdFlags::CLOEXEC).map_err(|e| Error::system("memfd_create", e))?;
        let mut file = File::from(fd);
        let content = [&MAGIC[..], &handle.reserved.map(i8::cast_unsigned)].concat();
        file.write_all(&content).map_err(|e| Error::system("writing an IPC handle", e))?;
        Ok(Some(OwnedFd::from(file)))
    }
}

impl Drop for Legacy {
    fn drop(&mut self) {
        let Ok(_entered) = self.context.enter() else { return };
        // SAFETY: allocated or opened once; whoever drops the last reference says that no call uses it.
        unsafe {
            let _ = if self.own { sys::cuMemFree_v2(self.base) } else { sys::cuIpcCloseMemHandle(self.base) };
        }
    }
}

/// What this module adds to the description of a device.
pub const NOTE: &str = "legacy IPC, no fault tolerance";

/// True if `EP_CUDA_LEGACY_IPC` asks for it.
///
/// # Errors
/// [`Status::InvalidArgument`] for anything but 0 and 1.
pub fn asked_for() -> Result<bool> {
    match std::env::var("EP_CUDA_LEGACY_IPC").as_deref() {
        Err(_) | Ok("" | "0") => Ok(false),
        Ok("1") => Ok(true),
        Ok(text) => Err(Error::new(
            Status::InvalidArgument,
            format!("EP_CUDA_LEGACY_IPC is '{text}', expected 0 or 1"),
        )),
    }
}
