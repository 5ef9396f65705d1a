//! Hashes of the large parts of a state, packed into words without loss: derived ones hash byte by byte,
//! which takes most of the checker's time.

use std::hash::{Hash, Hasher};

use super::{Cell, Local, Pair};

/// Digits below `1 << bits`, one behind the other.
struct Packer(u64);

impl Packer {
    fn push(&mut self, digit: u64, bits: u32) {
        debug_assert!(digit < 1 << bits && self.0.leading_zeros() >= bits);
        self.0 = self.0 << bits | digit;
    }
}

fn cell_digit(cell: Cell) -> u64 {
    match cell {
        Cell::Callers => 0,
        Cell::Quarantined => 1,
        Cell::Writable(epoch) => 8 + u64::from(epoch),
        Cell::Written(epoch) => 16 + u64::from(epoch),
        Cell::Readable(epoch) => 24 + u64::from(epoch),
    }
}

impl Hash for Pair {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        let mut words = Packer(1);
        for desc in &self.desc {
            words.push(desc.word.into(), 3);
            words.push(desc.stamp.into(), 3);
            words.push(desc.call.kind as u64, 3);
            words.push(desc.call.shape.into(), 1);
        }
        words.push(self.arrival.into(), 3);
        words.push(self.failed.into(), 1);
        hasher.write_u64(words.0);
        let mut rows = Packer(1);
        for &cell in self.cells.iter().flatten() {
            rows.push(cell_digit(cell), 5);
        }
        hasher.write_u64(rows.0);
    }
}

impl Hash for Local {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        let mut word = Packer(1);
        word.push(self.epoch.into(), 3);
        word.push(self.issued.into(), 3);
        word.push(self.stores.into(), 3);
        word.push(self.verdict as u64, 1);
        for peer in &self.peers {
            word.push(peer.state as u64, 2);
            word.push(peer.seen.into(), 1);
            word.push(peer.moved.into(), 2);
            word.push(peer.told.into(), 1);
        }
        for &outcome in &self.outcomes {
            word.push(outcome as u64, 2);
        }
        if let Some((record, told)) = self.telling {
            word.push(1 + u64::from(told), 3);
            word.push(record.by.into(), 2);
            word.push(record.names.into(), 2);
        }
        word.push(self.over.into(), 1);
        hasher.write_u64(word.0);
    }
}
