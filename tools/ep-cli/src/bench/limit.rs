//! The limit that a call is measured against: copying as many row bytes, by as many threads, in memory
//! that starts on cache lines.

use std::fmt;

use ep_core::host::copy_bytes;
use ep_peer::store_fence;
use serde::{Deserialize, Serialize};

use super::shape::{Op, Shape};
use crate::memory::Buffer;

/// A way to copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CopyKind {
    /// In pieces of 1 MiB; otherwise of a row.
    pub(crate) large: bool,
    /// With stores that pass the caches by; otherwise the C library's memcpy.
    pub(crate) streaming: bool,
    /// Reads no more bytes than the call has inputs, each as often as the call sends it.
    pub(crate) reuse: bool,
}

impl CopyKind {
    /// All ways that compare with `op`.
    pub(crate) fn all(op: Op) -> Vec<CopyKind> {
        let mut kinds = Vec::new();
        if op == Op::Plan {
            return kinds;
        }
        for large in [false, true] {
            for streaming in [false, true] {
                for reuse in [false, true] {
                    // Only a dispatch reads a row once for several ranks.
                    if !reuse || op == Op::Dispatch {
                        kinds.push(CopyKind { large, streaming, reuse });
                    }
                }
            }
        }
        kinds
    }
}

impl fmt::Display for CopyKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let size = if self.large { "1 MiB" } else { "row-sized" };
        let routine = if self.streaming { "streaming stores" } else { "memcpy" };
        let source = if self.reuse { "sources read as often as sent" } else { "distinct sources" };
        write!(f, "copy of {size} pieces, {routine}, {source}")
    }
}

/// The memory that is copied.
pub(crate) struct Limit {
    row_bytes: usize,
    pitch: usize,
    /// Bytes of the call's inputs.
    input_bytes: usize,
    most: usize,
    source: Option<Buffer>,
    target: Option<Buffer>,
}

const LARGE: usize = 1 << 20;

impl Limit {
    /// For calls that send at most `most` bytes. The memory is allocated when it is first used.
    pub(crate) fn new(shape: &Shape, most: usize) -> Limit {
        let row_bytes = shape.row_bytes();
        let pitch = row_bytes.next_multiple_of(64);
        Limit { row_bytes, pitch, input_bytes: shape.tokens * pitch, most, source: None, target: None }
    }

    /// Copies `bytes` bytes.
    pub(crate) fn copy(&mut self, kind: CopyKind, bytes: usize) {
        let room = self.most.div_ceil(self.row_bytes) * self.pitch;
        let source = self.source.get_or_insert_with(|| touched(room.max(self.input_bytes)));
        let target = self.target.get_or_insert_with(|| touched(room));
        let (piece, pitch) = match kind.large {
            true => (LARGE.min(bytes), LARGE.min(bytes).next_multiple_of(64)),
            false => (self.row_bytes, self.pitch),
        };
        if piece == 0 {
            return;
        }
        let count = bytes / piece;
        let inputs = (self.input_bytes / pitch).clamp(1, count.max(1));
        for i in 0..count {
            let from = if kind.reuse { i * inputs / count } else { i };
            // SAFETY: `count` pieces fit both buffers, which are apart.
            unsafe {
                let (to, from) = (target.address().add(i * pitch), source.address().add(from * pitch));
                match kind.streaming {
                    true => copy_bytes(to, from, piece, true),
                    false => std::ptr::copy_nonoverlapping(from, to, piece),
                }
            }
        }
        store_fence();
    }
}

/// Memory that is not the kernel's page of zeros.
fn touched(bytes: usize) -> Buffer {
    let mut buffer = Buffer::new(bytes);
    buffer.as_mut_slice().fill(1);
    buffer
}
