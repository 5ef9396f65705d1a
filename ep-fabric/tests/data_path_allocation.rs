//! Once a NIC is open and connected, this crate allocates nothing: neither to post nor to poll nor to ask for sleep.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::time::{Duration, Instant};

use ep_fabric::transport::{Completion, Posted, Region, Transport, Write};
use ep_fabric::{Library, Nic, Selection, Settings};

/// Counts the allocations of Rust code by thread; those of libfabric are its own.
struct Counting;

thread_local! {
    static COUNT: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: hands everything to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // A thread that is ending has no counter any more.
        let _ = COUNT.try_with(|count| count.set(count.get() + 1));
        // SAFETY: as the caller's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as the caller's.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn count() -> usize {
    COUNT.with(Cell::get)
}

#[test]
fn writes_and_completions_allocate_nothing() {
    let library = match Library::open() {
        Ok(library) => library,
        Err(error) => {
            assert!(std::env::var_os("CI").is_none(), "promised in CI, but could not run: {error}");
            return println!("skipped: {error}");
        }
    };
    let settings =
        Settings { nics: vec![String::from("127.0.0.1")], ..Settings::from_env().expect("good settings") };
    let selection = Selection::make(&library, &settings, false).expect("a provider");
    let mut nic = Nic::open(&selection, 0, &settings).expect("the NIC opens");
    let mut memory = vec![7u8; 8192];
    // SAFETY: the memory outlives the NIC, and is not touched while writes are in flight.
    let registered =
        nic.register(&unsafe { Region::new(memory.as_mut_ptr(), 8192, None) }).expect("registered");
    let address = nic.address();
    let peer = nic.connect(&address).expect("its own address");
    let mut found: Vec<Completion> = Vec::with_capacity(64);
    let write = Write {
        peer,
        local: registered.id,
        local_offset: 0,
        remote: registered.remote,
        remote_offset: 4096,
        bytes: 4096,
        immediate: 1,
        context: 1,
    };
    let deadline = Instant::now() + Duration::from_secs(60);
    let mut run = |count: usize| {
        let (mut posted, mut completed) = (0, 0);
        while completed < 2 * count {
            if posted < count && nic.write(&write).expect("a good write") == Posted::Yes {
                posted += 1;
            }
            nic.poll(&mut found).expect("the NIC lives");
            completed += found.len();
            found.clear();
            let _ = nic.may_sleep();
            assert!(Instant::now() < deadline, "{posted} posted, {completed} completed");
        }
    };
    run(10);
    let before = count();
    run(2000);
    assert_eq!(count() - before, 0, "allocations in 2000 writes");
}
