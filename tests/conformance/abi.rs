//! Small helpers over the C ABI.

use std::ffi::CStr;

use ep::capi::{ep_last_error, ep_status_name};

/// Turns a status into a sentence.
pub fn expect_ok(status: i32, call: &str) -> Result<(), String> {
    if status == 0 {
        return Ok(());
    }
    // SAFETY: both are texts that end with NUL and live until the next call of this thread.
    let (name, text) = unsafe { (CStr::from_ptr(ep_status_name(status)), CStr::from_ptr(ep_last_error())) };
    Err(format!("{call}: {}: {}", name.to_string_lossy(), text.to_string_lossy()))
}

/// `struct_size` of a struct.
pub fn size_of<T>() -> u32 {
    std::mem::size_of::<T>() as u32
}
