//! `ep_plan_update`.

use std::ptr;

use ep::capi::*;
use ep_core::Status;
use ep_core::tensor::Dtype;

use super::fixture::*;

struct Case {
    name: &'static str,
    status: Status,
    texts: &'static [&'static str],
    spoil: fn(&Fixture, &mut Args),
}

const fn invalid(name: &'static str, texts: &'static [&'static str], spoil: fn(&Fixture, &mut Args)) -> Case {
    Case { name, status: Status::InvalidArgument, texts, spoil }
}

const TENSOR: &[Case] = &[
    invalid("no dtype", &["topk_idx", "dtype 0"], |_, args| args.topk_idx.dtype = 0),
    invalid("dtype that does not exist", &["topk_idx", "dtype 99"], |_, args| args.topk_idx.dtype = 99),
    invalid("negative dtype", &["topk_idx", "dtype -1"], |_, args| args.topk_idx.dtype = -1),
    invalid("floats", &["topk_idx", "EP_DTYPE_F32"], |_, args| args.topk_idx.dtype = Dtype::F32 as i32),
    invalid("all zero", &["topk_idx"], |_, args| args.topk_idx = EpTensor::NONE),
    invalid("negative rows", &["topk_idx", "rows is -1"], |_, args| args.topk_idx.rows = -1),
    invalid("the lowest rows", &["topk_idx", "rows"], |_, args| args.topk_idx.rows = i64::MIN),
    invalid("the highest rows", &["topk_idx", "rows"], |_, args| args.topk_idx.rows = i64::MAX),
    invalid("negative cols", &["topk_idx", "cols is -2"], |_, args| args.topk_idx.cols = -2),
    invalid("the highest cols", &["topk_idx", "cols"], |_, args| args.topk_idx.cols = i64::MAX),
    invalid("too few slots", &["topk_idx", "1", "2"], |_, args| args.topk_idx.cols = 1),
    invalid("too many slots", &["topk_idx", "3", "2"], |_, args| {
        args.topk_idx.cols = 3;
        args.topk_idx.rows = 2;
    }),
    invalid("negative row stride", &["topk_idx", "row_stride"], |_, args| args.topk_idx.row_stride = -2),
    invalid("the highest row stride", &["topk_idx", "row_stride"], |_, args| {
        args.topk_idx.row_stride = i64::MAX;
    }),
    invalid("negative col stride", &["topk_idx", "col_stride"], |_, args| args.topk_idx.col_stride = -1),
    invalid("strides that overlap", &["topk_idx", "overlap"], |_, args| args.topk_idx.row_stride = 1),
    invalid("no data", &["topk_idx", "NULL"], |_, args| args.topk_idx.data = ptr::null_mut()),
    invalid("misaligned data", &["topk_idx", "aligned"], |_, args| {
        args.topk_idx.data = args.topk_idx.data.wrapping_add(1);
    }),
    Case {
        name: "reserved field",
        status: Status::UnknownField,
        texts: &["topk_idx", "reserved is 7"],
        spoil: |_, args| args.topk_idx.reserved = 7,
    },
    Case {
        name: "too many tokens",
        status: Status::Capacity,
        texts: &["7", "6", "max_tokens"],
        spoil: |_, args| {
            args.idx = vec![0; (MAX_TOKENS + 1) * TOPK];
            args.topk_idx = matrix(&mut args.idx, Dtype::I64, MAX_TOKENS + 1, TOPK);
        },
    },
];

const IDS: &[Case] = &[
    Case {
        name: "an id behind the last expert",
        status: Status::OutOfRange,
        texts: &["token 2", "slot 1", "3"],
        spoil: |_, args| args.idx[2 * TOPK + 1] = EXPERTS as i64,
    },
    Case {
        name: "an id below -1",
        status: Status::OutOfRange,
        texts: &["token 0", "slot 0", "-2"],
        spoil: |_, args| args.idx[0] = -2,
    },
    Case {
        name: "the highest id",
        status: Status::OutOfRange,
        texts: &["token 3", "slot 0", "9223372036854775807"],
        spoil: |_, args| args.idx[3 * TOPK] = i64::MAX,
    },
    Case {
        name: "an id that is valid in its low 32 bits",
        status: Status::OutOfRange,
        texts: &["token 1", "slot 1", "4294967297"],
        spoil: |_, args| args.idx[TOPK + 1] = (1 << 32) + 1,
    },
];

fn run(cases: &[Case]) {
    let fixture = Fixture::new();
    for Case { name, status, texts, spoil } in cases {
        let mut args = Args::new(&fixture, fixture.plan);
        spoil(&fixture, &mut args);
        let found = args.update();
        assert_refused(&fixture, &args, (name, "ep_plan_update", *status, texts), found);
    }
}

#[test]
fn update_refuses_tensors_that_are_no_routing() {
    run(TENSOR);
}

#[test]
fn update_names_the_token_and_slot_of_a_bad_id() {
    run(IDS);
}

#[test]
fn update_refuses_pointers_that_are_no_tensor() {
    let fixture = Fixture::new();
    let args = Args::new(&fixture, fixture.plan);
    let misaligned = ptr::from_ref(&args.topk_idx).wrapping_byte_add(1);
    for (pointer, text) in [(ptr::null(), "topk_idx is NULL"), (misaligned, "aligned")] {
        // SAFETY: null and misaligned tensors are refused unread.
        let found = unsafe { ep_plan_update(fixture.plan, pointer, ptr::null(), ptr::null_mut()) };
        let expected = (text, "ep_plan_update", Status::InvalidArgument, &["topk_idx", text][..]);
        assert_refused(&fixture, &args, expected, found);
    }
}

#[test]
fn a_refused_update_leaves_the_earlier_routing() {
    let fixture = Fixture::new();
    let mut args = Args::new(&fixture, fixture.plan);
    args.idx[0] = 77;
    assert_eq!(args.update(), Status::OutOfRange.code());
    // Without another update: the plan still has what it had.
    let args = Args::new(&fixture, fixture.plan);
    assert_ok(args.dispatch());
    assert_eq!(args.out.num_rows[0], ROWS as i64);
}

/// A group of one rank for as many experts as pad `u32` rows, and a plan whose experts begin at multiples of
/// `alignment`.
fn aligned_plan(num_experts: u32, alignment: u32, max_tokens: u64) -> (*mut EpGroup, EpStatus, *mut EpPlan) {
    let config = EpGroupConfig { max_local_experts: num_experts, ..zeroed() };
    let (mut group, mut plan) = (ptr::null_mut(), ptr::null_mut());
    // SAFETY: every pointer is to a local of the right type.
    unsafe {
        assert_ok(ep_group_create_versioned(ep_version(), &config, &bootstrap_alone(), &mut group));
        let config =
            EpPlanConfig { topk: 1, num_experts, max_tokens, expert_alignment: alignment, ..plan_config(1) };
        let status = ep_plan_create(group, &config, ptr::null_mut(), 0, &mut plan);
        (group, status, plan)
    }
}

#[test]
fn padding_that_no_row_number_can_hold_is_refused_when_the_plan_is_made() {
    let (group, status, plan) = aligned_plan(2048, 1 << 20, 10);
    let text = last_error();
    assert_eq!(status, Status::Capacity.code(), "{text}");
    for part in ["expert_alignment 1048576", "2147483648 rows", "2048 experts of rank 0", "2147483647"] {
        assert!(text.contains(part), "{text} does not say {part}");
    }
    assert!(plan.is_null());
    // SAFETY: the group is the test's.
    assert_ok(unsafe { ep_group_destroy(group, 0) });
}

/// Nothing is known of it before the counts of all ranks are there: the peers' updates have ended by then, so the
/// group breaks, with a status that says so.
#[test]
fn rows_that_no_number_can_hold_break_the_group_and_are_counted() {
    let num_experts = 2047;
    let tokens = (1 << 20) + num_experts as usize;
    let (group, status, plan) = aligned_plan(num_experts, 1 << 20, tokens as u64);
    assert_ok(status);
    // One row for each expert, and as many more for one as begin a second region.
    let mut idx: Vec<i32> = (0..tokens as i32).map(|i| if i < 2047 { i } else { 0 }).collect();
    let idx = matrix(&mut idx, Dtype::I32, tokens, 1);
    // SAFETY: the tensor is the test's.
    let update = || unsafe { ep_plan_update(plan, &idx, ptr::null(), ptr::null_mut()) };
    assert_eq!(update(), Status::Aborted.code(), "{}", last_error());
    let rows = 2048u64 << 20;
    assert!(last_error().contains(&format!("{rows} rows arrive at rank 0")), "{}", last_error());
    assert_eq!(update(), Status::Aborted.code(), "{}", last_error());
    assert!(last_error().contains(&rows.to_string()), "{}", last_error());
    // SAFETY: the handles are the test's.
    unsafe {
        assert_ok(ep_plan_destroy(plan));
        assert_ok(ep_group_destroy(group, 0));
    }
}
