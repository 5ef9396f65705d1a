//! What a rank got, in memory that the parent reads too: the outputs of one dispatch and one combine.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};

use anyhow::{Context, Result};
use bytemuck::Pod;
use ep_core::mem::Mapping;

use super::job::SheetFile;

/// How large the parts are; rank and parent work it out alike.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SheetShape {
    /// Rows that fit.
    pub(crate) capacity: usize,
    /// Tokens of the rank.
    pub(crate) tokens: usize,
    /// Bytes of a row.
    pub(crate) row_bytes: usize,
    /// Slots of a token.
    pub(crate) topk: usize,
    /// Most experts of a rank in any trace.
    pub(crate) experts: usize,
}

/// A part of a sheet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// `[capacity]` rows as they arrived.
    Rows,
    /// `[capacity, topk]` i32.
    Ids,
    /// `[capacity, topk]` f32, or `[capacity, 1]`.
    Weights,
    /// `[capacity]` i32.
    SrcRank,
    /// `[capacity]` i32.
    SrcToken,
    /// `[capacity]` i32.
    SrcSlot,
    /// Three i64: delivered, required, dropped.
    Numbers,
    /// `[experts]` i64.
    RowsPerExpert,
    /// `[experts + 1]` i64.
    ExpertOffsets,
    /// `[tokens]` rows: the sums.
    Combined,
}

const PARTS: [Part; 10] = [
    Part::Rows,
    Part::Ids,
    Part::Weights,
    Part::SrcRank,
    Part::SrcToken,
    Part::SrcSlot,
    Part::Numbers,
    Part::RowsPerExpert,
    Part::ExpertOffsets,
    Part::Combined,
];

impl SheetShape {
    fn bytes(&self, part: Part) -> usize {
        match part {
            Part::Rows => self.capacity * self.row_bytes,
            Part::Ids | Part::Weights => 4 * self.capacity * self.topk,
            Part::SrcRank | Part::SrcToken | Part::SrcSlot => 4 * self.capacity,
            Part::Numbers => 3 * 8,
            Part::RowsPerExpert => 8 * self.experts,
            Part::ExpertOffsets => 8 * (self.experts + 1),
            Part::Combined => self.tokens * self.row_bytes,
        }
    }

    /// Where a part begins; behind the last one if there is no `part`.
    fn offset(&self, part: Option<Part>) -> usize {
        let before = PARTS.iter().take_while(|&&other| Some(other) != part);
        before.map(|&before| self.bytes(before).next_multiple_of(64)).sum()
    }
}

/// A sheet, on either side.
pub(crate) struct Sheet {
    shape: SheetShape,
    memory: Mapping,
    /// Kept by the side that made it, for the other one to open.
    fd: Option<OwnedFd>,
}

impl Sheet {
    /// Makes one in this process.
    ///
    /// # Errors
    /// If there is no memory.
    pub(crate) fn create(shape: SheetShape) -> Result<Sheet> {
        let (memory, fd) = Mapping::create(shape.offset(None))?;
        Ok(Sheet { shape, memory, fd: Some(fd) })
    }

    /// Opens one that process `pid` made.
    ///
    /// # Errors
    /// If the system does not let this process see it.
    pub(crate) fn open(pid: u32, fd: i32, shape: SheetShape) -> Result<Sheet> {
        let path = format!("/proc/{pid}/fd/{fd}");
        let file = File::options().read(true).write(true).open(&path).with_context(|| path.clone())?;
        Ok(Sheet { shape, memory: Mapping::attach(OwnedFd::from(file), shape.offset(None))?, fd: None })
    }

    /// How the parent can open it.
    ///
    /// # Errors
    /// If it was not made here.
    pub(crate) fn file(&self) -> Result<SheetFile> {
        let fd = self.fd.as_ref().context("a sheet of another process")?;
        Ok(SheetFile { fd: fd.as_raw_fd(), capacity: self.shape.capacity })
    }

    /// The address of a part.
    pub(crate) fn address<T>(&self, part: Part) -> *mut T {
        // SAFETY: the mapping has all parts.
        unsafe { self.memory.base().add(self.shape.offset(Some(part))).cast() }
    }

    /// The first `count` elements of a part.
    pub(crate) fn read<T: Pod>(&self, part: Part, count: usize) -> &[T] {
        assert!(count * size_of::<T>() <= self.shape.bytes(part), "{part:?} has no {count} elements");
        // SAFETY: inside the part, which is aligned to 64 bytes; rank and parent take turns.
        unsafe { std::slice::from_raw_parts(self.address(part), count) }
    }

    /// Spoils the first `bytes` bytes of every part, so that what was not written shows.
    pub(crate) fn spoil(&mut self) {
        for part in PARTS {
            // SAFETY: as in `read`.
            unsafe { self.address::<u8>(part).write_bytes(0xA5, self.shape.bytes(part)) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_apart_and_seen_from_another_mapping() -> Result<()> {
        let shape = SheetShape { capacity: 3, tokens: 2, row_bytes: 10, topk: 8, experts: 5 };
        let sheet = Sheet::create(shape)?;
        let other = Sheet::open(std::process::id(), sheet.file()?.fd, shape)?;
        for (number, part) in PARTS.into_iter().enumerate() {
            // SAFETY: inside the part.
            unsafe { sheet.address::<u8>(part).write_bytes(number as u8, shape.bytes(part)) };
        }
        for (number, part) in PARTS.into_iter().enumerate() {
            let seen = other.read::<u8>(part, shape.bytes(part));
            assert!(seen.iter().all(|&byte| byte == number as u8), "{part:?}");
        }
        Ok(())
    }
}
