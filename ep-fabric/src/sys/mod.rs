//! The C interface of libfabric: types of 1.17, what came later, and the library itself.
//!
//! libfabric exports a handful of functions; everything else is called through tables of operations that each
//! object points to. `op!` reads an entry of such a table after it has checked that the table
//! is long enough: a provider that is older than the headers has shorter ones.

#[expect(non_camel_case_types, unreachable_pub, reason = "generated from C headers")]
#[allow(dead_code, reason = "enumerations come whole")]
#[rustfmt::skip]
mod bindings;
pub(crate) mod library;
pub(crate) mod newer;

use std::ffi::c_int;

use ep_core::{Error, Result, Status};

pub(crate) use bindings::*;
pub use library::Library;

/// Reads the entry `$entry` of the table `$table` of type `$type`: `None` if the table is null, too short, or
/// has no function there.
macro_rules! op {
    ($table:expr, $type:ident :: $entry:ident) => {{
        let table: *const $crate::sys::$type = $table;
        let needed = std::mem::offset_of!($crate::sys::$type, $entry) + std::mem::size_of::<usize>();
        // SAFETY: a table that is not null begins with its size and is readable that far; the entry is read only
        // if it lies within.
        unsafe {
            if table.is_null() || (&raw const (*table).size).read() < needed {
                None
            } else {
                (&raw const (*table).$entry).read()
            }
        }
    }};
}
pub(crate) use op;

/// The error for an operation that a provider does not have.
#[cold]
pub(crate) fn missing(call: &str) -> Error {
    Error::new(
        Status::Unsupported,
        format!(
            "the provider has no {call}: its table of operations is shorter or empty there; use another one"
        ),
    )
}

/// Turns an answer of libfabric into a result that names the call.
///
/// # Errors
/// If `code` is negative; the status follows the kind of the refusal.
pub(crate) fn check(library: &Library, code: isize, call: &str) -> Result<()> {
    if code >= 0 { Ok(()) } else { Err(refused(library, code, call)) }
}

#[cold]
pub(crate) fn refused(library: &Library, code: isize, call: &str) -> Error {
    let errno = errno_of(code);
    let text = library.text_of(errno);
    let (status, advice) = match errno {
        FI_ENOMEM => (Status::OutOfMemory, "; if this is registered memory, raise `ulimit -l`"),
        FI_ENOSYS | FI_EOPNOTSUPP | FI_ENODATA | FI_ENOPROTOOPT => (Status::Unsupported, ""),
        _ => (Status::System, ""),
    };
    Error::new(status, format!("{call} failed: {text} ({code}){advice}"))
}

/// The positive error number of a negative answer.
pub(crate) fn errno_of(code: isize) -> u32 {
    u32::try_from(code.unsigned_abs()).unwrap_or(u32::MAX)
}

/// Whether an answer is this error.
pub(crate) fn is(code: impl Into<i64>, errno: u32) -> bool {
    code.into() == -i64::from(errno)
}

/// Closes an object. Its children are closed before it: they hold a reference to its owner.
///
/// # Safety
/// `fid` is an open object of libfabric, and nobody uses it after this.
pub(crate) unsafe fn close(fid: *mut fid) {
    // SAFETY: by the caller's word, so its table is there.
    let close = op!(unsafe { (*fid).ops }, fi_ops::close);
    if let Some(close) = close {
        // SAFETY: by the caller's word. A refusal leaves the object open, which leaks it and breaks nothing.
        let _: c_int = unsafe { close(fid) };
    }
}
