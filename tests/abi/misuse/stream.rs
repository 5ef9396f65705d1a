//! Streams, and what a queued call does with a mistake.

use std::ptr;

use ep::capi::*;
use ep_core::Status;

use super::fixture::*;

#[test]
fn stream_entries_refuse_pointers_that_are_none() {
    let mut stream: *mut EpStream = ptr::null_mut();
    let out = &raw mut stream;
    for (text, out) in
        [("stream_out is NULL", ptr::null_mut()), ("stream_out is 0x", out.wrapping_byte_add(4))]
    {
        // SAFETY: null and misaligned pointers are refused.
        assert_eq!(unsafe { ep_stream_create(out) }, Status::InvalidArgument.code());
        assert!(last_error().contains(text), "{}", last_error());
    }
    assert!(stream.is_null());
}

#[test]
fn a_queued_mistake_is_refused_at_once_or_told_by_synchronize() {
    let fixture = Fixture::new();
    let mut args = Args::new(&fixture, fixture.plan);
    args.stream = fixture.stream.cast();
    args.idx[1] = 99;
    let queued = args.update();
    // SAFETY: the handle is alive.
    let status = if queued == 0 { unsafe { ep_stream_synchronize(fixture.stream, 0) } } else { queued };
    let expected = ("queued", "", Status::OutOfRange, &["token 0", "slot 1", "99"][..]);
    assert_eq!(status, expected.2.code(), "{}", last_error());
    for part in expected.3 {
        assert!(last_error().contains(part), "{}", last_error());
    }
    // The error was told once, and is gone.
    // SAFETY: the handle is alive.
    assert_ok(unsafe { ep_stream_synchronize(fixture.stream, 0) });
    args.idx[1] = 0;
    assert_ok(args.update());
    assert_ok(args.dispatch());
    // SAFETY: the handle is alive.
    assert_ok(unsafe { ep_stream_synchronize(fixture.stream, 0) });
    assert_eq!(args.out.num_rows[0], ROWS as i64);
    fixture.assert_works();
}

#[test]
fn a_stream_may_be_destroyed_with_calls_queued() {
    let fixture = Fixture::new();
    let mut args = Args::new(&fixture, fixture.plan);
    args.stream = fixture.stream.cast();
    for _ in 0..32 {
        assert_ok(args.update());
        assert_ok(args.dispatch());
    }
    // SAFETY: the handle is alive.
    assert_ok(unsafe { ep_stream_destroy(fixture.stream) });
    assert_eq!(args.out.num_rows[0], ROWS as i64);
    fixture.assert_works();
}
