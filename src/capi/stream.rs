//! Streams of the host backend.

use std::ffi::c_void;
use std::time::Duration;

use ep_core::Result;
use ep_core::engine::Stream;

use super::copy_out::ValueOut;
use super::guard::guard;
use super::handle::{InUse, Kind, Object, Pin, Table};
use super::types::{EpStatus, EpStream};

/// The longest wait for a stream: what "no limit" means in a library where every wait has one.
const MAX_WAIT: Duration = Duration::from_secs(24 * 3600);

static STREAMS: Table<StreamObject> = Table::new();

/// What an `ep_stream_t` names.
pub(crate) struct StreamObject {
    pub(crate) stream: Stream,
}

impl Object for StreamObject {
    type Opaque = EpStream;
    const KIND: Kind = Kind::Stream;
}

/// The stream of a call's `stream` argument; NULL is none.
pub(crate) fn pin_stream(stream: *mut c_void) -> Result<Option<Pin<StreamObject>>> {
    if stream.is_null() {
        return Ok(None);
    }
    STREAMS.pin(stream.cast(), "stream").map(Some)
}

/// `ep_stream_create`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ep_stream_create(stream_out: *mut *mut EpStream) -> EpStatus {
    guard("ep_stream_create", || {
        // SAFETY: by the header, the address of a pointer.
        let stream_out = unsafe { ValueOut::new(stream_out, "stream_out") }?;
        stream_out.write(STREAMS.insert(StreamObject { stream: Stream::new()? })?);
        Ok(())
    })
}

/// `ep_stream_synchronize`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ep_stream_synchronize(stream: *mut EpStream, timeout_ms: u32) -> EpStatus {
    guard("ep_stream_synchronize", || {
        let timeout = match timeout_ms {
            0 => MAX_WAIT,
            ms => Duration::from_millis(ms.into()),
        };
        STREAMS.pin(stream, "stream")?.stream.synchronize(timeout)
    })
}

/// `ep_stream_destroy`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ep_stream_destroy(stream: *mut EpStream) -> EpStatus {
    guard("ep_stream_destroy", || {
        if !stream.is_null() {
            drop(STREAMS.retire(stream, "stream", InUse::Refused)?);
        }
        Ok(())
    })
}
