//! Whose memory and stream an argument is: a wrong one would end the context, not just the call.

use std::ffi::c_void;

use cudarc::driver::sys::{self, CUpointer_attribute, CUstream, CUstreamCaptureStatus};
use ep_core::tensor::Tensor;
use ep_core::{Error, Result};

use crate::context::Context;
use crate::driver::check;

/// Checks that `stream` is of `context`, which is current, and tells whether it is being captured.
///
/// # Errors
/// [`ep_core::Status::InvalidArgument`] for a stream of another context.
///
/// # Safety
/// `stream` is a stream, or one of the driver's special values.
pub(crate) unsafe fn stream(context: &Context, stream: CUstream) -> Result<bool> {
    let mut owner = std::ptr::null_mut();
    // SAFETY: by the caller's word.
    check(unsafe { sys::cuStreamGetCtx(stream, &mut owner) }, "cuStreamGetCtx of the argument `stream`")?;
    if !context.is(owner) {
        return Err(Error::invalid(format!(
            "stream belongs to another context than the group's, which is the primary one of device {} ({})",
            context.ordinal(),
            context.name()
        )));
    }
    let mut capturing = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    // SAFETY: by the caller's word.
    check(unsafe { sys::cuStreamIsCapturing(stream, &mut capturing) }, "cuStreamIsCapturing")?;
    Ok(capturing != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
}

/// `CU_MEMORYTYPE_DEVICE`.
const TYPE_DEVICE: u32 = 2;

/// Checks that `address` is memory of the context's device. Null is absent.
///
/// # Errors
/// [`ep_core::Status::InvalidArgument`] naming the argument.
pub(crate) fn address(context: &Context, address: u64, name: &str) -> Result<()> {
    if address == 0 {
        return Ok(());
    }
    let (mut kind, mut ordinal) = (0u32, -1i32);
    let mut attributes = [
        CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
        CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
    ];
    let mut values: [*mut c_void; 2] = [(&raw mut kind).cast(), (&raw mut ordinal).cast()];
    // SAFETY: two attributes, and for each the address of an integer of its size. The driver looks the
    // address up and does not read there.
    let code =
        unsafe { sys::cuPointerGetAttributes(2, attributes.as_mut_ptr(), values.as_mut_ptr(), address) };
    check(code, format_args!("cuPointerGetAttributes of {name}"))?;
    if kind == TYPE_DEVICE && ordinal == context.ordinal() {
        return Ok(());
    }
    let what = match (kind, ordinal) {
        (TYPE_DEVICE, ordinal) => format!("memory of device {ordinal}"),
        _ => String::from("memory of the host"),
    };
    Err(Error::invalid(format!(
        "{name} is {what} ({address:#x}), expected memory of the group's device {} ({})",
        context.ordinal(),
        context.name()
    )))
}

/// Checks a tensor that may be absent or empty.
///
/// # Errors
/// As [`address`].
pub(crate) fn tensor(context: &Context, tensor: Option<&Tensor>, name: &str) -> Result<()> {
    match tensor {
        Some(tensor) if tensor.rows > 0 => address(context, tensor.data.addr() as u64, name),
        _ => Ok(()),
    }
}
