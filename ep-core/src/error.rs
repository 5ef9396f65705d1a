//! The one error type of the library, and the status codes that cross the C ABI.

use std::fmt;

/// A status code of `include/ep.h`. The ranges say how far the damage reaches.
///
/// 1–99 caller error, nothing changed · 100–199 this call failed, the object is still usable ·
/// 200–299 the group is broken, destroy it · 300 and up the process or device is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum Status {
    /// Success.
    Ok = 0,
    /// An argument is null, misaligned, negative, too large, or contradicts another one.
    InvalidArgument = 1,
    /// A struct is shorter than its first version, or longer than this library and not zero there.
    UnknownField = 2,
    /// An expert id, rank, lane or other id lies outside its range.
    OutOfRange = 3,
    /// More tokens, rows or bytes than the object was made for.
    Capacity = 4,
    /// The call came in the wrong order, for example a dispatch before the plan was updated.
    InvalidState = 5,
    /// This backend, dtype or combination is not supported; the text says what is.
    Unsupported = 6,
    /// The handle is null, of another kind, of another group, or already destroyed.
    BadHandle = 7,

    /// Ranks disagree: configuration at creation, or the calls that met in one lane.
    Mismatch = 100,
    /// The ranks could not meet: a peer is absent, sent garbage or has the wrong secret.
    Bootstrap = 101,
    /// Memory could not be allocated or mapped.
    OutOfMemory = 102,
    /// The operating system refused a call; the text names it.
    System = 103,
    /// The result is not there yet; the call may be repeated.
    NotReady = 104,

    /// A peer did not do its part before the deadline.
    Timeout = 200,
    /// A peer left or died.
    PeerLost = 201,
    /// The group was aborted, here or by a peer.
    Aborted = 202,
    /// A defect of the library was caught; the group is poisoned.
    Internal = 203,

    /// The device, and with it the process's context, is lost.
    DeviceLost = 300,
}

impl Status {
    /// Every status, in ascending order of code.
    pub const ALL: [Status; 18] = [
        Status::Ok,
        Status::InvalidArgument,
        Status::UnknownField,
        Status::OutOfRange,
        Status::Capacity,
        Status::InvalidState,
        Status::Unsupported,
        Status::BadHandle,
        Status::Mismatch,
        Status::Bootstrap,
        Status::OutOfMemory,
        Status::System,
        Status::NotReady,
        Status::Timeout,
        Status::PeerLost,
        Status::Aborted,
        Status::Internal,
        Status::DeviceLost,
    ];

    /// The number that crosses the C ABI.
    pub const fn code(self) -> i32 {
        self as i32
    }

    /// The status with this number, if there is one.
    pub fn from_code(code: i32) -> Option<Status> {
        Status::ALL.into_iter().find(|status| status.code() == code)
    }

    /// The name of the status in `include/ep.h`.
    pub const fn name(self) -> &'static str {
        match self {
            Status::Ok => "EP_OK",
            Status::InvalidArgument => "EP_ERR_INVALID_ARGUMENT",
            Status::UnknownField => "EP_ERR_UNKNOWN_FIELD",
            Status::OutOfRange => "EP_ERR_OUT_OF_RANGE",
            Status::Capacity => "EP_ERR_CAPACITY",
            Status::InvalidState => "EP_ERR_INVALID_STATE",
            Status::Unsupported => "EP_ERR_UNSUPPORTED",
            Status::BadHandle => "EP_ERR_BAD_HANDLE",
            Status::Mismatch => "EP_ERR_MISMATCH",
            Status::Bootstrap => "EP_ERR_BOOTSTRAP",
            Status::OutOfMemory => "EP_ERR_OUT_OF_MEMORY",
            Status::System => "EP_ERR_SYSTEM",
            Status::NotReady => "EP_ERR_NOT_READY",
            Status::Timeout => "EP_ERR_TIMEOUT",
            Status::PeerLost => "EP_ERR_PEER_LOST",
            Status::Aborted => "EP_ERR_ABORTED",
            Status::Internal => "EP_ERR_INTERNAL",
            Status::DeviceLost => "EP_ERR_DEVICE_LOST",
        }
    }

    /// True for the range 200–299: the group that returned it can only be destroyed.
    pub const fn breaks_group(self) -> bool {
        self.code() >= 200 && self.code() < 300
    }
}

/// A status and the sentence that says what was wrong, what was expected and what to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    /// The status code.
    pub status: Status,
    /// One sentence for a person.
    pub message: String,
}

/// The result of everything in this library that can fail.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Makes an error from its status and sentence.
    pub fn new(status: Status, message: impl Into<String>) -> Error {
        Error { status, message: message.into() }
    }

    /// A caller's mistake in an argument.
    pub fn invalid(message: impl Into<String>) -> Error {
        Error::new(Status::InvalidArgument, message)
    }

    /// A refused system call: names the call and the system's own text.
    pub fn system(call: &str, source: impl fmt::Display) -> Error {
        Error::new(Status::System, format!("{call} failed: {source}"))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.status.name(), self.message)
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_unique_ascending_and_found_again() {
        assert!(Status::ALL.windows(2).all(|pair| pair[0].code() < pair[1].code()));
        for status in Status::ALL {
            assert_eq!(Status::from_code(status.code()), Some(status));
            assert!(status.name().starts_with("EP_"));
        }
        assert_eq!(Status::from_code(42), None);
    }
}
