//! `fi_getinfo` and what it lists.

use std::ffi::{CStr, CString, c_char, c_int};
use std::mem::zeroed;
use std::ptr;

use super::with;
use crate::sys::{self, fi_domain_attr, fi_ep_attr, fi_fabric_attr, fi_info, fi_rx_attr, fi_tx_attr};

/// Writes in flight of the device: that of a P5.
pub(super) const TX_DEPTH: usize = 4096;

fn text(text: &str) -> *mut c_char {
    CString::new(text).expect("no NUL").into_raw()
}

unsafe fn copy(raw: *const c_char) -> *mut c_char {
    if raw.is_null() { ptr::null_mut() } else { unsafe { CStr::from_ptr(raw) }.to_owned().into_raw() }
}

fn empty() -> *mut fi_info {
    let mut info: fi_info = unsafe { zeroed() };
    info.tx_attr = Box::into_raw(Box::new(unsafe { zeroed::<fi_tx_attr>() }));
    info.rx_attr = Box::into_raw(Box::new(unsafe { zeroed::<fi_rx_attr>() }));
    info.ep_attr = Box::into_raw(Box::new(unsafe { zeroed::<fi_ep_attr>() }));
    info.domain_attr = Box::into_raw(Box::new(unsafe { zeroed::<fi_domain_attr>() }));
    info.fabric_attr = Box::into_raw(Box::new(unsafe { zeroed::<fi_fabric_attr>() }));
    with(|world| world.num_open += 1);
    Box::into_raw(Box::new(info))
}

pub(super) unsafe extern "C" fn dupinfo(from: *const fi_info) -> *mut fi_info {
    let info = empty();
    if from.is_null() {
        return info;
    }
    unsafe {
        (*info).caps = (*from).caps;
        (*info).mode = (*from).mode;
        *(*info).tx_attr = *(*from).tx_attr;
        *(*info).ep_attr = *(*from).ep_attr;
        *(*info).domain_attr = *(*from).domain_attr;
        *(*info).fabric_attr = *(*from).fabric_attr;
        (*(*info).domain_attr).name = copy((*(*from).domain_attr).name);
        (*(*info).fabric_attr).name = copy((*(*from).fabric_attr).name);
        (*(*info).fabric_attr).prov_name = copy((*(*from).fabric_attr).prov_name);
    }
    info
}

pub(super) unsafe extern "C" fn freeinfo(mut info: *mut fi_info) {
    while !info.is_null() {
        let this = unsafe { Box::from_raw(info) };
        info = this.next;
        unsafe {
            let domain = Box::from_raw(this.domain_attr);
            let fabric = Box::from_raw(this.fabric_attr);
            for name in [domain.name, fabric.name, fabric.prov_name] {
                if !name.is_null() {
                    drop(CString::from_raw(name));
                }
            }
            drop((Box::from_raw(this.tx_attr), Box::from_raw(this.rx_attr), Box::from_raw(this.ep_attr)));
        }
        with(|world| world.num_open -= 1);
    }
}

/// Offers two NICs of each fabric, to whoever takes what EFA demands.
pub(super) unsafe extern "C" fn getinfo(
    version: u32,
    _node: *const c_char,
    _service: *const c_char,
    _flags: u64,
    hints: *const fi_info,
    list: *mut *mut fi_info,
) -> c_int {
    let behaviour = with(|world| world.behaviour.clone());
    let (caps, mode, mr_mode) =
        unsafe { ((*hints).caps, (*hints).mode, (*(*hints).domain_attr).mr_mode as u32) };
    let base = sys::FI_MR_VIRT_ADDR | sys::FI_MR_ALLOCATED | sys::FI_MR_PROV_KEY;
    let hmem = caps & sys::FI_HMEM != 0;
    let mut last = list;
    unsafe { *list = ptr::null_mut() };
    for &fabric in &behaviour.fabrics {
        let direct = fabric == "efa-direct";
        let mut demanded = base | if direct { sys::FI_MR_LOCAL } else { 0 };
        demanded |= if hmem { sys::FI_MR_HMEM } else { 0 };
        let wants_context = direct && mode & sys::FI_CONTEXT2 == 0;
        if version > behaviour.version
            || mr_mode & demanded != demanded
            || wants_context
            || (hmem && !behaviour.has_device_memory)
        {
            continue;
        }
        for nic in ["rdmap9s0", "rdmap1s0"] {
            let info = empty();
            unsafe {
                (*info).caps = caps;
                (*info).mode = if direct { sys::FI_CONTEXT2 } else { 0 };
                (*(*info).tx_attr).size = TX_DEPTH;
                (*(*info).ep_attr).max_msg_size = usize::MAX;
                (*(*info).domain_attr).name = text(&format!("{nic}-{}", if direct { "dir" } else { "rdm" }));
                (*(*info).domain_attr).mr_mode = demanded as c_int;
                (*(*info).domain_attr).mr_key_size = 4;
                (*(*info).domain_attr).cq_data_size = 4;
                (*(*info).fabric_attr).name = text(fabric);
                (*(*info).fabric_attr).prov_name = text("efa");
                *last = info;
                last = &raw mut (*info).next;
            }
        }
    }
    match unsafe { (*list).is_null() } {
        true => -(sys::FI_ENODATA as c_int),
        false => 0,
    }
}
