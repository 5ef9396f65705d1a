//! The staging ring: bytes from one writer to one reader through the reader's memory, in pieces that are
//! never split at the ring's end. Both sides know each piece's size beforehand, so nothing is framed.

use std::sync::atomic::{AtomicU64, Ordering};

use super::exchange::store_fence;

/// Pieces begin at multiples of this.
pub(crate) const PIECE_ALIGN: u64 = 64;

/// Where a piece of `bytes` begins that follows position `position`, and the position behind it.
fn piece(position: u64, bytes: usize, ring_bytes: u64) -> (u64, u64) {
    let bytes = (bytes as u64).next_multiple_of(PIECE_ALIGN);
    let left = ring_bytes - position % ring_bytes;
    let start = if bytes > left { position + left } else { position };
    (start, start + bytes)
}

/// The writer's side, for one call. `sent` is where it is; the words are in shared memory.
pub struct RingWriter<'a> {
    /// The ring, in the reader's memory.
    data: *mut u8,
    ring_bytes: u64,
    /// In the reader's memory, written here.
    head: &'a AtomicU64,
    /// In this rank's memory, written by the reader.
    tail: &'a AtomicU64,
    sent: u64,
    published: u64,
    taken: u64,
}

impl<'a> RingWriter<'a> {
    /// Goes on at position `sent`, which is what the head word says.
    pub fn new(
        data: *mut u8,
        ring_bytes: usize,
        head: &'a AtomicU64,
        tail: &'a AtomicU64,
        sent: u64,
    ) -> RingWriter<'a> {
        // Acquire: pairs with the release in `RingReader::publish`; the bytes up to there may be reused.
        let taken = tail.load(Ordering::Acquire);
        RingWriter { data, ring_bytes: ring_bytes as u64, head, tail, sent, published: sent, taken }
    }

    /// Room for a piece of `bytes` (at most the ring's size), or None while the reader is behind.
    pub fn reserve(&mut self, bytes: usize) -> Option<*mut u8> {
        let (start, end) = piece(self.sent, bytes, self.ring_bytes);
        if end - self.taken > self.ring_bytes {
            // Acquire: as in `new`.
            self.taken = self.tail.load(Ordering::Acquire);
            if end - self.taken > self.ring_bytes {
                return None;
            }
        }
        self.sent = end;
        // SAFETY: a piece ends inside the ring by construction.
        Some(unsafe { self.data.add((start % self.ring_bytes) as usize) })
    }

    /// Makes the pieces so far visible. Returns false if there was nothing new.
    pub fn publish(&mut self) -> bool {
        if self.published == self.sent {
            return false;
        }
        store_fence();
        // Release: pairs with the acquire in `RingReader::peek`; publishes the pieces' bytes.
        self.head.store(self.sent, Ordering::Release);
        self.published = self.sent;
        true
    }

    /// Bytes written and not yet published.
    pub fn unpublished(&self) -> u64 {
        self.sent - self.published
    }

    /// The position to go on from in the next call.
    pub fn position(&self) -> u64 {
        self.sent
    }
}

/// The reader's side, for one call.
pub struct RingReader<'a> {
    data: *const u8,
    ring_bytes: u64,
    /// In this rank's memory, written by the writer.
    head: &'a AtomicU64,
    /// In the writer's memory, written here.
    tail: &'a AtomicU64,
    taken: u64,
    published: u64,
    available: u64,
}

impl<'a> RingReader<'a> {
    /// Goes on at position `taken`; the tail word may say less.
    pub fn new(
        data: *const u8,
        ring_bytes: usize,
        head: &'a AtomicU64,
        tail: &'a AtomicU64,
        taken: u64,
    ) -> RingReader<'a> {
        // Relaxed: this rank is the word's only writer.
        let published = tail.load(Ordering::Relaxed);
        RingReader { data, ring_bytes: ring_bytes as u64, head, tail, taken, published, available: taken }
    }

    /// The next piece, of `bytes`, if it is there. It stays until [`RingReader::take`].
    pub fn peek(&mut self, bytes: usize) -> Option<*const u8> {
        let (start, end) = piece(self.taken, bytes, self.ring_bytes);
        if end > self.available {
            // Acquire: pairs with the release in `RingWriter::publish`; makes the bytes visible.
            self.available = self.head.load(Ordering::Acquire);
            if end > self.available {
                return None;
            }
        }
        // SAFETY: a piece ends inside the ring by construction.
        Some(unsafe { self.data.add((start % self.ring_bytes) as usize) })
    }

    /// Done with the piece of `bytes` that was peeked last.
    pub fn take(&mut self, bytes: usize) {
        self.taken = piece(self.taken, bytes, self.ring_bytes).1;
    }

    /// Gives the taken pieces' room back to the writer once it is worth a message: a quarter of the ring,
    /// or anything if `all`. Returns true if it did.
    pub fn publish(&mut self, all: bool) -> bool {
        let taken = self.taken - self.published;
        if taken == 0 || (!all && taken < self.ring_bytes / 4) {
            return false;
        }
        // Release: pairs with the acquire in `RingWriter::reserve`; all reads of the pieces are done.
        self.tail.store(self.taken, Ordering::Release);
        self.published = self.taken;
        true
    }

    /// The position up to which the writer has its room back.
    pub(crate) fn published(&self) -> u64 {
        self.published
    }

    /// Drops everything that the writer published: after a call that failed on both sides.
    pub fn discard(&mut self) {
        // Acquire: pairs with the release in `RingWriter::publish`.
        self.taken = self.head.load(Ordering::Acquire);
    }

    /// The position to go on from in the next call.
    pub fn position(&self) -> u64 {
        self.taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_pass_in_order_over_many_laps() {
        let mut data = vec![0u8; 4096];
        let (head, tail) = (AtomicU64::new(0), AtomicU64::new(0));
        let address = data.as_mut_ptr();
        let mut writer = RingWriter::new(address, 4096, &head, &tail, 0);
        let mut reader = RingReader::new(address, 4096, &head, &tail, 0);
        let size = |i: usize| 1 + i * 37 % 1024;
        let (mut written, mut read) = (0, 0);
        while read < 10_000 {
            while let Some(piece) = (written < 10_000).then(|| writer.reserve(size(written))).flatten() {
                // SAFETY: the piece has this many bytes.
                unsafe { piece.write_bytes(written as u8, size(written)) };
                written += 1;
            }
            writer.publish();
            let before = read;
            while let Some(piece) = (read < written).then(|| reader.peek(size(read))).flatten() {
                // SAFETY: as above.
                let bytes = unsafe { std::slice::from_raw_parts(piece, size(read)) };
                assert!(bytes.iter().all(|&byte| byte == read as u8), "piece {read}");
                reader.take(size(read));
                read += 1;
            }
            reader.publish(true);
            assert!(read > before, "stuck at piece {read} of {written}");
        }
        assert_eq!(writer.position(), reader.position());
    }

    #[test]
    fn a_piece_of_the_rings_size_fits_an_empty_ring_at_its_start() {
        let mut data = vec![0u8; 1024];
        let (head, tail) = (AtomicU64::new(0), AtomicU64::new(0));
        let mut writer = RingWriter::new(data.as_mut_ptr(), 1024, &head, &tail, 0);
        assert!(writer.reserve(1024).is_some());
        assert!(writer.reserve(1).is_none());
    }
}
