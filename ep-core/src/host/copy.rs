//! Moving rows. The C library's copy is slow on some processors when source and destination are
//! misaligned to each other, and it cannot stream; rows are large, so both matter.

use std::sync::OnceLock;

/// Rows of at least this size that nobody reads soon are written past the caches: no line is fetched
/// only to be overwritten.
const STREAM_BYTES: usize = 1024;

type CopyFn = unsafe fn(*mut u8, *const u8, usize);

struct Copies {
    cached: CopyFn,
    streaming: CopyFn,
}

fn copies() -> &'static Copies {
    static COPIES: OnceLock<Copies> = OnceLock::new();
    COPIES.get_or_init(|| {
        #[cfg(target_arch = "x86_64")]
        if std::arch::is_x86_feature_detected!("avx") {
            return Copies { cached: avx::copy::<false>, streaming: avx::copy::<true> };
        }
        Copies { cached: plain, streaming: plain }
    })
}

/// # Safety
/// As [`std::ptr::copy_nonoverlapping`].
unsafe fn plain(dst: *mut u8, src: *const u8, bytes: usize) {
    // SAFETY: by the caller's word.
    unsafe { std::ptr::copy_nonoverlapping(src, dst, bytes) }
}

/// Copies `bytes` bytes. `stream`: the destination is not read soon; the caller orders it by a store
/// fence before it publishes.
///
/// # Safety
/// `src` is readable and `dst` writable for `bytes` bytes, and they do not overlap.
pub unsafe fn copy_bytes(dst: *mut u8, src: *const u8, bytes: usize, stream: bool) {
    // SAFETY: by the caller's word.
    unsafe {
        if bytes < 256 {
            std::ptr::copy_nonoverlapping(src, dst, bytes);
        } else if stream && bytes >= STREAM_BYTES {
            (copies().streaming)(dst, src, bytes);
        } else {
            (copies().cached)(dst, src, bytes);
        }
    }
}

/// One side of a row copy: where its first element is and how far apart its elements are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowEnd {
    pub(crate) address: *mut u8,
    pub(crate) col_pitch: usize,
}

/// Copies `cols` elements of `element` bytes each between rows of any column pitch.
///
/// # Safety
/// All elements of both sides are inside memory that may be read or written, and they do not overlap.
pub(crate) unsafe fn copy_row(dst: RowEnd, src: RowEnd, element: usize, cols: usize, stream: bool) {
    // SAFETY: by the caller's word, for every element.
    unsafe {
        if dst.col_pitch == element && src.col_pitch == element {
            return copy_bytes(dst.address, src.address, element * cols, stream);
        }
        let (mut to, mut from) = (dst.address, src.address);
        for col in 0..cols {
            std::ptr::copy_nonoverlapping(from, to, element);
            if col + 1 < cols {
                to = to.add(dst.col_pitch);
                from = from.add(src.col_pitch);
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod avx {
    use std::arch::x86_64::{__m256i, _mm256_loadu_si256, _mm256_storeu_si256, _mm256_stream_si256};

    const VECTOR: usize = size_of::<__m256i>();

    /// # Safety
    /// As `copy_nonoverlapping`; the processor has AVX; `bytes` is at least 32.
    #[target_feature(enable = "avx")]
    pub(super) unsafe fn copy<const STREAM: bool>(dst: *mut u8, src: *const u8, bytes: usize) {
        let head = dst.align_offset(VECTOR).min(bytes);
        // SAFETY: every access below stays inside the `bytes` bytes of either side, and the streaming
        // stores are aligned: `head` brings the destination to a multiple of the vector.
        unsafe {
            std::ptr::copy_nonoverlapping(src, dst, head);
            let (mut to, mut from) = (dst.add(head), src.add(head));
            let mut left = bytes - head;
            while left >= 4 * VECTOR {
                let a = _mm256_loadu_si256(from.cast());
                let b = _mm256_loadu_si256(from.add(VECTOR).cast());
                let c = _mm256_loadu_si256(from.add(2 * VECTOR).cast());
                let d = _mm256_loadu_si256(from.add(3 * VECTOR).cast());
                if STREAM {
                    _mm256_stream_si256(to.cast(), a);
                    _mm256_stream_si256(to.add(VECTOR).cast(), b);
                    _mm256_stream_si256(to.add(2 * VECTOR).cast(), c);
                    _mm256_stream_si256(to.add(3 * VECTOR).cast(), d);
                } else {
                    _mm256_storeu_si256(to.cast(), a);
                    _mm256_storeu_si256(to.add(VECTOR).cast(), b);
                    _mm256_storeu_si256(to.add(2 * VECTOR).cast(), c);
                    _mm256_storeu_si256(to.add(3 * VECTOR).cast(), d);
                }
                to = to.add(4 * VECTOR);
                from = from.add(4 * VECTOR);
                left -= 4 * VECTOR;
            }
            std::ptr::copy_nonoverlapping(from, to, left);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_and_offset_is_copied_whole_and_alone() {
        let src: Vec<u8> = (0..5000u32).map(|i| (i * 7 % 251) as u8).collect();
        for stream in [false, true] {
            for bytes in [0, 1, 31, 255, 256, 257, 1023, 1024, 1100, 4096, 4799] {
                for (from, to) in [(0, 0), (1, 16), (16, 1), (33, 7)] {
                    let mut dst = vec![0xA5u8; 5000];
                    // SAFETY: both vectors hold the range.
                    unsafe { copy_bytes(dst.as_mut_ptr().add(to), src.as_ptr().add(from), bytes, stream) };
                    crate::host::exchange::store_fence();
                    assert_eq!(dst[to..to + bytes], src[from..from + bytes]);
                    assert!(dst[..to].iter().chain(&dst[to + bytes..]).all(|&byte| byte == 0xA5));
                }
            }
        }
    }
}
