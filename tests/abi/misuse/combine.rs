//! `ep_combine`.

use std::ptr;

use ep::capi::*;
use ep_core::Status;
use ep_core::tensor::Dtype;

use super::fixture::*;

struct Case {
    name: &'static str,
    texts: &'static [&'static str],
    spoil: fn(&mut Args),
}

const fn case(name: &'static str, texts: &'static [&'static str], spoil: fn(&mut Args)) -> Case {
    Case { name, texts, spoil }
}

const ROWS_AND_RESULT: &[Case] = &[
    case("absent rows", &["rows"], |args| args.give.rows = EpTensor::NONE),
    case("negative rows", &["rows is -3"], |args| args.give.rows.rows = -3),
    case("rows without data", &["rows", "NULL"], |args| args.give.rows.data = ptr::null_mut()),
    case("misaligned rows", &["rows", "aligned"], |args| {
        args.give.rows.data = args.give.rows.data.wrapping_add(1);
    }),
    case("rows with gaps between columns", &["rows", "col_stride"], |args| {
        args.give.rows.cols = 4;
        args.give.rows.col_stride = 2;
        args.get.combined.cols = 4;
    }),
    case("no result", &["combined"], |args| args.get.combined = EpTensor::NONE),
    case("a result of another dtype", &["combined", "EP_DTYPE_BF16", "EP_DTYPE_F32"], |args| {
        args.get.combined.dtype = Dtype::Bf16 as i32;
    }),
    case("a result of other cols", &["combined", "4", "8"], |args| args.get.combined.cols = 4),
    case("a result of too few tokens", &["combined", "3", "4"], |args| args.get.combined.rows = 3),
    case("a result without data", &["combined", "NULL"], |args| args.get.combined.data = ptr::null_mut()),
    case("a result whose rows overlap", &["combined", "overlap"], |args| args.get.combined.row_stride = 4),
    case("a result with gaps between columns", &["combined", "col_stride"], |args| {
        args.give.rows.cols = 4;
        args.give.rows.row_stride = 8;
        args.get.combined.cols = 4;
        args.get.combined.col_stride = 2;
    }),
];

const WEIGHTS_AND_BIAS: &[Case] = &[
    case("weights of another dtype", &["topk_weights"], |args| {
        args.give.topk_weights = matrix(&mut args.weights, Dtype::Bf16, TOKENS, TOPK);
    }),
    case("weights of too few tokens", &["topk_weights", "3", "4"], |args| {
        args.give.topk_weights = matrix(&mut args.weights, Dtype::F32, 3, TOPK);
    }),
    case("weights of too few slots", &["topk_weights", "1", "2"], |args| {
        args.give.topk_weights = matrix(&mut args.weights, Dtype::F32, TOKENS, 1);
    }),
    case("row weights of another dtype", &["row_weights"], |args| {
        args.give.row_weights = matrix(&mut args.weights, Dtype::I32, ROWS, 1);
        args.get.combined_weights = matrix(&mut args.out.combined_weights, Dtype::F32, TOKENS, TOPK);
    }),
    case("row weights of too few rows", &["row_weights", "7", "8"], |args| {
        args.give.row_weights = matrix(&mut args.weights, Dtype::F32, ROWS - 1, 1);
        args.get.combined_weights = matrix(&mut args.out.combined_weights, Dtype::F32, TOKENS, TOPK);
    }),
    case("row weights of flat rows", &["row_weights", "2", "1"], |args| {
        args.give.row_weights = matrix(&mut args.rows, Dtype::F32, ROWS, TOPK);
        args.get.combined_weights = matrix(&mut args.out.combined_weights, Dtype::F32, TOKENS, TOPK);
    }),
    case("returned weights that nobody gives", &["combined_weights", "row_weights"], |args| {
        args.get.combined_weights = matrix(&mut args.out.combined_weights, Dtype::F32, TOKENS, TOPK);
    }),
    case("returned weights of too few slots", &["combined_weights", "1", "2"], |args| {
        args.give.row_weights = matrix(&mut args.weights, Dtype::F32, ROWS, 1);
        args.get.combined_weights = matrix(&mut args.out.combined_weights, Dtype::F32, TOKENS, 1);
    }),
    case("a bias of another dtype", &["bias[0]"], |args| {
        args.give.bias[0] = matrix(&mut args.tokens, Dtype::F16, TOKENS, HIDDEN);
    }),
    case("a bias of other cols", &["bias[0]", "4", "8"], |args| {
        args.give.bias[0] = matrix(&mut args.tokens, Dtype::F32, TOKENS, 4);
    }),
    case("a second bias of too few tokens", &["bias[1]", "3", "4"], |args| {
        args.give.bias[0] = matrix(&mut args.tokens, Dtype::F32, TOKENS, HIDDEN);
        args.give.bias[1] = matrix(&mut args.tokens, Dtype::F32, 3, HIDDEN);
    }),
];

const OPTIONS: &[Case] = &[
    case("an order that does not exist", &["reduce_order is 4"], |args| args.options.reduce_order = 4),
    case("a negative order", &["reduce_order is -1"], |args| args.options.reduce_order = -1),
    case("a wire dtype that does not exist", &["wire_dtype is 99"], |args| {
        args.options.reduce_order = 3;
        args.options.wire_dtype = 99;
    }),
    case("a wire dtype of one byte", &["wire_dtype is 4"], |args| {
        args.options.reduce_order = 3;
        args.options.wire_dtype = Dtype::F8E4M3 as i32;
    }),
];

const FLAT: &[Case] = &[
    case("slot order of flat rows", &["EP_REDUCE_TOPK_SLOT", "EP_LAYOUT_FLAT"], |args| {
        args.options.reduce_order = 1;
    }),
    case("factors of flat rows", &["topk_weights", "EP_LAYOUT_EXPERT_MAJOR"], |args| {
        args.give.topk_weights = matrix(&mut args.weights, Dtype::F32, TOKENS, TOPK);
    }),
    case("row weights of expert-major rows", &["row_weights", "1", "2"], |args| {
        args.give.row_weights = matrix(&mut args.weights, Dtype::F32, TOKENS, 1);
        args.get.combined_weights = matrix(&mut args.out.combined_weights, Dtype::F32, TOKENS, TOPK);
    }),
];

fn run(flat: bool, cases: &[Case]) {
    let fixture = Fixture::new();
    for Case { name, texts, spoil } in cases {
        let mut args = Args::new(&fixture, if flat { fixture.flat } else { fixture.plan });
        spoil(&mut args);
        let found = args.combine();
        assert_refused(&fixture, &args, (*name, "ep_combine", Status::InvalidArgument, *texts), found);
    }
}

#[test]
fn combine_refuses_rows_and_results_that_do_not_fit() {
    run(false, ROWS_AND_RESULT);
}

#[test]
fn combine_refuses_weights_and_biases_that_do_not_fit() {
    run(false, WEIGHTS_AND_BIAS);
}

#[test]
fn combine_refuses_options_that_do_not_exist() {
    run(false, OPTIONS);
}

#[test]
fn combine_refuses_what_only_the_other_layout_has() {
    run(true, FLAT);
}

#[test]
fn combine_adds_floats_only() {
    let fixture = Fixture::new();
    for dtype in Dtype::ALL {
        if matches!(dtype, Dtype::Bf16 | Dtype::F16 | Dtype::F32) {
            continue;
        }
        let mut args = Args::new(&fixture, fixture.plan);
        // As many bytes as the buffers have, at most.
        (args.give.rows.dtype, args.get.combined.dtype) = (dtype as i32, dtype as i32);
        (args.give.rows.cols, args.get.combined.cols) = (HIDDEN as i64 / 2, HIDDEN as i64 / 2);
        if dtype == Dtype::Opaque {
            (args.give.rows.cols, args.get.combined.cols) = (16, 16);
        }
        let found = args.combine();
        let expected =
            ("dtype", "ep_combine", Status::Unsupported, &["rows", dtype.name(), "EP_DTYPE_BF16"][..]);
        assert_refused(&fixture, &args, expected, found);
    }
}

#[test]
fn combine_before_update_is_refused() {
    let fixture = Fixture::new();
    let args = Args::new(&fixture, fixture.fresh);
    let expected = ("order", "ep_combine", Status::InvalidState, &["ep_plan_update"][..]);
    assert_refused(&fixture, &args, expected, args.combine());
}

#[test]
fn combine_refuses_pointers_that_are_no_structs() {
    let fixture = Fixture::new();
    let args = Args::new(&fixture, fixture.plan);
    let call =
        |inputs: *const EpCombineInputs, outputs: *const EpCombineOutputs, options: *const EpOptions| {
            // SAFETY: null and misaligned structs are refused unread.
            unsafe { ep_combine(fixture.plan, inputs, outputs, options, ptr::null_mut()) }
        };
    let (give, get, options) = (&raw const args.give, &raw const args.get, &raw const args.options);
    let cases = [
        ("inputs is NULL", ptr::null(), get, options),
        ("inputs is 0x", give.wrapping_byte_add(1), get, options),
        ("outputs is NULL", give, ptr::null(), options),
        ("outputs is 0x", give, get.wrapping_byte_add(4), options),
        ("options is 0x", give, get, options.wrapping_byte_add(1)),
    ];
    for (text, inputs, outputs, options) in cases {
        let found = call(inputs, outputs, options);
        let expected = (text, "ep_combine", Status::InvalidArgument, &[text][..]);
        assert_refused(&fixture, &args, expected, found);
    }
}

#[test]
fn either_bias_may_be_given_alone() {
    let fixture = Fixture::new();
    let combined = |which: Option<usize>| {
        let mut args = Args::new(&fixture, fixture.plan);
        args.rows.fill(0.25);
        if let Some(which) = which {
            args.give.bias[which] = args.send.payloads[0];
        }
        assert_ok(args.combine());
        args.out.combined.clone()
    };
    let (none, first, second) = (combined(None), combined(Some(0)), combined(Some(1)));
    assert_eq!(first, second);
    let tokens = &Args::new(&fixture, fixture.plan).tokens;
    assert!(none.iter().zip(tokens).zip(&first).all(|((sum, bias), with)| sum + bias == *with));
}
