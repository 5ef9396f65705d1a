//! What libfabric offers: `struct fi_info`, owned and read.

use std::ffi::{CStr, CString, c_char};
use std::fmt::Write;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use ep_core::{Error, Result, Status};

use crate::sys::{self, Library, fi_info};

/// One way to a network: a provider, a fabric, a domain (a NIC) and the limits there.
pub(crate) struct Info {
    raw: NonNull<fi_info>,
    library: Arc<Library>,
}

// SAFETY: plain memory of libfabric that nothing else points to; reading it is safe from any thread.
unsafe impl Send for Info {}
// SAFETY: as above; a shared reference only reads.
unsafe impl Sync for Info {}

impl Drop for Info {
    fn drop(&mut self) {
        // SAFETY: made by fi_dupinfo or fi_getinfo, and freed here only.
        unsafe { (self.library.exports.freeinfo)(self.raw.as_ptr()) }
    }
}

/// What a user needs, as hints.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Needs {
    /// Memory of a device will be registered.
    pub(crate) device_memory: bool,
    /// Ask for the traffic class of short messages.
    pub(crate) low_latency: bool,
}

impl Info {
    /// Asks for everything that can do what is needed; from the address `source` if one is given.
    ///
    /// # Errors
    /// What libfabric says, other than that there is nothing: then the list is empty.
    pub(crate) fn query(library: &Arc<Library>, needs: Needs, source: Option<IpAddr>) -> Result<Vec<Info>> {
        let hints = hints(library, needs)?;
        let node = source.map(|address| CString::new(address.to_string()).expect("an address has no NUL"));
        let flags = if node.is_some() { sys::FI_SOURCE | sys::FI_NUMERICHOST } else { 0 };
        let node = node.as_ref().map_or(ptr::null(), |node| node.as_ptr());
        let mut head = ptr::null_mut();
        // SAFETY: hints and node outlive the call, which writes the list's head.
        let code = unsafe {
            (library.exports.getinfo)(
                library.interface(),
                node,
                ptr::null(),
                flags,
                hints.raw.as_ptr(),
                &mut head,
            )
        };
        if sys::is(code, sys::FI_ENODATA) {
            return Ok(Vec::new());
        }
        sys::check(library, code as isize, "fi_getinfo")?;
        let mut found = Vec::new();
        while let Some(raw) = NonNull::new(head) {
            // SAFETY: an element of the list that was returned; taking it out leaves the rest a list of its own.
            unsafe {
                head = (*raw.as_ptr()).next;
                (*raw.as_ptr()).next = ptr::null_mut();
            }
            found.push(Info { raw, library: Arc::clone(library) });
        }
        Ok(found)
    }

    /// A copy to be changed.
    pub(crate) fn duplicate(&self) -> Result<Info> {
        // SAFETY: an info of this library.
        let raw = unsafe { (self.library.exports.dupinfo)(self.raw.as_ptr()) };
        let raw =
            NonNull::new(raw).ok_or_else(|| Error::new(Status::OutOfMemory, "fi_dupinfo found no memory"))?;
        Ok(Info { raw, library: Arc::clone(&self.library) })
    }

    pub(crate) fn library(&self) -> &Arc<Library> {
        &self.library
    }

    pub(crate) fn raw(&self) -> *mut fi_info {
        self.raw.as_ptr()
    }

    fn get(&self) -> &fi_info {
        // SAFETY: owned by self.
        unsafe { self.raw.as_ref() }
    }

    pub(crate) fn provider(&self) -> String {
        // SAFETY: fi_getinfo fills fabric_attr.
        text(unsafe { (*self.get().fabric_attr).prov_name })
    }

    pub(crate) fn fabric(&self) -> String {
        // SAFETY: as above.
        text(unsafe { (*self.get().fabric_attr).name })
    }

    pub(crate) fn domain(&self) -> String {
        // SAFETY: fi_getinfo fills domain_attr.
        text(unsafe { (*self.get().domain_attr).name })
    }

    /// The memory modes that the provider demands.
    pub(crate) fn mr_mode(&self) -> u32 {
        // SAFETY: as above.
        unsafe { (*self.get().domain_attr).mr_mode as u32 }
    }

    /// Bytes of a key that this side chooses.
    pub(crate) fn mr_key_bytes(&self) -> usize {
        // SAFETY: as above.
        unsafe { (*self.get().domain_attr).mr_key_size }
    }

    /// Bytes of an immediate.
    pub(crate) fn immediate_bytes(&self) -> usize {
        // SAFETY: as above.
        unsafe { (*self.get().domain_attr).cq_data_size }
    }

    /// Writes that may be in flight.
    pub(crate) fn tx_depth(&self) -> usize {
        // SAFETY: fi_getinfo fills tx_attr.
        unsafe { (*self.get().tx_attr).size }
    }

    /// Asks for another number of writes in flight.
    pub(crate) fn set_tx_depth(&mut self, depth: usize) {
        // SAFETY: as above, and self is borrowed for writing.
        unsafe { (*(*self.raw.as_ptr()).tx_attr).size = depth }
    }

    /// Bytes of the largest write.
    pub(crate) fn max_write(&self) -> usize {
        // SAFETY: fi_getinfo fills ep_attr.
        unsafe { (*self.get().ep_attr).max_msg_size }
    }

    pub(crate) fn has_device_memory(&self) -> bool {
        self.get().caps & sys::FI_HMEM != 0
    }

    /// The IP address of this side, if the provider uses such.
    pub(crate) fn ip(&self) -> Option<IpAddr> {
        let info = self.get();
        if info.src_addr.is_null() {
            return None;
        }
        // SAFETY: not null, so an address of that many bytes.
        ip_of(unsafe { std::slice::from_raw_parts(info.src_addr.cast::<u8>(), info.src_addrlen) })
    }

    /// The address as a person reads it: that of the interface, or the name of the domain.
    pub(crate) fn address(&self) -> String {
        self.ip().map_or_else(|| self.domain(), |ip| ip.to_string())
    }
}

/// Hints that say what every user of this crate needs.
fn hints(library: &Arc<Library>, needs: Needs) -> Result<Info> {
    // SAFETY: null asks for an empty info.
    let raw = unsafe { (library.exports.dupinfo)(ptr::null()) };
    let raw =
        NonNull::new(raw).ok_or_else(|| Error::new(Status::OutOfMemory, "fi_allocinfo found no memory"))?;
    let hints = Info { raw, library: Arc::clone(library) };
    let rma =
        sys::FI_MSG | sys::FI_RMA | sys::FI_READ | sys::FI_WRITE | sys::FI_REMOTE_READ | sys::FI_REMOTE_WRITE;
    let mut caps = u64::from(rma) | sys::FI_LOCAL_COMM | sys::FI_REMOTE_COMM;
    let mut mr_mode = sys::FI_MR_LOCAL | sys::FI_MR_VIRT_ADDR | sys::FI_MR_ALLOCATED | sys::FI_MR_PROV_KEY;
    if needs.device_memory {
        caps |= sys::FI_HMEM;
        mr_mode |= sys::FI_MR_HMEM;
    }
    // SAFETY: fresh, owned by `hints`, and dupinfo allocates every attribute.
    unsafe {
        let info = raw.as_ptr();
        (*info).caps = caps;
        (*info).mode = sys::FI_CONTEXT | sys::FI_CONTEXT2;
        (*(*info).ep_attr).type_ = sys::FI_EP_RDM;
        (*(*info).domain_attr).mr_mode = mr_mode as i32;
        (*(*info).domain_attr).threading = sys::FI_THREAD_DOMAIN;
        // Whoever owns the NIC polls it; threads of the provider would only take processor time.
        (*(*info).domain_attr).data_progress = sys::FI_PROGRESS_MANUAL;
        if needs.low_latency {
            (*(*info).tx_attr).tclass = sys::FI_TC_LOW_LATENCY;
        }
    }
    Ok(hints)
}

/// A C string of libfabric; null is empty.
fn text(raw: *const c_char) -> String {
    // SAFETY: not null, so a NUL-terminated string of the info.
    if raw.is_null() { String::new() } else { unsafe { CStr::from_ptr(raw) }.to_string_lossy().into_owned() }
}

/// The address in a `sockaddr_in` or `sockaddr_in6`.
fn ip_of(bytes: &[u8]) -> Option<IpAddr> {
    let family = i32::from(u16::from_ne_bytes(bytes.get(..2)?.try_into().ok()?));
    match family {
        libc::AF_INET => Some(Ipv4Addr::from(<[u8; 4]>::try_from(bytes.get(4..8)?).ok()?).into()),
        libc::AF_INET6 => Some(Ipv6Addr::from(<[u8; 16]>::try_from(bytes.get(8..24)?).ok()?).into()),
        _ => None,
    }
}

/// Bytes as hexadecimal digits, for messages.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn socket_addresses_are_read_and_others_are_not() {
        let mut v4 = vec![0; 16];
        v4[..2].copy_from_slice(&(libc::AF_INET as u16).to_ne_bytes());
        v4[4..8].copy_from_slice(&[127, 0, 0, 2]);
        assert_eq!(ip_of(&v4), Some(IpAddr::from([127, 0, 0, 2])));
        let mut v6 = vec![0; 28];
        v6[..2].copy_from_slice(&(libc::AF_INET6 as u16).to_ne_bytes());
        v6[23] = 1;
        assert_eq!(ip_of(&v6), Some(Ipv6Addr::LOCALHOST.into()));
        assert_eq!(ip_of(&v6[..20]), None);
        assert_eq!(ip_of(&[0xfe; 32]), None);
        assert_eq!(ip_of(&[2]), None);
    }
}
