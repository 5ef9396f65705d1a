//! One mapping of one memfd.

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;

use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, ftruncate, memfd_create};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
use rustix::process::{Resource, getrlimit};

use crate::error::{Error, Result, Status};

/// A shared mapping of a memfd. The memory has no name in any file system: it exists as long as a
/// mapping or a descriptor does, so nothing is left behind by a process that dies. Pages that nobody may
/// touch lie before and behind it: who runs over an end faults instead of writing into another mapping.
#[derive(Debug)]
pub struct Mapping {
    base: NonNull<u8>,
    bytes: usize,
    /// What was reserved: the mapping and its guards.
    reserved: NonNull<u8>,
    reserved_bytes: usize,
}

/// Refuses what a limit of this process forbids: the system would answer with a signal that ends it.
fn below_file_limit(bytes: usize) -> Result<()> {
    match getrlimit(Resource::Fsize).current {
        Some(limit) if bytes as u64 > limit => Err(Error::new(
            Status::OutOfMemory,
            format!(
                "{bytes} bytes of shared memory are more than the {limit} bytes that this process may give a file \
                 (RLIMIT_FSIZE); raise the limit with `ulimit -f`"
            ),
        )),
        _ => Ok(()),
    }
}

/// What the kernel maps at once where it can.
const HUGE_PAGE: usize = 2 << 20;

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
        below_file_limit(bytes)?;
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
        let page = rustix::param::page_size();
        // A guard before the memory must not cost its alignment to huge pages.
        let align = if bytes < HUGE_PAGE { page } else { HUGE_PAGE };
        let reserved_bytes = bytes + align + page;
        let refused = |call: &str, e: rustix::io::Errno| {
            Error::new(Status::OutOfMemory, format!("{call} of {bytes} bytes failed: {e}"))
        };
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a null hint lets the kernel choose a free range, so no existing mapping changes.
        let reserved =
            unsafe { mmap_anonymous(std::ptr::null_mut(), reserved_bytes, ProtFlags::empty(), flags) }
                .map_err(|e| refused("mmap", e))?;
        let address = (reserved.addr() + page).next_multiple_of(align);
        let base = reserved.cast::<u8>().with_addr(address);
        let (Some(reserved), Some(base)) = (NonNull::new(reserved.cast::<u8>()), NonNull::new(base)) else {
            return Err(Error::new(Status::OutOfMemory, "mmap returned address 0"));
        };
        // From here on dropping it gives the reservation back.
        let mapping = Mapping { base, bytes, reserved, reserved_bytes };
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::FIXED);
        // SAFETY: the range lies inside the reservation above, which is this mapping's own and unused.
        unsafe { mmap(base.as_ptr().cast(), bytes, protection, flags, fd, 0) }
            .map_err(|e| refused("mmap", e))?;
        Ok(mapping)
    }

    /// Gives memory to a range of what [`Mapping::create`] made; without it a first touch would, and who touches
    /// more than there is gets killed.
    ///
    /// # Errors
    /// [`Status::OutOfMemory`].
    pub fn back(fd: &OwnedFd, range: &Range<usize>) -> Result<()> {
        loop {
            match fallocate(fd, FallocateFlags::empty(), range.start as u64, range.len() as u64) {
                Ok(()) => return Ok(()),
                Err(rustix::io::Errno::INTR) => {}
                Err(e) => {
                    let text = format!("fallocate of {} bytes of shared memory failed: {e}", range.len());
                    return Err(Error::new(Status::OutOfMemory, text));
                }
            }
        }
    }

    /// Touches every page of a range, so that the data path meets no page fault. Without effect on old kernels.
    ///
    /// # Errors
    /// [`Status::OutOfMemory`].
    pub fn populate(&self, range: &Range<usize>) -> Result<()> {
        assert!(range.start <= range.end && range.end <= self.bytes, "{range:?} of {} bytes", self.bytes);
        // SAFETY: the range is inside the mapping; populating changes no content.
        let done = unsafe {
            let start = self.base.as_ptr().add(range.start);
            madvise(start.cast(), range.len(), Advice::LinuxPopulateWrite)
        };
        match done {
            Err(e @ (rustix::io::Errno::NOMEM | rustix::io::Errno::FAULT)) => Err(Error::new(
                Status::OutOfMemory,
                format!("madvise of {} bytes of shared memory failed: {e}", range.len()),
            )),
            // An interrupted or unknown call leaves pages to be touched later.
            _ => Ok(()),
        }
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
        // SAFETY: the reservation came from mmap, and `&mut self` shows that nobody else uses the range.
        let _ = unsafe { munmap(self.reserved.as_ptr().cast(), self.reserved_bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The protection of the page at `address`, as in /proc/self/maps; None if nothing is mapped there.
    fn protection(address: usize) -> Option<String> {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        maps.lines().find_map(|line| {
            let (range, rest) = line.split_once(' ')?;
            let (start, end) = range.split_once('-')?;
            let hex = |text| usize::from_str_radix(text, 16).unwrap();
            (hex(start)..hex(end)).contains(&address).then(|| rest[..4].to_string())
        })
    }

    #[test]
    fn pages_before_and_behind_a_mapping_may_not_be_touched() {
        for bytes in [1, 4096, HUGE_PAGE, 3 * HUGE_PAGE + 4096] {
            let (created, fd) = Mapping::create(bytes).unwrap();
            let attached = Mapping::attach(fd, bytes).unwrap();
            for mapping in [&created, &attached] {
                let (start, end) = (mapping.base().addr(), mapping.base().addr() + mapping.bytes());
                assert!(bytes < HUGE_PAGE || start.is_multiple_of(HUGE_PAGE));
                assert_eq!(protection(start - 1).as_deref(), Some("---p"));
                assert_eq!(protection(start).as_deref(), Some("rw-s"));
                assert_eq!(protection(end - 1).as_deref(), Some("rw-s"));
                assert_eq!(protection(end).as_deref(), Some("---p"));
            }
        }
    }
}
