//! Streams and events of the library's own, and questions about the caller's.

use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::sys::{self, CUevent, CUevent_flags, CUresult, CUstream, CUstream_flags};
use ep_core::{Error, Result, Status};

use crate::context::Context;
use crate::driver::check;

/// A stream that does not wait for the legacy default stream.
#[derive(Debug)]
pub struct Stream {
    context: Arc<Context>,
    raw: CUstream,
}

// SAFETY: streams may be used by any thread; the driver locks what it shares.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// Makes a stream.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn new(context: &Arc<Context>) -> Result<Stream> {
        let _entered = context.enter()?;
        let mut raw = std::ptr::null_mut();
        let flags = CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: a context is current.
        check(unsafe { sys::cuStreamCreate(&mut raw, flags) }, "cuStreamCreate")?;
        Ok(Stream { context: context.clone(), raw })
    }

    /// The stream as the driver names it.
    pub fn raw(&self) -> CUstream {
        self.raw
    }

    /// Waits until everything queued so far is done.
    ///
    /// # Errors
    /// [`Status::DeviceLost`] and others of the driver.
    pub fn synchronize(&self) -> Result<()> {
        let _entered = self.context.enter()?;
        // SAFETY: the stream exists.
        check(unsafe { sys::cuStreamSynchronize(self.raw) }, "cuStreamSynchronize")
    }
}

/// Waits until a stream of the context, which may be the NULL stream, is done.
///
/// # Errors
/// Those of the driver.
///
/// # Safety
/// `stream` is a stream of the context.
pub unsafe fn synchronize(context: &Context, stream: CUstream) -> Result<()> {
    let _entered = context.enter()?;
    // SAFETY: by the caller's word.
    check(unsafe { sys::cuStreamSynchronize(stream) }, "cuStreamSynchronize")
}

impl Drop for Stream {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: made by `new`; what is queued still runs.
            let _ = unsafe { sys::cuStreamDestroy_v2(self.raw) };
        }
    }
}

/// A point in a stream.
#[derive(Debug)]
pub struct Event {
    context: Arc<Context>,
    raw: CUevent,
}

// SAFETY: events may be used by any thread; the driver locks what it shares.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// Makes an event. `timing`: it can tell the time between two of its kind.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn new(context: &Arc<Context>, timing: bool) -> Result<Event> {
        let _entered = context.enter()?;
        let flags = match timing {
            true => CUevent_flags::CU_EVENT_DEFAULT,
            false => CUevent_flags::CU_EVENT_DISABLE_TIMING,
        };
        let mut raw = std::ptr::null_mut();
        // SAFETY: a context is current.
        check(unsafe { sys::cuEventCreate(&mut raw, flags as u32) }, "cuEventCreate")?;
        Ok(Event { context: context.clone(), raw })
    }

    /// Marks the end of what `stream` holds now.
    ///
    /// # Errors
    /// Those of the driver.
    ///
    /// # Safety
    /// `stream` is a stream of the event's context.
    pub unsafe fn record(&self, stream: CUstream) -> Result<()> {
        // SAFETY: by the caller's word.
        check(unsafe { sys::cuEventRecord(self.raw, stream) }, "cuEventRecord")
    }

    /// True once the mark was reached, or if there never was one.
    ///
    /// # Errors
    /// [`Status::DeviceLost`] and others of the driver.
    pub fn is_done(&self) -> Result<bool> {
        // SAFETY: the event exists; no context need be current.
        match unsafe { sys::cuEventQuery(self.raw) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            code => check(code, "cuEventQuery").map(|()| true),
        }
    }

    /// Waits for the mark.
    ///
    /// # Errors
    /// [`Status::Timeout`] when time is up, and those of [`Event::is_done`].
    pub fn wait(&self, timeout: Duration) -> Result<()> {
        let deadline = Instant::now() + timeout;
        while !self.is_done()? {
            if Instant::now() >= deadline {
                return Err(Error::new(Status::Timeout, format!("the device was not done in {timeout:?}")));
            }
            std::thread::yield_now();
        }
        Ok(())
    }

    /// Time from `start` to this event; both were reached.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn since(&self, start: &Event) -> Result<Duration> {
        let mut milliseconds = 0.0;
        // SAFETY: both events exist.
        let code = unsafe { sys::cuEventElapsedTime_v2(&mut milliseconds, start.raw, self.raw) };
        check(code, "cuEventElapsedTime")?;
        Ok(Duration::from_secs_f32(milliseconds.max(0.0) / 1e3))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: made by `new`.
            let _ = unsafe { sys::cuEventDestroy_v2(self.raw) };
        }
    }
}
