//! The completion queue of a NIC.

use std::os::fd::{BorrowedFd, RawFd};
use std::ptr::{self, NonNull};
use std::rc::Rc;

use ep_core::{Error, Result};

use crate::fabric::{Domain, nothing};
use crate::sys::newer::CqErrEntry;
use crate::sys::{self, fi_cq_attr, fi_cq_data_entry, fi_cq_err_entry, fid_cq, op};

type Read = unsafe extern "C" fn(*mut fid_cq, *mut std::ffi::c_void, usize) -> isize;
type ReadError = unsafe extern "C" fn(*mut fid_cq, *mut fi_cq_err_entry, u64) -> isize;

/// Entries read at a time.
pub(crate) const BATCH: usize = 32;

/// What a reading of the queue found.
pub(crate) enum Read32 {
    /// This many entries were written.
    Some(usize),
    /// The queue is empty.
    None,
    /// An error entry is next, and was taken.
    Error(CqError),
}

/// An error entry.
pub(crate) struct CqError {
    /// The context of the write, or null.
    pub(crate) context: usize,
    /// Positive error number.
    pub(crate) errno: u32,
    /// The provider's own number.
    pub(crate) provider_errno: i32,
    /// libfabric's and the provider's words.
    pub(crate) text: String,
}

/// A queue for both kinds of completion, own writes and peers' immediates.
pub(crate) struct CompletionQueue {
    raw: NonNull<fid_cq>,
    read: Read,
    read_error: ReadError,
    depth: usize,
    wait_fd: Option<RawFd>,
    domain: Rc<Domain>,
}

impl CompletionQueue {
    /// Opens a queue for `depth` completions, with the first of `waits` that the provider has.
    ///
    /// # Errors
    /// What libfabric says, with the call and the depth.
    pub(crate) fn open(
        domain: Rc<Domain>,
        depth: usize,
        waits: &[sys::fi_wait_obj],
    ) -> Result<Rc<CompletionQueue>> {
        // SAFETY: the domain is open.
        let open = op!(unsafe { (*domain.raw()).ops }, fi_ops_domain::cq_open)
            .ok_or_else(|| sys::missing("fi_cq_open"))?;
        let mut raw = ptr::null_mut();
        let mut code = 0;
        for &wait_obj in waits {
            // SAFETY: integers and a pointer that may be null.
            let mut attr: fi_cq_attr = unsafe { std::mem::zeroed() };
            (attr.size, attr.format, attr.wait_obj) = (depth, sys::FI_CQ_FORMAT_DATA, wait_obj);
            // SAFETY: domain and attributes outlive the call, which writes the object's address.
            code = unsafe { open(domain.raw(), &mut attr, &mut raw, ptr::null_mut()) };
            if code == 0 {
                break;
            }
        }
        sys::check(domain.library(), code as isize, &format!("fi_cq_open for {depth} completions"))?;
        let raw = NonNull::new(raw).ok_or_else(|| nothing("fi_cq_open"))?;
        // SAFETY: open, so its table of operations is there.
        let ops = unsafe { (*raw.as_ptr()).ops };
        let entries = (op!(ops, fi_ops_cq::read), op!(ops, fi_ops_cq::readerr));
        let (Some(read), Some(read_error)) = entries else {
            // SAFETY: open, and given up here.
            unsafe { sys::close(&raw mut (*raw.as_ptr()).fid) };
            return Err(sys::missing("fi_cq_read"));
        };
        let mut queue = CompletionQueue { raw, read, read_error, depth, wait_fd: None, domain };
        queue.wait_fd = queue.descriptor();
        Ok(Rc::new(queue))
    }

    /// The descriptor behind the queue, if it can be slept on.
    fn descriptor(&self) -> Option<RawFd> {
        let mut fd: RawFd = -1;
        // SAFETY: open; the field begins the object.
        let fid = unsafe { &raw mut (*self.raw.as_ptr()).fid };
        // SAFETY: open.
        let control = op!(unsafe { (*fid).ops }, fi_ops::control)?;
        // SAFETY: FI_GETWAIT writes an int where the wait object is a descriptor, and fails elsewhere.
        let code = unsafe { control(fid, sys::FI_GETWAIT as i32, (&raw mut fd).cast()) };
        (code == 0 && fd >= 0).then_some(fd)
    }

    pub(crate) fn raw(&self) -> *mut fid_cq {
        self.raw.as_ptr()
    }

    pub(crate) fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        // SAFETY: the descriptor is the queue's, and open as long as it.
        self.wait_fd.map(|fd| unsafe { BorrowedFd::borrow_raw(fd) })
    }

    pub(crate) fn may_sleep(&self) -> bool {
        // SAFETY: open.
        self.wait_fd.is_some() && self.domain.fabric().may_sleep(unsafe { &raw mut (*self.raw.as_ptr()).fid })
    }

    /// Reads up to [`BATCH`] completions into `entries`, without waiting.
    ///
    /// # Errors
    /// The queue is lost.
    #[inline]
    pub(crate) fn read(&self, entries: &mut [fi_cq_data_entry]) -> Result<Read32> {
        // SAFETY: the queue has the format of these entries, and writes no more of them than it is told.
        let code = unsafe { (self.read)(self.raw.as_ptr(), entries.as_mut_ptr().cast(), entries.len()) };
        if code > 0 {
            return Ok(Read32::Some(code as usize));
        }
        self.none_or_error(code)
    }

    fn none_or_error(&self, code: isize) -> Result<Read32> {
        if code == 0 || sys::is(code as i64, sys::FI_EAGAIN) {
            return Ok(Read32::None);
        }
        if sys::is(code as i64, sys::FI_EAVAIL) {
            return self.take_error();
        }
        Err(self.lost(code, "fi_cq_read"))
    }

    #[cold]
    fn take_error(&self) -> Result<Read32> {
        // SAFETY: integers and pointers that may be null. No buffer for the provider's data: it points to its own.
        let mut entry: CqErrEntry = unsafe { std::mem::zeroed() };
        // SAFETY: the entry is as long as that of any version.
        let code = unsafe { (self.read_error)(self.raw.as_ptr(), &mut entry.base, 0) };
        if code == 0 || sys::is(code as i64, sys::FI_EAGAIN) {
            return Ok(Read32::None);
        }
        if code < 0 {
            return Err(self.lost(code, "fi_cq_readerr"));
        }
        let errno = u32::try_from(entry.base.err).unwrap_or(0);
        if errno == sys::FI_EOVERRUN {
            return Err(self.lost(-(errno as isize), "fi_cq_readerr"));
        }
        Ok(Read32::Error(CqError {
            context: entry.base.op_context as usize,
            errno,
            provider_errno: entry.base.prov_errno,
            text: self.words(&entry.base, errno),
        }))
    }

    fn words(&self, entry: &fi_cq_err_entry, errno: u32) -> String {
        let text = self.domain.library().text_of(errno);
        // SAFETY: open.
        let Some(strerror) = op!(unsafe { (*self.raw.as_ptr()).ops }, fi_ops_cq::strerror) else {
            return format!("{text} ({errno})");
        };
        let mut own = [0u8; 160];
        // SAFETY: the entry was just read, so its data is valid; the buffer has the length that the call is told.
        let words = unsafe {
            strerror(self.raw.as_ptr(), entry.prov_errno, entry.err_data, own.as_mut_ptr().cast(), own.len())
        };
        if words.is_null() {
            return format!("{text} ({errno})");
        }
        // SAFETY: not null, so a NUL-terminated string of the provider, or the one in the buffer.
        let words = unsafe { std::ffi::CStr::from_ptr(words) }.to_string_lossy();
        format!("{text} ({errno}); the provider says: {words} ({})", entry.prov_errno)
    }

    #[cold]
    fn lost(&self, code: isize, call: &str) -> Error {
        let mut error = sys::refused(self.domain.library(), code, call);
        if sys::errno_of(code) == sys::FI_EOVERRUN {
            error.message += &format!(
                ": more than {} completions came unpolled; raise EP_FABRIC_CQ_DEPTH or lower what peers have in flight",
                self.depth
            );
        }
        error
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        // SAFETY: open, and the endpoint that was bound to it is closed: it held an `Rc`.
        unsafe { sys::close(&raw mut (*self.raw.as_ptr()).fid) }
    }
}
