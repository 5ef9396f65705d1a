//! Structs of older and newer headers, through every entry that takes one.

use std::ffi::c_void;
use std::mem::offset_of;
use std::ptr;

use ep::capi::*;
use ep_core::Status;

use super::fixture::*;

/// Room for a struct with what a newer header has behind it.
#[repr(C, align(16))]
struct Room([u8; 2048]);

impl Room {
    fn new<T: Copy>(value: &T, struct_size: usize) -> Box<Room> {
        let mut room = Box::new(Room([0; 2048]));
        // SAFETY: the room is longer than every struct.
        unsafe { room.0.as_mut_ptr().cast::<T>().write(*value) };
        room.set_size(struct_size);
        room
    }

    fn set_size(&mut self, struct_size: usize) {
        self.0[..4].copy_from_slice(&(struct_size as u32).to_ne_bytes());
    }
}

/// One struct of one entry: which struct, through which field the first version went, and a call that is
/// correct when the struct is.
struct Case<'a> {
    entry: &'static str,
    arg: &'static str,
    bytes: usize,
    min_bytes: usize,
    room: Box<Room>,
    call: Box<dyn FnMut(*mut c_void) -> EpStatus + 'a>,
    /// Whether the call only succeeds with the whole struct.
    needs_all: bool,
}

fn case<'a, T: Copy>(
    entry: &'static str,
    arg: &'static str,
    min_bytes: usize,
    value: &T,
    mut call: impl FnMut(*mut T) -> EpStatus + 'a,
) -> Case<'a> {
    Case {
        entry,
        arg,
        bytes: size_of::<T>(),
        min_bytes,
        room: Room::new(value, size_of::<T>()),
        call: Box::new(move |pointer| call(pointer.cast())),
        needs_all: false,
    }
}

/// Everything behind `field`, and the field too.
macro_rules! through {
    ($type:ty, $field:ident : $field_type:ty) => {
        offset_of!($type, $field) + size_of::<$field_type>()
    };
}

fn group_cases(fixture: &Fixture) -> Vec<Case<'_>> {
    let create = |config: *const EpGroupConfig, bootstrap: *const EpBootstrap| {
        let mut group = ptr::null_mut();
        // SAFETY: the tests pass structs of `struct_size` bytes.
        let status = unsafe { ep_group_create_versioned(ep_version(), config, bootstrap, &mut group) };
        assert_eq!(status == 0, !group.is_null());
        // SAFETY: NULL or alive.
        unsafe { ep_group_destroy(group, 0) };
        // The text of the creation, not of the destruction, which succeeded.
        status
    };
    vec![
        case("ep_group_create", "config", 8, &zeroed::<EpGroupConfig>(), move |config| {
            create(config, &bootstrap_alone())
        }),
        case(
            "ep_group_create",
            "bootstrap",
            through!(EpBootstrap, file: *const u8),
            &bootstrap_alone(),
            move |bootstrap| create(&zeroed(), bootstrap),
        ),
        case("ep_group_health", "error_out", 8, &zeroed::<EpErrorInfo>(), |info| {
            // SAFETY: the tests pass structs of `struct_size` bytes.
            unsafe { ep_group_health(fixture.group, info, ptr::null_mut(), 0) }
        }),
        case(
            "ep_group_query",
            "info_out",
            through!(EpGroupInfo, num_ranks: i32),
            &zeroed::<EpGroupInfo>(),
            |info| {
                // SAFETY: as above.
                unsafe { ep_group_query(fixture.group, info) }
            },
        ),
    ]
}

fn plan_cases(fixture: &Fixture) -> Vec<Case<'_>> {
    let min = through!(EpPlanConfig, num_experts: u32);
    vec![
        case("ep_plan_bytes", "config", min, &plan_config(0), |config| {
            // SAFETY: the tests pass structs of `struct_size` bytes.
            unsafe { ep_plan_bytes(fixture.group, config, &mut 0) }
        }),
        case("ep_plan_create", "config", min, &plan_config(0), |config| {
            let mut plan = ptr::null_mut();
            // SAFETY: as above.
            let status = unsafe { ep_plan_create(fixture.group, config, ptr::null_mut(), 0, &mut plan) };
            // SAFETY: NULL or alive.
            unsafe { ep_plan_destroy(plan) };
            status
        }),
        case(
            "ep_plan_counts",
            "counts_out",
            through!(EpCounts, num_rows: i64),
            &zeroed::<EpCounts>(),
            |counts| {
                // SAFETY: as above.
                unsafe { ep_plan_counts(fixture.plan, 0, counts) }
            },
        ),
    ]
}

fn call_cases<'a>(fixture: &'a Fixture, args: &'a Args) -> Vec<Case<'a>> {
    let (plan, stream) = (fixture.plan, ptr::null_mut());
    let tensors = size_of::<EpTensor>();
    let mut cases = vec![
        case("ep_plan_update", "options", 8, &args.options, move |options| {
            // SAFETY: the tests pass structs of `struct_size` bytes.
            unsafe { ep_plan_update(plan, &args.topk_idx, options, stream) }
        }),
        case("ep_dispatch", "options", 8, &args.options, move |options| {
            // SAFETY: as above.
            unsafe { ep_dispatch(plan, &args.send, &args.receive, options, stream) }
        }),
        case("ep_combine", "options", 8, &args.options, move |options| {
            // SAFETY: as above.
            unsafe { ep_combine(plan, &args.give, &args.get, options, stream) }
        }),
        case("ep_dispatch", "inputs", 8 + 4 * tensors, &args.send, move |inputs| {
            // SAFETY: as above.
            unsafe { ep_dispatch(plan, inputs, &args.receive, ptr::null(), stream) }
        }),
        case("ep_dispatch", "outputs", 8 + 4 * tensors, &args.receive, move |outputs| {
            // SAFETY: as above.
            unsafe { ep_dispatch(plan, &args.send, outputs, ptr::null(), stream) }
        }),
        case("ep_combine", "inputs", 8 + tensors, &args.give, move |inputs| {
            // SAFETY: as above.
            unsafe { ep_combine(plan, inputs, &args.get, ptr::null(), stream) }
        }),
        case("ep_combine", "outputs", 8 + tensors, &args.get, move |outputs| {
            // SAFETY: as above.
            unsafe { ep_combine(plan, &args.give, outputs, ptr::null(), stream) }
        }),
    ];
    // Half a tensor is none that a call accepts: between the versions there are whole ones only.
    cases.iter_mut().filter(|case| case.arg != "options").for_each(|case| case.needs_all = true);
    cases
}

fn for_each_case(test: impl Fn(&mut Case<'_>)) {
    let fixture = Fixture::new();
    let args = Args::new(&fixture, fixture.plan);
    let mut cases = group_cases(&fixture);
    cases.extend(plan_cases(&fixture));
    cases.extend(call_cases(&fixture, &args));
    for mut case in cases {
        test(&mut case);
        fixture.assert_works();
    }
}

impl Case<'_> {
    fn run(&mut self) -> EpStatus {
        (self.call)(self.room.0.as_mut_ptr().cast())
    }

    #[track_caller]
    fn assert_unknown_field(&mut self, text: &str) {
        let before = self.room.0;
        let status = self.run();
        let (entry, arg, said) = (self.entry, self.arg, last_error());
        assert_eq!(status, Status::UnknownField.code(), "{entry}, {arg}: {said}");
        assert!(said.starts_with(&format!("{entry}: {arg}: ")) && said.contains(text), "{said}");
        assert!(before == self.room.0, "{entry}: {arg} was written by a call that failed");
    }
}

#[test]
fn a_struct_as_this_header_has_it_is_accepted() {
    for_each_case(|case| assert_ok(case.run()));
}

#[test]
fn a_newer_struct_is_accepted_if_its_tail_is_zero() {
    for_each_case(|case| {
        for extra in [4, 8, 200] {
            case.room.set_size(case.bytes + extra);
            assert_ok(case.run());
        }
    });
}

#[test]
fn a_newer_struct_with_something_in_its_tail_is_refused() {
    for_each_case(|case| {
        for extra in [4, 8, 200] {
            case.room.set_size(case.bytes + extra);
            for at in [case.bytes, case.bytes + extra - 1] {
                case.room.0[at] = 1;
                case.assert_unknown_field(&format!("byte {at} of"));
                case.room.0[at] = 0;
            }
            // Behind the struct nothing is looked at.
            case.room.0[case.bytes + extra] = 1;
            assert_ok(case.run());
            case.room.0[case.bytes + extra] = 0;
        }
    });
}

#[test]
fn an_older_struct_is_accepted_and_what_lies_behind_it_is_not_read() {
    for_each_case(|case| {
        if case.needs_all {
            return;
        }
        let before = case.room.0;
        // The shortest one: its last field is the last without which it makes no sense.
        case.room.set_size(case.min_bytes);
        let min_bytes = case.min_bytes;
        case.room.0[min_bytes..].fill(0xEE);
        assert_ok(case.run());
        assert!(case.room.0[min_bytes..].iter().all(|byte| *byte == 0xEE), "{}: {}", case.entry, case.arg);
        case.room.0 = before;
    });
}

#[test]
fn older_dispatch_and_combine_structs_lack_their_optional_fields() {
    let fixture = Fixture::new();
    let mut args = Args::new(&fixture, fixture.plan);
    args.send.struct_size = offset_of!(EpDispatchInputs, topk_weights) as u32;
    args.receive.struct_size = offset_of!(EpDispatchOutputs, topk_idx) as u32;
    // Behind its size a struct is no struct: garbage there is not seen.
    args.send.topk_weights.dtype = 77;
    args.receive.expert_offsets = ptr::without_provenance_mut(1);
    assert_ok(args.dispatch());
    args.give.struct_size = offset_of!(EpCombineInputs, row_weights) as u32;
    args.give.topk_weights.dtype = 77;
    args.get.struct_size = offset_of!(EpCombineOutputs, combined_weights) as u32;
    args.get.combined_weights.rows = -1;
    args.options.struct_size = offset_of!(EpOptions, timeout_ms) as u32;
    args.options.reduce_order = 99;
    assert_ok(args.combine());
}

#[test]
fn a_struct_that_is_too_short_or_absurd_is_refused() {
    for_each_case(|case| {
        for size in [0, 1, 4, case.min_bytes - 1, (64 << 10) + 1, u32::MAX as usize] {
            case.room.set_size(size);
            case.assert_unknown_field(&format!("struct_size is {size}"));
        }
    });
}

#[test]
fn reserved_fields_are_refused_by_name() {
    let reserved = |arg: &str| match arg {
        "bootstrap" => Some(("reserved_flags", 4)),
        "config" | "options" => Some(("reserved_flags", 4)),
        "counts_out" => Some(("reserved", offset_of!(EpCounts, reserved))),
        _ => None,
    };
    for_each_case(|case| {
        let combine = case.entry == "ep_combine" && case.arg != "options";
        if let Some((field, at)) = reserved(case.arg).or(combine.then_some(("reserved_flags", 4))) {
            case.room.0[at] = 5;
            case.assert_unknown_field(&format!("{field} of"));
        }
    });
}
