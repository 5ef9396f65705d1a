//! Every entry that takes a handle, with everything that is not one.

use std::ffi::c_void;
use std::ptr;

use ep::capi::*;
use ep_core::Status;

use super::fixture::*;

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Group,
    Window,
    Stream,
    Plan,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::Group => "ep_group_t",
            Kind::Window => "ep_window_t",
            Kind::Stream => "ep_stream_t",
            Kind::Plan => "ep_plan_t",
        }
    }
}

struct Entry {
    name: &'static str,
    kind: Kind,
    /// Whether NULL means "nothing to do" or "none" there.
    null_is_allowed: bool,
    /// Calls the entry with this handle and otherwise correct arguments.
    call: unsafe fn(*mut c_void, &mut Args) -> EpStatus,
}

const fn entry(name: &'static str, kind: Kind, call: unsafe fn(*mut c_void, &mut Args) -> EpStatus) -> Entry {
    Entry { name, kind, null_is_allowed: false, call }
}

const fn ending(
    name: &'static str,
    kind: Kind,
    call: unsafe fn(*mut c_void, &mut Args) -> EpStatus,
) -> Entry {
    Entry { name, kind, null_is_allowed: true, call }
}

/// A place for a handle that no call may write.
fn nowhere<T>() -> *mut *mut T {
    Box::leak(Box::new(ptr::null_mut()))
}

#[rustfmt::skip]
#[expect(
    clippy::undocumented_unsafe_blocks,
    reason = "in all of them: handles are looked up, never dereferenced, and the other arguments are correct",
)]
const ENTRIES: &[Entry] = &[
    ending("ep_group_destroy", Kind::Group, |h, _| unsafe { ep_group_destroy(h.cast(), 0) }),
    entry("ep_group_abort", Kind::Group, |h, _| unsafe { ep_group_abort(h.cast()) }),
    entry("ep_group_health", Kind::Group, |h, _| unsafe {
        ep_group_health(h.cast(), &mut zeroed(), ptr::null_mut(), 0)
    }),
    entry("ep_group_query", Kind::Group, |h, _| unsafe { ep_group_query(h.cast(), &mut zeroed()) }),
    entry("ep_group_stats", Kind::Group, |h, _| unsafe {
        ep_group_stats(h.cast(), &mut EpPeerStats::default(), 1)
    }),
    entry("ep_window_allocate", Kind::Group, |h, _| unsafe { ep_window_allocate(h.cast(), 64, nowhere()) }),
    entry("ep_window_register", Kind::Group, |h, args| unsafe {
        ep_window_register(h.cast(), args.rows.as_mut_ptr().cast(), 64, nowhere())
    }),
    entry("ep_plan_bytes", Kind::Group, |h, _| unsafe { ep_plan_bytes(h.cast(), &plan_config(1), &mut 0) }),
    entry("ep_plan_create", Kind::Group, |h, _| unsafe {
        ep_plan_create(h.cast(), &plan_config(1), ptr::null_mut(), 0, nowhere())
    }),
    entry("ep_window_data", Kind::Window, |h, _| unsafe {
        ep_window_data(h.cast(), &mut ptr::null_mut(), &mut 0)
    }),
    ending("ep_window_release", Kind::Window, |h, _| unsafe { ep_window_release(h.cast()) }),
    entry("ep_stream_synchronize", Kind::Stream, |h, _| unsafe { ep_stream_synchronize(h.cast(), 1) }),
    ending("ep_stream_destroy", Kind::Stream, |h, _| unsafe { ep_stream_destroy(h.cast()) }),
    ending("ep_plan_destroy", Kind::Plan, |h, _| unsafe { ep_plan_destroy(h.cast()) }),
    entry("ep_plan_counts", Kind::Plan, |h, args| unsafe { ep_plan_counts(h.cast(), 1, &mut args.out.counts) }),
    entry("ep_plan_update", Kind::Plan, |h, args| { args.plan = h.cast(); args.update() }),
    entry("ep_dispatch", Kind::Plan, |h, args| { args.plan = h.cast(); args.dispatch() }),
    entry("ep_combine", Kind::Plan, |h, args| { args.plan = h.cast(); args.combine() }),
    // The streams of the calls that take one.
    ending("ep_plan_update", Kind::Stream, |h, args| { args.stream = h; args.update() }),
    ending("ep_dispatch", Kind::Stream, |h, args| { args.stream = h; args.dispatch() }),
    ending("ep_combine", Kind::Stream, |h, args| { args.stream = h; args.combine() }),
];

#[track_caller]
fn refused(fixture: &Fixture, entry: &Entry, what: &str, handle: *mut c_void, texts: &[&str]) {
    let mut args = Args::new(fixture, fixture.plan);
    // SAFETY: handles are looked up, never dereferenced; everything else is correct.
    let found = unsafe { (entry.call)(handle, &mut args) };
    let case = format!("{} with {what}", entry.name);
    assert_refused(fixture, &args, (&case, entry.name, Status::BadHandle, texts), found);
}

#[test]
fn every_entry_of_the_header_with_a_handle_is_listed() {
    let listed: std::collections::BTreeSet<_> = ENTRIES.iter().map(|entry| entry.name.to_string()).collect();
    let without_handle = [
        "ep_group_create_versioned",
        "ep_last_error",
        "ep_status_name",
        "ep_status_scope",
        "ep_stream_create",
        "ep_unique_id_create",
        "ep_unique_id_from_address",
        "ep_version",
    ];
    let all = crate::compile::header_functions();
    let expected: Vec<_> = all.into_iter().filter(|name| !without_handle.contains(&name.as_str())).collect();
    assert_eq!(listed.into_iter().collect::<Vec<_>>(), expected);
}

#[test]
fn null_is_refused_where_it_means_nothing() {
    let fixture = Fixture::new();
    for entry in ENTRIES {
        if entry.null_is_allowed {
            let mut args = Args::new(&fixture, fixture.plan);
            // SAFETY: NULL is allowed there.
            assert_ok(unsafe { (entry.call)(ptr::null_mut(), &mut args) });
        } else {
            refused(&fixture, entry, "NULL", ptr::null_mut(), &["is NULL", entry.kind.name()]);
        }
    }
}

#[test]
fn handles_of_another_kind_are_refused_by_name() {
    let fixture = Fixture::new();
    for entry in ENTRIES {
        let handles: [(Kind, *mut c_void); 4] = [
            (Kind::Group, fixture.group.cast()),
            (Kind::Window, fixture.window.cast()),
            (Kind::Stream, fixture.stream.cast()),
            (Kind::Plan, fixture.plan.cast()),
        ];
        for (kind, handle) in handles.into_iter().filter(|(kind, _)| *kind != entry.kind) {
            refused(&fixture, entry, kind.name(), handle, &[kind.name(), entry.kind.name()]);
        }
    }
}

#[test]
fn stray_pointers_are_refused_unread() {
    let fixture = Fixture::new();
    let mut on_stack = [0u64; 4];
    let mut on_heap = vec![0u64; 4];
    for entry in ENTRIES {
        let strays = [
            on_stack.as_mut_ptr().cast::<c_void>(),
            on_heap.as_mut_ptr().cast(),
            on_stack.as_mut_ptr().wrapping_byte_add(1).cast(),
            ptr::without_provenance_mut(1),
            ptr::without_provenance_mut(usize::MAX),
            fixture.group.wrapping_byte_add(1).cast(),
            // Pages that are not there.
            ptr::without_provenance_mut(4096),
        ];
        for stray in strays {
            refused(&fixture, entry, "a stray pointer", stray, &["which no call has returned"]);
        }
    }
}

#[test]
fn destroyed_handles_are_refused() {
    let fixture = Fixture::new();
    // Objects of their own, and others in the places that they leave.
    let (old, _new) = (Fixture::new(), Fixture::new());
    let handles = |kind| -> *mut c_void {
        match kind {
            Kind::Group => old.group.cast(),
            Kind::Window => old.window.cast(),
            Kind::Stream => old.stream.cast(),
            Kind::Plan => old.plan.cast(),
        }
    };
    // SAFETY: the handles are alive.
    unsafe {
        assert_ok(ep_plan_destroy(old.plan));
        assert_ok(ep_stream_destroy(old.stream));
        assert_ok(ep_window_release(old.window));
        assert_ok(ep_group_destroy(old.group, 0));
    }
    let _newer = Fixture::new();
    for entry in ENTRIES {
        refused(&fixture, entry, "a destroyed handle", handles(entry.kind), &["destroyed already"]);
    }
}

#[test]
fn plans_and_windows_of_a_destroyed_group_can_only_be_destroyed() {
    let fixture = Fixture::new();
    let old = Fixture::new();
    // SAFETY: the handle is alive.
    assert_ok(unsafe { ep_group_destroy(old.group, 0) });
    for entry in ENTRIES.iter().filter(|entry| !entry.null_is_allowed) {
        match entry.kind {
            Kind::Plan => refused(&fixture, entry, "an orphaned plan", old.plan.cast(), &["destroyed"]),
            Kind::Window => refused(&fixture, entry, "an orphaned window", old.window.cast(), &["destroyed"]),
            Kind::Group | Kind::Stream => {}
        }
    }
    // SAFETY: the handles are alive.
    unsafe {
        assert_ok(ep_plan_destroy(old.plan));
        assert_ok(ep_plan_destroy(old.flat));
        assert_ok(ep_plan_destroy(old.fresh));
        assert_ok(ep_window_release(old.window));
    }
}
