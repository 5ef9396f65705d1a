//! Tables of the objects that a caller holds handles of.
//!
//! A handle is a number in the clothes of a pointer: kind, generation and index. Nothing that a caller
//! passes is dereferenced, so null, a stray pointer, a handle of another kind and one that was destroyed
//! (also one whose place has a new object since) all end in [`Status::BadHandle`].
//!
//! An entry *pins* its handles: the object stays while a pin is alive. Pinning is one compare-and-swap;
//! only making and freeing objects takes the table's lock. Slots are never freed, so a late look at one
//! is safe.

use std::cell::UnsafeCell;
use std::collections::VecDeque;
use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use ep_core::{Error, Result, Status};

/// The bits of a handle, from the lowest: 4 that are zero, 20 of index, 20 of generation, 3 of kind.
/// That is below 2^47, as some languages want pointers to be; the kinds are chosen so that the addresses
/// of a Linux process (heap 5, stack and mappings 7, small programs 0) are not handles.
const INDEX_SHIFT: u32 = 4;
const GENERATION_SHIFT: u32 = 24;
const KIND_SHIFT: u32 = 44;
const FIELD_MASK: u64 = (1 << 20) - 1;

/// The most objects of one kind that are alive at a time.
const MAX_OBJECTS: usize = 1 << 20;
/// Chunk `c` has `FIRST_CHUNK << c` slots.
const FIRST_CHUNK: usize = 64;
const NUM_CHUNKS: usize = (MAX_OBJECTS / FIRST_CHUNK).ilog2() as usize + 1;

const _: () = assert!(size_of::<usize>() == 8, "handles use 47 bits of a pointer");

/// What a handle names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Group = 1,
    Window = 2,
    Plan = 3,
    Stream = 4,
}

impl Kind {
    const ALL: [Kind; 4] = [Kind::Group, Kind::Window, Kind::Plan, Kind::Stream];

    const fn name(self) -> &'static str {
        match self {
            Kind::Group => "ep_group_t",
            Kind::Window => "ep_window_t",
            Kind::Plan => "ep_plan_t",
            Kind::Stream => "ep_stream_t",
        }
    }
}

/// An object that the C ABI hands out, and the C type that its handles point to.
pub(crate) trait Object: Send + Sync + 'static {
    type Opaque;
    const KIND: Kind;
}

/// The word of a slot: generation above, then whether the object is alive, then how many pins it has.
const LIVE: u64 = 1 << 31;
const PINS: u64 = LIVE - 1;
const WORD_GENERATION_SHIFT: u32 = 32;

struct Slot<T> {
    word: AtomicU64,
    value: UnsafeCell<Option<T>>,
}

// SAFETY: `value` is written only by the one thread that has taken the slot from the free list or that
// has dropped the last pin of a dead object; everyone else reads it under a pin. The word orders both.
unsafe impl<T: Send + Sync> Sync for Slot<T> {}

/// All objects of one kind.
pub(crate) struct Table<T> {
    chunks: [OnceLock<Box<[Slot<T>]>>; NUM_CHUNKS],
    free: Mutex<Free>,
}

struct Free {
    /// Oldest first, so that a stale handle meets a new object as late as can be.
    indices: VecDeque<usize>,
    /// Slots from here on were never used.
    next: usize,
}

/// Whether an object may be destroyed while calls use it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum InUse {
    /// They end first; the object is freed when the last one has.
    Waits,
    /// That is the caller's mistake.
    Refused,
}

impl<T: Object> Table<T> {
    pub(crate) const fn new() -> Table<T> {
        Table {
            chunks: [const { OnceLock::new() }; NUM_CHUNKS],
            free: Mutex::new(Free { indices: VecDeque::new(), next: 0 }),
        }
    }

    /// Keeps an object and returns its handle.
    pub(crate) fn insert(&self, value: T) -> Result<*mut T::Opaque> {
        let index = self.claim()?;
        let (chunk, at) = place(index);
        let slots = self.chunks[chunk].get_or_init(|| (0..FIRST_CHUNK << chunk).map(|_| empty()).collect());
        let slot = &slots[at];
        // SAFETY: the slot came from the free list, so no pin exists and none can be taken before LIVE.
        unsafe { *slot.value.get() = Some(value) };
        // Relaxed: the thread that freed the slot released it to us through the lock of the free list.
        let generation = slot.word.load(Ordering::Relaxed) >> WORD_GENERATION_SHIFT;
        // Release: pairs with the acquire in `pin`; publishes the value.
        slot.word.store(generation << WORD_GENERATION_SHIFT | LIVE, Ordering::Release);
        let handle =
            (T::KIND as u64) << KIND_SHIFT | generation << GENERATION_SHIFT | (index as u64) << INDEX_SHIFT;
        Ok(std::ptr::without_provenance_mut(handle as usize))
    }

    /// The object of a handle; `arg` is the name of the parameter.
    pub(crate) fn pin(&'static self, handle: *const T::Opaque, arg: &str) -> Result<Pin<T>> {
        let (slot, index, generation) = self.find(handle.addr() as u64, arg)?;
        // Relaxed: only a guess for the exchange below.
        let mut word = slot.word.load(Ordering::Relaxed);
        loop {
            check_alive::<T>(word, generation, arg)?;
            // Acquire: pairs with the release in `insert`; makes the value visible.
            match slot.word.compare_exchange_weak(word, word + 1, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return Ok(Pin { table: self, slot, index }),
                Err(seen) => word = seen,
            }
        }
    }

    /// Ends the handle. The object goes with the last pin, which may be the returned one.
    pub(crate) fn retire(&'static self, handle: *mut T::Opaque, arg: &str, in_use: InUse) -> Result<Pin<T>> {
        let (slot, index, generation) = self.find(handle.addr() as u64, arg)?;
        // Relaxed: only a guess for the exchange below.
        let mut word = slot.word.load(Ordering::Relaxed);
        loop {
            check_alive::<T>(word, generation, arg)?;
            if word & PINS != 0 && in_use == InUse::Refused {
                let (name, calls) = (T::KIND.name(), word & PINS);
                let text = format!("{arg}: {calls} calls are using this {name}; let them end first");
                return Err(Error::new(Status::InvalidState, text));
            }
            let dead = (word & !LIVE) + 1;
            // Acquire: pairs with the release in `insert` and those of earlier pins.
            match slot.word.compare_exchange_weak(word, dead, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return Ok(Pin { table: self, slot, index }),
                Err(seen) => word = seen,
            }
        }
    }

    fn find(&self, handle: u64, arg: &str) -> Result<(&Slot<T>, usize, u64)> {
        let bad = |text: String| Err(Error::new(Status::BadHandle, text));
        let wanted = T::KIND.name();
        if handle == 0 {
            return bad(format!("{arg} is NULL, expected an {wanted}"));
        }
        let unknown = || bad(format!("{arg} is {handle:#x}, which no call has returned as an {wanted}"));
        if handle & ((1 << INDEX_SHIFT) - 1) != 0 {
            return unknown();
        }
        let index = (handle >> INDEX_SHIFT & FIELD_MASK) as usize;
        let generation = handle >> GENERATION_SHIFT & FIELD_MASK;
        let kind = handle >> KIND_SHIFT;
        if kind != T::KIND as u64 {
            return match Kind::ALL.into_iter().find(|known| *known as u64 == kind) {
                Some(known) => bad(format!("{arg} is an {}, expected an {wanted}", known.name())),
                None => unknown(),
            };
        }
        let (chunk, at) = place(index);
        match self.chunks.get(chunk).and_then(OnceLock::get) {
            Some(slots) => Ok((&slots[at], index, generation)),
            None => unknown(),
        }
    }

    fn claim(&self) -> Result<usize> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(index) = free.indices.pop_front() {
            return Ok(index);
        }
        if free.next == MAX_OBJECTS {
            let name = T::KIND.name();
            let text = format!("{MAX_OBJECTS} {name} handles are in use; destroy some first");
            return Err(Error::new(Status::Capacity, text));
        }
        free.next += 1;
        Ok(free.next - 1)
    }

    /// Frees the object of a slot that is dead and has no pins.
    fn free(&self, slot: &Slot<T>, index: usize) {
        // SAFETY: the object is dead, so no pin can be taken, and the caller has dropped the last one.
        let value = unsafe { (*slot.value.get()).take() };
        // Relaxed: nobody else changes the word of a dead slot; the lock below passes it on.
        let generation = (slot.word.load(Ordering::Relaxed) >> WORD_GENERATION_SHIFT) + 1;
        slot.word.store(generation << WORD_GENERATION_SHIFT, Ordering::Relaxed);
        // A slot whose generations are used up is given up, so that no old handle ever fits again.
        if generation <= FIELD_MASK {
            self.free.lock().unwrap_or_else(PoisonError::into_inner).indices.push_back(index);
        }
        // Last, and outside the lock: freeing an object may take long, or panic.
        drop(value);
    }
}

fn check_alive<T: Object>(word: u64, generation: u64, arg: &str) -> Result<()> {
    if word >> WORD_GENERATION_SHIFT == generation && word & LIVE != 0 {
        return Ok(());
    }
    let name = T::KIND.name();
    Err(Error::new(Status::BadHandle, format!("{arg} is an {name} that was destroyed already")))
}

/// The chunk of an index, and the place in it.
fn place(index: usize) -> (usize, usize) {
    let chunk = (index / FIRST_CHUNK + 1).ilog2() as usize;
    (chunk, index - FIRST_CHUNK * ((1 << chunk) - 1))
}

fn empty<T>() -> Slot<T> {
    // Generations begin at 1: an all-zero field never fits.
    Slot { word: AtomicU64::new(1 << WORD_GENERATION_SHIFT), value: UnsafeCell::new(None) }
}

/// Keeps an object alive for the length of a call.
pub(crate) struct Pin<T: Object> {
    table: &'static Table<T>,
    slot: &'static Slot<T>,
    index: usize,
}

impl<T: Object> Deref for Pin<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: the value is not written while a pin is alive.
        let value = unsafe { &*self.slot.value.get() };
        value.as_ref().expect("a slot that can be pinned has a value")
    }
}

impl<T: Object> Drop for Pin<T> {
    fn drop(&mut self) {
        // AcqRel: the last pin of a dead object must see what the others did before it frees the object.
        let before = self.slot.word.fetch_sub(1, Ordering::AcqRel);
        if before & PINS == 1 && before & LIVE == 0 {
            self.table.free(self.slot, self.index);
        }
    }
}
