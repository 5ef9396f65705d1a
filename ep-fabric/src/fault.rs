//! What an error completion means.

use crate::cq::CqError;
use crate::sys;
use crate::transport::FaultClass;

/// Whose fault an error is. The EFA provider's own numbers say more than the error number beside them.
pub(crate) fn class_of(error: &CqError, efa: bool) -> FaultClass {
    match (efa, error.provider_errno) {
        // BAD_DEST_QPN, UNRESP_REMOTE, UNREACH_REMOTE; unresponsive, peer aborted.
        (true, 9 | 13 | 15 | 4124 | 4126 | 4127) => FaultClass::PeerDead,
        (true, 14) => FaultClass::UnknownPeer,
        // BAD_ADDRESS, BAD_STATUS.
        (true, 7 | 12) => FaultClass::BadAddress,
        // FLUSHED, ABORT.
        (true, 1 | 8) => FaultClass::Ours,
        _ => class_of_errno(error.errno),
    }
}

/// The same by the error number alone, as a call that posts returns it.
pub(crate) fn class_of_errno(errno: u32) -> FaultClass {
    match errno {
        sys::FI_ENOTCONN
        | sys::FI_ECONNRESET
        | sys::FI_ECONNREFUSED
        | sys::FI_ECONNABORTED
        | sys::FI_ESHUTDOWN
        | sys::FI_ETIMEDOUT
        | sys::FI_EHOSTDOWN
        | sys::FI_EHOSTUNREACH
        | sys::FI_ENETUNREACH
        | EPIPE => FaultClass::PeerDead,
        // We cancel nothing and do not poll a NIC that we close: the provider dropped what a dead connection had.
        sys::FI_ECANCELED => FaultClass::PeerDead,
        sys::FI_EACCES | sys::FI_EFAULT | sys::FI_EINVAL | sys::FI_EKEYREJECTED | sys::FI_ENOKEY => {
            FaultClass::BadAddress
        }
        _ => FaultClass::Other,
    }
}

/// libfabric has no name for it and passes it through.
const EPIPE: u32 = libc::EPIPE as u32;

#[cfg(test)]
mod tests {
    use super::*;

    fn class(errno: u32, provider_errno: i32, efa: bool) -> FaultClass {
        class_of(&CqError { context: 0, errno, provider_errno, text: String::new() }, efa)
    }

    #[test]
    fn efa_numbers_are_told_apart() {
        for dead in [9, 13, 15, 4124, 4126, 4127] {
            assert_eq!(class(sys::FI_EIO, dead, true), FaultClass::PeerDead);
        }
        assert_eq!(class(sys::FI_EIO, 14, true), FaultClass::UnknownPeer);
        assert_eq!(class(sys::FI_EIO, 7, true), FaultClass::BadAddress);
        assert_eq!(class(sys::FI_EIO, 12, true), FaultClass::BadAddress);
        assert_eq!(class(sys::FI_EIO, 1, true), FaultClass::Ours);
        assert_eq!(class(sys::FI_EIO, 8, true), FaultClass::Ours);
        assert_eq!(class(sys::FI_ENOMEM, 10, true), FaultClass::Other);
    }

    #[test]
    fn numbers_of_other_providers_are_not_taken_for_those_of_efa() {
        assert_eq!(class(sys::FI_ENOMEM, 14, false), FaultClass::Other);
        assert_eq!(class(sys::FI_ECONNRESET, 104, false), FaultClass::PeerDead);
        assert_eq!(class(EPIPE, 32, false), FaultClass::PeerDead);
        assert_eq!(class(sys::FI_EACCES, 13, false), FaultClass::BadAddress);
        assert_eq!(class(sys::FI_ECANCELED, 125, false), FaultClass::PeerDead);
        assert_eq!(class(sys::FI_EIO, 5, false), FaultClass::Other);
    }
}
