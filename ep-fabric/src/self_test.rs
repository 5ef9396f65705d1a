//! The proof that a NIC keeps its contract: a write to itself arrives, bytes and immediate.
//!
//! Some versions of libfabric cut immediates to 16 bits on EFA; a protocol that counts by them would never finish.

use std::time::{Duration, Instant};

use ep_core::{Error, Result, Status};

use crate::nic::Nic;
use crate::transport::{Completion, PeerId, Posted, Region, Registered, Transport, Write};

const DEADLINE: Duration = Duration::from_secs(5);
/// Both halves differ, and have their upper bit set in one and not in the other.
const IMMEDIATE: u32 = 0xa5a5_5a5a;
const PAYLOAD: u64 = 0x0123_4567_89ab_cdef;

/// Writes 8 bytes to itself, then 0 bytes, and looks at what arrived.
///
/// # Errors
/// [`Status::Unsupported`] if something else arrived than was sent, [`Status::Timeout`] if nothing did; what the
/// NIC says if a call fails.
pub(crate) fn run(nic: &mut Nic) -> Result<()> {
    let mut memory = Box::new([PAYLOAD, 0u64]);
    let address = memory.as_mut_ptr();
    // SAFETY: deregistered below before `memory` goes; and on an early return the caller drops the NIC, whose
    // endpoint nobody writes to any more: its address was given to nobody.
    let registered = nic.register(&unsafe { Region::new(address.cast(), 16, None) })?;
    let own_address = nic.address();
    let peer = nic.connect(&own_address)?;
    let result = exchange(nic, peer, registered, IMMEDIATE, 8)
        // SAFETY: the memory is alive, and the write into it has arrived.
        .and_then(|()| match unsafe { address.add(1).read_volatile() } {
            PAYLOAD => exchange(nic, peer, registered, !IMMEDIATE, 0),
            other => Err(broken(format!("a write of {PAYLOAD:#x} to itself arrived as {other:#x}"))),
        });
    if result.is_err() {
        // The NIC may still use the memory: it is dropped by the caller, and 16 bytes stay behind.
        std::mem::forget(memory);
        return result;
    }
    nic.disconnect(peer);
    nic.deregister(registered.id)
}

fn exchange(nic: &mut Nic, peer: PeerId, region: Registered, immediate: u32, bytes: u64) -> Result<()> {
    let write = Write {
        peer,
        local: region.id,
        local_offset: 0,
        remote: region.remote,
        remote_offset: 8,
        bytes,
        immediate,
        context: u64::from(immediate),
    };
    let deadline = Instant::now() + DEADLINE;
    let (mut posted, mut sent, mut arrived) = (false, false, false);
    let mut found = Vec::with_capacity(4);
    while !(sent && arrived) {
        if !posted {
            posted = nic.write(&write)? == Posted::Yes;
        }
        nic.poll(&mut found)?;
        for completion in found.drain(..) {
            match completion {
                Completion::Sent { .. } => sent = true,
                Completion::Arrived { immediate: got } if got == immediate => arrived = true,
                Completion::Arrived { immediate: got } => {
                    return Err(broken(format!(
                        "an immediate of {immediate:#010x} arrived as {got:#010x}; this version of the provider cuts it"
                    )));
                }
                Completion::Failed { text, .. } => {
                    return Err(broken(format!("a write to itself failed: {text}")));
                }
            }
        }
        if Instant::now() > deadline {
            let state = |yes: bool| if yes { "yes" } else { "no" };
            return Err(Error::new(
                Status::Timeout,
                format!(
                    "a write of {bytes} bytes to itself did not arrive in {} s (posted: {}, sent: {}, arrived: {})",
                    DEADLINE.as_secs(),
                    state(posted),
                    state(sent),
                    state(arrived)
                ),
            ));
        }
        std::thread::yield_now();
    }
    Ok(())
}

fn broken(what: String) -> Error {
    Error::new(
        Status::Unsupported,
        format!("{what}; use another version of libfabric (EP_LIBFABRIC) or another provider"),
    )
}
