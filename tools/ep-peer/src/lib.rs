//! What `ep bench` shares with the MPI program that it measures itself against: the contents of rows,
//! the copy, the reduction and the checksum, so that neither side has a better one.
//!
//! The `epx_` functions are declared in `tools/ep-cli/mpi/peer.c`. They are no part of libep.

pub mod checksum;
pub mod content;
pub mod rng;

use ep_core::host::{Close, Reduction, Term, Values, copy_bytes, reduce};
use ep_core::tensor::Dtype;

/// The most terms of a sum.
const MAX_TERMS: usize = 256;

/// Adds the `count` rows at `rows`, as a combine of flat rows does. Returns 0 on success.
///
/// # Safety
/// `rows` has `count` addresses of `cols` elements each, and `out` has room for as many.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn epx_reduce(
    dtype: i32,
    out: *mut u8,
    cols: usize,
    rows: *const *const u8,
    count: usize,
) -> i32 {
    let (Ok(dtype), 0..=MAX_TERMS) = (Dtype::from_code(dtype), count) else { return 1 };
    let mut terms =
        [Term { row: std::ptr::null(), weight: 1.0, close: Close::Nothing, values: Values::Own }; MAX_TERMS];
    for (i, term) in terms.iter_mut().enumerate().take(count) {
        // SAFETY: by the caller's word.
        term.row = unsafe { *rows.add(i) };
    }
    // SAFETY: as above.
    let known = unsafe { reduce(dtype, out, cols, [std::ptr::null(); 2], &terms[..count], Reduction::Chain) };
    i32::from(!known)
}

/// Copies a row; `streaming` 1: past the caches.
///
/// # Safety
/// As `memcpy`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn epx_copy(to: *mut u8, from: *const u8, bytes: usize, streaming: i32) {
    // SAFETY: by the caller's word.
    unsafe { copy_bytes(to, from, bytes, streaming != 0) }
}

/// Streaming copies are done when it returns.
pub fn store_fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 processor has sfence.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

/// As [`store_fence`].
#[unsafe(no_mangle)]
pub extern "C" fn epx_fence() {
    store_fence();
}

/// Fills a row with the numbers that belong to a name of `parts` words.
///
/// # Safety
/// `row` has `bytes` bytes and `name` has `parts` words.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn epx_fill_row(
    row: *mut u8,
    bytes: usize,
    dtype: i32,
    name: *const u64,
    parts: usize,
) {
    let Ok(dtype) = Dtype::from_code(dtype) else { return };
    // SAFETY: by the caller's word.
    let (row, name) =
        unsafe { (std::slice::from_raw_parts_mut(row, bytes), std::slice::from_raw_parts(name, parts)) };
    content::fill_row(row, dtype, name);
}

/// Goes on with a checksum.
///
/// # Safety
/// `data` has `bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn epx_checksum(state: u64, data: *const u8, bytes: usize) -> u64 {
    // SAFETY: by the caller's word.
    checksum::checksum(state, unsafe { std::slice::from_raw_parts(data, bytes) })
}
