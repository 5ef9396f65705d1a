//! The endpoint: what writes go through.

use std::ffi::{c_int, c_void};
use std::ptr::{self, NonNull};
use std::rc::Rc;
use std::sync::Arc;

use ep_core::{Result, Status};

use crate::av::AddressVector;
use crate::cq::CompletionQueue;
use crate::fabric::{Domain, nothing};
use crate::info::Info;
use crate::sys::{self, Library, fi_addr_t, fi_context2, fi_msg_rma, fi_rma_iov, fid_ep, iovec, op};
use crate::transport::MAX_ADDRESS_BYTES;

type WriteMsg = unsafe extern "C" fn(*mut fid_ep, *const fi_msg_rma, u64) -> isize;

/// Every write has an immediate, one completion here, and that completion means: the bytes lie there.
const FLAGS: u64 = (sys::FI_REMOTE_CQ_DATA | sys::FI_COMPLETION | sys::FI_DELIVERY_COMPLETE) as u64;

/// An endpoint of reliable datagrams, with its queue and its peers.
pub(crate) struct Endpoint {
    raw: NonNull<fid_ep>,
    writemsg: WriteMsg,
    queue: Rc<CompletionQueue>,
    vector: Rc<AddressVector>,
    domain: Rc<Domain>,
}

/// One write, checked.
pub(crate) struct Post {
    pub(crate) peer: fi_addr_t,
    pub(crate) local: *mut c_void,
    pub(crate) descriptor: *mut c_void,
    pub(crate) bytes: usize,
    pub(crate) remote: u64,
    pub(crate) key: u64,
    pub(crate) immediate: u32,
    pub(crate) context: *mut fi_context2,
}

impl Endpoint {
    /// Opens an endpoint; [`Endpoint::enable`] makes it usable.
    ///
    /// # Errors
    /// What libfabric says, with the call.
    pub(crate) fn open(
        domain: Rc<Domain>,
        info: &Info,
        queue: Rc<CompletionQueue>,
        vector: Rc<AddressVector>,
    ) -> Result<Endpoint> {
        // SAFETY: the domain is open.
        let open = op!(unsafe { (*domain.raw()).ops }, fi_ops_domain::endpoint)
            .ok_or_else(|| sys::missing("fi_endpoint"))?;
        let mut raw = ptr::null_mut();
        // SAFETY: domain and info outlive the call, which writes the object's address.
        let code = unsafe { open(domain.raw(), info.raw(), &mut raw, ptr::null_mut()) };
        sys::check(domain.library(), code as isize, "fi_endpoint")?;
        let raw = NonNull::new(raw).ok_or_else(|| nothing("fi_endpoint"))?;
        // SAFETY: open.
        let writemsg = op!(unsafe { (*raw.as_ptr()).rma }, fi_ops_rma::writemsg);
        let Some(writemsg) = writemsg else {
            // SAFETY: open, and given up here.
            unsafe { sys::close(&raw mut (*raw.as_ptr()).fid) };
            return Err(sys::missing("fi_writemsg"));
        };
        Ok(Endpoint { raw, writemsg, queue, vector, domain })
    }

    /// Binds queue and peers, and starts.
    ///
    /// # Errors
    /// What libfabric says, with the call.
    pub(crate) fn enable(&self) -> Result<()> {
        let fid = self.fid();
        // SAFETY: open.
        let bind = op!(unsafe { (*fid).ops }, fi_ops::bind).ok_or_else(|| sys::missing("fi_ep_bind"))?;
        // SAFETY: all three are open, and the endpoint holds the other two until it is closed.
        let code = unsafe { bind(fid, (&raw mut (*self.vector.raw()).fid).cast(), 0) };
        sys::check(self.library(), code as isize, "fi_ep_bind of the address vector")?;
        let both = u64::from(sys::FI_TRANSMIT | sys::FI_RECV);
        // SAFETY: as above.
        let code = unsafe { bind(fid, &raw mut (*self.queue.raw()).fid, both) };
        sys::check(self.library(), code as isize, "fi_ep_bind of the completion queue")?;
        // SAFETY: open.
        let control = op!(unsafe { (*fid).ops }, fi_ops::control).ok_or_else(|| sys::missing("fi_enable"))?;
        // SAFETY: open, and FI_ENABLE takes no argument.
        let code = unsafe { control(fid, sys::FI_ENABLE as c_int, ptr::null_mut()) };
        sys::check(self.library(), code as isize, "fi_enable")
    }

    /// What peers need to reach this endpoint.
    ///
    /// # Errors
    /// What libfabric says, or [`Status::Unsupported`] if it is too long.
    pub(crate) fn address(&self) -> Result<Vec<u8>> {
        // SAFETY: open.
        let getname = op!(unsafe { (*self.raw.as_ptr()).cm }, fi_ops_cm::getname)
            .ok_or_else(|| sys::missing("fi_getname"))?;
        let mut bytes = vec![0u8; MAX_ADDRESS_BYTES];
        let mut len = bytes.len();
        // SAFETY: the buffer has the length that the call is told.
        let code = unsafe { getname(self.fid(), bytes.as_mut_ptr().cast(), &mut len) };
        if sys::is(code, sys::FI_ETOOSMALL) || len > bytes.len() {
            let message =
                format!("the provider's addresses have {len} bytes, expected at most {MAX_ADDRESS_BYTES}");
            return Err(ep_core::Error::new(Status::Unsupported, message));
        }
        sys::check(self.library(), code as isize, "fi_getname")?;
        bytes.truncate(len);
        Ok(bytes)
    }

    pub(crate) fn library(&self) -> &Arc<Library> {
        self.domain.library()
    }

    pub(crate) fn queue(&self) -> &CompletionQueue {
        &self.queue
    }

    pub(crate) fn vector(&self) -> &AddressVector {
        &self.vector
    }

    /// Posts a write; returns libfabric's answer.
    ///
    /// # Safety
    /// The local bytes lie in memory registered on this domain, and `context` stays until the completion.
    #[inline]
    pub(crate) unsafe fn write(&self, post: &Post) -> isize {
        let local = iovec { iov_base: post.local, iov_len: post.bytes };
        let mut descriptor = post.descriptor;
        // One element also for a write without bytes: EFA needs it, and others crash without.
        let remote = fi_rma_iov { addr: post.remote, len: post.bytes, key: post.key };
        let message = fi_msg_rma {
            msg_iov: &raw const local,
            desc: &raw mut descriptor,
            iov_count: 1,
            addr: post.peer,
            rma_iov: &raw const remote,
            rma_iov_count: 1,
            context: post.context.cast(),
            data: u64::from(post.immediate),
        };
        // SAFETY: the provider copies the message; the bytes and the context stay by the caller's word.
        unsafe { (self.writemsg)(self.raw.as_ptr(), &raw const message, FLAGS) }
    }

    /// `fi_setopt`; returns libfabric's answer.
    ///
    /// # Errors
    /// If the provider has no options.
    ///
    /// # Safety
    /// `value` points to `len` bytes of the option's type.
    pub(crate) unsafe fn set_option(&self, option: c_int, value: *const c_void, len: usize) -> Result<c_int> {
        // SAFETY: open.
        let setopt = op!(unsafe { (*self.raw.as_ptr()).ops }, fi_ops_ep::setopt)
            .ok_or_else(|| sys::missing("fi_setopt"))?;
        // SAFETY: by the caller's word.
        Ok(unsafe { setopt(self.fid(), sys::FI_OPT_ENDPOINT as c_int, option, value, len) })
    }

    /// `fi_getopt`; returns libfabric's answer.
    ///
    /// # Errors
    /// If the provider has no options.
    ///
    /// # Safety
    /// `value` points to `len` bytes of the option's type.
    pub(crate) unsafe fn get_option(
        &self,
        option: c_int,
        value: *mut c_void,
        len: &mut usize,
    ) -> Result<c_int> {
        // SAFETY: open.
        let getopt = op!(unsafe { (*self.raw.as_ptr()).ops }, fi_ops_ep::getopt)
            .ok_or_else(|| sys::missing("fi_getopt"))?;
        // SAFETY: by the caller's word.
        Ok(unsafe { getopt(self.fid(), sys::FI_OPT_ENDPOINT as c_int, option, value, len) })
    }

    fn fid(&self) -> *mut sys::fid {
        // SAFETY: open; the field begins the object.
        unsafe { &raw mut (*self.raw.as_ptr()).fid }
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        // SAFETY: open. Queue, peers and domain are let go after this.
        unsafe { sys::close(self.fid()) }
    }
}
