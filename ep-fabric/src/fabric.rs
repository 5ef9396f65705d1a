//! The fabric and the domain: a network, and one NIC on it.

use std::ptr::{self, NonNull};
use std::rc::Rc;
use std::sync::Arc;

use ep_core::{Error, Result, Status};

use crate::info::Info;
use crate::sys::{self, Library, fid, fid_domain, fid_fabric, op};

type TryWait = unsafe extern "C" fn(*mut fid_fabric, *mut *mut fid, i32) -> i32;

/// An open network.
pub(crate) struct Fabric {
    raw: NonNull<fid_fabric>,
    /// Asks whether one may sleep; not every provider can be slept on.
    trywait: Option<TryWait>,
    library: Arc<Library>,
}

impl Fabric {
    /// Opens the fabric of `info`.
    ///
    /// # Errors
    /// What libfabric says, with the call.
    pub(crate) fn open(info: &Info) -> Result<Rc<Fabric>> {
        let library = Arc::clone(info.library());
        let mut raw = ptr::null_mut();
        // SAFETY: the attributes are the info's; the call writes the object's address.
        let code = unsafe { (library.exports.fabric)((*info.raw()).fabric_attr, &mut raw, ptr::null_mut()) };
        sys::check(&library, code as isize, "fi_fabric")?;
        let raw = NonNull::new(raw).ok_or_else(|| nothing("fi_fabric"))?;
        // SAFETY: open, so its table of operations is there as long as it is.
        let trywait = op!(unsafe { (*raw.as_ptr()).ops }, fi_ops_fabric::trywait);
        Ok(Rc::new(Fabric { raw, trywait, library }))
    }

    /// Whether a sleeper on the descriptor of `object` will be woken by its next event.
    pub(crate) fn may_sleep(&self, object: *mut fid) -> bool {
        let Some(trywait) = self.trywait else { return false };
        let mut objects = [object];
        // SAFETY: both objects are open; the array has the one element that the call is told of.
        unsafe { trywait(self.raw.as_ptr(), objects.as_mut_ptr(), 1) == 0 }
    }
}

impl Drop for Fabric {
    fn drop(&mut self) {
        // SAFETY: open, and the domain that held it is closed.
        unsafe { sys::close((&raw mut (*self.raw.as_ptr()).fid).cast()) }
    }
}

/// One NIC of a network, used by one thread at a time.
pub(crate) struct Domain {
    raw: NonNull<fid_domain>,
    fabric: Rc<Fabric>,
}

impl Domain {
    /// Opens the domain of `info`, on the fabric of the same info.
    ///
    /// # Errors
    /// What libfabric says, with the call and the NIC.
    pub(crate) fn open(fabric: Rc<Fabric>, info: &Info) -> Result<Rc<Domain>> {
        // SAFETY: the fabric is open.
        let open = op!(unsafe { (*fabric.raw.as_ptr()).ops }, fi_ops_fabric::domain)
            .ok_or_else(|| sys::missing("fi_domain"))?;
        let mut raw = ptr::null_mut();
        // SAFETY: fabric and info outlive the call, which writes the object's address.
        let code = unsafe { open(fabric.raw.as_ptr(), info.raw(), &mut raw, ptr::null_mut()) };
        sys::check(&fabric.library, code as isize, "fi_domain")?;
        let raw = NonNull::new(raw).ok_or_else(|| nothing("fi_domain"))?;
        Ok(Rc::new(Domain { raw, fabric }))
    }

    pub(crate) fn fabric(&self) -> &Fabric {
        &self.fabric
    }

    pub(crate) fn library(&self) -> &Arc<Library> {
        &self.fabric.library
    }

    pub(crate) fn raw(&self) -> *mut fid_domain {
        self.raw.as_ptr()
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // SAFETY: open, and everything that was opened on it held an `Rc` and is closed.
        unsafe { sys::close(&raw mut (*self.raw.as_ptr()).fid) }
    }
}

/// The error for a call that succeeded and gave nothing.
#[cold]
pub(crate) fn nothing(call: &str) -> Error {
    Error::new(Status::System, format!("{call} succeeded and returned no object; the provider is broken"))
}
