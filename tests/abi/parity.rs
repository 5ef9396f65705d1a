//! Prototypes and constants: a C compiler compares what Rust has with what the header says.

use std::collections::BTreeMap;
use std::ffi::CStr;
use std::fmt::Write;
use std::fs;

use cbindgen::{Builder, Config, ItemType, Language, Style};
use ep::capi;
use ep_core::Status;
use ep_core::config::{Layout, MAX_PAYLOADS, ReduceOrder};
use ep_core::tensor::Dtype;

use crate::compile::{GCC, compile, header_code, header_functions, root, scratch};

/// The Rust names of the header's types.
const TYPES: [(&str, &str); 19] = [
    ("EpStatus", "ep_status_t"),
    ("EpGroup", "ep_group_t"),
    ("EpStream", "ep_stream_t"),
    ("EpWindow", "ep_window_t"),
    ("EpPlan", "ep_plan_t"),
    ("EpTensor", "ep_tensor_t"),
    ("EpUniqueId", "ep_unique_id_t"),
    ("EpBootstrap", "ep_bootstrap_t"),
    ("EpGroupConfig", "ep_group_config_t"),
    ("EpErrorInfo", "ep_error_info_t"),
    ("EpGroupInfo", "ep_group_info_t"),
    ("EpPeerStats", "ep_peer_stats_t"),
    ("EpPlanConfig", "ep_plan_config_t"),
    ("EpOptions", "ep_options_t"),
    ("EpCounts", "ep_counts_t"),
    ("EpDispatchInputs", "ep_dispatch_inputs_t"),
    ("EpDispatchOutputs", "ep_dispatch_outputs_t"),
    ("EpCombineInputs", "ep_combine_inputs_t"),
    ("EpCombineOutputs", "ep_combine_outputs_t"),
];

/// The prototypes of the Rust entries, in C.
fn rust_prototypes() -> String {
    let mut config = Config { language: Language::C, no_includes: true, ..Config::default() };
    config.documentation = false;
    config.style = Style::Type;
    config.usize_is_size_t = true;
    config.export.item_types = vec![ItemType::Functions];
    config.export.rename = TYPES.map(|(rust, c)| (rust.to_string(), c.to_string())).into();
    // cbindgen follows the `mod` lines from there.
    let builder = Builder::new().with_config(config).with_src(root().join("src/capi/mod.rs"));
    let mut text = Vec::new();
    builder.generate().expect("cbindgen reads src/capi").write(&mut text);
    let text = String::from_utf8(text).expect("C is UTF-8");
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    // One prototype a line, whatever their length.
    lines.flat_map(str::split_whitespace).collect::<Vec<_>>().join(" ").replace("; ", ";\n")
}

/// Compiles the header together with `prototypes`.
fn accepts(test: &str, prototypes: &str) -> Result<(), String> {
    let source = scratch(test).join("parity.c");
    fs::write(&source, format!("#include \"ep.h\"\n{prototypes}\nint unused;\n")).unwrap();
    compile(GCC.c, &["-std=c11", "-fsyntax-only"], &[&source])
}

#[test]
fn prototypes_are_those_of_the_header() {
    let prototypes = rust_prototypes();
    accepts("prototypes", &prototypes).unwrap_or_else(|error| panic!("{error}\n{prototypes}"));
    let mut names: Vec<String> = prototypes
        .split(';')
        .filter_map(|one| one.split_once('(')?.0.rsplit([' ', '*', '\n']).next().map(str::to_string))
        .collect();
    names.sort();
    assert_eq!(names, header_functions(), "{prototypes}");
}

#[test]
fn the_compiler_finds_a_prototype_that_differs() {
    let prototypes = rust_prototypes();
    let changes = [
        ("const ep_plan_config_t *config", "ep_plan_config_t *config"),
        ("uint32_t timeout_ms", "int32_t timeout_ms"),
        ("size_t bytes", "uint32_t bytes"),
        ("ep_window_t *window", "ep_plan_t *window"),
        ("void **data_out", "void *data_out"),
        (", void *stream", ""),
    ];
    for (from, to) in changes {
        assert!(prototypes.contains(from), "{from} is not in\n{prototypes}");
        assert!(accepts("prototypes-changed", &prototypes.replacen(from, to, 1)).is_err(), "{from} to {to}");
    }
}

/// Every constant that both sides have.
fn rust_constants() -> BTreeMap<String, i64> {
    let mut constants: BTreeMap<String, i64> = [
        ("EP_SCOPE_NONE", capi::EP_SCOPE_NONE),
        ("EP_SCOPE_CALLER", capi::EP_SCOPE_CALLER),
        ("EP_SCOPE_CALL", capi::EP_SCOPE_CALL),
        ("EP_SCOPE_GROUP", capi::EP_SCOPE_GROUP),
        ("EP_SCOPE_PROCESS", capi::EP_SCOPE_PROCESS),
        ("EP_BACKEND_AUTO", capi::EP_BACKEND_AUTO),
        ("EP_BACKEND_HOST", capi::EP_BACKEND_HOST),
        ("EP_BACKEND_CUDA", capi::EP_BACKEND_CUDA),
        ("EP_TRANSPORT_AUTO", capi::EP_TRANSPORT_AUTO),
        ("EP_TRANSPORT_SHARED_MEMORY", capi::EP_TRANSPORT_SHARED_MEMORY),
        ("EP_TRANSPORT_FABRIC", capi::EP_TRANSPORT_FABRIC),
        ("EP_ROUTE_AUTO", capi::EP_ROUTE_AUTO),
        ("EP_ROUTE_RELAY", capi::EP_ROUTE_RELAY),
        ("EP_ROUTE_DIRECT", capi::EP_ROUTE_DIRECT),
        ("EP_RANK_ALIVE", capi::EP_RANK_ALIVE),
        ("EP_RANK_LOST", capi::EP_RANK_LOST),
        ("EP_LAYOUT_FLAT", Layout::Flat as i32),
        ("EP_LAYOUT_EXPERT_MAJOR", Layout::ExpertMajor as i32),
        ("EP_REDUCE_DEFAULT", capi::EP_REDUCE_DEFAULT),
        ("EP_REDUCE_TOPK_SLOT", ReduceOrder::TopkSlot as i32),
        ("EP_REDUCE_RANK", ReduceOrder::Rank as i32),
        ("EP_REDUCE_NODE_RANK", ReduceOrder::NodeRank as i32),
    ]
    .map(|(name, value)| (name.to_string(), value.into()))
    .into();
    constants.extend(Status::ALL.map(|status| (status.name().to_string(), status.code().into())));
    constants.extend(Dtype::ALL.map(|dtype| (dtype.name().to_string(), dtype as i64)));
    constants
}

/// The enumerators of the header. Each has its value written out.
fn header_constants() -> BTreeMap<String, i64> {
    let code = header_code();
    let blocks = code.split("enum {").skip(1).map(|rest| rest.split_once('}').expect("enums end").0);
    blocks
        .flat_map(|block| block.split(','))
        .map(str::trim)
        .filter(|enumerator| !enumerator.is_empty())
        .map(|enumerator| {
            let (name, value) = enumerator.split_once('=').expect("every enumerator has its value");
            (name.trim().to_string(), value.trim().parse().expect("values are decimal"))
        })
        .collect()
}

#[test]
fn constants_are_those_of_the_header() {
    assert_eq!(rust_constants(), header_constants());
}

#[test]
fn the_compiler_agrees_on_constants_and_versions() {
    let mut text = String::from("#include \"ep.h\"\n");
    let mut assert_equal = |name: &str, value: i64| {
        writeln!(text, "_Static_assert({name} == {value}, \"{name} is {value} in Rust\");").expect("grows");
    };
    rust_constants().iter().for_each(|(name, value)| assert_equal(name, *value));
    assert_equal("EP_MAX_PAYLOADS", MAX_PAYLOADS as i64);
    assert_equal("EP_VERSION_MAJOR", env!("CARGO_PKG_VERSION_MAJOR").parse().unwrap());
    assert_equal("EP_VERSION_MINOR", env!("CARGO_PKG_VERSION_MINOR").parse().unwrap());
    assert_equal("EP_VERSION_PATCH", env!("CARGO_PKG_VERSION_PATCH").parse().unwrap());
    assert_equal("EP_VERSION_NUMBER", capi::ep_version().into());
    text.push_str("int unused;\n");
    let source = scratch("constants").join("constants.c");
    fs::write(&source, text).unwrap();
    compile(GCC.c, &["-std=c11", "-fsyntax-only"], &[&source]).unwrap_or_else(|error| panic!("{error}"));
}

#[test]
fn every_status_has_its_name_and_its_scope() {
    for code in -1000..1000 {
        // SAFETY: `ep_status_name` returns static text.
        let name = unsafe { CStr::from_ptr(capi::ep_status_name(code)) }.to_str().unwrap();
        let scope = match code {
            0 => capi::EP_SCOPE_NONE,
            1..=99 => capi::EP_SCOPE_CALLER,
            100..=199 => capi::EP_SCOPE_CALL,
            200..=299 => capi::EP_SCOPE_GROUP,
            _ => capi::EP_SCOPE_PROCESS,
        };
        assert_eq!(capi::ep_status_scope(code), scope, "{code}");
        let expected = Status::from_code(code).map_or("EP_ERR_UNKNOWN", Status::name);
        assert_eq!(name, expected, "{code}");
        if let Some(status) = Status::from_code(code) {
            assert_eq!(header_constants()[status.name()], i64::from(code));
            assert_eq!(status.breaks_group(), scope == capi::EP_SCOPE_GROUP);
        }
    }
}
