//! An allocator that counts the allocations of a thread that asked for it.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static COUNTING: Cell<bool> = const { Cell::new(false) };
    static COUNT: Cell<usize> = const { Cell::new(0) };
}

struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn note() {
    // A thread that ends has lost its cells already; it is not one that counts.
    if COUNTING.try_with(Cell::get).unwrap_or(false) {
        COUNT.with(|count| count.set(count.get() + 1));
    }
}

// SAFETY: every request is passed on to the system's allocator as it is.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note();
        // SAFETY: by the caller's word.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, address: *mut u8, layout: Layout) {
        note();
        // SAFETY: by the caller's word.
        unsafe { System.dealloc(address, layout) }
    }

    unsafe fn realloc(&self, address: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        note();
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

#[test]
fn the_counter_counts() {
    let (kept, count) = count(|| std::hint::black_box(vec![1u8; 100]));
    assert_eq!(count, 1);
    assert_eq!(self::count(|| drop(kept)).1, 1);
    assert_eq!(self::count(|| ()).1, 0);
}
