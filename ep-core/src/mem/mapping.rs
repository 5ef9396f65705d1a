//! One mapping of one memfd.

use std::os::fd::OwnedFd;
use std::ptr::NonNull;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

use crate::error::{Error, Result, Status};

/// A shared mapping of a memfd. The memory has no name in any file system: it exists as long as a
/// mapping or a descriptor does, so nothing is left behind by a process that dies.
#[derive(Debug)]
pub struct Mapping {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: a mapping is an address range of the process, not of a thread; unmapping it needs `&mut`.
unsafe impl Send for Mapping {}
// SAFETY: `&Mapping` gives out addresses only; who reads or writes there says why it is sound.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Makes zeroed memory of `bytes` (rounded up to pages), and the descriptor to give to other processes;
    /// the mapping does not need it.
    ///
    /// # Errors
    /// [`Status::OutOfMemory`] naming the size.
    pub fn create(bytes: usize) -> Result<(Mapping, OwnedFd)> {
        let bytes = bytes.max(1).next_multiple_of(rustix::param::page_size());
        let refused = |call: &str, e: rustix::io::Errno| {
            Error::new(Status::OutOfMemory, format!("{call} of {bytes} bytes of shared memory failed: {e}"))
        };
        let fd = memfd_create("ep", MemfdFlags::CLOEXEC).map_err(|e| refused("memfd_create", e))?;
        ftruncate(&fd, bytes as u64).map_err(|e| refused("ftruncate", e))?;
        Ok((Mapping::map(&fd, bytes)?, fd))
    }

    /// Maps memory received from another process. The descriptor is closed: the mapping keeps the memory.
    ///
    /// # Errors
    /// [`Status::OutOfMemory`], or [`Status::System`] if the descriptor is smaller than `bytes`.
    pub fn attach(fd: OwnedFd, bytes: usize) -> Result<Mapping> {
        let stat = rustix::fs::fstat(&fd).map_err(|e| Error::system("fstat of a peer's memory", e))?;
        let bytes = bytes.max(1).next_multiple_of(rustix::param::page_size());
        if (stat.st_size as u64) < bytes as u64 {
            return Err(Error::new(
                Status::System,
                format!("a peer's memory has {} bytes, expected {bytes}", stat.st_size),
            ));
        }
        Mapping::map(&fd, bytes)
    }

    fn map(fd: &OwnedFd, bytes: usize) -> Result<Mapping> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a null hint lets the kernel choose a free range, so no existing mapping changes.
        let address = unsafe { mmap(std::ptr::null_mut(), bytes, protection, MapFlags::SHARED, fd, 0) }
            .map_err(|e| Error::new(Status::OutOfMemory, format!("mmap of {bytes} bytes failed: {e}")))?;
        let Some(base) = NonNull::new(address.cast::<u8>()) else {
            return Err(Error::new(Status::OutOfMemory, "mmap returned address 0"));
        };
        Ok(Mapping { base, bytes })
    }

    /// Touches every page, so that the data path meets no page fault. Without effect on old kernels.
    pub fn populate(&self) {
        // SAFETY: the range is this mapping; populating changes no content.
        let _ = unsafe { madvise(self.base.as_ptr().cast(), self.bytes, Advice::LinuxPopulateWrite) };
    }

    /// First address.
    pub fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Size in bytes, whole pages.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: base and bytes came from mmap, and `&mut self` shows that nobody else uses the range.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}
