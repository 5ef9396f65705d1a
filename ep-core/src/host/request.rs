//! The ring of row requests: numbers of 32 bits from the rank that adds rows to the rank that holds them.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::mem::Words;
use crate::wire::REQUESTS;

/// One ring, as either side sees it. Positions count entries since the group was made.
pub(super) struct RequestRing<'a> {
    /// The segment in which the entries lie, the holder's.
    pub(super) entries: &'a Words,
    /// Offset of the first.
    pub(super) start: usize,
    /// In the holder's memory, written by the asker.
    pub(super) head: &'a AtomicU64,
    /// In the asker's memory, written by the holder.
    pub(super) tail: &'a AtomicU64,
}

impl RequestRing<'_> {
    fn entry(&self, index: u64) -> &AtomicU32 {
        self.entries.u32(self.start + 4 * (index % REQUESTS as u64) as usize)
    }

    /// Asker: true if `count` entries have room at `position`.
    pub(super) fn has_room(&self, position: u64, count: u64) -> bool {
        // Acquire: pairs with the release in `release`; the entries up to there may be reused.
        position + count - self.tail.load(Ordering::Acquire) <= REQUESTS as u64
    }

    /// Asker: writes an entry that has room, not yet visible.
    pub(super) fn put(&self, position: u64, entry: u32) {
        // Relaxed: published by the release store in `publish`.
        self.entry(position).store(entry, Ordering::Relaxed);
    }

    /// Asker: makes the entries before `position` visible.
    pub(super) fn publish(&self, position: u64) {
        // Release: pairs with the acquire in `head`; publishes the entries.
        self.head.store(position, Ordering::Release);
    }

    /// Holder: how many entries there are.
    pub(super) fn head(&self) -> u64 {
        // Acquire: pairs with the release in `publish`; makes the entries visible.
        self.head.load(Ordering::Acquire)
    }

    /// Holder: an entry below the head.
    pub(super) fn get(&self, position: u64) -> u32 {
        // Relaxed: ordered by the acquire in `head`.
        self.entry(position).load(Ordering::Relaxed)
    }

    /// Holder: the entries before `position` were read.
    pub(super) fn release(&self, position: u64) {
        // Release: pairs with the acquire in `has_room`.
        self.tail.store(position, Ordering::Release);
    }

    /// Holder: voids the requests of a call that failed. Returns the new position.
    pub(super) fn discard(&self) -> u64 {
        let head = self.head();
        self.release(head);
        head
    }
}
