//! The sentence of a thread's last failed call.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};

use ep_core::Error;

thread_local! {
    static LAST: RefCell<Option<CString>> = const { RefCell::new(None) };
}

/// `ep_last_error`.
#[unsafe(no_mangle)]
pub extern "C" fn ep_last_error() -> *const c_char {
    // The text stays where it is until this thread fails again: a call of `set` replaces the string.
    // A thread whose locals are gone already has no text left.
    LAST.try_with(|last| last.borrow().as_deref().map_or(c"".as_ptr(), CStr::as_ptr)).unwrap_or(c"".as_ptr())
}

/// Keeps the sentence of a call that failed, with the name of its entry before it.
pub(crate) fn set(entry: &str, error: &Error) {
    let text = sanitise(format!("{entry}: {}", error.message));
    // A thread that is about to end may have no locals any more; then nobody can ask for the text.
    let _ = LAST.try_with(|last| last.replace(Some(text)));
}

/// The text up to its end, whatever bytes it has: a NUL inside would cut it short.
fn sanitise(text: String) -> CString {
    let mut bytes = text.into_bytes();
    bytes.iter_mut().filter(|byte| **byte == 0).for_each(|byte| *byte = b'?');
    CString::new(bytes).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    fn text() -> String {
        // SAFETY: `ep_last_error` returns a string that lives until this thread fails again.
        unsafe { CStr::from_ptr(ep_last_error()) }.to_str().unwrap().to_string()
    }

    #[test]
    fn a_text_stays_and_belongs_to_its_thread() {
        thread::spawn(|| {
            assert_eq!(text(), "");
            set("ep_x", &Error::invalid("rows is -1"));
            assert_eq!(text(), "ep_x: rows is -1");
            assert_eq!(text(), "ep_x: rows is -1");
            thread::spawn(|| assert_eq!(text(), "")).join().unwrap();
            set("ep_y", &Error::invalid("cols is 0"));
            assert_eq!(text(), "ep_y: cols is 0");
        })
        .join()
        .unwrap();
    }

    #[test]
    fn a_nul_inside_does_not_cut_the_text() {
        thread::spawn(|| {
            set("ep_x", &Error::invalid("file is \"a\0b\""));
            assert_eq!(text(), "ep_x: file is \"a?b\"");
        })
        .join()
        .unwrap();
    }

    #[test]
    fn a_thread_that_is_ending_gets_an_empty_text() {
        struct Late;
        impl Drop for Late {
            fn drop(&mut self) {
                set("ep_x", &Error::invalid("late"));
                assert!(!ep_last_error().is_null());
            }
        }
        thread_local!(static LATE: Late = const { Late });
        thread::spawn(|| {
            // Made first, so dropped after `LAST` is gone, or before; both must be safe.
            LATE.with(|_| ());
            set("ep_x", &Error::invalid("early"));
        })
        .join()
        .unwrap();
    }
}
