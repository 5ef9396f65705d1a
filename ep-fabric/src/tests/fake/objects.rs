//! The objects of the fake and their tables of operations.

use std::ffi::{c_char, c_int, c_void};
use std::mem::zeroed;
use std::ptr;

use super::{ADDRESS_BYTES, EndpointState, Event, QueueState, Registration, World, with};
use crate::sys::newer::{self, CqErrEntry, FI_MR_DMABUF, MrDmabuf};
use crate::sys::*;

/// An object: what libfabric's header shows, then what the fake knows of it.
#[repr(C)]
struct Object<T> {
    public: T,
    index: usize,
    name: &'static str,
}

/// Opens an object whose fid is at its beginning.
fn open<T>(public: T, index: usize, name: &'static str) -> *mut T {
    with(|world| world.num_open += 1);
    let object = Box::into_raw(Box::new(Object { public, index, name })).cast::<T>();
    let ops =
        fi_ops { close: Some(close::<T>), bind: Some(bind), control: Some(control), ..unsafe { zeroed() } };
    // SAFETY: every public part begins with a `fid`.
    unsafe { (*object.cast::<fid>()).ops = table("fi_ops", ops, |table| &mut table.size) };
    object
}

/// A table of operations, as long as the behaviour says.
fn table<T>(name: &str, mut table: T, size: impl Fn(&mut T) -> &mut usize) -> *mut T {
    let cut = with(|world| world.behaviour.short_table.filter(|short| short.0 == name).map(|short| short.1));
    *size(&mut table) = cut.unwrap_or(size_of::<T>());
    Box::leak(Box::new(table))
}

/// The number of an object; the prefix of every object is the same.
unsafe fn index_of<T>(object: *mut T) -> usize {
    unsafe { (*object.cast::<Object<T>>()).index }
}

unsafe extern "C" fn close<T>(fid: *mut fid) -> c_int {
    let object = unsafe { Box::from_raw(fid.cast::<Object<T>>()) };
    with(|world| {
        world.num_open -= 1;
        world.closed.push(object.name);
        match object.name {
            "mr" => world.registrations[object.index].open = false,
            "ep" => {
                // What is in flight is flushed: nothing of it may touch memory later.
                world.in_flight.retain(|write| write.from != object.index && write.to != Ok(object.index));
            }
            _ => {}
        }
    });
    0
}

pub(super) unsafe extern "C" fn open_fabric(
    _attr: *mut fi_fabric_attr,
    fabric: *mut *mut fid_fabric,
    _context: *mut c_void,
) -> c_int {
    let ops = fi_ops_fabric { domain: Some(open_domain), trywait: Some(trywait), ..unsafe { zeroed() } };
    let public =
        fid_fabric { ops: table("fi_ops_fabric", ops, |table| &mut table.size), ..unsafe { zeroed() } };
    unsafe { *fabric = open(public, 0, "fabric") };
    0
}

unsafe extern "C" fn trywait(_: *mut fid_fabric, _: *mut *mut fid, _: c_int) -> c_int {
    0
}

unsafe extern "C" fn open_domain(
    _fabric: *mut fid_fabric,
    _info: *mut fi_info,
    domain: *mut *mut fid_domain,
    _context: *mut c_void,
) -> c_int {
    let ops = fi_ops_domain {
        av_open: Some(open_av),
        cq_open: Some(open_cq),
        endpoint: Some(open_ep),
        ..unsafe { zeroed() }
    };
    let mr = fi_ops_mr { regattr: Some(regattr), ..unsafe { zeroed() } };
    let public = fid_domain {
        ops: table("fi_ops_domain", ops, |table| &mut table.size),
        mr: table("fi_ops_mr", mr, |table| &mut table.size),
        ..unsafe { zeroed() }
    };
    unsafe { *domain = open(public, 0, "domain") };
    0
}

unsafe extern "C" fn open_cq(
    _domain: *mut fid_domain,
    attr: *mut fi_cq_attr,
    cq: *mut *mut fid_cq,
    _context: *mut c_void,
) -> c_int {
    let attr = unsafe { *attr };
    // EFA has no descriptor to wait on.
    if attr.wait_obj != FI_WAIT_NONE {
        return -(FI_ENOSYS as c_int);
    }
    let index = with(|world| {
        if attr.format != FI_CQ_FORMAT_DATA {
            world.offend("a queue of another format");
        }
        world.queues.push(QueueState { depth: attr.size, ..QueueState::default() });
        world.queues.len() - 1
    });
    let ops = fi_ops_cq {
        read: Some(read_cq),
        readerr: Some(read_error),
        strerror: Some(words),
        ..unsafe { zeroed() }
    };
    let public = fid_cq { ops: table("fi_ops_cq", ops, |table| &mut table.size), ..unsafe { zeroed() } };
    unsafe { *cq = open(public, index, "cq") };
    0
}

unsafe extern "C" fn read_cq(cq: *mut fid_cq, entries: *mut c_void, count: usize) -> isize {
    let index = unsafe { index_of(cq) };
    with(|world| {
        world.progress(index);
        let queue = &mut world.queues[index];
        for at in 0..count {
            let (context, flags, data) = match queue.events.front() {
                Some(&Event::Sent(context)) => (context, FI_RMA | FI_WRITE, 0),
                Some(&Event::Arrived(data)) => (0, FI_RMA | FI_REMOTE_WRITE | FI_REMOTE_CQ_DATA, data),
                Some(Event::Failed { .. }) if at == 0 => return -(FI_EAVAIL as isize),
                None if at == 0 && queue.overrun => return -(FI_EOVERRUN as isize),
                None if at == 0 => return -(FI_EAGAIN as isize),
                _ => return at as isize,
            };
            queue.events.pop_front();
            let entry = fi_cq_data_entry {
                op_context: context as *mut c_void,
                flags: u64::from(flags),
                len: 0,
                buf: ptr::null_mut(),
                data,
            };
            unsafe { entries.cast::<fi_cq_data_entry>().add(at).write(entry) };
        }
        count as isize
    })
}

unsafe extern "C" fn read_error(cq: *mut fid_cq, entry: *mut fi_cq_err_entry, _flags: u64) -> isize {
    let index = unsafe { index_of(cq) };
    with(|world| match world.queues[index].events.pop_front() {
        Some(Event::Failed { context, provider_errno }) => {
            let mut error: CqErrEntry = unsafe { zeroed() };
            error.base.op_context = context as *mut c_void;
            error.base.err = FI_EIO as c_int;
            error.base.prov_errno = provider_errno;
            // Interfaces since 1.20 also have the source's address here.
            error.tail[0] = u64::MAX;
            unsafe { entry.cast::<[u64; 12]>().write(*(&raw const error).cast()) };
            1
        }
        _ => -(FI_EAGAIN as isize),
    })
}

unsafe extern "C" fn words(
    _cq: *mut fid_cq,
    _errno: c_int,
    _data: *const c_void,
    text: *mut c_char,
    len: usize,
) -> *const c_char {
    let words = b"device error\0";
    if len < words.len() {
        return ptr::null();
    }
    unsafe { ptr::copy_nonoverlapping(words.as_ptr().cast(), text, words.len()) };
    text
}

unsafe extern "C" fn open_av(
    _domain: *mut fid_domain,
    _attr: *mut fi_av_attr,
    av: *mut *mut fid_av,
    _context: *mut c_void,
) -> c_int {
    let index = with(|world| {
        world.vectors.push(Default::default());
        world.vectors.len() - 1
    });
    let ops = fi_ops_av { insert: Some(insert), remove: Some(remove), ..unsafe { zeroed() } };
    let public = fid_av { ops: table("fi_ops_av", ops, |table| &mut table.size), ..unsafe { zeroed() } };
    unsafe { *av = open(public, index, "av") };
    0
}

unsafe extern "C" fn insert(
    av: *mut fid_av,
    address: *const c_void,
    _count: usize,
    peer: *mut fi_addr_t,
    _flags: u64,
    _context: *mut c_void,
) -> c_int {
    let (index, address) = unsafe { (index_of(av), *address.cast::<[u8; ADDRESS_BYTES]>()) };
    if address[0] != 0xfa {
        unsafe { *peer = u64::MAX };
        return 0;
    }
    with(|world| {
        world.next_id += 1;
        if world.vectors[index].values().any(|known| *known == address) {
            world.offend("an address was inserted twice");
        }
        world.vectors[index].insert(world.next_id, address);
        unsafe { *peer = world.next_id };
    });
    1
}

unsafe extern "C" fn remove(av: *mut fid_av, peer: *mut fi_addr_t, _count: usize, _flags: u64) -> c_int {
    let (index, peer) = unsafe { (index_of(av), *peer) };
    with(|world| {
        let address = world.vectors[index].remove(&peer);
        let to = address.map(|address| address[1] as usize);
        let busy = world.in_flight.iter().any(|write| {
            world.endpoints[write.from].vector == Some(index) && to.is_some_and(|to| write.to == Ok(to))
        });
        if busy || to.is_none() {
            world.offend("a peer was removed with a write in flight, or was not there");
        }
    });
    0
}

unsafe extern "C" fn open_ep(
    _domain: *mut fid_domain,
    info: *mut fi_info,
    ep: *mut *mut fid_ep,
    _context: *mut c_void,
) -> c_int {
    let tx_depth = unsafe { (*(*info).tx_attr).size };
    let index = with(|world| {
        world.endpoints.push(EndpointState { tx_depth, ..EndpointState::default() });
        world.endpoints.len() - 1
    });
    let ops = fi_ops_ep { getopt: Some(getopt), setopt: Some(setopt), ..unsafe { zeroed() } };
    let cm = fi_ops_cm { getname: Some(getname), ..unsafe { zeroed() } };
    let rma = fi_ops_rma { writemsg: Some(writemsg), ..unsafe { zeroed() } };
    let public = fid_ep {
        ops: table("fi_ops_ep", ops, |table| &mut table.size),
        cm: table("fi_ops_cm", cm, |table| &mut table.size),
        rma: table("fi_ops_rma", rma, |table| &mut table.size),
        ..unsafe { zeroed() }
    };
    unsafe { *ep = open(public, index, "ep") };
    0
}

unsafe extern "C" fn bind(ep: *mut fid, other: *mut fid, flags: u64) -> c_int {
    let index = unsafe { index_of(ep.cast::<fid_ep>()) };
    let queue = flags & u64::from(FI_TRANSMIT | FI_RECV) != 0;
    with(|world| match queue {
        true => world.endpoints[index].queue = Some(unsafe { index_of(other.cast::<fid_cq>()) }),
        false => world.endpoints[index].vector = Some(unsafe { index_of(other.cast::<fid_av>()) }),
    });
    0
}

unsafe extern "C" fn control(object: *mut fid, command: c_int, _argument: *mut c_void) -> c_int {
    if command != FI_ENABLE as c_int {
        return -(FI_ENOSYS as c_int);
    }
    let index = unsafe { index_of(object.cast::<fid_ep>()) };
    with(|world| {
        let endpoint = &mut world.endpoints[index];
        endpoint.enabled = true;
        match endpoint.queue.is_some() && endpoint.vector.is_some() {
            true => 0,
            false => -(FI_EINVAL as c_int),
        }
    })
}

unsafe extern "C" fn setopt(
    ep: *mut fid,
    level: c_int,
    option: c_int,
    value: *const c_void,
    len: usize,
) -> c_int {
    let index = unsafe { index_of(ep.cast::<fid_ep>()) };
    let value = unsafe { std::slice::from_raw_parts(value.cast::<u8>(), len) }.to_vec();
    with(|world| {
        if world.endpoints[index].enabled || level != FI_OPT_ENDPOINT as c_int {
            world.offend(format!("option {option} was set too late, or at level {level}"));
        }
        if world.behaviour.unknown_options.contains(&option) {
            return -(FI_ENOPROTOOPT as c_int);
        }
        world.options.push((index, option, value));
        0
    })
}

unsafe extern "C" fn getopt(
    _ep: *mut fid,
    _level: c_int,
    option: c_int,
    value: *mut c_void,
    len: *mut usize,
) -> c_int {
    with(|world| {
        if world.behaviour.unknown_options.contains(&option) {
            return -(FI_ENOPROTOOPT as c_int);
        }
        match (option, unsafe { *len }) {
            (newer::FI_OPT_EFA_EMULATED_WRITE, 1) => {
                unsafe { value.cast::<bool>().write(world.behaviour.emulated_write) };
                0
            }
            (newer::FI_OPT_MAX_RMA_SIZE, 8) => {
                unsafe { value.cast::<usize>().write(1 << 30) };
                0
            }
            _ => -(FI_ENOPROTOOPT as c_int),
        }
    })
}

unsafe extern "C" fn getname(ep: *mut fid, address: *mut c_void, len: *mut usize) -> c_int {
    let index = unsafe { index_of(ep.cast::<fid_ep>()) };
    let room = unsafe { std::mem::replace(&mut *len, ADDRESS_BYTES) };
    if room < ADDRESS_BYTES {
        return -(FI_ETOOSMALL as c_int);
    }
    unsafe { address.cast::<[u8; ADDRESS_BYTES]>().write(World::address_of(index)) };
    0
}

unsafe extern "C" fn writemsg(ep: *mut fid_ep, message: *const fi_msg_rma, flags: u64) -> isize {
    let (index, message) = unsafe { (index_of(ep), *message) };
    with(|world| world.post(index, &message, flags)) as isize
}

unsafe extern "C" fn regattr(
    _domain: *mut fid,
    attr: *const fi_mr_attr,
    flags: u64,
    mr: *mut *mut fid_mr,
) -> c_int {
    let attr = unsafe { attr.read() };
    let (address, bytes, dmabuf) = if flags & FI_MR_DMABUF != 0 {
        let export = unsafe { ptr::read(attr.mr_iov.cast::<MrDmabuf>()) };
        (export.base_addr as u64, export.len as u64, Some((export.fd, export.offset)))
    } else {
        let memory = unsafe { *attr.mr_iov };
        (memory.iov_base as u64, memory.iov_len as u64, None)
    };
    let (index, id, key) = with(|world| {
        world.next_id += 1;
        let (id, key) = (world.next_id, (world.next_id * 0x9e37_79b9) & 0xffff_ffff);
        let iface = attr.iface;
        world.registrations.push(Registration { id, address, bytes, key, flags, iface, dmabuf, open: true });
        (world.registrations.len() - 1, id, key)
    });
    let public = fid_mr { mem_desc: id as *mut c_void, key, ..unsafe { zeroed() } };
    unsafe { *mr = open(public, index, "mr") };
    0
}
