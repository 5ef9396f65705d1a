//! Memory of the device that only this rank uses.
//!
//! It comes from the device's memory pool, in the order of a stream of the library's own: freeing it does
//! not wait for kernels of other streams, which may wait for a peer.

use std::sync::Arc;

use cudarc::driver::sys;
use ep_core::{Error, Result};

use crate::context::Context;
use crate::driver::check;
use crate::stream::Stream;

/// A context with a stream for the library's own copies.
#[derive(Debug)]
pub struct Pool {
    context: Arc<Context>,
    stream: Stream,
}

impl Pool {
    /// Makes a pool.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn new(context: &Arc<Context>) -> Result<Arc<Pool>> {
        Ok(Arc::new(Pool { context: context.clone(), stream: Stream::new(context)? }))
    }

    /// The context.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Waits until the library's own copies are done.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn synchronize(&self) -> Result<()> {
        self.stream.synchronize()
    }

    /// Zeroed memory.
    ///
    /// # Errors
    /// [`ep_core::Status::OutOfMemory`].
    pub fn allocate(self: &Arc<Self>, bytes: usize) -> Result<Buffer> {
        let bytes = bytes.max(1).next_multiple_of(256);
        let _entered = self.context.enter()?;
        let mut base = 0;
        // SAFETY: a context is current, the stream exists.
        let code = unsafe { sys::cuMemAllocAsync(&mut base, bytes, self.stream.raw()) };
        check(code, format_args!("cuMemAllocAsync of {bytes} bytes"))?;
        let buffer = Buffer { pool: self.clone(), base, bytes };
        self.zero(base, bytes)?;
        Ok(buffer)
    }

    /// Zeroes device memory and waits until it is.
    ///
    /// # Errors
    /// Those of the driver.
    pub(crate) fn zero(&self, base: u64, bytes: usize) -> Result<()> {
        let _entered = self.context.enter()?;
        // SAFETY: the caller owns the range.
        let code = unsafe { sys::cuMemsetD8Async(base, 0, bytes, self.stream.raw()) };
        check(code, format_args!("cuMemsetD8Async of {bytes} bytes"))?;
        self.stream.synchronize()
    }

    /// Copies to device memory that this rank owns, and waits until it is there.
    ///
    /// # Errors
    /// Those of the driver.
    pub(crate) fn write(&self, base: u64, bytes: &[u8]) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        let _entered = self.context.enter()?;
        // SAFETY: the source lives until the stream was synchronised; the caller owns the destination.
        let code =
            unsafe { sys::cuMemcpyHtoDAsync_v2(base, bytes.as_ptr().cast(), bytes.len(), self.stream.raw()) };
        check(code, format_args!("cuMemcpyHtoDAsync of {} bytes", bytes.len()))?;
        self.stream.synchronize()
    }

    /// Copies to device memory anywhere, and waits until it is there.
    ///
    /// # Errors
    /// Those of the driver.
    ///
    /// # Safety
    /// The range is device memory that no call uses meanwhile.
    pub unsafe fn upload(&self, to: u64, from: &[u8]) -> Result<()> {
        self.write(to, from)
    }

    /// Copies from device memory anywhere.
    ///
    /// # Errors
    /// Those of the driver.
    ///
    /// # Safety
    /// The range is device memory; what wrote there is done.
    pub unsafe fn download(&self, from: u64, to: &mut [u8]) -> Result<()> {
        if to.is_empty() {
            return Ok(());
        }
        let _entered = self.context.enter()?;
        // SAFETY: by the caller's word.
        let code =
            unsafe { sys::cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), from, to.len(), self.stream.raw()) };
        check(code, format_args!("cuMemcpyDtoHAsync of {} bytes", to.len()))?;
        self.stream.synchronize()
    }

    /// Queues a copy from memory that stays. Does not wait.
    ///
    /// # Errors
    /// Those of the driver.
    ///
    /// # Safety
    /// `from` is pinned memory of `bytes` bytes that lives until the copy is done.
    pub(crate) unsafe fn queue_write(&self, base: u64, from: *const u8, bytes: usize) -> Result<()> {
        let _entered = self.context.enter()?;
        // SAFETY: by the caller's word.
        let code = unsafe { sys::cuMemcpyHtoDAsync_v2(base, from.cast(), bytes, self.stream.raw()) };
        check(code, format_args!("cuMemcpyHtoDAsync of {bytes} bytes"))
    }
}

/// Device memory of this rank.
#[derive(Debug)]
pub struct Buffer {
    pool: Arc<Pool>,
    base: u64,
    bytes: usize,
}

impl Buffer {
    /// First address on the device.
    pub fn base(&self) -> u64 {
        self.base
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Copies `bytes` to `offset`, and waits until they are there.
    ///
    /// # Errors
    /// [`ep_core::Status::InvalidArgument`] if they leave the buffer, and those of the driver.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<()> {
        self.check_range(offset, bytes.len())?;
        self.pool.write(self.base + offset as u64, bytes)
    }

    /// Copies from `offset`, when everything that the caller's streams do is done.
    ///
    /// # Errors
    /// As [`Buffer::write`].
    pub fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<()> {
        self.check_range(offset, bytes.len())?;
        let _entered = self.pool.context.enter()?;
        // SAFETY: the range is inside the buffer.
        let code = unsafe {
            sys::cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), self.base + offset as u64, bytes.len())
        };
        check(code, format_args!("cuMemcpyDtoH of {} bytes", bytes.len()))
    }

    fn check_range(&self, offset: usize, bytes: usize) -> Result<()> {
        match offset.checked_add(bytes) {
            Some(end) if end <= self.bytes => Ok(()),
            _ => Err(Error::invalid(format!("{offset} + {bytes} leaves a buffer of {} bytes", self.bytes))),
        }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Ok(_entered) = self.pool.context.enter() {
            // SAFETY: allocated by `allocate`; whoever drops it says that no call uses it any more.
            let _ = unsafe { sys::cuMemFreeAsync(self.base, self.pool.stream.raw()) };
        }
    }
}
