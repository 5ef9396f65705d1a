//! Memory of the host that the device reads and writes.

use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

use cudarc::driver::sys;
use ep_core::{Error, Result, Status};

use crate::context::Context;
use crate::driver::check;

/// A zeroed block. Blocks return to their pool: freeing host memory would wait for the device.
#[derive(Debug)]
pub struct Pinned {
    pool: Arc<PinnedPool>,
    block: Block,
}

#[derive(Clone, Copy, Debug)]
struct Block {
    host: NonNull<u8>,
    device: u64,
    bytes: usize,
}

// SAFETY: an address range of the process, not of a thread.
unsafe impl Send for Block {}
// SAFETY: `&Block` gives out addresses only; who reads or writes there says why it is sound.
unsafe impl Sync for Block {}

/// The blocks of one context.
#[derive(Debug)]
pub struct PinnedPool {
    context: Arc<Context>,
    free: Mutex<Vec<Block>>,
}

/// The smallest block: what shares a page is mapped together anyway.
const MIN_BLOCK: usize = 4096;

impl PinnedPool {
    /// An empty pool.
    pub fn new(context: &Arc<Context>) -> Arc<PinnedPool> {
        Arc::new(PinnedPool { context: context.clone(), free: Mutex::new(Vec::new()) })
    }

    fn free_list(&self) -> std::sync::MutexGuard<'_, Vec<Block>> {
        self.free.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// A zeroed block of at least `bytes`.
    ///
    /// # Errors
    /// [`Status::OutOfMemory`].
    pub fn allocate(self: &Arc<Self>, bytes: usize) -> Result<Pinned> {
        let bytes = bytes.max(MIN_BLOCK).next_power_of_two();
        let mut free = self.free_list();
        let found = free.iter().position(|block| block.bytes == bytes).map(|at| free.swap_remove(at));
        drop(free);
        let block = match found {
            Some(block) => block,
            None => self.make(bytes)?,
        };
        // SAFETY: the block is as long as said and nobody else's; the device does not use it yet.
        unsafe { block.host.as_ptr().write_bytes(0, bytes) };
        Ok(Pinned { pool: self.clone(), block })
    }

    fn make(&self, bytes: usize) -> Result<Block> {
        let _entered = self.context.enter()?;
        let mut host = std::ptr::null_mut();
        let flags = sys::CU_MEMHOSTALLOC_DEVICEMAP | sys::CU_MEMHOSTALLOC_PORTABLE;
        // SAFETY: a context is current.
        let code = unsafe { sys::cuMemHostAlloc(&mut host, bytes, flags) };
        check(code, format_args!("cuMemHostAlloc of {bytes} bytes"))?;
        let mut device = 0;
        // SAFETY: the memory was just allocated as mapped.
        let code = unsafe { sys::cuMemHostGetDevicePointer_v2(&mut device, host, 0) };
        check(code, "cuMemHostGetDevicePointer")?;
        let host = NonNull::new(host.cast::<u8>())
            .ok_or_else(|| Error::new(Status::OutOfMemory, "cuMemHostAlloc returned address 0"))?;
        Ok(Block { host, device, bytes })
    }
}

impl Drop for PinnedPool {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            for block in self.free_list().drain(..) {
                // SAFETY: allocated by `make`; every block has returned, since each holds the pool.
                let _ = unsafe { sys::cuMemFreeHost(block.host.as_ptr().cast()) };
            }
        }
    }
}

impl Pinned {
    /// Address on the host.
    pub fn host(&self) -> *mut u8 {
        self.block.host.as_ptr()
    }

    /// Address on the device.
    pub fn device(&self) -> u64 {
        self.block.device
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.block.bytes
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        self.pool.free_list().push(self.block);
    }
}
