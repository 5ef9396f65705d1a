//! Typed access to shared memory by offset: the only place where addresses become references.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64};

use super::Mapping;

/// A rank's segment, read and written by several processes at once. Everything in it is reached as an
/// atomic word, or by raw pointer under a protocol rule that names the word which orders the access.
#[derive(Clone, Debug)]
pub struct Words {
    mapping: Arc<Mapping>,
}

impl Words {
    /// Gives access to `mapping`.
    pub fn new(mapping: Arc<Mapping>) -> Words {
        Words { mapping }
    }

    /// The address of byte `offset`.
    ///
    /// # Panics
    /// If `bytes` from there leave the mapping: offsets come from `layout` only, so that is a defect.
    pub fn at(&self, offset: usize, bytes: usize) -> *mut u8 {
        assert!(offset + bytes <= self.mapping.bytes(), "offset {offset} + {bytes} leaves the segment");
        // SAFETY: just checked to stay inside the mapping.
        unsafe { self.mapping.base().add(offset) }
    }

    /// The 64-bit word at `offset`.
    pub fn u64(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8), "offset {offset} is not 8-byte aligned");
        // SAFETY: inside the mapping, aligned, and every access to this word in any process is atomic.
        unsafe { AtomicU64::from_ptr(self.at(offset, 8).cast()) }
    }

    /// The 32-bit word at `offset`.
    pub fn u32(&self, offset: usize) -> &AtomicU32 {
        assert!(offset.is_multiple_of(4), "offset {offset} is not 4-byte aligned");
        // SAFETY: inside the mapping, aligned, and every access to this word in any process is atomic.
        unsafe { AtomicU32::from_ptr(self.at(offset, 4).cast()) }
    }

    /// The memory behind the words.
    pub fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping
    }
}
