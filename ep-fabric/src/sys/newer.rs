//! What libfabric gained after 1.17, whose headers the bindings are of. Structs only grew at their ends, and a
//! library reads or writes the new fields when it is asked for an interface that has them: so these are given
//! to every version.

use std::ffi::{c_int, c_void};

use super::{FI_PROV_SPECIFIC_EFA, fi_cq_err_entry, fi_mr_attr};

/// The newest interface that is asked for. Later ones change nothing that is used here.
pub(crate) const INTERFACE: u32 = version(1, 22);
/// The oldest library that is accepted.
pub(crate) const OLDEST: u32 = version(1, 17);
/// The first library with `FI_MR_DMABUF`.
pub(crate) const DMABUF_SINCE: u32 = version(1, 20);
/// The library from which EFA is known to work well; see `docs/LIBFABRIC.md`.
pub(crate) const EFA_SINCE: u32 = version(2, 4);

/// As `FI_VERSION`.
pub(crate) const fn version(major: u32, minor: u32) -> u32 {
    major << 16 | minor
}

/// A flag of `fi_mr_regattr`: the attributes have a [`MrDmabuf`] where an iovec was.
pub(crate) const FI_MR_DMABUF: u64 = 1 << 40;

/// Options of `fi_setopt`, 1.18 and later.
pub(crate) const FI_OPT_CUDA_API_PERMITTED: c_int = 10;
pub(crate) const FI_OPT_SHARED_MEMORY_PERMITTED: c_int = 11;
pub(crate) const FI_OPT_MAX_RMA_SIZE: c_int = 14;

/// Options of the EFA provider.
const EFA: c_int = -(FI_PROV_SPECIFIC_EFA as c_int);
pub(crate) const FI_OPT_EFA_EMULATED_WRITE: c_int = EFA + 2;
pub(crate) const FI_OPT_EFA_USE_DEVICE_RDMA: c_int = EFA + 4;
pub(crate) const FI_OPT_EFA_HOMOGENEOUS_PEERS: c_int = EFA + 7;

/// `struct fi_mr_attr` with the fields of 1.20 and 2.0, and room for more.
#[repr(C)]
pub(crate) struct MrAttr {
    pub(crate) base: fi_mr_attr,
    pub(crate) tail: [u64; 8],
}

/// `struct fi_mr_dmabuf` of 1.20.
#[repr(C)]
pub(crate) struct MrDmabuf {
    pub(crate) fd: c_int,
    pub(crate) offset: u64,
    pub(crate) len: usize,
    pub(crate) base_addr: *mut c_void,
}

/// `struct fi_cq_err_entry` with the source address of 1.20, and room for more.
#[repr(C)]
pub(crate) struct CqErrEntry {
    pub(crate) base: fi_cq_err_entry,
    pub(crate) tail: [u64; 8],
}
