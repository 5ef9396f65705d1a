//! How a producer of commands wakes a proxy that sleeps.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering, fence};

use rustix::event::{EventfdFlags, eventfd};

use crate::error::{Error, Result};

/// A flag that the proxy sets before it sleeps, and the descriptor that it sleeps on.
#[derive(Debug)]
pub(super) struct Waker {
    asleep: AtomicU32,
    event: OwnedFd,
}

impl Waker {
    pub(super) fn new() -> Result<Waker> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| Error::system("eventfd", e))?;
        Ok(Waker { asleep: AtomicU32::new(0), event })
    }

    /// Producer: after a command or a request was published.
    #[inline]
    pub(super) fn wake_if_asleep(&self) {
        // SeqCst fence: pairs with the one in `fall_asleep`. Either the proxy sees the command, or this thread sees
        // that it sleeps.
        fence(Ordering::SeqCst);
        // Relaxed: ordered by the fence.
        if self.asleep.load(Ordering::Relaxed) != 0 {
            self.wake();
        }
    }

    #[cold]
    fn wake(&self) {
        // Refused only when the count is at its end, and then the proxy wakes anyway.
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }

    /// Proxy: announces that it will sleep. It must look at all rings and the mailbox once more before it does.
    pub(super) fn fall_asleep(&self) {
        // Relaxed: ordered by the fence.
        self.asleep.store(1, Ordering::Relaxed);
        // SeqCst fence: pairs with the one in `wake_if_asleep`.
        fence(Ordering::SeqCst);
    }

    /// Proxy: does not sleep, or no longer.
    pub(super) fn stay_awake(&self) {
        // Relaxed: a stale 1 costs a producer a needless write.
        self.asleep.store(0, Ordering::Relaxed);
        let mut count = [0; 8];
        // Nobody woke it: there is nothing to read.
        let _ = rustix::io::read(&self.event, &mut count);
    }

    /// What to poll(2) on, for reading.
    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}
