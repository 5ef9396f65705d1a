//! Which backend a group gets, and why.

use ep_core::engine::Backend;
use ep_core::{Error, Result};
use ep_cuda::{Context, CudaDevice, device, driver};

use crate::capi::{EP_BACKEND_AUTO, EP_BACKEND_CUDA};

/// Chooses for this rank; the ranks compare their choices when they meet. CUDA is chosen where it is asked
/// for, or where the calling thread works with a device already.
///
/// # Errors
/// Why there is no CUDA, if it is asked for.
pub(crate) fn choose(asked: i32) -> Result<Backend> {
    match asked {
        EP_BACKEND_CUDA => match device::default_ordinal().and_then(CudaDevice::open) {
            Ok(device) => Ok(Backend::on(device, "asked for")),
            Err(error) => Err(Error::new(
                error.status,
                format!("EP_BACKEND_CUDA: {}; EP_BACKEND_HOST works everywhere", error.message),
            )),
        },
        EP_BACKEND_AUTO => Ok(auto()),
        // EP_BACKEND_HOST, or a number that the engine refuses.
        _ => Ok(Backend::host("asked for")),
    }
}

fn auto() -> Backend {
    let Some(ordinal) = Context::current_ordinal() else {
        return Backend::host(match driver::find() {
            Err(error) => error.message,
            Ok(()) => String::from(
                "this thread has no current CUDA context; call cudaSetDevice first, or ask for EP_BACKEND_CUDA",
            ),
        });
    };
    match CudaDevice::open(ordinal) {
        Ok(device) => Backend::on(device, "this thread has a current CUDA context"),
        Err(error) => Backend::host(error.message),
    }
}

#[cfg(test)]
mod tests {
    use ep_core::Status;

    use super::*;
    use crate::capi::EP_BACKEND_HOST;

    #[test]
    fn the_host_is_chosen_where_nobody_uses_cuda() {
        assert!(choose(EP_BACKEND_HOST).unwrap().device.is_none());
        let auto = choose(EP_BACKEND_AUTO).unwrap();
        assert!(auto.device.is_none() && !auto.reason.is_empty(), "{}", auto.reason);
    }

    #[test]
    fn cuda_is_refused_with_the_reason_where_it_is_not() {
        let Err(missing) = driver::open() else {
            println!("skipped: this machine has a CUDA driver");
            return;
        };
        let error = choose(EP_BACKEND_CUDA).err().expect("no driver");
        assert_eq!(error.status, Status::Unsupported);
        assert!(error.message.contains(&missing.message), "{error}");
        assert!(error.message.contains("CUDA driver") || error.message.contains("kernels"), "{error}");
    }
}
