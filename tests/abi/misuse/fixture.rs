//! A group of one rank with everything made, a correct call of every kind, and what a mistake must leave
//! alone.

use std::ffi::{CStr, c_void};
use std::ptr;

use ep::capi::*;
use ep_core::Status;
use ep_core::tensor::Dtype;

pub(crate) const TOKENS: usize = 4;
pub(crate) const MAX_TOKENS: usize = 6;
pub(crate) const TOPK: usize = 2;
pub(crate) const EXPERTS: usize = 3;
pub(crate) const HIDDEN: usize = 8;
/// Expert-major rows of the fixture's routing: every slot is taken.
pub(crate) const ROWS: usize = TOKENS * TOPK;

/// What every output holds before a call.
const UNTOUCHED: u8 = 0xA5;

pub(crate) fn size<T>() -> u32 {
    size_of::<T>() as u32
}

/// A struct of which all is zero but its size.
pub(crate) fn zeroed<T: Copy>() -> T {
    // SAFETY: all types of the header may be all zero.
    let mut value: T = unsafe { std::mem::zeroed() };
    // SAFETY: the structs that the tests pass here begin with their size.
    unsafe { ptr::from_mut(&mut value).cast::<u32>().write(size::<T>()) };
    value
}

pub(crate) fn matrix<T>(data: &mut [T], dtype: Dtype, rows: usize, cols: usize) -> EpTensor {
    EpTensor::contiguous(data.as_mut_ptr().cast(), dtype, rows, cols)
}

/// The sentence of this thread's last failed call.
pub(crate) fn last_error() -> String {
    // SAFETY: the text lives until this thread's next call.
    unsafe { CStr::from_ptr(ep_last_error()) }.to_str().expect("texts are UTF-8").to_string()
}

#[track_caller]
pub(crate) fn assert_ok(status: EpStatus) {
    assert_eq!(status, 0, "{}", last_error());
}

/// The all-gather of a group of one.
pub(crate) unsafe extern "C" fn gather_alone(
    _: *mut c_void,
    send: *const c_void,
    recv: *mut c_void,
    bytes: usize,
) -> i32 {
    // SAFETY: with one rank both have `bytes` bytes.
    unsafe { ptr::copy_nonoverlapping(send.cast::<u8>(), recv.cast::<u8>(), bytes) };
    0
}

pub(crate) fn bootstrap_alone() -> EpBootstrap {
    EpBootstrap { num_ranks: 1, all_gather: Some(gather_alone), ..zeroed() }
}

pub(crate) fn plan_config(layout: i32) -> EpPlanConfig {
    EpPlanConfig {
        topk: TOPK as u32,
        num_experts: EXPERTS as u32,
        max_tokens: MAX_TOKENS as u64,
        layout,
        ..zeroed()
    }
}

/// One of each object.
pub(crate) struct Fixture {
    pub(crate) group: *mut EpGroup,
    pub(crate) window: *mut EpWindow,
    pub(crate) stream: *mut EpStream,
    /// Expert-major, updated.
    pub(crate) plan: *mut EpPlan,
    /// Flat, updated.
    pub(crate) flat: *mut EpPlan,
    /// Expert-major, never updated.
    pub(crate) fresh: *mut EpPlan,
}

impl Fixture {
    pub(crate) fn new() -> Fixture {
        let mut fixture = Fixture {
            group: ptr::null_mut(),
            window: ptr::null_mut(),
            stream: ptr::null_mut(),
            plan: ptr::null_mut(),
            flat: ptr::null_mut(),
            fresh: ptr::null_mut(),
        };
        let (config, bootstrap): (EpGroupConfig, _) = (zeroed(), bootstrap_alone());
        // SAFETY: every pointer is to a local of the right type.
        unsafe {
            assert_ok(ep_group_create_versioned(ep_version(), &config, &bootstrap, &mut fixture.group));
            assert_ok(ep_window_allocate(fixture.group, 4096, &mut fixture.window));
            assert_ok(ep_stream_create(&mut fixture.stream));
        }
        fixture.plan = fixture.make_plan(1);
        fixture.flat = fixture.make_plan(0);
        fixture.fresh = fixture.make_plan(1);
        fixture.assert_works();
        fixture
    }

    pub(crate) fn make_plan(&self, layout: i32) -> *mut EpPlan {
        let mut plan = ptr::null_mut();
        // SAFETY: every pointer is to a local of the right type.
        assert_ok(unsafe { ep_plan_create(self.group, &plan_config(layout), ptr::null_mut(), 0, &mut plan) });
        plan
    }

    /// Runs a correct update, dispatch and combine with both plans, and checks the results.
    #[track_caller]
    pub(crate) fn assert_works(&self) {
        for plan in [self.plan, self.flat] {
            let mut args = Args::new(self, plan);
            assert_ok(args.update());
            assert_ok(args.dispatch());
            if plan == self.plan {
                assert_eq!(args.out.num_rows[0], ROWS as i64);
                args.rows.copy_from_slice(&args.out.rows[..ROWS * HIDDEN]);
            } else {
                assert_eq!(args.out.num_rows[0], TOKENS as i64);
                let flat = TOKENS * HIDDEN;
                args.rows[..flat].copy_from_slice(&args.out.rows[..flat]);
            }
            assert_ok(args.combine());
            // Expert-major: the sum of both slots' copies. Flat: the one row.
            let factor = if plan == self.plan { TOPK as f32 } else { 1.0 };
            for (combined, token) in args.out.combined.iter().zip(&args.tokens) {
                assert_eq!(*combined, factor * token);
            }
        }
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        // SAFETY: the handles are the fixture's. A test may have destroyed some of them already.
        unsafe {
            for plan in [self.plan, self.flat, self.fresh] {
                ep_plan_destroy(plan);
            }
            ep_window_release(self.window);
            ep_stream_destroy(self.stream);
            ep_group_destroy(self.group, 0);
        }
    }
}

/// Every buffer that a call writes.
pub(crate) struct Outputs {
    pub(crate) rows: Vec<f32>,
    pub(crate) weights: Vec<f32>,
    pub(crate) idx: Vec<i64>,
    pub(crate) src_rank: Vec<i32>,
    pub(crate) src_token: Vec<i32>,
    pub(crate) src_slot: Vec<i32>,
    pub(crate) num_rows: [i64; 1],
    pub(crate) num_required: [i64; 1],
    pub(crate) num_dropped: [i64; 1],
    pub(crate) rows_per_expert: [i64; EXPERTS],
    pub(crate) expert_offsets: [i64; EXPERTS + 1],
    pub(crate) combined: Vec<f32>,
    pub(crate) combined_weights: Vec<f32>,
    pub(crate) counts: EpCounts,
    pub(crate) counts_experts: [i64; EXPERTS],
    pub(crate) counts_sources: [i64; 1],
}

impl Outputs {
    fn new() -> Outputs {
        let word = i32::from_ne_bytes([UNTOUCHED; 4]);
        let long = i64::from_ne_bytes([UNTOUCHED; 8]);
        let float = f32::from_ne_bytes([UNTOUCHED; 4]);
        let words = || vec![word; ROWS];
        Outputs {
            rows: vec![float; ROWS * HIDDEN],
            weights: vec![float; ROWS * TOPK],
            idx: vec![long; ROWS * TOPK],
            src_rank: words(),
            src_token: words(),
            src_slot: words(),
            num_rows: [long],
            num_required: [long],
            num_dropped: [long],
            rows_per_expert: [long; EXPERTS],
            expert_offsets: [long; EXPERTS + 1],
            combined: vec![float; TOKENS * HIDDEN],
            combined_weights: vec![float; TOKENS * TOPK],
            counts: EpCounts { num_rows: long, num_tokens: long, ..zeroed() },
            counts_experts: [long; EXPERTS],
            counts_sources: [long],
        }
    }

    #[track_caller]
    fn assert_untouched(&self, case: &str) {
        fn all<T>(values: &[T]) -> bool {
            // SAFETY: plain numbers.
            let bytes =
                unsafe { std::slice::from_raw_parts(values.as_ptr().cast::<u8>(), size_of_val(values)) };
            bytes.iter().all(|byte| *byte == UNTOUCHED)
        }
        let untouched = [
            ("rows", all(&self.rows)),
            ("weights", all(&self.weights)),
            ("idx", all(&self.idx)),
            ("src_rank", all(&self.src_rank)),
            ("src_token", all(&self.src_token)),
            ("src_slot", all(&self.src_slot)),
            ("num_rows", all(&self.num_rows)),
            ("num_required", all(&self.num_required)),
            ("num_dropped", all(&self.num_dropped)),
            ("rows_per_expert", all(&self.rows_per_expert)),
            ("expert_offsets", all(&self.expert_offsets)),
            ("combined", all(&self.combined)),
            ("combined_weights", all(&self.combined_weights)),
            ("counts", all(&[self.counts.num_rows, self.counts.num_tokens])),
            ("counts_experts", all(&self.counts_experts)),
            ("counts_sources", all(&self.counts_sources)),
        ];
        for (name, is_untouched) in untouched {
            assert!(is_untouched, "{case}: {name} was written by a call that failed");
        }
    }
}

/// Correct arguments of every call on a plan, for a test to spoil. The structs point into the buffers.
pub(crate) struct Args {
    pub(crate) plan: *mut EpPlan,
    pub(crate) idx: Vec<i64>,
    pub(crate) tokens: Vec<f32>,
    pub(crate) weights: Vec<f32>,
    pub(crate) rows: Vec<f32>,
    pub(crate) out: Outputs,
    pub(crate) topk_idx: EpTensor,
    pub(crate) send: EpDispatchInputs,
    pub(crate) receive: EpDispatchOutputs,
    pub(crate) give: EpCombineInputs,
    pub(crate) get: EpCombineOutputs,
    pub(crate) options: EpOptions,
    pub(crate) stream: *mut c_void,
}

impl Args {
    pub(crate) fn new(fixture: &Fixture, plan: *mut EpPlan) -> Box<Args> {
        let flat = plan == fixture.flat;
        let num_rows = if flat { TOKENS } else { ROWS };
        let mut args = Box::new(Args {
            plan,
            // Slots of a token name different experts, and each expert gets rows.
            idx: (0..TOKENS * TOPK).map(|i| ((i / TOPK + i % TOPK) % EXPERTS) as i64).collect(),
            tokens: (0..TOKENS * HIDDEN).map(|i| i as f32).collect(),
            weights: vec![1.0; TOKENS * TOPK],
            rows: vec![0.0; ROWS * HIDDEN],
            out: Outputs::new(),
            topk_idx: EpTensor::NONE,
            send: EpDispatchInputs { num_payloads: 1, ..zeroed() },
            receive: EpDispatchOutputs { num_payloads: 1, ..zeroed() },
            give: zeroed(),
            get: zeroed(),
            options: zeroed(),
            stream: ptr::null_mut(),
        });
        let Args { idx, tokens, weights, rows, out, .. } = &mut *args;
        let topk_idx = matrix(idx, Dtype::I64, TOKENS, TOPK);
        let sent = matrix(tokens, Dtype::F32, TOKENS, HIDDEN);
        let topk_weights = matrix(weights, Dtype::F32, TOKENS, TOPK);
        let received = matrix(&mut out.rows, Dtype::F32, num_rows, HIDDEN);
        let given = matrix(rows, Dtype::F32, num_rows, HIDDEN);
        let combined = matrix(&mut out.combined, Dtype::F32, TOKENS, HIDDEN);
        args.topk_idx = topk_idx;
        args.send.payloads[0] = sent;
        args.send.topk_weights = topk_weights;
        args.receive.payloads[0] = received;
        args.receive.num_rows = args.out.num_rows.as_mut_ptr();
        args.give.rows = given;
        args.get.combined = combined;
        args
    }

    pub(crate) fn update(&self) -> EpStatus {
        // SAFETY: the structs point into the buffers, unless a test has spoiled them.
        unsafe { ep_plan_update(self.plan, &self.topk_idx, &self.options, self.stream) }
    }

    pub(crate) fn dispatch(&self) -> EpStatus {
        // SAFETY: as in `update`.
        unsafe { ep_dispatch(self.plan, &self.send, &self.receive, &self.options, self.stream) }
    }

    pub(crate) fn combine(&self) -> EpStatus {
        // SAFETY: as in `update`.
        unsafe { ep_combine(self.plan, &self.give, &self.get, &self.options, self.stream) }
    }
}

/// Calls one entry and checks that it refuses as it must: the status, its sentence (with the name of the
/// entry and all of `texts`), outputs as they were, and everything usable afterwards.
#[track_caller]
pub(crate) fn assert_refused(
    fixture: &Fixture,
    args: &Args,
    (case, entry, expected, texts): (&str, &str, Status, &[&str]),
    status: EpStatus,
) {
    let text = last_error();
    let found = Status::from_code(status).map_or("an unknown status", Status::name);
    assert_eq!(found, expected.name(), "{case}: {text}");
    assert!(text.starts_with(&format!("{entry}: ")), "{case}: {text}");
    for part in texts {
        assert!(text.contains(part), "{case}: \"{text}\" does not say \"{part}\"");
    }
    args.out.assert_untouched(case);
    fixture.assert_works();
}
