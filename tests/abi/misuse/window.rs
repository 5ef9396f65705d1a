//! Windows.

use std::ffi::c_void;
use std::ptr;

use ep::capi::*;
use ep_core::Status;
use ep_core::tensor::Dtype;

use super::fixture::*;

#[test]
fn window_entries_refuse_pointers_that_are_none() {
    let fixture = Fixture::new();
    let args = Args::new(&fixture, fixture.plan);
    let (mut window, mut data, mut bytes) = (ptr::null_mut::<EpWindow>(), ptr::null_mut::<c_void>(), 77);
    let (window_out, data_out, bytes_out) = (&raw mut window, &raw mut data, &raw mut bytes);
    let outs =
        [("window_out is NULL", ptr::null_mut()), ("window_out is 0x", window_out.wrapping_byte_add(1))];
    for (text, out) in outs {
        // SAFETY: null and misaligned pointers are refused.
        let found = unsafe { ep_window_allocate(fixture.group, 64, out) };
        assert_refused(
            &fixture,
            &args,
            (text, "ep_window_allocate", Status::InvalidArgument, &[text]),
            found,
        );
        // SAFETY: as above.
        let found = unsafe { ep_window_register(fixture.group, ptr::null_mut(), 0, out) };
        assert_refused(
            &fixture,
            &args,
            (text, "ep_window_register", Status::InvalidArgument, &[text]),
            found,
        );
    }
    let data_cases = [
        ("data_out is NULL", ptr::null_mut(), bytes_out),
        ("data_out is 0x", data_out.wrapping_byte_add(1), bytes_out),
        ("bytes_out is NULL", data_out, ptr::null_mut()),
        ("bytes_out is 0x", data_out, bytes_out.wrapping_byte_add(4)),
    ];
    for (text, data_out, bytes_out) in data_cases {
        // SAFETY: as above.
        let found = unsafe { ep_window_data(fixture.window, data_out, bytes_out) };
        assert_refused(&fixture, &args, (text, "ep_window_data", Status::InvalidArgument, &[text]), found);
    }
    assert!(window.is_null() && data.is_null() && bytes == 77);
}

#[test]
fn memory_that_nobody_has_is_refused_and_the_group_goes_on() {
    let fixture = Fixture::new();
    // The first ones are more than addresses can tell, the last is more than a machine has.
    for (bytes, expected) in [
        (usize::MAX, Status::InvalidArgument),
        (usize::MAX / 2, Status::InvalidArgument),
        (1 << 46, Status::OutOfMemory),
    ] {
        let mut window = ptr::null_mut();
        // SAFETY: the address of a pointer.
        let status = unsafe { ep_window_allocate(fixture.group, bytes, &mut window) };
        assert_eq!(status, expected.code(), "{bytes}: {}", last_error());
        assert!(last_error().contains(&bytes.to_string()), "{}", last_error());
        assert!(window.is_null());
        fixture.assert_works();
    }
}

#[test]
fn memory_of_the_caller_is_unsupported_with_the_reason() {
    let fixture = Fixture::new();
    let mut args = Args::new(&fixture, fixture.plan);
    let mut window = ptr::null_mut();
    let data = args.rows.as_mut_ptr().cast();
    // SAFETY: the memory is the test's.
    let found = unsafe { ep_window_register(fixture.group, data, 64, &mut window) };
    let texts = ["ep_window_allocate", "can map only memory that the library allocated"];
    assert_refused(&fixture, &args, ("register", "ep_window_register", Status::Unsupported, &texts), found);
    // SAFETY: NULL is refused.
    let found = unsafe { ep_window_register(fixture.group, ptr::null_mut(), 64, &mut window) };
    let expected = ("NULL", "ep_window_register", Status::InvalidArgument, &["data is NULL"][..]);
    assert_refused(&fixture, &args, expected, found);
    assert!(window.is_null());
}

#[test]
fn the_window_after_the_last_one_is_refused_and_comes_when_one_has_gone() {
    let fixture = Fixture::new();
    let allocate = || {
        let mut window = ptr::null_mut();
        // SAFETY: the address of a pointer.
        let status = unsafe { ep_window_allocate(fixture.group, 64, &mut window) };
        (status, window)
    };
    // One is the fixture's.
    let mut windows = Vec::new();
    for _ in 1..64 {
        let (status, window) = allocate();
        assert_ok(status);
        windows.push(window);
    }
    let (status, window) = allocate();
    assert_eq!(status, Status::Capacity.code());
    assert!(last_error().contains("64") && window.is_null(), "{}", last_error());
    fixture.assert_works();
    // SAFETY: the handle is alive.
    assert_ok(unsafe { ep_window_release(windows.pop().expect("there are 63")) });
    let (status, window) = allocate();
    assert_ok(status);
    windows.push(window);
    for window in windows {
        // SAFETY: the handles are alive.
        assert_ok(unsafe { ep_window_release(window) });
    }
}

#[test]
fn a_window_may_be_empty() {
    let fixture = Fixture::new();
    let (mut window, mut data, mut bytes) = (ptr::null_mut(), ptr::null_mut(), 77);
    // SAFETY: every pointer is to a local of the right type.
    unsafe {
        assert_ok(ep_window_allocate(fixture.group, 0, &mut window));
        assert_ok(ep_window_data(window, &mut data, &mut bytes));
        assert_ok(ep_window_release(window));
    }
    assert_eq!(bytes, 0);
}

/// A call with one argument that this changes to begin at an address.
type Partly = (&'static str, fn(&mut Args, *mut u8), fn(&Args) -> EpStatus);

/// Every argument that has memory; each has more than 4 bytes of it.
const MEMORY: &[Partly] = &[
    ("topk_idx", |args, at| args.topk_idx.data = at.cast(), Args::update),
    ("inputs.payloads[0]", |args, at| args.send.payloads[0].data = at.cast(), Args::dispatch),
    ("inputs.topk_weights", |args, at| args.send.topk_weights.data = at.cast(), Args::dispatch),
    ("outputs.payloads[0]", |args, at| args.receive.payloads[0].data = at.cast(), Args::dispatch),
    (
        "outputs.payloads[0]",
        |args, at| {
            // Wider than its elements: the last row reaches over the end although as many bytes would fit.
            args.receive.payloads[0].data = at.cast();
            args.receive.payloads[0].row_stride = 64;
        },
        Args::dispatch,
    ),
    (
        "outputs.topk_weights",
        |args, at| {
            args.receive.topk_weights = matrix(&mut args.out.weights, Dtype::F32, ROWS, 1);
            args.receive.topk_weights.data = at.cast();
        },
        Args::dispatch,
    ),
    ("outputs.src_rank", |args, at| args.receive.src_rank = at.cast(), Args::dispatch),
    ("outputs.src_token", |args, at| args.receive.src_token = at.cast(), Args::dispatch),
    ("outputs.src_slot", |args, at| args.receive.src_slot = at.cast(), Args::dispatch),
    ("outputs.rows_per_expert", |args, at| args.receive.rows_per_expert = at.cast(), Args::dispatch),
    ("outputs.expert_offsets", |args, at| args.receive.expert_offsets = at.cast(), Args::dispatch),
    ("inputs.rows", |args, at| args.give.rows.data = at.cast(), Args::combine),
    (
        "inputs.row_weights",
        |args, at| {
            args.give.row_weights = matrix(&mut args.weights, Dtype::F32, ROWS, 1);
            args.give.row_weights.data = at.cast();
        },
        Args::combine,
    ),
    (
        "inputs.topk_weights",
        |args, at| {
            args.give.topk_weights = args.send.topk_weights;
            args.give.topk_weights.data = at.cast();
        },
        Args::combine,
    ),
    (
        "inputs.bias[0]",
        |args, at| {
            args.give.bias[0] = args.send.payloads[0];
            args.give.bias[0].data = at.cast();
        },
        Args::combine,
    ),
    ("outputs.combined", |args, at| args.get.combined.data = at.cast(), Args::combine),
    (
        "outputs.combined_weights",
        |args, at| {
            args.give.row_weights = matrix(&mut args.weights, Dtype::F32, ROWS, 1);
            args.get.combined_weights = matrix(&mut args.out.combined_weights, Dtype::F32, TOKENS, TOPK);
            args.get.combined_weights.data = at.cast();
        },
        Args::combine,
    ),
];

#[test]
fn memory_that_lies_partly_in_a_window_is_refused() {
    let fixture = Fixture::new();
    // Not whole pages: the rest of the page is not the window's.
    let asked = 1000;
    let (mut window, mut data, mut bytes) = (ptr::null_mut(), ptr::null_mut(), 0);
    // SAFETY: every pointer is to a local of the right type.
    unsafe {
        assert_ok(ep_window_allocate(fixture.group, asked, &mut window));
        assert_ok(ep_window_data(window, &mut data, &mut bytes));
    }
    let base = data.cast::<u8>();
    let bounds = format!("{:#x} to {:#x} ({asked} bytes)", base.addr(), base.addr() + asked);
    let overrun = [base.wrapping_sub(8), base.wrapping_add(asked - 8)];
    for (name, spoil, call) in MEMORY {
        for at in overrun {
            let mut args = Args::new(&fixture, fixture.plan);
            spoil(&mut args, at);
            let status = call(&args);
            let text = last_error();
            assert_eq!(status, Status::InvalidArgument.code(), "{name}: {text}");
            for part in [*name, "only partly", &bounds, &format!("lies at {:#x}", at.addr())] {
                assert!(text.contains(part), "{name}: \"{text}\" does not say \"{part}\"");
            }
        }
    }
    fixture.assert_works();
    let mut plan = ptr::null_mut();
    let memory = base.map_addr(|at| (at + asked).next_multiple_of(64) - 64);
    // SAFETY: the memory is refused.
    let status = unsafe {
        ep_plan_create(fixture.group, &plan_config(1), memory.cast::<c_void>(), 1 << 20, &mut plan)
    };
    assert_eq!(status, Status::InvalidArgument.code(), "{}", last_error());
    assert!(last_error().contains("plan memory") && last_error().contains(&bounds), "{}", last_error());

    // To the last byte is allowed.
    let mut args = Args::new(&fixture, fixture.plan);
    args.receive.payloads[0].data = base.wrapping_add(asked - 4 * ROWS * HIDDEN).cast();
    assert_ok(args.dispatch());
    // SAFETY: the handle is alive.
    assert_ok(unsafe { ep_window_release(window) });
}
