//! Whom to name when a deadline passes. The peer that a rank waits for may be a victim itself, held up by
//! a third: a rank in the next call waits for one that a hung rank keeps in this call. So a rank that waits
//! long says in a word of its own segment for whom, and counts there each time it looks again. At its
//! deadline a rank watches its peers' words for a moment. A peer that counts is alive and waits in vain for
//! the one it names; the first on this way that does not count is the cause.

use std::sync::atomic::Ordering;
use std::time::Instant;

use super::exchange::{Exchange, Missing};
use super::wait::SLICE;
use crate::error::Result;

/// Slices of watching: living waiters look again once a slice, and shall not miss it on a busy machine.
const WATCHED_SLICES: u32 = 5;

/// What a rank says while it waits: the awaited rank plus one, and how often it has looked in vain.
/// 0: it does not wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Says(u64);

impl Says {
    fn awaited(self) -> Option<usize> {
        (self.0 as u32 as usize).checked_sub(1)
    }
}

impl Exchange<'_> {
    /// Says that this rank waits for `peer`, and still does.
    pub(super) fn announce(&mut self, peer: usize) {
        self.looks = self.looks.wrapping_add(1);
        let says = u64::from(self.looks) << 32 | (peer as u64 + 1);
        // Relaxed: the word is read by itself, at deadlines only.
        self.group.own_segment().u64(self.group.layout.waiting(self.lane)).store(says, Ordering::Relaxed);
    }

    /// Takes back what `announce` said.
    pub(super) fn denounce(&mut self) {
        if self.looks != 0 {
            self.looks = 0;
            // Relaxed: as in `announce`.
            self.group.own_segment().u64(self.group.layout.waiting(self.lane)).store(0, Ordering::Relaxed);
        }
    }

    /// Nothing, for a rank of another node.
    fn says(&self, rank: usize) -> Says {
        let Some(place) = self.group.topology.place(rank) else { return Says(0) };
        // Relaxed: as in `announce`.
        Says(self.group.segments[place].u64(self.group.layout.waiting(self.lane)).load(Ordering::Relaxed))
    }

    /// The rank that holds this call up, at its deadline: `missing.first`, or whom the missing wait for.
    ///
    /// # Errors
    /// What broke the group meanwhile.
    pub(super) fn culprit(&mut self, missing: &Missing, first: usize) -> Result<usize> {
        let is_local = self.group.topology.place(first).is_some();
        if missing.count == 1 && is_local && self.says(first).awaited().is_none() {
            return Ok(first);
        }
        let before: Vec<Says> = (0..self.group.num_ranks).map(|rank| self.says(rank)).collect();
        self.watch(first)?;
        let victim = |rank: usize| {
            let says = self.says(rank);
            says.awaited().filter(|_| says != before[rank])
        };
        let mut culprit = missing.ranks().find(|&rank| victim(rank).is_none()).unwrap_or(first);
        for _ in 0..self.group.num_ranks {
            match victim(culprit) {
                Some(awaited) if awaited != self.group.rank && awaited < self.group.num_ranks => {
                    culprit = awaited
                }
                _ => break,
            }
        }
        // What the ranks of another node wait for can be seen there only, and they tell.
        if self.group.topology.place(culprit).is_none() {
            self.watch(first)?;
            self.watch(first)?;
        }
        Ok(culprit)
    }

    /// Lets a moment pass in which others count, or say what broke the group.
    fn watch(&mut self, first: usize) -> Result<()> {
        let end = Instant::now() + WATCHED_SLICES * SLICE;
        while Instant::now() < end {
            let seen = self.bell();
            self.group.poll_net();
            if let Some(error) = self.group.broken() {
                return Err(error);
            }
            self.announce(first);
            self.own_bell().sleep(seen, SLICE);
        }
        Ok(())
    }
}
