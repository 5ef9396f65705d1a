//! The CUDA driver: opened once, at run time.

use std::ffi::CStr;
use std::fmt::Display;
use std::sync::OnceLock;

use cudarc::driver::sys::{self, CUresult};
use ep_core::{Error, Result, Status};

use crate::images;

/// The driver, initialised.
#[derive(Clone, Copy, Debug)]
pub struct Driver {
    /// The CUDA version it supports: 13000 is 13.0.
    pub version: u32,
    /// Devices that it shows to this process.
    pub num_devices: usize,
}

static DRIVER: OnceLock<Result<Driver>> = OnceLock::new();

/// Opens the driver, the first time; later calls repeat the answer. Does not create a context.
///
/// # Errors
/// [`Status::Unsupported`]: built without kernels, no driver, a driver older than the kernels, no device.
pub fn open() -> Result<Driver> {
    DRIVER.get_or_init(open_once).clone()
}

/// Finds kernels and the driver's library. Does not start the driver.
///
/// # Errors
/// [`Status::Unsupported`] saying which is missing.
pub fn find() -> Result<()> {
    images::needed_driver()?;
    // SAFETY: looks for the library and loads it; its initialisers are the driver's own.
    match unsafe { sys::is_culib_present() } {
        true => Ok(()),
        false => Err(Error::new(
            Status::Unsupported,
            "there is no CUDA driver on this machine (libcuda.so.1 was not found)",
        )),
    }
}

fn open_once() -> Result<Driver> {
    let unsupported = |text: String| Err(Error::new(Status::Unsupported, text));
    let needed = images::needed_driver()?;
    find()?;
    let mut version = 0;
    // SAFETY: the library is there, and every driver has this function; it needs no initialisation.
    check(unsafe { sys::cuDriverGetVersion(&mut version) }, "cuDriverGetVersion")?;
    let version = u32::try_from(version).unwrap_or(0);
    if version < needed {
        return unsupported(format!(
            "the CUDA driver supports CUDA {}, and the kernels of this build need {}; install a newer driver",
            dotted(version),
            dotted(needed)
        ));
    }
    // SAFETY: as above.
    match unsafe { sys::cuInit(0) } {
        CUresult::CUDA_SUCCESS => {}
        CUresult::CUDA_ERROR_NO_DEVICE => {
            return unsupported(String::from("the CUDA driver finds no device"));
        }
        code => {
            return unsupported(format!("the CUDA driver does not start: {}", error(code, "cuInit").message));
        }
    }
    let mut count = 0;
    // SAFETY: the driver is initialised.
    check(unsafe { sys::cuDeviceGetCount(&mut count) }, "cuDeviceGetCount")?;
    Ok(Driver { version, num_devices: usize::try_from(count).unwrap_or(0) })
}

/// `13000` is `13.0`.
pub fn dotted(version: u32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

/// Turns a driver's answer into a result that names the call.
///
/// # Errors
/// A status by the kind of the refusal; the text is `call` and the driver's own words.
pub fn check(code: CUresult, call: impl Display) -> Result<()> {
    if code == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(error(code, call)) }
}

#[cold]
fn error(code: CUresult, call: impl Display) -> Error {
    Error::new(status_of(code), format!("{call} failed: {}", name_of(code)))
}

fn status_of(code: CUresult) -> Status {
    use CUresult as R;
    match code {
        R::CUDA_ERROR_OUT_OF_MEMORY => Status::OutOfMemory,
        R::CUDA_ERROR_NOT_SUPPORTED
        | R::CUDA_ERROR_NOT_PERMITTED
        | R::CUDA_ERROR_NO_BINARY_FOR_GPU
        | R::CUDA_ERROR_INVALID_DEVICE => Status::Unsupported,
        // Sticky: every later call of the process on this device returns the same.
        R::CUDA_ERROR_ILLEGAL_ADDRESS
        | R::CUDA_ERROR_ILLEGAL_INSTRUCTION
        | R::CUDA_ERROR_INVALID_ADDRESS_SPACE
        | R::CUDA_ERROR_MISALIGNED_ADDRESS
        | R::CUDA_ERROR_INVALID_PC
        | R::CUDA_ERROR_ASSERT
        | R::CUDA_ERROR_HARDWARE_STACK_ERROR
        | R::CUDA_ERROR_LAUNCH_FAILED
        | R::CUDA_ERROR_LAUNCH_TIMEOUT
        | R::CUDA_ERROR_ECC_UNCORRECTABLE
        | R::CUDA_ERROR_NVLINK_UNCORRECTABLE
        | R::CUDA_ERROR_CONTEXT_IS_DESTROYED
        | R::CUDA_ERROR_MPS_CLIENT_TERMINATED
        | R::CUDA_ERROR_DEINITIALIZED => Status::DeviceLost,
        _ => Status::System,
    }
}

fn name_of(code: CUresult) -> String {
    let (mut name, mut text) = (std::ptr::null(), std::ptr::null());
    // SAFETY: both write the address of a static string, or leave null for a code they do not know.
    unsafe {
        let _ = sys::cuGetErrorName(code, &mut name);
        let _ = sys::cuGetErrorString(code, &mut text);
    }
    let of = |text: *const std::ffi::c_char| {
        // SAFETY: not null, so a static NUL-terminated string of the driver.
        if text.is_null() { None } else { Some(unsafe { CStr::from_ptr(text) }.to_string_lossy()) }
    };
    match (of(name), of(text)) {
        (Some(name), Some(text)) => format!("{name} ({text})"),
        _ => format!("error {}", code as u32),
    }
}
