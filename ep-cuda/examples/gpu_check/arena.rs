//! Memory for the arguments of calls, on the host or on the device, in a window or not.

use std::sync::Arc;

use cudarc::driver::sys;
use ep_core::Result;
use ep_core::engine::{Group, Window};
use ep_cuda::driver::check;
use ep_cuda::pool::{Buffer, Pool};
use ep_cuda::stream::Stream;

/// Where blocks come from.
pub struct Arena {
    /// None: the host.
    device: Option<(Arc<Pool>, Stream)>,
    window: Window,
    used: usize,
}

/// Memory that lives as long as this value, or as the window it is in.
pub struct Block {
    pub address: *mut u8,
    pub bytes: usize,
    on_device: bool,
    _buffer: Option<Buffer>,
    _lines: Option<Vec<Line>>,
}

/// A cache line, for its alignment.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

const ALIGN: usize = 256;

impl Arena {
    pub fn new(group: &Arc<Group>, pool: Option<&Arc<Pool>>, window_bytes: usize) -> Result<Arena> {
        let device = match pool {
            None => None,
            Some(pool) => Some((pool.clone(), Stream::new(pool.context())?)),
        };
        Ok(Arena { device, window: Window::allocate(group, window_bytes)?, used: 0 })
    }

    /// The stream of the device's calls; null on the host.
    pub fn stream(&self) -> *mut std::ffi::c_void {
        self.device.as_ref().map_or(std::ptr::null_mut(), |(_, stream)| stream.raw().cast())
    }

    /// Waits for the stream.
    pub fn synchronize(&self) -> Result<()> {
        self.device.as_ref().map_or(Ok(()), |(_, stream)| stream.synchronize())
    }

    /// True if nothing is under way on the stream.
    pub fn is_done(&self) -> Result<bool> {
        let Some((_, stream)) = &self.device else { return Ok(true) };
        // SAFETY: the stream exists.
        match unsafe { sys::cuStreamQuery(stream.raw()) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            code => check(code, "cuStreamQuery").map(|()| true),
        }
    }

    /// Forgets the blocks in the window.
    pub fn reset_window(&mut self) {
        self.used = 0;
    }

    /// A block of the window; None if it has no room left.
    pub fn in_window(&mut self, bytes: usize) -> Option<Block> {
        let start = self.used.next_multiple_of(ALIGN);
        if start + bytes > self.window.bytes() {
            return None;
        }
        self.used = start + bytes;
        let address = self.window.data().wrapping_add(start);
        Some(Block { address, bytes, on_device: self.device.is_some(), _buffer: None, _lines: None })
    }

    /// A block outside the window.
    pub fn ordinary(&self, bytes: usize) -> Result<Block> {
        match &self.device {
            Some((pool, _)) => {
                let buffer = pool.allocate(bytes)?;
                let address = buffer.base() as *mut u8;
                Ok(Block { address, bytes, on_device: true, _buffer: Some(buffer), _lines: None })
            }
            None => {
                let mut lines = vec![Line([0; 64]); bytes.div_ceil(64).max(1)];
                let address = lines.as_mut_ptr().cast();
                Ok(Block { address, bytes, on_device: false, _buffer: None, _lines: Some(lines) })
            }
        }
    }

    pub fn block(&mut self, bytes: usize, window: bool) -> Result<Block> {
        if window && let Some(block) = self.in_window(bytes) {
            return Ok(block);
        }
        self.ordinary(bytes)
    }

    /// A block with this content.
    pub fn holding(&mut self, content: &[u8], window: bool) -> Result<Block> {
        let block = self.block(content.len(), window)?;
        self.write(&block, content)?;
        Ok(block)
    }

    pub fn write(&self, block: &Block, content: &[u8]) -> Result<()> {
        assert!(content.len() <= block.bytes, "{} bytes into {}", content.len(), block.bytes);
        let Some((pool, stream)) = self.device.as_ref().filter(|_| block.on_device && !content.is_empty())
        else {
            // SAFETY: the block is as long as said, and no call uses it.
            unsafe { std::ptr::copy_nonoverlapping(content.as_ptr(), block.address, content.len()) };
            return Ok(());
        };
        let _entered = pool.context().enter()?;
        let to = block.address.addr() as u64;
        // On the stream of the calls: a copy that is none's may end after they begin.
        // SAFETY: as above, on the device.
        let code =
            unsafe { sys::cuMemcpyHtoDAsync_v2(to, content.as_ptr().cast(), content.len(), stream.raw()) };
        check(code, "cuMemcpyHtoDAsync")?;
        stream.synchronize()
    }

    pub fn read(&self, block: &Block) -> Result<Vec<u8>> {
        let mut content = vec![0; block.bytes];
        if content.is_empty() {
            return Ok(content);
        }
        let Some((pool, _)) = self.device.as_ref().filter(|_| block.on_device) else {
            // SAFETY: the block is as long as said, and no call uses it.
            unsafe { std::ptr::copy_nonoverlapping(block.address, content.as_mut_ptr(), content.len()) };
            return Ok(content);
        };
        let _entered = pool.context().enter()?;
        let from = block.address.addr() as u64;
        // SAFETY: as above, on the device.
        let code = unsafe { sys::cuMemcpyDtoH_v2(content.as_mut_ptr().cast(), from, content.len()) };
        check(code, "cuMemcpyDtoH")?;
        Ok(content)
    }
}
