//! Who is at the other end of a Unix socket.

use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// Reads an option of `N` integers.
fn option<const N: usize>(socket: BorrowedFd<'_>, name: libc::c_int) -> Option<[i32; N]> {
    let mut value = MaybeUninit::<[i32; N]>::uninit();
    let mut bytes = size_of::<[i32; N]>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `bytes` bytes to `value`, and says how many.
    let result = unsafe {
        let value = value.as_mut_ptr().cast();
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, name, value, &mut bytes)
    };
    // SAFETY: all of it was written.
    (result == 0 && bytes as usize == size_of::<[i32; N]>()).then(|| unsafe { value.assume_init() })
}

/// Process and user of the peer, as `struct ucred` has them. The process is 0 where it has no number here:
/// in another container, that shares the network but not the processes.
fn credentials(socket: BorrowedFd<'_>) -> Option<(i32, u32)> {
    // Not rustix's: its process number cannot be 0.
    option(socket, libc::SO_PEERCRED).map(|[process, user, _group]: [i32; 3]| (process, user as u32))
}

/// True if the peer is of the same user as this process.
pub(super) fn is_same_user(socket: BorrowedFd<'_>) -> bool {
    credentials(socket).is_some_and(|(_, user)| user == rustix::process::geteuid().as_raw())
}

/// A descriptor that is readable once the peer's process has ended. None where the system offers none.
pub(super) fn process_of(socket: BorrowedFd<'_>) -> Option<OwnedFd> {
    if let Some([fd]) = option(socket, libc::SO_PEERPIDFD) {
        // SAFETY: the kernel has just made this descriptor for this process.
        return Some(unsafe { OwnedFd::from_raw_fd(fd) });
    }
    // Before Linux 6.5. The peer is in the middle of its greeting, so the number is still its own.
    let (process, _) = credentials(socket)?;
    pidfd_open(Pid::from_raw(process)?, PidfdFlags::empty()).ok()
}
