//! `ep_plan_bytes`, `ep_plan_create`, `ep_plan_counts`.

use std::ptr;

use ep::capi::*;
use ep_core::Status;

use super::fixture::*;

#[repr(C, align(64))]
struct Memory([u8; 1 << 16]);

struct Case {
    status: Status,
    texts: &'static [&'static str],
    spoil: fn(&mut EpPlanConfig),
}

const fn invalid(texts: &'static [&'static str], spoil: fn(&mut EpPlanConfig)) -> Case {
    Case { status: Status::InvalidArgument, texts, spoil }
}

static THREE: [u32; 1] = [3];
static FOUR: [u32; 1] = [4];

const CONFIGS: &[Case] = &[
    Case { status: Status::OutOfRange, texts: &["lane", "2"], spoil: |config| config.lane = 2 },
    Case { status: Status::OutOfRange, texts: &["lane"], spoil: |config| config.lane = u32::MAX },
    invalid(&["topk", "0"], |config| config.topk = 0),
    invalid(&["topk", "257", "256"], |config| config.topk = 257),
    invalid(&["topk"], |config| config.topk = u32::MAX),
    invalid(&["num_experts", "0"], |config| config.num_experts = 0),
    invalid(&["num_experts", "1048577"], |config| config.num_experts = (1 << 20) + 1),
    invalid(&["num_experts"], |config| config.num_experts = u32::MAX),
    Case {
        status: Status::Capacity,
        texts: &["max_local_experts", "257", "256"],
        spoil: |config| config.num_experts = 257,
    },
    invalid(&["layout is 2"], |config| config.layout = 2),
    invalid(&["layout is -1"], |config| config.layout = -1),
    invalid(&["max_tokens"], |config| config.max_tokens = u64::MAX),
    invalid(&["max_tokens"], |config| config.max_tokens = 1 << 40),
    invalid(&["expert_alignment"], |config| config.expert_alignment = u32::MAX),
    invalid(&["expert_alignment", "EP_LAYOUT_EXPERT_MAJOR"], |config| {
        config.layout = 0;
        config.expert_alignment = 8;
    }),
    invalid(&["num_experts_per_rank is 2", "1"], |config| {
        config.experts_per_rank = THREE.as_ptr();
        config.num_experts_per_rank = 2;
    }),
    invalid(&["num_experts_per_rank is 0"], |config| config.experts_per_rank = THREE.as_ptr()),
    invalid(&["experts_per_rank is NULL"], |config| config.num_experts_per_rank = 1),
    invalid(&["experts_per_rank", "4", "3"], |config| {
        config.experts_per_rank = FOUR.as_ptr();
        config.num_experts_per_rank = 1;
    }),
    invalid(&["experts_per_rank is 0x"], |config| {
        config.experts_per_rank = THREE.as_ptr().wrapping_byte_add(2);
        config.num_experts_per_rank = 1;
    }),
];

#[test]
fn plans_are_not_made_of_nonsense() {
    let fixture = Fixture::new();
    let args = Args::new(&fixture, fixture.plan);
    for Case { status, texts, spoil } in CONFIGS {
        let mut config = plan_config(1);
        spoil(&mut config);
        let case = texts.join(", ");
        let mut bytes = 77;
        // SAFETY: every pointer is to a local of the right type.
        let found = unsafe { ep_plan_bytes(fixture.group, &config, &mut bytes) };
        assert_refused(&fixture, &args, (&case, "ep_plan_bytes", *status, texts), found);
        assert_eq!(bytes, 77);
        let mut plan = ptr::null_mut();
        // SAFETY: as above.
        let found = unsafe { ep_plan_create(fixture.group, &config, ptr::null_mut(), 0, &mut plan) };
        assert_refused(&fixture, &args, (&case, "ep_plan_create", *status, texts), found);
        assert!(plan.is_null());
    }
}

#[test]
fn plan_entries_refuse_pointers_that_are_none() {
    let fixture = Fixture::new();
    let args = Args::new(&fixture, fixture.plan);
    let config = plan_config(1);
    let (config, mut bytes, mut plan) = (&raw const config, 0, ptr::null_mut::<EpPlan>());
    let (bytes, plan) = (&raw mut bytes, &raw mut plan);
    let bytes_cases = [
        ("config is NULL", ptr::null(), bytes),
        ("config is 0x", config.wrapping_byte_add(4), bytes),
        ("bytes_out is NULL", config, ptr::null_mut()),
        ("bytes_out is 0x", config, bytes.wrapping_byte_add(1)),
    ];
    for (text, config, bytes) in bytes_cases {
        // SAFETY: null and misaligned pointers are refused unread.
        let found = unsafe { ep_plan_bytes(fixture.group, config, bytes) };
        assert_refused(&fixture, &args, (text, "ep_plan_bytes", Status::InvalidArgument, &[text]), found);
    }
    let create_cases = [
        ("config is NULL", ptr::null(), plan),
        ("config is 0x", config.wrapping_byte_add(4), plan),
        ("plan_out is NULL", config, ptr::null_mut()),
        ("plan_out is 0x", config, plan.wrapping_byte_add(1)),
    ];
    for (text, config, plan) in create_cases {
        // SAFETY: as above.
        let found = unsafe { ep_plan_create(fixture.group, config, ptr::null_mut(), 0, plan) };
        assert_refused(&fixture, &args, (text, "ep_plan_create", Status::InvalidArgument, &[text]), found);
    }
    let counts = &raw mut *Box::leak(Box::new(zeroed::<EpCounts>()));
    for (text, counts) in
        [("counts_out is NULL", ptr::null_mut()), ("counts_out is 0x", counts.wrapping_byte_add(4))]
    {
        // SAFETY: as above.
        let found = unsafe { ep_plan_counts(fixture.plan, 0, counts) };
        assert_refused(&fixture, &args, (text, "ep_plan_counts", Status::InvalidArgument, &[text]), found);
    }
}

#[test]
fn memory_that_does_not_fit_the_plan_is_refused() {
    let fixture = Fixture::new();
    let args = Args::new(&fixture, fixture.plan);
    let config = plan_config(1);
    let mut needed = 0;
    // SAFETY: every pointer is to a local of the right type.
    assert_ok(unsafe { ep_plan_bytes(fixture.group, &config, &mut needed) });
    assert!(needed > 0 && needed < size_of::<Memory>());
    let mut memory = Box::new(Memory([0; 1 << 16]));
    let base = memory.0.as_mut_ptr();
    let mut plan = ptr::null_mut();
    let mut create = |memory: *mut u8, bytes| {
        // SAFETY: memory that is too small or misaligned is refused before it is written.
        unsafe { ep_plan_create(fixture.group, &config, memory.cast(), bytes, &mut plan) }
    };
    let invalid = Status::InvalidArgument;
    let found = create(ptr::null_mut(), needed);
    assert_refused(&fixture, &args, ("NULL", "ep_plan_create", invalid, &["memory is NULL"]), found);
    let found = create(base.wrapping_add(32), needed);
    assert_refused(&fixture, &args, ("misaligned", "ep_plan_create", invalid, &["64 bytes"]), found);
    for bytes in [0, 1, needed - 1] {
        let found = create(base, bytes);
        let texts = [&*bytes.to_string(), &*needed.to_string()];
        assert_refused(&fixture, &args, ("short", "ep_plan_create", Status::Capacity, &texts), found);
    }
    assert_ok(create(base, needed));
    assert!(!plan.is_null());
    let own = Args::new(&fixture, plan);
    assert_ok(own.update());
    assert_ok(own.dispatch());
    // SAFETY: the handle is alive.
    assert_ok(unsafe { ep_plan_destroy(plan) });
}

type Spoil<'a> = &'a dyn Fn(&mut Outputs);

#[test]
fn counts_check_their_arrays() {
    let fixture = Fixture::new();
    let counts = |plan, spoil: Spoil<'_>| {
        let mut args = Args::new(&fixture, fixture.plan);
        let (experts, sources) = (args.out.counts_experts.as_mut_ptr(), args.out.counts_sources.as_mut_ptr());
        args.out.counts.rows_per_expert = experts;
        args.out.counts.rows_per_source = sources;
        (args.out.counts.num_local_experts, args.out.counts.num_ranks) = (EXPERTS as u32, 1);
        spoil(&mut args.out);
        // SAFETY: arrays of another length are refused before they are written.
        let status = unsafe { ep_plan_counts(plan, 0, &mut args.out.counts) };
        (args, status)
    };
    let cases: [(&str, Spoil<'_>); 8] = [
        ("num_local_experts is 2, expected 3", &|out| out.counts.num_local_experts = 2),
        ("num_local_experts is 4, expected 3", &|out| out.counts.num_local_experts = 4),
        ("num_local_experts is 0, expected 3", &|out| out.counts.num_local_experts = 0),
        ("rows_per_expert is NULL", &|out| out.counts.rows_per_expert = ptr::null_mut()),
        ("rows_per_expert is 0x", &|out| {
            out.counts.rows_per_expert = out.counts.rows_per_expert.wrapping_byte_add(4);
        }),
        ("num_ranks is 2, expected 1", &|out| out.counts.num_ranks = 2),
        ("rows_per_source is NULL", &|out| out.counts.rows_per_source = ptr::null_mut()),
        ("rows_per_source is 0x", &|out| {
            out.counts.rows_per_source = out.counts.rows_per_source.wrapping_byte_add(1);
        }),
    ];
    for (text, spoil) in cases {
        let (args, found) = counts(fixture.plan, spoil);
        assert_refused(&fixture, &args, (text, "ep_plan_counts", Status::InvalidArgument, &[text]), found);
    }
    let (args, found) = counts(fixture.fresh, &|_| {});
    let expected = ("order", "ep_plan_counts", Status::InvalidState, &["ep_plan_update"][..]);
    assert_refused(&fixture, &args, expected, found);
    let (args, found) = counts(fixture.plan, &|_| {});
    assert_ok(found);
    assert_eq!((args.out.counts.num_rows, args.out.counts.num_tokens), (ROWS as i64, TOKENS as i64));
    assert_eq!(args.out.counts_experts.iter().sum::<i64>(), ROWS as i64);
    assert_eq!(args.out.counts_sources, [ROWS as i64]);
}
