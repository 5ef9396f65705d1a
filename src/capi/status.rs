//! Names and scopes of statuses.

use std::ffi::{CStr, c_char};

use ep_core::Status;

use super::types::{
    EP_SCOPE_CALL, EP_SCOPE_CALLER, EP_SCOPE_GROUP, EP_SCOPE_NONE, EP_SCOPE_PROCESS, EpStatus,
};

/// `ep_status_name`.
#[unsafe(no_mangle)]
pub extern "C" fn ep_status_name(status: EpStatus) -> *const c_char {
    Status::from_code(status).map_or(c"EP_ERR_UNKNOWN", name).as_ptr()
}

/// `ep_status_scope`. A number that no range has counts as the worst.
#[unsafe(no_mangle)]
pub extern "C" fn ep_status_scope(status: EpStatus) -> i32 {
    match status {
        0 => EP_SCOPE_NONE,
        1..=99 => EP_SCOPE_CALLER,
        100..=199 => EP_SCOPE_CALL,
        200..=299 => EP_SCOPE_GROUP,
        _ => EP_SCOPE_PROCESS,
    }
}

/// `Status::name`, with the NUL that C needs.
fn name(status: Status) -> &'static CStr {
    match status {
        Status::Ok => c"EP_OK",
        Status::InvalidArgument => c"EP_ERR_INVALID_ARGUMENT",
        Status::UnknownField => c"EP_ERR_UNKNOWN_FIELD",
        Status::OutOfRange => c"EP_ERR_OUT_OF_RANGE",
        Status::Capacity => c"EP_ERR_CAPACITY",
        Status::InvalidState => c"EP_ERR_INVALID_STATE",
        Status::Unsupported => c"EP_ERR_UNSUPPORTED",
        Status::BadHandle => c"EP_ERR_BAD_HANDLE",
        Status::Mismatch => c"EP_ERR_MISMATCH",
        Status::Bootstrap => c"EP_ERR_BOOTSTRAP",
        Status::OutOfMemory => c"EP_ERR_OUT_OF_MEMORY",
        Status::System => c"EP_ERR_SYSTEM",
        Status::NotReady => c"EP_ERR_NOT_READY",
        Status::Timeout => c"EP_ERR_TIMEOUT",
        Status::PeerLost => c"EP_ERR_PEER_LOST",
        Status::Aborted => c"EP_ERR_ABORTED",
        Status::Internal => c"EP_ERR_INTERNAL",
        Status::DeviceLost => c"EP_ERR_DEVICE_LOST",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_core() {
        for status in Status::ALL {
            assert_eq!(name(status).to_str(), Ok(status.name()));
        }
    }

    #[test]
    fn scopes_follow_the_ranges() {
        let scopes = [(-1, 4), (0, 0), (1, 1), (99, 1), (100, 2), (199, 2), (200, 3), (299, 3), (300, 4)];
        for (status, scope) in scopes {
            assert_eq!(ep_status_scope(status), scope, "{status}");
        }
    }
}
