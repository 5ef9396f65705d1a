//! Which process this is, as far as `fork` is concerned: a child has copies of its parent's objects, but not
//! their threads, and must not act in the parent's place.

use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

static FORKS: AtomicU32 = AtomicU32::new(0);

/// Runs in the child, between `fork` and its return: nothing but a store is allowed there.
extern "C" fn in_child() {
    // Relaxed: the child has one thread.
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// A number that differs between a process and those it was forked from. No system call.
pub(super) fn process() -> u32 {
    static WATCH: Once = Once::new();
    WATCH.call_once(|| {
        // SAFETY: `in_child` is safe to run there. Should the system have no memory to note it, children are
        // not told apart, as without this.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    });
    // Relaxed: only a number.
    FORKS.load(Ordering::Relaxed)
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_child_is_told_apart() {
        let parent = super::process();
        // SAFETY: the child calls nothing but async-signal-safe functions.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(i32::from(super::process() == parent)) };
        }
        let mut status = 0;
        // SAFETY: a child of this process, and room for its status.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0, "the child took itself for its parent");
        assert_eq!(super::process(), parent);
    }
}
