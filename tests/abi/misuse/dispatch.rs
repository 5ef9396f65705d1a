//! `ep_dispatch`.

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

/// An address that fits no number.
fn odd<T>(buffer: &mut [T]) -> *mut T {
    buffer.as_mut_ptr().wrapping_byte_add(1)
}

const INPUTS: &[Case] = &[
    case("five payloads in", &["num_payloads", "5"], |args| args.send.num_payloads = 5),
    case("the most payloads in", &["num_payloads"], |args| args.send.num_payloads = u32::MAX),
    case("five payloads out", &["num_payloads", "5"], |args| args.receive.num_payloads = 5),
    case("more in than out", &["num_payloads", "2", "1"], |args| {
        args.send.num_payloads = 2;
        args.send.payloads[1] = args.send.payloads[0];
    }),
    case("an absent payload", &["payloads[0]"], |args| args.send.payloads[0] = EpTensor::NONE),
    case("a dtype that does not exist", &["payloads[0]", "dtype 12"], |args| {
        args.send.payloads[0].dtype = 12;
    }),
    case("fewer rows than tokens", &["payloads[0]", "3", "4"], |args| args.send.payloads[0].rows = 3),
    case("more rows than tokens", &["payloads[0]", "5", "4"], |args| {
        args.send.payloads[0].rows = 5;
        args.send.payloads[0].cols = 4;
        args.receive.payloads[0].cols = 4;
    }),
    case("no data", &["payloads[0]", "NULL"], |args| args.send.payloads[0].data = ptr::null_mut()),
    case("misaligned data", &["payloads[0]", "aligned"], |args| {
        args.send.payloads[0].data = args.send.payloads[0].data.wrapping_add(2);
    }),
    case("opaque rows of 24 bytes", &["payloads[0]", "16"], |args| {
        for payload in [&mut args.send.payloads[0], &mut args.receive.payloads[0]] {
            payload.dtype = Dtype::Opaque as i32;
            payload.cols = 24;
        }
    }),
    case("weights of another dtype", &["topk_weights"], |args| {
        args.send.topk_weights.dtype = Dtype::I32 as i32;
    }),
    case("weights of too few tokens", &["topk_weights", "3", "4"], |args| args.send.topk_weights.rows = 3),
    case("weights of too few slots", &["topk_weights", "1", "2"], |args| args.send.topk_weights.cols = 1),
    case("weights without data", &["topk_weights", "NULL"], |args| {
        args.send.topk_weights.data = ptr::null_mut();
    }),
];

const OUTPUTS: &[Case] = &[
    case("an absent payload", &["payloads[0]"], |args| args.receive.payloads[0] = EpTensor::NONE),
    case("another dtype", &["payloads[0]", "EP_DTYPE_I32", "EP_DTYPE_F32"], |args| {
        args.receive.payloads[0].dtype = Dtype::I32 as i32;
    }),
    case("other cols", &["payloads[0]", "4", "8"], |args| args.receive.payloads[0].cols = 4),
    case("negative capacity", &["payloads[0]", "rows is -1"], |args| args.receive.payloads[0].rows = -1),
    case("no data", &["payloads[0]", "NULL"], |args| args.receive.payloads[0].data = ptr::null_mut()),
    case("rows that overlap", &["payloads[0]", "overlap"], |args| args.receive.payloads[0].row_stride = 4),
    case("capacities that differ", &["payloads[1]", "7", "8"], |args| {
        args.send.num_payloads = 2;
        args.receive.num_payloads = 2;
        args.send.payloads[1] = matrix(&mut args.weights, Dtype::F32, TOKENS, 1);
        args.receive.payloads[1] = matrix(&mut args.out.weights, Dtype::F32, ROWS - 1, 1);
    }),
    case("weights of another dtype", &["topk_weights"], |args| {
        args.receive.topk_weights = matrix(&mut args.out.weights, Dtype::F16, ROWS, 1);
    }),
    case("weights of flat rows", &["topk_weights", "2", "1"], |args| {
        args.receive.topk_weights = matrix(&mut args.out.weights, Dtype::F32, ROWS, TOPK);
    }),
    case("weights of too few rows", &["topk_weights", "7", "8"], |args| {
        args.receive.topk_weights = matrix(&mut args.out.weights, Dtype::F32, ROWS - 1, 1);
    }),
    case("weights that nobody sends", &["topk_weights"], |args| {
        args.send.topk_weights = EpTensor::NONE;
        args.receive.topk_weights = matrix(&mut args.out.weights, Dtype::F32, ROWS, 1);
    }),
    case("weights with gaps", &["topk_weights", "contiguous"], |args| {
        args.receive.topk_weights = matrix(&mut args.out.weights, Dtype::F32, ROWS, 1);
        args.receive.topk_weights.row_stride = 2;
    }),
    case("ids of expert-major rows", &["topk_idx", "EP_LAYOUT_FLAT"], |args| {
        args.receive.topk_idx = matrix(&mut args.out.idx, Dtype::I64, ROWS, TOPK);
    }),
    case("misaligned src_rank", &["src_rank"], |args| args.receive.src_rank = odd(&mut args.out.src_rank)),
    case("misaligned src_token", &["src_token"], |args| {
        args.receive.src_token = odd(&mut args.out.src_token)
    }),
    case("misaligned src_slot", &["src_slot"], |args| args.receive.src_slot = odd(&mut args.out.src_slot)),
    case("misaligned num_rows", &["num_rows"], |args| args.receive.num_rows = odd(&mut args.out.num_rows)),
    case("misaligned num_required", &["num_required"], |args| {
        args.receive.num_required = odd(&mut args.out.num_required);
    }),
    case("misaligned num_dropped", &["num_dropped"], |args| {
        args.receive.num_dropped = odd(&mut args.out.num_dropped);
    }),
    case("misaligned rows_per_expert", &["rows_per_expert"], |args| {
        args.receive.rows_per_expert = odd(&mut args.out.rows_per_expert);
    }),
    case("misaligned expert_offsets", &["expert_offsets"], |args| {
        args.receive.expert_offsets = odd(&mut args.out.expert_offsets);
    }),
];

const FLAT: &[Case] = &[
    case("slots of flat rows", &["src_slot", "EP_LAYOUT_EXPERT_MAJOR"], |args| {
        args.receive.src_slot = args.out.src_slot.as_mut_ptr();
    }),
    case("offsets of flat rows", &["expert_offsets", "EP_LAYOUT_EXPERT_MAJOR"], |args| {
        args.receive.expert_offsets = args.out.expert_offsets.as_mut_ptr();
    }),
    case("weights of expert-major rows", &["topk_weights", "1", "2"], |args| {
        args.receive.topk_weights = matrix(&mut args.out.weights, Dtype::F32, TOKENS, 1);
    }),
    case("ids that are floats", &["topk_idx", "EP_DTYPE_F32"], |args| {
        args.receive.topk_idx = matrix(&mut args.out.weights, Dtype::F32, TOKENS, TOPK);
    }),
    case("ids of too few slots", &["topk_idx", "1", "2"], |args| {
        args.receive.topk_idx = matrix(&mut args.out.idx, Dtype::I64, TOKENS, 1);
    }),
    case("ids with gaps", &["topk_idx", "contiguous"], |args| {
        args.receive.topk_idx = matrix(&mut args.out.idx, Dtype::I64, TOKENS, TOPK);
        args.receive.topk_idx.row_stride = 4;
    }),
];

fn run(flat: bool, cases: &[Case]) {
    let fixture = Fixture::new();
    for Case { name, texts, spoil } in cases {
        let mut args = Args::new(&fixture, if flat { fixture.flat } else { fixture.plan });
        spoil(&mut args);
        let found = args.dispatch();
        let expected = (*name, "ep_dispatch", Status::InvalidArgument, *texts);
        assert_refused(&fixture, &args, expected, found);
    }
}

#[test]
fn dispatch_refuses_inputs_that_do_not_fit_the_routing() {
    run(false, INPUTS);
}

#[test]
fn dispatch_refuses_outputs_that_do_not_fit_the_inputs() {
    run(false, OUTPUTS);
}

#[test]
fn dispatch_refuses_outputs_of_the_other_layout() {
    run(true, FLAT);
}

#[test]
fn dispatch_before_update_is_refused() {
    let fixture = Fixture::new();
    let args = Args::new(&fixture, fixture.fresh);
    let expected = ("order", "ep_dispatch", Status::InvalidState, &["ep_plan_update"][..]);
    assert_refused(&fixture, &args, expected, args.dispatch());
}

#[test]
fn dispatch_refuses_pointers_that_are_no_structs() {
    let fixture = Fixture::new();
    let args = Args::new(&fixture, fixture.plan);
    let call =
        |inputs: *const EpDispatchInputs, outputs: *const EpDispatchOutputs, options: *const EpOptions| {
            // SAFETY: null and misaligned structs are refused unread.
            unsafe { ep_dispatch(fixture.plan, inputs, outputs, options, ptr::null_mut()) }
        };
    let (send, receive, options) = (&raw const args.send, &raw const args.receive, &raw const args.options);
    let cases = [
        ("inputs is NULL", ptr::null(), receive, options),
        ("inputs is 0x", send.wrapping_byte_add(4), receive, options),
        ("outputs is NULL", send, ptr::null(), options),
        ("outputs is 0x", send, receive.wrapping_byte_add(1), options),
        ("options is 0x", send, receive, options.wrapping_byte_add(2)),
    ];
    for (text, inputs, outputs, options) in cases {
        let found = call(inputs, outputs, options);
        let expected = (text, "ep_dispatch", Status::InvalidArgument, &[text][..]);
        assert_refused(&fixture, &args, expected, found);
    }
}
