//! Streams: those of the host backend, and what a call is given as one.

use std::ffi::c_void;
use std::time::Duration;

use ep_core::engine::{DeviceStream, Plan, Stream};
use ep_core::{Error, Result};

use super::copy_out::ValueOut;
use super::guard::guard;
use super::handle::{InUse, Kind, Object, Pin, Table, is_handle};
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

/// A call's `stream` argument.
pub(crate) enum Queue {
    /// NULL is none: the call runs before it returns.
    Host(Option<Pin<StreamObject>>),
    /// As the caller's device knows it; NULL is one of its streams.
    Device(DeviceStream),
}

impl Queue {
    /// The stream of a call of `plan`.
    pub(crate) fn of(plan: &Plan, stream: *mut c_void) -> Result<Queue> {
        if plan.is_on_device() {
            // The driver would follow it as a pointer.
            if is_handle(stream) {
                return Err(Error::invalid(
                    "stream is an ep_stream_t, which is of the host backend; the group is on CUDA and takes a \
                     cudaStream_t",
                ));
            }
            return Ok(Queue::Device(stream));
        }
        if stream.is_null() {
            return Ok(Queue::Host(None));
        }
        STREAMS.pin(stream.cast(), "stream").map(|stream| Queue::Host(Some(stream)))
    }
}

impl StreamObject {
    /// The engine's stream of an optional pin.
    pub(crate) fn of(pin: &Option<Pin<StreamObject>>) -> Option<&Stream> {
        pin.as_ref().map(|pin| &pin.stream)
    }
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
