//! Objects that end while others still use them, from other threads and on other ranks.

use std::ffi::CStr;
use std::ptr;
use std::thread;
use std::time::{Duration, Instant};

use ep::capi::*;
use ep_core::Status;
use ep_core::tensor::Dtype;

use crate::misuse::fixture::*;

/// A handle may be used by any thread.
struct Handle<T>(*mut T);

impl<T> Clone for Handle<T> {
    fn clone(&self) -> Handle<T> {
        *self
    }
}

impl<T> Copy for Handle<T> {}

// SAFETY: a handle is a number that the library looks up.
unsafe impl<T> Send for Handle<T> {}

impl<T> Handle<T> {
    fn get(self) -> *mut T {
        self.0
    }
}

/// Two ranks of one group, both in this process.
fn two_groups() -> [Handle<EpGroup>; 2] {
    let mut id = EpUniqueId { bytes: [0; 128] };
    // SAFETY: the address of an id.
    assert_ok(unsafe { ep_unique_id_create(&mut id) });
    let create = move |rank| {
        let bootstrap = EpBootstrap { rank, num_ranks: 2, unique_id: &id, ..zeroed() };
        let config: EpGroupConfig = zeroed();
        let mut group = ptr::null_mut();
        // SAFETY: every pointer is to a local of the right type.
        assert_ok(unsafe { ep_group_create_versioned(ep_version(), &config, &bootstrap, &mut group) });
        Handle(group)
    };
    let other = thread::spawn(move || create(1));
    [create(0), other.join().expect("rank 1 joins")]
}

fn plan_of(group: Handle<EpGroup>) -> Handle<EpPlan> {
    let mut plan = ptr::null_mut();
    let config = plan_config(1);
    // SAFETY: every pointer is to a local of the right type.
    assert_ok(unsafe { ep_plan_create(group.get(), &config, ptr::null_mut(), 0, &mut plan) });
    Handle(plan)
}

/// An update that a peer does not join, on a thread of its own.
fn lonely_update(plan: Handle<EpPlan>, timeout_ms: u32) -> thread::JoinHandle<(EpStatus, String)> {
    thread::spawn(move || {
        let mut idx = vec![0i64; TOKENS * TOPK];
        let topk_idx = matrix(&mut idx, Dtype::I64, TOKENS, TOPK);
        let options = EpOptions { timeout_ms, ..zeroed() };
        // SAFETY: every pointer is to a local of the right type.
        let status = unsafe { ep_plan_update(plan.get(), &topk_idx, &options, ptr::null_mut()) };
        (status, last_error())
    })
}

/// Waits until a call is inside the engine: nothing tells so from outside.
fn let_it_begin() {
    thread::sleep(Duration::from_millis(200));
}

#[track_caller]
fn assert_status(status: EpStatus, expected: Status) {
    assert_eq!(Status::from_code(status), Some(expected), "{}", last_error());
}

#[test]
fn destroying_a_group_ends_the_call_that_waits_in_it() {
    let [mine, peers] = two_groups();
    let plan = plan_of(mine);
    let waiting = lonely_update(plan, 60_000);
    let_it_begin();
    // SAFETY: handles are looked up.
    unsafe {
        // While a call uses it, a plan stays.
        assert_status(ep_plan_destroy(plan.get()), Status::InvalidState);
        assert!(last_error().contains("1 calls are using this ep_plan_t"), "{}", last_error());
        let begun = Instant::now();
        ep_group_destroy(mine.get(), 300);
        assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
        let (status, text) = waiting.join().expect("the call ends");
        assert_eq!(Status::from_code(status), Some(Status::Aborted), "{text}");
        assert_ok(ep_plan_destroy(plan.get()));
        assert_status(ep_group_abort(mine.get()), Status::BadHandle);
        assert_ok(ep_group_destroy(peers.get(), 0));
    }
}

#[test]
fn abort_from_another_thread_ends_the_call_at_once() {
    let [mine, peers] = two_groups();
    let plan = plan_of(mine);
    let waiting = lonely_update(plan, 60_000);
    let_it_begin();
    let begun = Instant::now();
    // SAFETY: handles are looked up.
    assert_ok(unsafe { ep_group_abort(mine.get()) });
    let (status, text) = waiting.join().expect("the call ends");
    assert_eq!(Status::from_code(status), Some(Status::Aborted), "{text}");
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    // The peer sees it too.
    let mut info: EpErrorInfo = zeroed();
    // SAFETY: the address of a struct; handles are looked up.
    unsafe {
        assert_ok(ep_group_health(peers.get(), &mut info, ptr::null_mut(), 0));
        assert_eq!((info.status, info.rank), (Status::Aborted.code(), 0));
        assert_ok(ep_plan_destroy(plan.get()));
        assert_ok(ep_group_destroy(mine.get(), 0));
        assert_ok(ep_group_destroy(peers.get(), 0));
    }
}

#[test]
fn a_peer_that_does_not_come_is_named_at_the_deadline() {
    let [mine, peers] = two_groups();
    let plan = plan_of(mine);
    let (status, text) = lonely_update(plan, 300).join().expect("the call ends");
    assert_eq!(Status::from_code(status), Some(Status::Timeout), "{text}");
    assert!(text.contains("rank 1"), "{text}");
    let (mut info, mut states): (EpErrorInfo, _) = (zeroed(), [-1; 2]);
    // SAFETY: the addresses of a struct and of as many states; handles are looked up.
    unsafe {
        assert_ok(ep_group_health(mine.get(), &mut info, states.as_mut_ptr(), 2));
        assert_eq!((info.status, info.rank, info.peer, info.lane), (Status::Timeout.code(), 0, 1, 0));
        assert!(CStr::from_ptr(info.text.as_ptr()).to_str().expect("texts are UTF-8").contains("rank 1"));
        assert_eq!(states, [EP_RANK_ALIVE; 2]);
        assert_ok(ep_plan_destroy(plan.get()));
        assert_ok(ep_group_destroy(mine.get(), 0));
        // Who left is told from who is there.
        assert_ok(ep_group_health(peers.get(), ptr::null_mut(), states.as_mut_ptr(), 2));
        assert_eq!(states, [EP_RANK_LOST, EP_RANK_ALIVE]);
        assert_ok(ep_group_destroy(peers.get(), 0));
    }
}

#[test]
fn a_window_keeps_its_memory_until_it_is_released() {
    let fixture = Fixture::new();
    let (mut data, mut bytes) = (ptr::null_mut(), 0);
    // SAFETY: every pointer is to a local of the right type; the window outlives the writes.
    unsafe {
        assert_ok(ep_window_data(fixture.window, &mut data, &mut bytes));
        assert_ok(ep_group_destroy(fixture.group, 0));
        data.cast::<u8>().write_bytes(1, bytes);
        assert_ok(ep_window_release(fixture.window));
    }
}

#[test]
fn each_thread_has_its_own_last_error() {
    // SAFETY: a stray handle is looked up.
    assert_status(unsafe { ep_group_abort(ptr::without_provenance_mut(16)) }, Status::BadHandle);
    let mine = last_error();
    thread::spawn(|| {
        assert_eq!(last_error(), "");
        // SAFETY: NULL is refused.
        assert_status(unsafe { ep_stream_create(ptr::null_mut()) }, Status::InvalidArgument);
        assert!(last_error().starts_with("ep_stream_create: "));
    })
    .join()
    .expect("the thread ends");
    assert_eq!(last_error(), mine);
    // A call that succeeds leaves the text.
    // SAFETY: NULL is allowed.
    assert_ok(unsafe { ep_group_destroy(ptr::null_mut(), 0) });
    assert_eq!(last_error(), mine);
}
