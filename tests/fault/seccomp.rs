//! A filter that lets a thread make the given system calls only. A call that is not among them is noted,
//! and the thread stays where it is for ever: its process must end by itself.

use std::sync::atomic::{AtomicI64, Ordering};

/// The number of a refused call; -1: none was.
static REFUSED: AtomicI64 = AtomicI64::new(-1);

#[cfg(target_arch = "x86_64")]
const ARCH: u32 = 0xC000_003E;
#[cfg(target_arch = "aarch64")]
const ARCH: u32 = 0xC000_00B7;

/// Offsets in `struct seccomp_data`.
const NUMBER: u32 = 0;
const ARCHITECTURE: u32 = 4;

/// Offset of `si_syscall` in a `siginfo_t` of SIGSYS.
const SI_SYSCALL: usize = 24;

fn statement(code: u32, k: u32) -> libc::sock_filter {
    libc::sock_filter { code: code as u16, jt: 0, jf: 0, k }
}

fn load(offset: u32) -> libc::sock_filter {
    statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, offset)
}

/// Goes on with the next statement if the loaded word is `value`, and skips it otherwise.
fn if_equal(value: u32) -> libc::sock_filter {
    libc::sock_filter { jf: 1, ..statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, value) }
}

fn answer(what: u32) -> libc::sock_filter {
    statement(libc::BPF_RET | libc::BPF_K, what)
}

extern "C" fn note_refused(_: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel gives the address of a siginfo_t, which has this field for SIGSYS.
    let number = unsafe { info.cast::<u8>().add(SI_SYSCALL).cast::<i32>().read() };
    REFUSED.store(number.into(), Ordering::SeqCst);
    loop {
        std::hint::spin_loop();
    }
}

/// True if the kernel has filters.
pub(crate) fn supported() -> bool {
    // SAFETY: plain system call.
    unsafe { libc::prctl(libc::PR_GET_SECCOMP, 0, 0, 0, 0) >= 0 }
}

/// The refused call, if there was one.
pub(crate) fn refused() -> Option<i64> {
    Some(REFUSED.load(Ordering::SeqCst)).filter(|&number| number >= 0)
}

/// From now on, the calling thread makes no system call but those in `allowed`.
pub(crate) fn allow_only(allowed: &[libc::c_long]) {
    let mut program = vec![load(ARCHITECTURE), if_equal(ARCH), load(NUMBER)];
    for &number in allowed {
        program.push(if_equal(number as u32));
        program.push(answer(libc::SECCOMP_RET_ALLOW));
    }
    program.push(answer(libc::SECCOMP_RET_TRAP));
    let program = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: all zero is an action without flags and with an empty mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = note_refused as *const () as usize;
    action.sa_flags = libc::SA_SIGINFO;
    // SAFETY: the handler only stores and spins; the program outlives the call that installs it.
    unsafe {
        assert_eq!(libc::sigaction(libc::SIGSYS, &action, std::ptr::null_mut()), 0);
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        let mode = libc::SECCOMP_MODE_FILTER;
        let installed = libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const program);
        assert_eq!(installed, 0, "{}", std::io::Error::last_os_error());
    }
}
