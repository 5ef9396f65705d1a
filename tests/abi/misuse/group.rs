//! Meeting, and the entries of groups.

use std::ffi::{CStr, c_void};
use std::ptr;

use ep::capi::*;
use ep_core::Status;

use super::fixture::*;

/// Calls `ep_group_create`, which must fail and leave its output.
#[track_caller]
fn create_fails(config: &EpGroupConfig, bootstrap: &EpBootstrap, expected: Status, texts: &[&str]) {
    let mut group: *mut EpGroup = ptr::without_provenance_mut(16);
    // SAFETY: every pointer is to a local of the right type.
    let status = unsafe { ep_group_create_versioned(ep_version(), config, bootstrap, &mut group) };
    let text = last_error();
    assert_eq!(Status::from_code(status), Some(expected), "{text}");
    assert!(text.starts_with("ep_group_create: "), "{text}");
    for part in texts {
        assert!(text.contains(part), "\"{text}\" does not say \"{part}\"");
    }
    assert_eq!(group.addr(), 16, "{text}");
}

#[test]
fn create_refuses_bootstraps_that_name_no_meeting() {
    let good = bootstrap_alone();
    let id = EpUniqueId { bytes: [0; 128] };
    let file = c"/nowhere".as_ptr();
    let none = EpBootstrap { all_gather: None, ..good };
    let invalid = |bootstrap: EpBootstrap, texts: &[&str]| {
        create_fails(&zeroed(), &bootstrap, Status::InvalidArgument, texts);
    };
    invalid(none, &["none of all_gather, unique_id and file", "exactly one"]);
    invalid(EpBootstrap { unique_id: &id, ..good }, &["all_gather and unique_id of"]);
    invalid(EpBootstrap { file, ..good }, &["all_gather and file of"]);
    invalid(EpBootstrap { file, unique_id: &id, ..none }, &["unique_id and file of"]);
    invalid(EpBootstrap { file, unique_id: &id, ..good }, &["all_gather and unique_id and file of"]);
    invalid(EpBootstrap { file: c"".as_ptr(), ..none }, &["file is empty"]);
    let endless = [b'x' as i8; 5000];
    invalid(EpBootstrap { file: endless.as_ptr(), ..none }, &["file is longer than 4096 bytes"]);
    invalid(EpBootstrap { num_ranks: 0, ..good }, &["num_ranks is 0"]);
    invalid(EpBootstrap { num_ranks: -1, ..good }, &["num_ranks is -1"]);
    invalid(EpBootstrap { num_ranks: 4097, ..good }, &["num_ranks is 4097", "4096"]);
    for rank in [-1, 1, i32::MAX, i32::MIN] {
        let bootstrap = EpBootstrap { rank, ..good };
        create_fails(&zeroed(), &bootstrap, Status::OutOfRange, &[&format!("rank is {rank}")]);
    }
}

#[test]
fn create_refuses_configs_that_cannot_be() {
    let good: EpGroupConfig = zeroed();
    let cases = [
        (EpGroupConfig { backend: 3, ..good }, Status::InvalidArgument, "backend"),
        (EpGroupConfig { backend: -1, ..good }, Status::InvalidArgument, "backend"),
        (EpGroupConfig { backend: EP_BACKEND_CUDA, ..good }, Status::Unsupported, "CUDA"),
        (EpGroupConfig { num_lanes: 17, ..good }, Status::InvalidArgument, "num_lanes"),
        (EpGroupConfig { num_lanes: u32::MAX, ..good }, Status::InvalidArgument, "num_lanes"),
        (EpGroupConfig { max_local_experts: u32::MAX, ..good }, Status::InvalidArgument, "max_local_experts"),
    ];
    for (config, status, text) in cases {
        create_fails(&config, &bootstrap_alone(), status, &[text]);
    }
}

#[test]
fn create_refuses_null_and_misaligned_pointers() {
    let (config, bootstrap): (EpGroupConfig, _) = (zeroed(), bootstrap_alone());
    let mut group: *mut EpGroup = ptr::null_mut();
    let out = &raw mut group;
    let (config, bootstrap) = (&raw const config, &raw const bootstrap);
    let cases = [
        ("config is NULL", ptr::null(), bootstrap, out),
        ("config is 0x", config.wrapping_byte_add(1), bootstrap, out),
        ("bootstrap is NULL", config, ptr::null(), out),
        ("bootstrap is 0x", config, bootstrap.wrapping_byte_add(4), out),
        ("group_out is NULL", config, bootstrap, ptr::null_mut()),
        ("group_out is 0x", config, bootstrap, out.wrapping_byte_add(4)),
    ];
    for (text, config, bootstrap, out) in cases {
        // SAFETY: null and misaligned pointers are refused unread.
        let status = unsafe { ep_group_create_versioned(ep_version(), config, bootstrap, out) };
        assert_eq!(status, Status::InvalidArgument.code(), "{text}");
        assert!(last_error().contains(text), "{}", last_error());
    }
    assert!(group.is_null());
}

#[test]
fn create_refuses_the_header_of_another_version() {
    for version in [0, ep_version() + 100, ep_version() + 10_000, u32::MAX] {
        let mut group = ptr::null_mut();
        let (config, bootstrap): (EpGroupConfig, _) = (zeroed(), bootstrap_alone());
        // SAFETY: every pointer is to a local of the right type.
        let status = unsafe { ep_group_create_versioned(version, &config, &bootstrap, &mut group) };
        assert_eq!(status, Status::Unsupported.code());
        let (major, minor) = (version / 10_000, version / 100 % 100);
        assert!(last_error().contains(&format!("ep.h {major}.{minor}.")), "{}", last_error());
        assert!(last_error().contains(concat!("libep ", env!("CARGO_PKG_VERSION"))), "{}", last_error());
        assert!(group.is_null());
    }
}

#[test]
fn a_callback_that_fails_is_a_bootstrap_error() {
    unsafe extern "C" fn fails(_: *mut c_void, _: *const c_void, _: *mut c_void, _: usize) -> i32 {
        42
    }
    unsafe extern "C" fn does_nothing(_: *mut c_void, _: *const c_void, _: *mut c_void, _: usize) -> i32 {
        0
    }
    let with = |all_gather| EpBootstrap { all_gather: Some(all_gather), ..bootstrap_alone() };
    create_fails(&zeroed(), &with(fails), Status::Bootstrap, &["42"]);
    create_fails(&zeroed(), &with(does_nothing), Status::Bootstrap, &["all-gather"]);
}

#[test]
fn ranks_that_never_come_are_named_at_the_deadline() {
    let mut id = EpUniqueId { bytes: [0; 128] };
    // SAFETY: the address of an id.
    assert_ok(unsafe { ep_unique_id_create(&mut id) });
    let absent =
        EpBootstrap { num_ranks: 3, rank: 1, unique_id: &id, all_gather: None, timeout_ms: 300, ..zeroed() };
    create_fails(&zeroed(), &absent, Status::Bootstrap, &["0", "2"]);
}

#[test]
fn an_id_that_nobody_made_is_refused() {
    for byte in [0, 0xFF] {
        let id = EpUniqueId { bytes: [byte; 128] };
        let bootstrap = EpBootstrap { unique_id: &id, all_gather: None, ..bootstrap_alone() };
        create_fails(&zeroed(), &bootstrap, Status::InvalidArgument, &["id"]);
    }
}

#[test]
fn ids_are_not_made_of_nonsense() {
    let secret = c"secret";
    let mut id = EpUniqueId { bytes: [0xA5; 128] };
    let make = |address: Option<&CStr>, secret: Option<&CStr>, id: *mut EpUniqueId| {
        let pointer = |text: Option<&CStr>| text.map_or(ptr::null(), CStr::as_ptr);
        // SAFETY: NULL or strings, and NULL or the address of an id.
        unsafe { ep_unique_id_from_address(pointer(address), pointer(secret), id) }
    };
    let cases: [(Option<&CStr>, Option<&CStr>, &str); 7] = [
        (None, Some(secret), "address is NULL"),
        (Some(c"127.0.0.1:5000"), None, "secret is NULL"),
        (Some(c""), Some(secret), "address"),
        (Some(c"127.0.0.1"), Some(secret), "port"),
        (Some(c"127.0.0.1:99999"), Some(secret), "127.0.0.1:99999"),
        (Some(c"127.0.0.1:0"), Some(secret), "127.0.0.1:0"),
        (Some(c"\xFF:5000"), Some(secret), "UTF-8"),
    ];
    for (address, secret, text) in cases {
        assert_eq!(
            make(address, secret, &mut id),
            Status::InvalidArgument.code(),
            "{text}: {}",
            last_error()
        );
        let said = last_error();
        assert!(said.starts_with("ep_unique_id_from_address: ") && said.contains(text), "{said}");
        assert!(id.bytes.iter().all(|byte| *byte == 0xA5));
    }
    // Two dots in a row are no name, which the resolver knows without asking anybody.
    assert_eq!(
        make(Some(c"no..host:5000"), Some(secret), &mut id),
        Status::System.code(),
        "{}",
        last_error()
    );
    assert!(last_error().contains("no..host"), "{}", last_error());
    let good = Some(c"127.0.0.1:5000");
    assert_eq!(make(good, Some(secret), ptr::null_mut()), Status::InvalidArgument.code());
    assert!(last_error().contains("id_out is NULL"), "{}", last_error());
    // SAFETY: NULL is refused.
    assert_eq!(unsafe { ep_unique_id_create(ptr::null_mut()) }, Status::InvalidArgument.code());
    assert_ok(make(good, Some(secret), &mut id));
    let mut same = id;
    assert_ok(make(good, Some(secret), &mut same));
    assert_eq!(id.bytes, same.bytes);
}

#[test]
fn health_and_stats_check_their_arrays() {
    let fixture = Fixture::new();
    let args = Args::new(&fixture, fixture.plan);
    let mut states = [7; 2];
    let mut stats = [EpPeerStats { calls: 7, ..EpPeerStats::default() }; 2];
    let mut info: EpErrorInfo = EpErrorInfo { status: 7, ..zeroed() };
    let odd_states = states.as_mut_ptr().wrapping_byte_add(1);
    let health = |info: *mut EpErrorInfo, states: *mut i32, num_states| {
        // SAFETY: null and misaligned pointers and wrong lengths are refused before anything is written.
        unsafe { ep_group_health(fixture.group, info, states, num_states) }
    };
    let (info_out, states_out) = (&raw mut info, states.as_mut_ptr());
    let cases = [
        (health(info_out, ptr::null_mut(), 1), "states_out is NULL", last_error()),
        (health(info_out, states_out, 0), "num_states is 0, expected 1", last_error()),
        (health(info_out, states_out, 2), "num_states is 2, expected 1", last_error()),
        (health(info_out, states_out, u32::MAX), "num_states is 4294967295", last_error()),
        (health(info_out, odd_states, 1), "states_out is 0x", last_error()),
        (health(info_out.wrapping_byte_add(4), states_out, 1), "error_out is 0x", last_error()),
    ];
    for (status, text, said) in cases {
        assert_eq!(status, Status::InvalidArgument.code(), "{said}");
        assert!(said.starts_with("ep_group_health: ") && said.contains(text), "{said}");
    }
    let stats_out = stats.as_mut_ptr();
    for (stats, num_peers, text) in [
        (ptr::null_mut(), 1, "stats_out is NULL"),
        (stats_out, 0, "num_peers is 0, expected 1"),
        (stats_out, 2, "num_peers is 2, expected 1"),
        (stats_out.wrapping_byte_add(4), 1, "stats_out is 0x"),
    ] {
        // SAFETY: as above.
        let found = unsafe { ep_group_stats(fixture.group, stats, num_peers) };
        assert_refused(&fixture, &args, (text, "ep_group_stats", Status::InvalidArgument, &[text]), found);
    }
    assert_eq!((info.status, states, stats[0].calls), (7, [7; 2], 7));
    assert_ok(health(info_out, states_out, 1));
    assert_eq!((info.status, info.peer, info.lane, states), (0, -1, -1, [EP_RANK_ALIVE, 7]));
    assert_ok(health(ptr::null_mut(), ptr::null_mut(), 0));
}

#[test]
fn an_aborted_group_says_why_until_it_is_destroyed() {
    let fixture = Fixture::new();
    let args = Args::new(&fixture, fixture.plan);
    // SAFETY: the handle is alive.
    assert_ok(unsafe { ep_group_abort(fixture.group) });
    for status in [args.update(), args.dispatch(), args.combine()] {
        assert_eq!(status, Status::Aborted.code());
        assert!(last_error().contains("ep_group_abort"), "{}", last_error());
    }
    let mut info: EpErrorInfo = zeroed();
    // SAFETY: the address of a struct.
    assert_ok(unsafe { ep_group_health(fixture.group, &mut info, ptr::null_mut(), 0) });
    assert_eq!((info.status, info.rank), (Status::Aborted.code(), 0));
    // SAFETY: texts in structs end with a NUL.
    assert!(!unsafe { CStr::from_ptr(info.text.as_ptr()) }.is_empty());
    // SAFETY: the handle is alive.
    assert_ok(unsafe { ep_group_destroy(fixture.group, 0) });
    // SAFETY: handles are looked up.
    assert_eq!(unsafe { ep_group_destroy(fixture.group, 0) }, Status::BadHandle.code());
}
