//! An allocator that counts, for a thread that asks for it or for the whole process.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicIsize, AtomicUsize, Ordering};

thread_local! {
    static COUNTING: Cell<bool> = const { Cell::new(false) };
    static COUNT: Cell<usize> = const { Cell::new(0) };
}

static COUNTING_ALL: AtomicBool = AtomicBool::new(false);
static COUNT_ALL: AtomicUsize = AtomicUsize::new(0);
static LIVE_BYTES: AtomicIsize = AtomicIsize::new(0);

struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn note(more_bytes: isize) {
    LIVE_BYTES.fetch_add(more_bytes, Ordering::Relaxed);
    if COUNTING_ALL.load(Ordering::Relaxed) {
        COUNT_ALL.fetch_add(1, Ordering::Relaxed);
    }
    // A thread that ends has lost its cells already; it is not one that counts.
    if COUNTING.try_with(Cell::get).unwrap_or(false) {
        COUNT.with(|count| count.set(count.get() + 1));
    }
}

// SAFETY: every request is passed on to the system's allocator as it is.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note(layout.size() as isize);
        // SAFETY: by the caller's word.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, address: *mut u8, layout: Layout) {
        note(-(layout.size() as isize));
        // SAFETY: by the caller's word.
        unsafe { System.dealloc(address, layout) }
    }

    unsafe fn realloc(&self, address: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        note(size as isize - layout.size() as isize);
        // SAFETY: by the caller's word.
        unsafe { System.realloc(address, layout, size) }
    }
}

/// Runs `body` and returns how often this thread allocated or freed meanwhile.
pub(crate) fn count<T>(body: impl FnOnce() -> T) -> (T, usize) {
    COUNT.set(0);
    COUNTING.set(true);
    let result = body();
    COUNTING.set(false);
    (result, COUNT.get())
}

/// Begins to count what any thread does.
pub(crate) fn start_counting_all() {
    COUNT_ALL.store(0, Ordering::SeqCst);
    COUNTING_ALL.store(true, Ordering::SeqCst);
}

/// Ends it, and returns how often any thread allocated or freed.
pub(crate) fn stop_counting_all() -> usize {
    COUNTING_ALL.store(false, Ordering::SeqCst);
    COUNT_ALL.load(Ordering::SeqCst)
}

/// Bytes that this process has allocated and not freed.
pub(crate) fn live_bytes() -> isize {
    LIVE_BYTES.load(Ordering::SeqCst)
}

#[test]
fn the_counter_counts() {
    let (kept, count) = count(|| std::hint::black_box(vec![1u8; 100]));
    assert_eq!(count, 1);
    assert_eq!(self::count(|| drop(kept)).1, 1);
    assert_eq!(self::count(|| ()).1, 0);
}
