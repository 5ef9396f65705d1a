//! In which shape a kernel runs, and the launch.

use bytemuck::NoUninit;
use cudarc::driver::sys::{self, CUstream};
use ep_core::{Error, Result, Status};

use crate::args::MAX_CHUNKS;
use crate::driver::check;
use crate::module::{Function, Kernel};

/// Blocks, threads of each, and their dynamic shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) grid: usize,
    pub(crate) block: usize,
    pub(crate) shared: usize,
}

include!(concat!(env!("OUT_DIR"), "/launch.rs"));

/// SMs of a call when the caller does not choose.
pub(crate) const DEFAULT_SMS: usize = 24;

/// Tokens of a piece of an update, and the number of pieces.
pub(crate) fn chunks(tokens: usize) -> (usize, usize) {
    let chunk = tokens.div_ceil(MAX_CHUNKS).max(128).next_multiple_of(32);
    (chunk, tokens.div_ceil(chunk))
}

/// Shape of the plan kernels. `bins`: what an update counts.
pub(crate) fn plan(kernel: Kernel, sms: usize, chunks: usize, bins: usize) -> Shape {
    // The second kernel has one more piece of work: to talk to the peers.
    let work = if kernel == Kernel::PlanPlace { chunks + 1 } else { chunks.max(1) };
    // EP_PLAN_SHARED_BYTES
    Shape { grid: sms.min(work), block: PLAN_THREADS, shared: PLAN_THREADS / 32 * bins * 4 }
}

/// Shape of the dispatch kernel on a device whose blocks have `most` bytes of dynamic shared memory.
pub(crate) fn dispatch(sms: usize, most: usize) -> Shape {
    Shape { grid: sms, block: DISPATCH_THREADS, shared: DISPATCH_SHARED_BYTES.min(most) }
}

/// Shape of the combine kernel, likewise. `serves`: this rank's rows go through rings.
pub(crate) fn combine(sms: usize, serves: bool, most: usize) -> Shape {
    let shared = if serves { COMBINE_SHARED_BYTES.min(most) } else { 0 };
    Shape { grid: sms, block: COMBINE_THREADS, shared }
}

/// Queues a kernel on a stream.
///
/// # Errors
/// [`Status::Unsupported`] if it needs more shared memory than the device has, and those of the driver.
///
/// # Safety
/// A context is current, `stream` is one of its streams, and `args` are the kernel's: what they point to
/// is valid until the kernel has run.
pub(crate) unsafe fn launch<A: NoUninit>(
    kernel: Kernel,
    function: Function,
    shape: Shape,
    stream: CUstream,
    args: &A,
) -> Result<()> {
    if shape.shared > function.max_shared {
        return Err(Error::new(
            Status::Unsupported,
            format!(
                "{} needs {} bytes of shared memory for this plan, the device has {}",
                kernel.name(),
                shape.shared,
                function.max_shared
            ),
        ));
    }
    let mut params = [std::ptr::from_ref(args).cast_mut().cast::<std::ffi::c_void>()];
    let Shape { grid, block, shared } = shape;
    // SAFETY: by the caller's word; the driver copies the arguments before it returns.
    let code = unsafe {
        sys::cuLaunchKernel(
            function.raw,
            grid as u32,
            1,
            1,
            block as u32,
            1,
            1,
            shared as u32,
            stream,
            params.as_mut_ptr(),
            std::ptr::null_mut(),
        )
    };
    check(code, format_args!("launching {} with {grid} x {block} threads", kernel.name()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover_the_tokens_and_are_few() {
        for tokens in [0, 1, 127, 128, 129, 4096, 8191, 8192, 8193, 100_000, 1 << 24] {
            let (chunk, count) = chunks(tokens);
            assert!(chunk % 32 == 0 && count <= MAX_CHUNKS, "{tokens}: {count} x {chunk}");
            assert!(count * chunk >= tokens && (count == 0 || (count - 1) * chunk < tokens));
        }
    }
}
