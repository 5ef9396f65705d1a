//! The data path allocates nothing: not in the C entries, and not in the engine once it has warmed up.
//!
//! A test binary of its own, since its allocator counts what the whole process does.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ffi::CStr;
use std::ptr;
use std::thread;

use ep::capi::*;
use ep_core::tensor::Dtype;

struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: hands everything to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // A thread that is ending has no counter any more, and no call to count.
        let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
        // SAFETY: passed on to the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: passed on to the caller.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const TOKENS: usize = 64;
const TOPK: usize = 4;
const EXPERTS: usize = 16;
const HIDDEN: usize = 128;
const RANKS: usize = 2;
/// Room for all that both ranks send.
const ROWS: usize = RANKS * TOKENS * TOPK;

fn zeroed<T: Copy>() -> T {
    // SAFETY: all structs of the header may be all zero.
    let mut value: T = unsafe { std::mem::zeroed() };
    // SAFETY: they begin with their size.
    unsafe { ptr::from_mut(&mut value).cast::<u32>().write(size_of::<T>() as u32) };
    value
}

#[track_caller]
fn assert_ok(status: EpStatus) {
    // SAFETY: the text lives until this thread's next call.
    assert_eq!(status, 0, "{:?}", unsafe { CStr::from_ptr(ep_last_error()) });
}

fn floats(data: &mut [f32], rows: usize, cols: usize) -> EpTensor {
    EpTensor::contiguous(data.as_mut_ptr().cast(), Dtype::F32, rows, cols)
}

/// Runs batches on one rank and returns how often its thread allocated, once scratch memory has grown to
/// what the plan needs.
fn run_rank(rank: usize, id: &EpUniqueId, layout: i32) -> u64 {
    let bootstrap = EpBootstrap { rank: rank as i32, num_ranks: RANKS as i32, unique_id: id, ..zeroed() };
    let plan_config = EpPlanConfig {
        topk: TOPK as u32,
        num_experts: EXPERTS as u32,
        max_tokens: TOKENS as u64,
        layout,
        ..zeroed()
    };
    let (config, mut group, mut plan) = (zeroed(), ptr::null_mut(), ptr::null_mut());
    let mut idx: Vec<i32> = (0..TOKENS * TOPK).map(|i| ((i * 7 + rank) % EXPERTS) as i32).collect();
    let (mut tokens, mut rows) = (vec![1f32; TOKENS * HIDDEN], vec![0f32; ROWS * HIDDEN]);
    let (mut weights, mut combined) = (vec![1f32; TOKENS * TOPK], vec![0f32; TOKENS * HIDDEN]);
    let topk_idx = EpTensor::contiguous(idx.as_mut_ptr().cast(), Dtype::I32, TOKENS, TOPK);
    let (mut send, mut receive): (EpDispatchInputs, EpDispatchOutputs) = (zeroed(), zeroed());
    let (mut give, mut get): (EpCombineInputs, EpCombineOutputs) = (zeroed(), zeroed());
    (send.num_payloads, receive.num_payloads) = (1, 1);
    send.payloads[0] = floats(&mut tokens, TOKENS, HIDDEN);
    send.topk_weights = floats(&mut weights, TOKENS, TOPK);
    receive.payloads[0] = floats(&mut rows, ROWS, HIDDEN);
    give.rows = receive.payloads[0];
    get.combined = floats(&mut combined, TOKENS, HIDDEN);
    let options: EpOptions = zeroed();
    // SAFETY: every pointer is to a local of the right type, and the tensors describe the buffers above.
    unsafe {
        assert_ok(ep_group_create_versioned(ep_version(), &config, &bootstrap, &mut group));
        assert_ok(ep_plan_create(group, &plan_config, ptr::null_mut(), 0, &mut plan));
        let batch = || {
            assert_ok(ep_plan_update(plan, &topk_idx, &options, ptr::null_mut()));
            assert_ok(ep_dispatch(plan, &send, &receive, &options, ptr::null_mut()));
            assert_ok(ep_combine(plan, &give, &get, ptr::null(), ptr::null_mut()));
        };
        (0..3).for_each(|_| batch());
        let before = ALLOCATIONS.get();
        (0..100).for_each(|_| batch());
        let during = ALLOCATIONS.get() - before;
        assert_ok(ep_plan_destroy(plan));
        assert_ok(ep_group_destroy(group, 0));
        during
    }
}

#[test]
fn update_dispatch_and_combine_do_not_allocate() {
    for layout in [0, 1] {
        let mut id = EpUniqueId { bytes: [0; 128] };
        // SAFETY: the address of an id.
        assert_ok(unsafe { ep_unique_id_create(&mut id) });
        let allocations = thread::scope(|scope| {
            let id = &id;
            let ranks: [_; RANKS] =
                std::array::from_fn(|rank| scope.spawn(move || run_rank(rank, id, layout)));
            ranks.map(|rank| rank.join().expect("the rank ends"))
        });
        assert_eq!(allocations, [0; RANKS], "allocations in 100 batches of layout {layout}, by rank");
    }
}
