//! Memory that peers write and read directly.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::group::Group;
use super::handover::hand_over;
use crate::config::MAX_WINDOWS;
use crate::error::{Error, Result, Status};
use crate::mem::{Mapping, SegmentId, find, publish};
use crate::tensor::Tensor;
use crate::wire::Place;

/// One window as this rank sees it: its own part and its peers'.
pub(crate) struct WindowShared {
    /// The same number on every rank, from 1.
    id: u32,
    /// None where the rank asked for 0 bytes.
    parts: Vec<Option<Arc<Mapping>>>,
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
        if bytes > isize::MAX as usize / 2 {
            return Err(Error::invalid(format!("a window of {bytes} bytes does not fit the address space")));
        }
        let deadline = Instant::now() + group.default_timeout();
        let mut bootstrap = group.bootstrap.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        // Relaxed: the bootstrap's lock orders the allocations of this rank.
        let id = group.next_window.fetch_add(1, Ordering::Relaxed);
        let own = make_part(group, bytes);
        let hello = match &own {
            Ok((_, segment)) => [&[HELLO_PART][..], &(bytes as u64).to_le_bytes(), segment].concat(),
            Err(error) => [&[HELLO_ERROR][..], error.message.as_bytes()].concat(),
        };
        let hellos = bootstrap.all_gather(&hello, deadline)?;
        // All ranks see the same hellos, so either all stop here or none does: the ranks stay in step.
        let (own, _) = own?;
        let peers = parse(&hellos)?;
        let parts = map_parts(group, id, own, &peers, deadline);
        let answer = parts.as_ref().err().map_or(Vec::new(), |error| error.message.clone().into_bytes());
        let answers = bootstrap.all_gather(&answer, deadline)?;
        let parts = parts?;
        if let Some(refused) = answers.iter().position(|answer| !answer.is_empty()) {
            let text = String::from_utf8_lossy(&answers[refused]).into_owned();
            return Err(Error::new(
                Status::OutOfMemory,
                format!("rank {refused} could not map the window: {text}"),
            ));
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
        self.shared.parts[self.group.rank].as_ref().map_or(std::ptr::dangling_mut(), |part| part.base())
    }

    /// Size as asked for.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        self.group.windows.rcu(|windows| {
            windows.iter().filter(|window| window.id != self.shared.id).cloned().collect::<Vec<_>>()
        });
    }
}

type OwnPart = Option<(Arc<Mapping>, OwnedFd)>;

fn make_part(group: &Group, bytes: usize) -> Result<(OwnPart, SegmentId)> {
    if group.windows.load().len() >= MAX_WINDOWS {
        return Err(Error::new(
            Status::Capacity,
            format!("{MAX_WINDOWS} windows are alive already; release one first"),
        ));
    }
    if bytes == 0 {
        return Ok((None, SegmentId::default()));
    }
    // A memfd promises any size; the process that then touches more than there is gets killed.
    let available = memory_of_machine();
    if bytes as u64 > available {
        return Err(Error::new(
            Status::OutOfMemory,
            format!("a window of {bytes} bytes is more than the {available} bytes of this machine's memory"),
        ));
    }
    let (part, fd) = Mapping::create(bytes)?;
    part.populate();
    let part = Arc::new(part);
    let segment = publish(&part)?;
    Ok((Some((part, fd)), segment))
}

/// Bytes of memory and swap, used or not.
fn memory_of_machine() -> u64 {
    let info = rustix::system::sysinfo();
    // The types of the fields differ between targets.
    #[allow(clippy::unnecessary_cast)]
    (info.totalram as u64).saturating_add(info.totalswap as u64).saturating_mul(info.mem_unit.into())
}

/// First byte of a rank's answer: its size and segment follow, or why it has none.
const HELLO_PART: u8 = 1;
const HELLO_ERROR: u8 = 0;

/// Each rank's size and segment.
fn parse(hellos: &[Vec<u8>]) -> Result<Vec<(usize, SegmentId)>> {
    let one = |(rank, hello): (usize, &Vec<u8>)| match hello.split_first() {
        Some((&HELLO_PART, part)) if part.len() == 8 + size_of::<SegmentId>() => {
            let mut bytes = [0; 8];
            let mut segment = SegmentId::default();
            bytes.copy_from_slice(&part[..8]);
            segment.copy_from_slice(&part[8..]);
            Ok((u64::from_le_bytes(bytes) as usize, segment))
        }
        _ => Err(Error::new(
            Status::OutOfMemory,
            format!(
                "rank {rank} could not allocate its part: {}",
                String::from_utf8_lossy(hello.get(1..).unwrap_or_default())
            ),
        )),
    };
    hellos.iter().enumerate().map(one).collect()
}

fn map_parts(
    group: &Group,
    id: u32,
    own: OwnPart,
    peers: &[(usize, SegmentId)],
    deadline: Instant,
) -> Result<Vec<Option<Arc<Mapping>>>> {
    let (own, fd) = own.unzip();
    let mut parts: Vec<Option<Arc<Mapping>>> = vec![None; peers.len()];
    parts[group.rank] = own;
    let has_part = |peer: usize| peers[peer].0 != 0;
    hand_over(group.links(), id.into(), fd.as_ref().map(OwnedFd::as_fd), has_part, deadline, |peer, fd| {
        let part = Mapping::attach(fd, peers[peer].0)?;
        part.populate();
        parts[peer] = Some(Arc::new(part));
        Ok(())
    })?;
    for peer in (0..peers.len()).filter(|&peer| has_part(peer)) {
        if parts[peer].is_none() {
            let text = || format!("rank {peer} left while its window was being mapped");
            parts[peer] = Some(find(&peers[peer].1).ok_or_else(|| Error::new(Status::PeerLost, text()))?);
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
