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
use std::ffi::c_void;
use std::ops::Deref;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use ep_core::{Error, Result, Status};

mod bits;
mod fork;

pub(crate) use bits::Kind;

use bits::{Bits, MAX_GENERATION, MAX_OBJECTS};

/// Chunk `c` has `FIRST_CHUNK << c` slots.
const FIRST_CHUNK: usize = 64;
const NUM_CHUNKS: usize = (MAX_OBJECTS / FIRST_CHUNK).ilog2() as usize + 1;

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
    /// The process, by its number of forks, that made the object.
    process: AtomicU32,
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

/// True for what looks like a handle of ours, alive or not; the addresses of objects never do.
pub(crate) fn is_handle(pointer: *const c_void) -> bool {
    Bits::decode(pointer.addr()).is_some()
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
        // Relaxed: published by the release of the word below.
        slot.process.store(fork::process(), Ordering::Relaxed);
        // Relaxed: the thread that freed the slot released it to us through the lock of the free list.
        let generation = slot.word.load(Ordering::Relaxed) >> WORD_GENERATION_SHIFT;
        // Release: pairs with the acquire in `pin`; publishes the value.
        slot.word.store(generation << WORD_GENERATION_SHIFT | LIVE, Ordering::Release);
        let bits = Bits { kind: T::KIND, generation, index };
        Ok(std::ptr::without_provenance_mut(bits.encode()))
    }

    /// The object of a handle; `arg` is the name of the parameter.
    pub(crate) fn pin(&'static self, handle: *const T::Opaque, arg: &str) -> Result<Pin<T>> {
        let (slot, index, generation) = self.find(handle.addr(), arg)?;
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
        let (slot, index, generation) = self.find(handle.addr(), arg)?;
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

    fn find(&self, handle: usize, arg: &str) -> Result<(&Slot<T>, usize, u64)> {
        let bad = |text: String| Err(Error::new(Status::BadHandle, text));
        let wanted = T::KIND.name();
        if handle == 0 {
            return bad(format!("{arg} is NULL, expected an {wanted}"));
        }
        let bits = Bits::decode(handle);
        if let Some(bits) = bits
            && bits.kind != T::KIND
        {
            return bad(format!("{arg} is an {}, expected an {wanted}", bits.kind.name()));
        }
        let slot = bits.and_then(|Bits { kind: _, generation, index }| {
            let (chunk, at) = place(index);
            let slots = self.chunks.get(chunk)?.get()?;
            Some((slots.get(at)?, index, generation))
        });
        match slot {
            // Relaxed: only a number; a child has what its parent stored before it forked.
            Some((slot, ..)) if slot.process.load(Ordering::Relaxed) != fork::process() => bad(format!(
                "{arg} was made by the process that this one was forked from; only that one may use it"
            )),
            Some(found) => Ok(found),
            None => bad(format!("{arg} is {handle:#x}, which no call has returned as an {wanted}")),
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
        if generation <= MAX_GENERATION {
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
    Slot {
        word: AtomicU64::new(1 << WORD_GENERATION_SHIFT),
        process: AtomicU32::new(0),
        value: UnsafeCell::new(None),
    }
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

#[cfg(test)]
mod tests {
    use std::ptr;
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;
    use std::thread;

    use super::*;

    /// Counts how many of it were freed.
    struct Probe(Arc<AtomicUsize>);

    impl Object for Probe {
        type Opaque = u8;
        const KIND: Kind = Kind::Plan;
    }

    impl Drop for Probe {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn bad(result: Result<Pin<Probe>>) -> String {
        let error = result.err().expect("the handle is bad");
        assert_eq!(error.status, Status::BadHandle);
        error.message
    }

    #[test]
    fn places_fill_chunk_after_chunk() {
        let mut expected =
            (0..NUM_CHUNKS).flat_map(|chunk| (0..FIRST_CHUNK << chunk).map(move |at| (chunk, at)));
        for index in 0..1000 {
            assert_eq!(Some(place(index)), expected.next());
        }
        let (chunk, at) = place(MAX_OBJECTS - 1);
        assert!(chunk < NUM_CHUNKS && at < FIRST_CHUNK << chunk);
    }

    #[test]
    fn an_object_lives_until_it_is_retired() {
        static TABLE: Table<Probe> = Table::new();
        let (table, freed) = (&TABLE, Arc::new(AtomicUsize::new(0)));
        let handles: Vec<_> = (0..1000).map(|_| table.insert(Probe(Arc::clone(&freed))).unwrap()).collect();
        for handle in &handles {
            assert!(table.pin(*handle, "plan").is_ok());
        }
        assert_eq!(freed.load(Ordering::SeqCst), 0);
        for handle in &handles {
            drop(table.retire(*handle, "plan", InUse::Refused).unwrap());
            assert!(bad(table.pin(*handle, "plan")).contains("plan is an ep_plan_t that was destroyed"));
            bad(table.retire(*handle, "plan", InUse::Waits));
        }
        assert_eq!(freed.load(Ordering::SeqCst), 1000);
    }

    #[test]
    fn a_reused_place_does_not_answer_to_the_old_handle() {
        static TABLE: Table<Probe> = Table::new();
        let (table, freed) = (&TABLE, Arc::new(AtomicUsize::new(0)));
        let mut old = Vec::new();
        for _ in 0..100 {
            let handle = table.insert(Probe(Arc::clone(&freed))).unwrap();
            drop(table.retire(handle, "plan", InUse::Refused).unwrap());
            old.push(handle);
        }
        let alive = table.insert(Probe(Arc::clone(&freed))).unwrap();
        assert!(old.iter().all(|handle| *handle != alive));
        old.iter().for_each(|handle| drop(bad(table.pin(*handle, "plan"))));
        assert!(table.pin(alive, "plan").is_ok());
    }

    #[test]
    fn what_is_no_handle_is_told_apart() {
        static TABLE: Table<Probe> = Table::new();
        let (table, freed) = (&TABLE, Arc::new(AtomicUsize::new(0)));
        let with = |kind, generation, index| {
            ptr::without_provenance::<u8>(Bits { kind, generation, index }.encode())
        };
        assert_eq!(bad(table.pin(ptr::null(), "plan")), "plan is NULL, expected an ep_plan_t");
        let group = with(Kind::Group, 1, 0);
        assert_eq!(bad(table.pin(group, "plan")), "plan is an ep_group_t, expected an ep_plan_t");
        let handle = table.insert(Probe(freed)).unwrap();
        assert_eq!(handle.cast_const(), with(Kind::Plan, 1, 0));
        let on_stack = 0u8;
        let no_slot = with(Kind::Plan, 1, MAX_OBJECTS - 1);
        for stray in [&raw const on_stack, handle.wrapping_add(1), no_slot, ptr::without_provenance(1)] {
            assert!(bad(table.pin(stray, "plan")).contains("which no call has returned"), "{stray:p}");
        }
        // There is a slot, but no call has returned this handle yet.
        bad(table.pin(with(Kind::Plan, 1, 1), "plan"));
        bad(table.pin(with(Kind::Plan, 2, 0), "plan"));
    }

    #[test]
    fn a_pinned_object_is_not_freed() {
        static TABLE: Table<Probe> = Table::new();
        let (table, freed) = (&TABLE, Arc::new(AtomicUsize::new(0)));
        let handle = table.insert(Probe(Arc::clone(&freed))).unwrap();
        let pin = table.pin(handle, "plan").unwrap();
        let error = table.retire(handle, "plan", InUse::Refused).err().unwrap();
        assert_eq!(error.status, Status::InvalidState);
        assert!(error.message.contains("1 calls are using this ep_plan_t"), "{error}");
        drop(table.retire(handle, "plan", InUse::Waits).unwrap());
        assert_eq!(freed.load(Ordering::SeqCst), 0);
        bad(table.pin(handle, "plan"));
        drop(pin);
        assert_eq!(freed.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn a_slot_whose_generations_are_used_up_is_given_up() {
        static TABLE: Table<Probe> = Table::new();
        let (table, freed) = (&TABLE, Arc::new(AtomicUsize::new(0)));
        let first = table.insert(Probe(Arc::clone(&freed))).unwrap();
        drop(table.retire(first, "plan", InUse::Refused).unwrap());
        let slot = &table.chunks[0].get().unwrap()[0];
        slot.word.store(MAX_GENERATION << WORD_GENERATION_SHIFT, Ordering::SeqCst);
        let last = table.insert(Probe(Arc::clone(&freed))).unwrap();
        assert!(table.pin(last, "plan").is_ok());
        drop(table.retire(last, "plan", InUse::Refused).unwrap());
        let next = table.insert(Probe(freed)).unwrap();
        assert_eq!(Bits::decode(next.addr()).unwrap().index, 1);
        bad(table.pin(first, "plan"));
        bad(table.pin(last, "plan"));
    }

    #[test]
    fn threads_that_race_to_destroy_free_once() {
        const ROUNDS: usize = if cfg!(miri) { 20 } else { 2000 };
        static TABLE: Table<Probe> = Table::new();
        let (table, freed) = (&TABLE, Arc::new(AtomicUsize::new(0)));
        for _ in 0..ROUNDS {
            let handle = table.insert(Probe(Arc::clone(&freed))).unwrap().addr();
            thread::scope(|scope| {
                scope.spawn(move || {
                    if let Ok(probe) = table.pin(ptr::without_provenance(handle), "plan") {
                        assert!(Arc::strong_count(&probe.0) >= 2);
                    }
                });
                let end = move || {
                    let handle = ptr::without_provenance_mut(handle);
                    table.retire(handle, "plan", InUse::Waits).is_ok()
                };
                let enders = [scope.spawn(end), scope.spawn(end)];
                assert_eq!(enders.map(|ender| ender.join().unwrap()).iter().filter(|ok| **ok).count(), 1);
            });
        }
        assert_eq!(freed.load(Ordering::SeqCst), ROUNDS);
    }
}
