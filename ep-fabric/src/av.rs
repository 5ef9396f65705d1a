//! The address vector: the peers that a NIC knows.

use std::ptr::{self, NonNull};
use std::rc::Rc;

use ep_core::{Error, Result, Status};

use crate::fabric::{Domain, nothing};
use crate::info::hex;
use crate::sys::{self, fi_addr_t, fi_av_attr, fid_av, op};

/// `FI_ADDR_NOTAVAIL`.
const NOT_AVAILABLE: fi_addr_t = fi_addr_t::MAX;

/// Peers by number.
pub(crate) struct AddressVector {
    raw: NonNull<fid_av>,
    domain: Rc<Domain>,
}

impl AddressVector {
    /// Opens a table of peers.
    ///
    /// # Errors
    /// What libfabric says, with the call.
    pub(crate) fn open(domain: Rc<Domain>) -> Result<Rc<AddressVector>> {
        // SAFETY: the domain is open.
        let open = op!(unsafe { (*domain.raw()).ops }, fi_ops_domain::av_open)
            .ok_or_else(|| sys::missing("fi_av_open"))?;
        // SAFETY: integers and pointers that may be null.
        let mut attr: fi_av_attr = unsafe { std::mem::zeroed() };
        attr.type_ = sys::FI_AV_TABLE;
        let mut raw = ptr::null_mut();
        // SAFETY: domain and attributes outlive the call, which writes the object's address.
        let code = unsafe { open(domain.raw(), &mut attr, &mut raw, ptr::null_mut()) };
        sys::check(domain.library(), code as isize, "fi_av_open")?;
        let raw = NonNull::new(raw).ok_or_else(|| nothing("fi_av_open"))?;
        Ok(Rc::new(AddressVector { raw, domain }))
    }

    pub(crate) fn raw(&self) -> *mut fid_av {
        self.raw.as_ptr()
    }

    /// Makes a peer known.
    ///
    /// # Errors
    /// [`Status::Bootstrap`] for bytes that the provider does not take for an address.
    pub(crate) fn insert(&self, address: &[u8]) -> Result<fi_addr_t> {
        // SAFETY: open.
        let insert = op!(unsafe { (*self.raw.as_ptr()).ops }, fi_ops_av::insert)
            .ok_or_else(|| sys::missing("fi_av_insert"))?;
        let mut peer = NOT_AVAILABLE;
        // SAFETY: one address, of the length that the endpoint's own has (the caller checked), and one result.
        let code =
            unsafe { insert(self.raw.as_ptr(), address.as_ptr().cast(), 1, &mut peer, 0, ptr::null_mut()) };
        if code == 1 && peer != NOT_AVAILABLE {
            return Ok(peer);
        }
        let why = if code < 0 {
            self.domain.library().text_of(sys::errno_of(code as isize))
        } else {
            String::from("refused")
        };
        Err(Error::new(
            Status::Bootstrap,
            format!(
                "fi_av_insert of the peer's address {} failed: {why} ({code}); it cannot be reached from here",
                hex(address)
            ),
        ))
    }

    /// Forgets a peer to which nothing is in flight.
    pub(crate) fn remove(&self, mut peer: fi_addr_t) {
        // SAFETY: open.
        let Some(remove) = op!(unsafe { (*self.raw.as_ptr()).ops }, fi_ops_av::remove) else { return };
        // SAFETY: one peer that was inserted. A refusal leaves the entry, which costs a few bytes.
        unsafe { remove(self.raw.as_ptr(), &mut peer, 1, 0) };
    }
}

impl Drop for AddressVector {
    fn drop(&mut self) {
        // SAFETY: open, and the endpoint that was bound to it is closed: it held an `Rc`.
        unsafe { sys::close(&raw mut (*self.raw.as_ptr()).fid) }
    }
}
