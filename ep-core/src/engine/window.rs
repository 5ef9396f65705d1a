//! Memory that peers write and read directly.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::group::Group;
use super::share::Offer;
use crate::config::MAX_WINDOWS;
use crate::error::{Error, Result, Status};
use crate::mem::{Mapping, Memory, SegmentId, publish};
use crate::tensor::Tensor;
use crate::wire::Place;

/// One window as this rank sees it: its own part and its peers'.
pub(crate) struct WindowShared {
    /// The same number on every rank, 1 to [`MAX_WINDOWS`].
    id: u32,
    /// None where the rank asked for 0 bytes.
    parts: Vec<Option<Memory>>,
    own_rank: usize,
}

impl WindowShared {
    pub(super) fn own_bytes(&self) -> usize {
        self.parts[self.own_rank].as_ref().map_or(0, |part| part.bytes())
    }
}

/// This rank's part of a window; dropping it releases it.
pub struct Window {
    group: Arc<Group>,
    shared: Arc<WindowShared>,
    bytes: usize,
}

impl Window {
    /// Allocates a window. Collective.
    ///
    /// # Errors
    /// [`Status::OutOfMemory`], [`Status::Capacity`], [`Status::Bootstrap`], [`Status::Aborted`].
    pub fn allocate(group: &Arc<Group>, bytes: usize) -> Result<Window> {
        group.check_usable()?;
        // What was aborted meanwhile ends for that reason, whatever it then met with.
        Window::meet_and_map(group, bytes).map_err(|error| group.check_usable().err().unwrap_or(error))
    }

    fn meet_and_map(group: &Arc<Group>, bytes: usize) -> Result<Window> {
        if bytes > isize::MAX as usize / 2 {
            return Err(Error::invalid(format!("a window of {bytes} bytes does not fit the address space")));
        }
        let deadline = Instant::now() + group.default_timeout();
        let mut bootstrap = group.bootstrap.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        // Relaxed: the bootstrap's lock orders the allocations of this rank.
        let tag = group.next_window.fetch_add(1, Ordering::Relaxed).into();
        let own = make_part(group, bytes);
        let hellos = bootstrap.all_gather(&hello(group, &own), deadline).map_err(no_more_windows)?;
        // All ranks see the same hellos, so either all stop here or none does: the ranks stay in step.
        let own = own?;
        let (id, offers) = parse(&hellos)?;
        let parts = map_parts(group, tag, own, &offers, deadline);
        let answer = parts.as_ref().err().map_or(Vec::new(), |error| error.message.clone().into_bytes());
        let answers = match bootstrap.all_gather(&answer, deadline) {
            Ok(answers) => answers,
            // As when a group is made: whom this rank waited for says more than who was then late.
            Err(error) => {
                let own = parts.err().filter(|own| own.status == Status::Bootstrap);
                return Err(no_more_windows(own.unwrap_or(error)));
            }
        };
        let parts = parts?;
        if let Some(refused) = answers.iter().position(|answer| !answer.is_empty()) {
            let text = String::from_utf8_lossy(&answers[refused]).into_owned();
            return Err(Error::new(
                Status::OutOfMemory,
                format!("rank {refused} could not map the window: {text}"),
            ));
        }
        if let Some(device) = &group.device {
            device.set_window(id, Some(&parts))?;
        }
        let shared = Arc::new(WindowShared { id, parts, own_rank: group.rank });
        group.windows.rcu(|windows| {
            let mut windows = Vec::clone(windows);
            windows.push(shared.clone());
            windows
        });
        Ok(Window { group: group.clone(), shared, bytes })
    }

    /// Address of this rank's part; aligned to pages, dangling if the size is 0.
    pub fn data(&self) -> *mut u8 {
        self.shared.parts[self.group.rank].as_ref().map_or(NO_MEMORY, |part| part.base())
    }

    /// Size as asked for.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

/// A bootstrap that failed once stays failed: what that means for the group.
fn no_more_windows(error: Error) -> Error {
    let text = format!(
        "{}; this group can make no more windows, everything else of it works on. For windows, make a new group",
        error.message
    );
    Error::new(error.status, text)
}

/// What a part of 0 bytes has for an address: aligned like any other, and nothing to read there.
const NO_MEMORY: *mut u8 = std::ptr::without_provenance_mut(4096);

impl Drop for Window {
    fn drop(&mut self) {
        if let Some(device) = &self.group.device {
            // A device that cannot forget the window is lost: no later call runs on it.
            let _ = device.set_window(self.shared.id, None);
        }
        self.group.windows.rcu(|windows| {
            windows.iter().filter(|window| window.id != self.shared.id).cloned().collect::<Vec<_>>()
        });
    }
}

/// This rank's part; empty if it has 0 bytes.
#[derive(Default)]
struct OwnPart {
    memory: Option<Memory>,
    /// For peers of other processes.
    fd: Option<OwnedFd>,
    segment: SegmentId,
}

fn make_part(group: &Group, bytes: usize) -> Result<OwnPart> {
    if bytes == 0 {
        return Ok(OwnPart::default());
    }
    let (memory, fd) = match &group.backend.device {
        Some(device) => {
            let memory = Memory::Device(device.allocate(bytes)?);
            let fd = memory.export()?;
            (memory, fd)
        }
        None => {
            let (mapping, fd) = Mapping::create(host_bytes(bytes)?)?;
            mapping.populate();
            (Memory::Host(Arc::new(mapping)), Some(fd))
        }
    };
    let segment = publish(&memory)?;
    Ok(OwnPart { memory: Some(memory), fd, segment })
}

/// Refuses what the machine cannot have.
fn host_bytes(bytes: usize) -> Result<usize> {
    // A memfd promises any size; the process that then touches more than there is gets killed.
    let available = memory_of_machine();
    if bytes as u64 > available {
        return Err(Error::new(
            Status::OutOfMemory,
            format!("a window of {bytes} bytes is more than the {available} bytes of this machine's memory"),
        ));
    }
    Ok(bytes)
}

/// Bytes of memory and swap, used or not.
fn memory_of_machine() -> u64 {
    let info = rustix::system::sysinfo();
    // The types of the fields differ between targets.
    #[allow(clippy::unnecessary_cast)]
    (info.totalram as u64).saturating_add(info.totalswap as u64).saturating_mul(info.mem_unit.into())
}

/// First byte of a rank's message: its windows, size and segment follow, or why it has no part.
const HELLO_PART: u8 = 1;
const HELLO_ERROR: u8 = 0;
const HELLO_BYTES: usize = 1 + 8 + 8 + size_of::<SegmentId>();

fn hello(group: &Group, own: &Result<OwnPart>) -> Vec<u8> {
    // One bit per window of this rank: the new one takes a number that is free on all ranks.
    let alive = group.windows.load().iter().fold(0u64, |alive, window| alive | 1 << (window.id - 1));
    match own {
        Ok(OwnPart { memory, segment, .. }) => {
            let bytes = memory.as_ref().map_or(0, |memory| memory.bytes() as u64);
            [&[HELLO_PART][..], &alive.to_le_bytes(), &bytes.to_le_bytes(), segment].concat()
        }
        Err(error) => [&[HELLO_ERROR][..], error.message.as_bytes()].concat(),
    }
}

/// The number of the new window, and each rank's size and segment.
fn parse(hellos: &[Vec<u8>]) -> Result<(u32, Vec<Offer>)> {
    let mut alive = 0;
    let one = |(rank, hello): (usize, &Vec<u8>)| {
        let word = |at: usize| hello[at..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        if hello.len() != HELLO_BYTES || hello[0] != HELLO_PART {
            return Err(Error::new(
                Status::OutOfMemory,
                format!(
                    "rank {rank} could not allocate its part: {}",
                    String::from_utf8_lossy(hello.get(1..).unwrap_or_default())
                ),
            ));
        }
        alive |= word(1);
        let mut id = SegmentId::default();
        id.copy_from_slice(&hello[17..]);
        Ok(Offer { bytes: word(9) as usize, id })
    };
    let offers = hellos.iter().enumerate().map(one).collect::<Result<Vec<Offer>>>()?;
    if alive == u64::MAX {
        return Err(Error::new(
            Status::Capacity,
            format!("{MAX_WINDOWS} windows are alive already; release one first, on every rank"),
        ));
    }
    Ok((alive.trailing_ones() + 1, offers))
}

const _: () = assert!(MAX_WINDOWS == u64::BITS as usize);

fn map_parts(
    group: &Group,
    tag: u64,
    own: OwnPart,
    offers: &[Offer],
    deadline: Instant,
) -> Result<Vec<Option<Memory>>> {
    let fd = own.fd.as_ref().map(OwnedFd::as_fd);
    let parts = group.reach(deadline).share(own.memory, fd, offers, tag)?;
    for (link, part) in group.links().iter().zip(&parts) {
        if let (Some(_), Some(Memory::Host(mapping))) = (link, part) {
            mapping.populate();
        }
    }
    Ok(parts)
}

/// The windows of a group as one call sees them.
pub(crate) struct WindowTable {
    windows: arc_swap::Guard<Arc<Vec<Arc<WindowShared>>>>,
}

impl WindowTable {
    /// Takes the table for the time of a call. Lock-free.
    pub(crate) fn of(group: &Group) -> WindowTable {
        WindowTable { windows: group.windows.load() }
    }

    /// Where `tensor` lies for peers; window 0 if it is outside this rank's windows.
    pub(crate) fn place(&self, tensor: &Tensor) -> Place {
        let mut place = Place {
            row_pitch: tensor.row_pitch() as u64,
            col_pitch: (tensor.col_stride * tensor.dtype.bytes()) as u64,
            ..Place::default()
        };
        let start = tensor.data.addr();
        for window in self.windows.iter() {
            if let Some(part) = &window.parts[window.own_rank] {
                let base = part.base().addr();
                if start >= base && start + tensor.span_bytes() <= base + part.bytes() {
                    place.window = window.id;
                    place.offset = (start - base) as u64;
                }
            }
        }
        place
    }

    /// The address of a peer's place in this process, checked to hold `rows` rows of `row_span` bytes.
    pub(crate) fn resolve(&self, peer: usize, place: &Place, rows: u64, row_span: u64) -> Option<*mut u8> {
        let window = self.windows.iter().find(|window| window.id == place.window)?;
        let part = window.parts[peer].as_ref()?;
        let last = rows.saturating_sub(1).checked_mul(place.row_pitch)?.checked_add(row_span)?;
        let end = place.offset.checked_add(if rows == 0 { 0 } else { last })?;
        // SAFETY: the offset was just checked to lie inside the mapping.
        (end <= part.bytes() as u64).then(|| unsafe { part.base().add(place.offset as usize) })
    }
}
