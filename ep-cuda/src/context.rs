//! A device's primary context: the one that the CUDA runtime, and with it PyTorch, uses.

use std::ffi::{CStr, c_char};
use std::marker::PhantomData;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUcontext, CUdevice, CUdevice_attribute};
use ep_core::{Error, Result, Status};

use crate::driver::{self, check};

/// The primary context of one device, kept alive.
#[derive(Debug)]
pub struct Context {
    ordinal: i32,
    device: CUdevice,
    raw: CUcontext,
    name: String,
}

// SAFETY: a context may be used by any thread that makes it current.
unsafe impl Send for Context {}
// SAFETY: as above; the driver locks what it shares.
unsafe impl Sync for Context {}

impl Context {
    /// Keeps the primary context of device `ordinal`; creates it if nobody has yet.
    ///
    /// # Errors
    /// [`Status::Unsupported`] if there is no driver or device; [`Status::OutOfMemory`].
    pub fn retain(ordinal: i32) -> Result<Arc<Context>> {
        let driver = driver::open()?;
        if usize::try_from(ordinal).is_ok_and(|ordinal| ordinal >= driver.num_devices) || ordinal < 0 {
            return Err(Error::new(
                Status::Unsupported,
                format!("CUDA device {ordinal} does not exist, there are {}", driver.num_devices),
            ));
        }
        let mut device = 0;
        // SAFETY: the driver is open.
        check(unsafe { sys::cuDeviceGet(&mut device, ordinal) }, "cuDeviceGet")?;
        let mut name = [0 as c_char; 128];
        // SAFETY: the array is as long as said; its last byte stays 0.
        check(unsafe { sys::cuDeviceGetName(name.as_mut_ptr(), 127, device) }, "cuDeviceGetName")?;
        // SAFETY: it ends with a NUL, see above.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
        let mut raw = std::ptr::null_mut();
        // SAFETY: the driver is open, the device exists.
        let code = unsafe { sys::cuDevicePrimaryCtxRetain(&mut raw, device) };
        check(code, format_args!("cuDevicePrimaryCtxRetain of device {ordinal}"))?;
        Ok(Arc::new(Context { ordinal, device, raw, name }))
    }

    /// Device of the calling thread's current context, if it has one. Does not start the driver.
    pub fn current_ordinal() -> Option<i32> {
        driver::find().ok()?;
        let mut current = std::ptr::null_mut();
        // SAFETY: the library is there; without cuInit, which a context needs, this is an error.
        check(unsafe { sys::cuCtxGetCurrent(&mut current) }, "cuCtxGetCurrent").ok()?;
        if current.is_null() {
            return None;
        }
        let mut device = 0;
        // SAFETY: a context is current. Device handles are ordinals.
        check(unsafe { sys::cuCtxGetDevice(&mut device) }, "cuCtxGetDevice").ok()?;
        Some(device)
    }

    /// Makes the context current until the guard is dropped. Free if it is current already.
    ///
    /// # Errors
    /// [`Status::DeviceLost`] and others of the driver.
    pub fn enter(&self) -> Result<Entered<'_>> {
        let mut current = std::ptr::null_mut();
        // SAFETY: the driver is open, since this context exists.
        check(unsafe { sys::cuCtxGetCurrent(&mut current) }, "cuCtxGetCurrent")?;
        let pushed = current != self.raw;
        if pushed {
            // SAFETY: the context is kept alive by `self`.
            check(unsafe { sys::cuCtxPushCurrent_v2(self.raw) }, "cuCtxPushCurrent")?;
        }
        Ok(Entered { pushed, context: PhantomData, thread: PhantomData })
    }

    /// Number of the device.
    pub fn ordinal(&self) -> i32 {
        self.ordinal
    }

    /// Name of the device.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// An attribute of the device.
    ///
    /// # Errors
    /// [`Status::System`] for an attribute that the driver does not know.
    pub fn attribute(&self, attribute: CUdevice_attribute) -> Result<i32> {
        let mut value = 0;
        // SAFETY: the device exists.
        let code = unsafe { sys::cuDeviceGetAttribute(&mut value, attribute, self.device) };
        check(code, format_args!("cuDeviceGetAttribute({attribute:?})"))?;
        Ok(value)
    }

    /// True if `context` is this one.
    pub(crate) fn is(&self, context: CUcontext) -> bool {
        self.raw == context
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once by `retain`, released once here.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

/// A context that is current on this thread.
#[derive(Debug)]
pub struct Entered<'a> {
    pushed: bool,
    context: PhantomData<&'a Context>,
    /// What is current belongs to a thread.
    thread: PhantomData<*const ()>,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        if self.pushed {
            let mut popped = std::ptr::null_mut();
            // SAFETY: pushed by `enter` on this thread, which the guard cannot leave.
            let _ = unsafe { sys::cuCtxPopCurrent_v2(&mut popped) };
        }
    }
}
