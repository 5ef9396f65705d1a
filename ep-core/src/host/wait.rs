//! Waiting for a peer's word: spin a bounded time, yield, then sleep, never past the deadline.

use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use rustix::thread::futex;

use crate::mem::Words;

/// How long to spin and yield before sleeping. More cores than ranks: a peer is running and will answer
/// within microseconds. Fewer: spinning keeps it from running, and yielding may run anyone.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    spins: u32,
    yields: u32,
}

impl Patience {
    /// Chosen from how many ranks of this machine share its cores.
    pub fn for_ranks(ranks_here: usize) -> Patience {
        let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
        if ranks_here <= cores {
            Patience { spins: 2000, yields: 8 }
        } else {
            Patience { spins: 20, yields: 2 }
        }
    }
}

/// The longest sleep: how soon a waiter notices an abort or a dead peer without being woken.
pub(super) const SLICE: Duration = Duration::from_millis(20);

/// The doorbell of one lane of one rank. Publishers write their words, then ring.
#[derive(Clone, Copy, Debug)]
pub struct Doorbell<'a> {
    segment: &'a Words,
    bell: usize,
    sleeping: usize,
}

impl<'a> Doorbell<'a> {
    /// The doorbell at these offsets of `segment`.
    pub fn new(segment: &'a Words, bell: usize, sleeping: usize) -> Doorbell<'a> {
        Doorbell { segment, bell, sleeping }
    }

    /// Tells the owner that a word changed. A system call only if the owner sleeps.
    pub fn ring(&self) {
        self.count_up();
        self.wake();
    }

    /// Tells the owner that a word changed, if it is awake. Whoever calls this calls [`Doorbell::wake`] before
    /// it waits itself.
    pub fn count_up(&self) {
        // Release: pairs with the acquire in `count`; a waiter that sees the new count sees the word.
        self.segment.u32(self.bell).fetch_add(1, Ordering::Release);
    }

    /// Wakes the owner if it sleeps: it looks at all words that were counted before.
    pub fn wake(&self) {
        // SeqCst fence: pairs with the one in `sleep`. Either the owner sees the new count, or this
        // thread sees that it sleeps.
        fence(Ordering::SeqCst);
        // Relaxed: ordered by the fence.
        if self.segment.u32(self.sleeping).load(Ordering::Relaxed) != 0 {
            // Waking nobody is no error: the owner may have woken by itself.
            let _ = futex::wake(self.segment.u32(self.bell), futex::Flags::empty(), i32::MAX as u32);
        }
    }

    /// The number of rings so far. Take it before looking at the words, give it to `Waiter::wait`.
    pub fn count(&self) -> u32 {
        // Acquire: pairs with the release in `ring`.
        self.segment.u32(self.bell).load(Ordering::Acquire)
    }

    /// Sleeps until the count differs from `seen`, at most `time`.
    pub(super) fn sleep(&self, seen: u32, time: Duration) {
        let sleeping = self.segment.u32(self.sleeping);
        // Relaxed: ordered by the fence.
        sleeping.store(1, Ordering::Relaxed);
        // SeqCst fence: pairs with the one in `ring`.
        fence(Ordering::SeqCst);
        if self.count() == seen {
            let timeout =
                rustix::time::Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() };
            // Not waited, timed out, interrupted: all mean "look again".
            let _ = futex::wait(self.segment.u32(self.bell), futex::Flags::empty(), seen, Some(&timeout));
        }
        // Relaxed: only this thread sleeps here; a stale 1 costs a publisher one needless wake.
        sleeping.store(0, Ordering::Relaxed);
    }
}

/// One call's waiting. Counts how often it waited in vain since the last progress.
#[derive(Debug)]
pub(super) struct Waiter {
    patience: Patience,
    deadline: Instant,
    idle_rounds: u32,
}

/// Why [`Waiter::wait`] returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Woken {
    /// Look at the words again.
    LookAgain,
    /// A sleep ended: look again, and see whether peers live and whether the group was aborted.
    CheckPeers,
    /// The deadline has passed.
    TimeUp,
}

impl Waiter {
    /// A call that may wait until `deadline`.
    pub(super) fn new(patience: Patience, deadline: Instant) -> Waiter {
        Waiter { patience, deadline, idle_rounds: 0 }
    }

    /// Something moved: start patient again.
    pub(super) fn progressed(&mut self) {
        self.idle_rounds = 0;
    }

    /// Waits for the doorbell to move on from `seen`.
    pub(super) fn wait(&mut self, bell: &Doorbell<'_>, seen: u32) -> Woken {
        self.idle_rounds += 1;
        if self.idle_rounds == 1 {
            for _ in 0..self.patience.spins {
                if bell.count() != seen {
                    return Woken::LookAgain;
                }
                std::hint::spin_loop();
            }
        }
        if self.idle_rounds <= self.patience.yields {
            std::thread::yield_now();
            return Woken::LookAgain;
        }
        let now = Instant::now();
        if now >= self.deadline {
            return Woken::TimeUp;
        }
        bell.sleep(seen, SLICE.min(self.deadline - now));
        Woken::CheckPeers
    }
}
