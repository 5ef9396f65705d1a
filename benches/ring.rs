//! The staging ring: rows in by one thread and out by another, without the rest of a call.

mod common;

use std::sync::atomic::AtomicU64;

use common::{Buffer, Compared};
use criterion::{Criterion, criterion_group, criterion_main};
use ep_core::host::{RingReader, RingWriter, copy_bytes};

const ROW_BYTES: usize = 14336;
const ROWS: usize = 512;
const RING_BYTES: usize = 256 << 10;
/// Rows between two messages.
const BATCH: usize = 4;

/// Looks before a thread that waits lets others run.
const SPINS: u32 = 2000;

fn wait(patience: &mut u32) {
    match patience {
        0 => std::thread::yield_now(),
        _ => {
            *patience -= 1;
            std::hint::spin_loop();
        }
    }
}

/// Writes `ROWS` rows from `from`.
fn write(ring: *mut u8, head: &AtomicU64, tail: &AtomicU64, sent: &mut u64, from: *const u8) {
    let mut writer = RingWriter::new(ring, RING_BYTES, head, tail, *sent);
    for row in 0..ROWS {
        let mut patience = SPINS;
        let piece = loop {
            match writer.reserve(ROW_BYTES) {
                Some(piece) => break piece,
                None => {
                    writer.publish();
                    wait(&mut patience);
                }
            }
        };
        // SAFETY: the piece and the source have a row.
        unsafe { copy_bytes(piece, from.add(row * ROW_BYTES), ROW_BYTES, false) };
        if row % BATCH == BATCH - 1 {
            writer.publish();
        }
    }
    writer.publish();
    *sent = writer.position();
}

/// Reads `ROWS` rows to `to`.
fn read(ring: *const u8, head: &AtomicU64, tail: &AtomicU64, taken: &mut u64, to: *mut u8) {
    let mut reader = RingReader::new(ring, RING_BYTES, head, tail, *taken);
    for row in 0..ROWS {
        let mut patience = SPINS;
        let piece = loop {
            match reader.peek(ROW_BYTES) {
                Some(piece) => break piece,
                None => wait(&mut patience),
            }
        };
        // SAFETY: the piece and the target have a row.
        unsafe { copy_bytes(to.add(row * ROW_BYTES), piece, ROW_BYTES, true) };
        reader.take(ROW_BYTES);
        reader.publish(false);
    }
    reader.publish(true);
    *taken = reader.position();
}

fn between_threads(criterion: &mut Criterion) {
    let (from, to) = (Buffer::new(ROWS * ROW_BYTES), Buffer::new(ROWS * ROW_BYTES));
    let ring = Buffer::new(RING_BYTES);
    let mut group = Compared::new(criterion, "ring", ROWS * ROW_BYTES);
    group.bench("limit: memcpy, once, by one thread", || {
        for row in 0..ROWS {
            // SAFETY: both buffers have every row.
            unsafe {
                let at = row * ROW_BYTES;
                std::ptr::copy_nonoverlapping(from.address().add(at), to.address().add(at), ROW_BYTES);
            }
        }
    });
    let (head, tail) = (AtomicU64::new(0), AtomicU64::new(0));
    let addresses = (ring.address().addr(), from.address().addr());
    let (mut sent, mut taken) = (0, 0);
    group.bench_many("write and read, two threads", |calls| {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let (ring, from) = (addresses.0 as *mut u8, addresses.1 as *const u8);
                (0..calls).for_each(|_| write(ring, &head, &tail, &mut sent, from));
            });
            (0..calls).for_each(|_| read(ring.address(), &head, &tail, &mut taken, to.address()));
        });
    });
}

criterion_group!(benches, between_threads);
criterion_main!(benches);
