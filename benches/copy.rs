//! Packing: rows of 7168 bf16 columns to places apart, each row to several, as a dispatch sends them.

mod common;

use common::{Buffer, Compared, Rng};
use criterion::{Criterion, criterion_group, criterion_main};
use ep_core::host::copy_bytes;

const ROW_BYTES: usize = 14336;
const TOKENS: usize = 512;
/// Places that each row goes to.
const COPIES: usize = 3;
const LARGE: usize = 1 << 20;

fn packing(criterion: &mut Criterion) {
    let bytes = TOKENS * COPIES * ROW_BYTES;
    let (from, to) = (Buffer::new(bytes), Buffer::new(bytes));
    let (from, to) = (from.address(), to.address());
    let mut rng = Rng(1);
    let mut places: Vec<usize> = (0..TOKENS * COPIES).collect();
    for i in (1..places.len()).rev() {
        places.swap(i, rng.below(i + 1));
    }
    let mut group = Compared::new(criterion, "packing", bytes);
    group.bench("limit: memcpy of 1 MiB pieces", || {
        for at in (0..bytes).step_by(LARGE) {
            // SAFETY: both buffers hold `bytes` bytes.
            unsafe {
                std::ptr::copy_nonoverlapping(from.add(at), to.add(at), LARGE.min(bytes - at));
            }
        }
    });
    for (name, stream) in [("cached stores", false), ("streaming stores", true)] {
        group.bench(name, || {
            for (i, place) in places.iter().enumerate() {
                // SAFETY: both buffers have room for every row.
                unsafe {
                    copy_bytes(
                        to.add(place * ROW_BYTES),
                        from.add(i / COPIES * ROW_BYTES),
                        ROW_BYTES,
                        stream,
                    );
                }
            }
        });
    }
}

fn misaligned(criterion: &mut Criterion) {
    let bytes = TOKENS * ROW_BYTES;
    let (from, to) = (Buffer::new(bytes + 64), Buffer::new(bytes + 64));
    let (from, to) = (from.address(), to.address().wrapping_add(16));
    let mut group = Compared::new(criterion, "copy to an address 16 bytes off", bytes);
    group.bench("limit: memcpy, aligned", || {
        for row in 0..TOKENS {
            // SAFETY: both buffers have room for every row; `to` is 16 bytes inside.
            unsafe {
                let at = row * ROW_BYTES;
                std::ptr::copy_nonoverlapping(from.add(at), to.sub(16).add(at), ROW_BYTES);
            }
        }
    });
    group.bench("memcpy", || {
        for row in 0..TOKENS {
            // SAFETY: as above.
            unsafe {
                std::ptr::copy_nonoverlapping(from.add(row * ROW_BYTES), to.add(row * ROW_BYTES), ROW_BYTES)
            };
        }
    });
    group.bench("copy_bytes", || {
        for row in 0..TOKENS {
            // SAFETY: as above.
            unsafe { copy_bytes(to.add(row * ROW_BYTES), from.add(row * ROW_BYTES), ROW_BYTES, false) };
        }
    });
}

criterion_group!(benches, packing, misaligned);
criterion_main!(benches);
