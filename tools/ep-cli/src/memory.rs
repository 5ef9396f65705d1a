//! Memory that starts on a cache line, and the barrier that ranks share.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use ep_core::mem::{Mapping, Words};

/// A cache line, for its alignment.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// Zeroed bytes that start at a multiple of 64.
pub(crate) struct Buffer {
    lines: Vec<Line>,
    bytes: usize,
}

impl Buffer {
    /// Room for `bytes`, every page of it touched.
    pub(crate) fn new(bytes: usize) -> Buffer {
        Buffer { lines: vec![Line([0; 64]); bytes.div_ceil(64)], bytes }
    }

    /// The bytes of `values`.
    pub(crate) fn of<T: bytemuck::Pod>(values: &[T]) -> Buffer {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        let mut buffer = Buffer::new(bytes.len());
        buffer.as_mut_slice().copy_from_slice(bytes);
        buffer
    }

    /// The address of the first byte, for calls that write there.
    pub(crate) fn address(&self) -> *mut u8 {
        self.lines.as_ptr().cast::<u8>().cast_mut()
    }

    /// How many bytes there are.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// All bytes.
    pub(crate) fn as_slice(&self) -> &[u8] {
        // SAFETY: the lines are one block of at least `bytes` initialized bytes.
        unsafe { std::slice::from_raw_parts(self.lines.as_ptr().cast(), self.bytes) }
    }

    /// All bytes, to write.
    pub(crate) fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `&mut self` makes it the only view.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), self.bytes) }
    }
}

/// Where all ranks wait for each other before a measured call. A file that every rank maps.
pub(crate) struct Barrier {
    words: Words,
    ranks: u32,
}

/// Bytes of the barrier's file.
pub(crate) const BARRIER_BYTES: u64 = 4096;

impl Barrier {
    /// Maps the file at `path`, which has [`BARRIER_BYTES`] zero bytes before the first rank comes.
    ///
    /// # Errors
    /// Those of opening and mapping the file.
    pub(crate) fn open(path: &Path, ranks: usize) -> Result<Barrier> {
        let file = File::options().read(true).write(true).open(path)?;
        let memory = Mapping::attach(OwnedFd::from(file), BARRIER_BYTES as usize)?;
        Ok(Barrier { words: Words::new(Arc::new(memory)), ranks: ranks as u32 })
    }

    /// Returns once every rank has come. Yields while it waits: ranks may be more than cores.
    ///
    /// # Errors
    /// If a rank does not come in time.
    pub(crate) fn wait(&self, timeout: Duration) -> Result<()> {
        let (arrived, round) = (self.words.u32(0), self.words.u32(64));
        // Acquire: pairs with the release below, of the previous round.
        let this_round = round.load(Ordering::Acquire);
        // AcqRel: the last rank sees what all ranks did before, and they see its reset of the count.
        if arrived.fetch_add(1, Ordering::AcqRel) + 1 == self.ranks {
            // Relaxed: published by the release below.
            arrived.store(0, Ordering::Relaxed);
            // Release: pairs with the acquires of the ranks that wait.
            round.store(this_round.wrapping_add(1), Ordering::Release);
            return Ok(());
        }
        let deadline = Instant::now() + timeout;
        // Acquire: pairs with the release above.
        while round.load(Ordering::Acquire) == this_round {
            if Instant::now() >= deadline {
                bail!("not every rank came to the start of a measured call within {timeout:?}");
            }
            std::thread::yield_now();
        }
        Ok(())
    }
}
