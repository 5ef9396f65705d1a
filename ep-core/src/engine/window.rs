//! Memory that peers write and read directly.

use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::group::Group;
use super::rounds::Rounds;
use super::share::Offer;
use crate::config::MAX_WINDOWS;
use crate::error::{Error, Result, Status};
use crate::mem::{Mapping, Memory, SegmentId, publish, require};
use crate::tensor::Tensor;
use crate::wire::Place;

/// One window as this rank sees it: its own part and its peers'.
pub(crate) struct WindowShared {
    /// The same number on every rank, 1 to [`MAX_WINDOWS`].
    id: u32,
    /// None where the rank asked for 0 bytes.
    parts: Vec<Option<Memory>>,
    own_rank: usize,
    /// What this rank asked for; its part has whole pages.
    asked_bytes: usize,
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
        let mut bootstrap = group.bootstrap.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        // Relaxed: the bootstrap's lock orders the allocations of this rank.
        let tag = group.next_window.fetch_add(1, Ordering::Relaxed).into();
        let (timeout, is_usable) = (group.default_timeout(), || group.check_usable());
        let mut rounds = Rounds { bootstrap: &mut **bootstrap, timeout, is_usable: &is_usable };

        let mut touched = 0;
        let step = |own: &mut OwnPart| own.touch(&mut touched);
        let own = rounds.run("allocate its part", make_part(group, bytes), step, |own| hello(group, own));
        let (own, hellos) = own.map_err(no_more_windows)?;
        // All ranks see the same hellos, so either all stop here or none does: the ranks stay in step.
        let (id, offers) = parse(&hellos)?;
        let parts = map_parts(group, tag, own, &offers, Instant::now() + timeout);
        let mut places = Places::default();
        let step = |parts: &mut Vec<Option<Memory>>| places.touch(group, parts);
        let parts = rounds.run("map the window", parts, step, |_| Vec::new());
        let (parts, _) = parts.map_err(no_more_windows)?;
        if let Some(device) = &group.device {
            device.set_window(id, Some(&parts))?;
        }
        let shared = Arc::new(WindowShared { id, parts, own_rank: group.rank, asked_bytes: bytes });
        group.windows.rcu(|windows| {
            let mut windows = Vec::clone(windows);
            windows.push(shared.clone());
            windows
        });
        Ok(Window { group: group.clone(), shared })
    }

    /// Address of this rank's part; aligned to pages, dangling if the size is 0.
    pub fn data(&self) -> *mut u8 {
        self.shared.parts[self.group.rank].as_ref().map_or(NO_MEMORY, |part| part.base())
    }

    /// Size as asked for.
    pub fn bytes(&self) -> usize {
        self.shared.asked_bytes
    }
}

/// A bootstrap that failed once stays failed: what that means for the group.
fn no_more_windows(error: Error) -> Error {
    if error.status != Status::Bootstrap {
        return error;
    }
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

/// Bytes that are touched between looks at the clock and the group.
const PIECE: usize = 16 << 20;

/// The next piece of memory of which the first `touched` bytes are touched.
fn next_piece(mapping: &Mapping, touched: usize) -> Range<usize> {
    touched..mapping.bytes().min(touched + PIECE)
}

impl OwnPart {
    /// Makes the system give the next piece of memory; true when it has given all.
    fn touch(&self, touched: &mut usize) -> Result<bool> {
        let (Some(Memory::Host(mapping)), Some(fd)) = (&self.memory, &self.fd) else { return Ok(true) };
        let piece = next_piece(mapping, *touched);
        require(piece.len())?;
        Mapping::back(fd, &piece)?;
        mapping.populate(&piece)?;
        *touched = piece.end;
        Ok(*touched == mapping.bytes())
    }
}

/// How far this rank is with mapping the pages of its peers.
#[derive(Default)]
struct Places {
    peer: usize,
    touched: usize,
}

impl Places {
    /// Maps the next piece of a peer's memory, so that no call meets a page fault; true when there is none.
    fn touch(&mut self, group: &Group, parts: &[Option<Memory>]) -> Result<bool> {
        let links = group.links();
        while self.peer < parts.len() {
            if let (Some(_), Some(Memory::Host(mapping))) = (&links[self.peer], &parts[self.peer])
                && self.touched < mapping.bytes()
            {
                let piece = next_piece(mapping, self.touched);
                mapping.populate(&piece)?;
                self.touched = piece.end;
                return Ok(false);
            }
            (self.peer, self.touched) = (self.peer + 1, 0);
        }
        Ok(true)
    }
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

const HELLO_BYTES: usize = 8 + 8 + size_of::<SegmentId>();

/// A rank's windows, and its part's size and segment.
fn hello(group: &Group, own: &OwnPart) -> Vec<u8> {
    // One bit per window of this rank: the new one takes a number that is free on all ranks.
    let alive = group.windows.load().iter().fold(0u64, |alive, window| alive | 1 << (window.id - 1));
    let bytes = own.memory.as_ref().map_or(0, |memory| memory.bytes() as u64);
    [&alive.to_le_bytes()[..], &bytes.to_le_bytes(), &own.segment].concat()
}

/// The number of the new window, and each rank's size and segment.
fn parse(hellos: &[Vec<u8>]) -> Result<(u32, Vec<Offer>)> {
    let mut alive = 0;
    let one = |(rank, hello): (usize, &Vec<u8>)| {
        let word = |at: usize| hello[at..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        if hello.len() != HELLO_BYTES {
            return Err(Error::new(
                Status::Internal,
                format!("rank {rank} told {} bytes of its part, expected {HELLO_BYTES}", hello.len()),
            ));
        }
        alive |= word(0);
        let mut id = SegmentId::default();
        id.copy_from_slice(&hello[16..]);
        Ok(Offer { bytes: word(8) as usize, id })
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
    group.reach(deadline).share(own.memory, fd, offers, tag)
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

    /// Refuses memory that lies partly in a window of this rank: the rest of it is not the window's, and may
    /// be anybody's.
    pub(crate) fn check(&self, name: &str, memory: &Range<usize>) -> Result<()> {
        for window in self.windows.iter() {
            let Some(part) = &window.parts[window.own_rank] else { continue };
            let base = part.base().addr();
            // What was asked for is the caller's; what rounding added to it is nobody's.
            let (end, mapped) = (base + window.asked_bytes, base + part.bytes());
            let is_apart = memory.is_empty() || memory.end <= base || memory.start >= mapped;
            if !is_apart && (memory.start < base || memory.end > end) {
                return Err(Error::invalid(format!(
                    "{name} lies at {:#x} to {:#x} ({} bytes), only partly in the window at {base:#x} to {end:#x} \
                     ({} bytes); it must lie wholly in a window or outside of all",
                    memory.start,
                    memory.end,
                    memory.len(),
                    window.asked_bytes
                )));
            }
        }
        Ok(())
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
