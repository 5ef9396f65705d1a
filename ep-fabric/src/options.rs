//! Options of an endpoint: what EFA needs to be told, and asked, before a byte flows.

use std::ffi::{c_int, c_void};

use ep_core::{Error, Result, Status};

use crate::endpoint::Endpoint;
use crate::sys::newer::{
    FI_OPT_CUDA_API_PERMITTED, FI_OPT_EFA_EMULATED_WRITE, FI_OPT_EFA_HOMOGENEOUS_PEERS,
    FI_OPT_EFA_USE_DEVICE_RDMA, FI_OPT_MAX_RMA_SIZE, FI_OPT_SHARED_MEMORY_PERMITTED,
};
use crate::sys::{self, FI_OPT_EFA_RNR_RETRY, FI_OPT_FI_HMEM_P2P};

/// `FI_HMEM_P2P_REQUIRED`.
const P2P_REQUIRED: c_int = 1;
/// Repeat for ever while the receiver is not ready.
const RNR_FOR_EVER: usize = 7;

/// What an older library's "no such option" means.
#[derive(Clone, Copy, PartialEq)]
enum IfUnknown {
    /// The library does not do what the option forbids, or does what it asks for.
    Fine,
    /// The library is too old to be used.
    Refuse,
}

/// Sets the options of an EFA endpoint that is not enabled yet.
///
/// # Errors
/// The option that was refused, and what that means.
pub(crate) fn prepare_efa(endpoint: &Endpoint, device_memory: bool) -> Result<()> {
    use IfUnknown::{Fine, Refuse};
    let (no, yes) = (false, true);
    // Only one thread serves a NIC: it must not call CUDA, nor copy through shared memory.
    set(endpoint, FI_OPT_CUDA_API_PERMITTED, "FI_OPT_CUDA_API_PERMITTED", &no, Fine)?;
    set(endpoint, FI_OPT_SHARED_MEMORY_PERMITTED, "FI_OPT_SHARED_MEMORY_PERMITTED", &no, Fine)?;
    // A write is one operation of the device, or this endpoint is useless.
    set(endpoint, FI_OPT_EFA_USE_DEVICE_RDMA, "FI_OPT_EFA_USE_DEVICE_RDMA", &yes, Refuse)?;
    // All ranks run one library, so nobody has to wait for a peer that does not poll yet.
    set(endpoint, FI_OPT_EFA_HOMOGENEOUS_PEERS, "FI_OPT_EFA_HOMOGENEOUS_PEERS", &yes, Fine)?;
    set(endpoint, FI_OPT_EFA_RNR_RETRY as c_int, "FI_OPT_EFA_RNR_RETRY", &RNR_FOR_EVER, Fine)?;
    if device_memory {
        // Fail instead of copying behind our back.
        set(endpoint, FI_OPT_FI_HMEM_P2P as c_int, "FI_OPT_FI_HMEM_P2P", &P2P_REQUIRED, Refuse)?;
    }
    Ok(())
}

/// Refuses an EFA endpoint whose writes would be emulated by messages.
///
/// # Errors
/// [`Status::Unsupported`], with what to do.
pub(crate) fn check_efa(endpoint: &Endpoint) -> Result<()> {
    let mut emulated = true;
    let code = get(endpoint, FI_OPT_EFA_EMULATED_WRITE, &mut emulated)?;
    let library = endpoint.library();
    if sys::is(code, sys::FI_ENOPROTOOPT) {
        let message = format!(
            "{library} is too old for EFA: it has no FI_OPT_EFA_EMULATED_WRITE; expected 2.4 or newer"
        );
        return Err(Error::new(Status::Unsupported, message));
    }
    sys::check(library, code as isize, "fi_getopt of FI_OPT_EFA_EMULATED_WRITE")?;
    if emulated {
        let message = format!(
            "{library} would emulate writes on this EFA device by messages; use an instance with RDMA write (P5 or \
             later) and the EFA installer's library in EP_LIBFABRIC"
        );
        return Err(Error::new(Status::Unsupported, message));
    }
    Ok(())
}

/// The largest write, if the endpoint has its own idea of it.
///
/// # Errors
/// If the provider has no options at all.
pub(crate) fn max_write(endpoint: &Endpoint) -> Result<Option<usize>> {
    let mut bytes = 0usize;
    let code = get(endpoint, FI_OPT_MAX_RMA_SIZE, &mut bytes)?;
    Ok((code == 0 && bytes > 0).then_some(bytes))
}

fn set<T>(endpoint: &Endpoint, option: c_int, name: &str, value: &T, unknown: IfUnknown) -> Result<()> {
    // SAFETY: the value is of the type that the option has: `bool`, `int` or `size_t`.
    let code =
        unsafe { endpoint.set_option(option, std::ptr::from_ref(value).cast::<c_void>(), size_of::<T>()) }?;
    let is_unknown =
        [sys::FI_ENOPROTOOPT, sys::FI_EOPNOTSUPP, sys::FI_ENOSYS].iter().any(|&errno| sys::is(code, errno));
    if is_unknown && unknown == IfUnknown::Fine {
        return Ok(());
    }
    let mut result = sys::check(endpoint.library(), code as isize, &format!("fi_setopt of {name}"));
    if let Err(error) = &mut result {
        error.message +=
            &format!("; EFA needs it: use {}", "libfabric 2.4 or newer on an instance with RDMA write");
    }
    result
}

/// libfabric's answer, and the value if that is 0.
fn get<T>(endpoint: &Endpoint, option: c_int, value: &mut T) -> Result<c_int> {
    let mut len = size_of::<T>();
    // SAFETY: the value is of the type that the option has, and `len` its size.
    unsafe { endpoint.get_option(option, std::ptr::from_mut(value).cast::<c_void>(), &mut len) }
}
