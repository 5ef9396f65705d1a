//! `kernels/include/ep/wire.h` and `ep_core::wire` say the same, to the byte.

use std::io::Write;
use std::mem::offset_of;
use std::process::{Command, Stdio};

use ep_core::wire::*;

/// A C translation unit that fails to compile where the header and Rust differ.
fn assertions() -> String {
    let mut unit = String::from("#include <stddef.h>\n#include \"ep/wire.h\"\n");
    let mut equal = |c: &str, rust: u64| unit.push_str(&format!("EP_WIRE_ASSERT({c} == {rust});\n"));

    equal("EP_WIRE_VERSION", WIRE_VERSION.into());
    equal("EP_WIRE_DEPTH", DEPTH);
    equal("EP_WIRE_LINE_BYTES", LINE_BYTES as u64);
    equal("EP_WIRE_MAX_PAYLOADS", MAX_PAYLOADS as u64);
    equal("EP_WIRE_REQUESTS", REQUESTS as u64);
    equal("EP_WIRE_ERROR_TEXT", ERROR_TEXT as u64);
    equal("EP_WIRE_OP_PLAN", OP_PLAN.into());
    equal("EP_WIRE_OP_DISPATCH", OP_DISPATCH.into());
    equal("EP_WIRE_OP_COMBINE", OP_COMBINE.into());
    equal("EP_WIRE_OP_FAILED", OP_FAILED.into());
    equal("EP_WIRE_FLAG_TOPK_WEIGHTS", FLAG_TOPK_WEIGHTS.into());
    equal("EP_WIRE_FLAG_ROW_WEIGHTS", FLAG_ROW_WEIGHTS.into());
    equal("EP_WIRE_FLAG_ORDER_SHIFT", FLAG_ORDER_SHIFT.into());
    equal("EP_WIRE_FLAG_WIRE_BF16", FLAG_WIRE_BF16.into());
    equal("EP_WIRE_WANTS_META", WANTS_META.into());

    equal("sizeof(ep_wire_place_t)", size_of::<Place>() as u64);
    equal("offsetof(ep_wire_place_t, window)", offset_of!(Place, window) as u64);
    equal("offsetof(ep_wire_place_t, offset)", offset_of!(Place, offset) as u64);
    equal("offsetof(ep_wire_place_t, row_pitch)", offset_of!(Place, row_pitch) as u64);
    equal("offsetof(ep_wire_place_t, col_pitch)", offset_of!(Place, col_pitch) as u64);

    equal("sizeof(ep_wire_desc_t)", DESC_BYTES as u64);
    equal("offsetof(ep_wire_desc_t, epoch)", 0);
    // The Rust struct begins behind the epoch, and the C one after the error's state.
    let desc = [
        ("plan_epoch", offset_of!(DescBody, plan_epoch)),
        ("plan_hash", offset_of!(DescBody, plan_hash)),
        ("op", offset_of!(DescBody, op)),
        ("flags", offset_of!(DescBody, flags)),
        ("dtypes", offset_of!(DescBody, dtypes)),
        ("num_payloads", offset_of!(DescBody, num_payloads)),
        ("row_bytes", offset_of!(DescBody, row_bytes)),
        ("wants", offset_of!(DescBody, wants)),
        ("plan_fields", offset_of!(DescBody, plan_fields)),
        ("capacity", offset_of!(DescBody, capacity)),
        ("places", offset_of!(DescBody, places)),
    ];
    for (field, offset) in desc {
        equal(&format!("offsetof(ep_wire_desc_t, {field})"), 8 + offset as u64);
    }
    let words = [
        ("arrival", line::ARRIVAL),
        ("ring_head", line::RING_HEAD),
        ("ring_tail", line::RING_TAIL),
        ("request_head", line::REQUEST_HEAD),
        ("request_tail", line::REQUEST_TAIL),
    ];
    for (field, offset) in words {
        equal(&format!("offsetof(ep_wire_line_t, {field})"), offset as u64);
    }
    equal("EP_WIRE_RECORD_ALIGN", RECORD_ALIGN as u64);
    unit.push_str(&messages());
    let mut equal = |c: &str, rust: u64| unit.push_str(&format!("EP_WIRE_ASSERT({c} == {rust});\n"));
    equal("sizeof(ep_wire_error_t)", ERROR_BYTES as u64);
    let error = [
        ("status", offset_of!(ErrorBody, status)),
        ("rank", offset_of!(ErrorBody, rank)),
        ("peer", offset_of!(ErrorBody, peer)),
        ("lane", offset_of!(ErrorBody, lane)),
        ("epoch", offset_of!(ErrorBody, epoch)),
        ("text", offset_of!(ErrorBody, text)),
    ];
    for (field, offset) in error {
        equal(&format!("offsetof(ep_wire_error_t, {field})"), 4 + offset as u64);
    }
    unit
}

/// The part about messages between nodes.
fn messages() -> String {
    let mut unit = String::new();
    let mut equal = |c: &str, rust: u64| unit.push_str(&format!("EP_WIRE_ASSERT({c} == {rust});\n"));
    equal("sizeof(ep_wire_relay_desc_t)", RELAY_DESC_BYTES as u64);
    let relay = [
        ("desc", offset_of!(RelayDesc, epoch)),
        ("rows_first", offset_of!(RelayDesc, rows_first)),
        ("requests_first", offset_of!(RelayDesc, requests_first)),
        ("num_tokens", offset_of!(RelayDesc, num_tokens)),
        ("num_ranks", offset_of!(RelayDesc, num_ranks)),
    ];
    for (field, offset) in relay {
        equal(&format!("offsetof(ep_wire_relay_desc_t, {field})"), offset as u64);
    }
    equal("sizeof(ep_wire_chunk_t)", CHUNK_BYTES as u64);
    let chunk = [
        ("epoch", offset_of!(Chunk, epoch)),
        ("first", offset_of!(Chunk, first)),
        ("records", offset_of!(Chunk, records)),
        ("piece", offset_of!(Chunk, piece)),
        ("col", offset_of!(Chunk, col)),
        ("cols", offset_of!(Chunk, cols)),
    ];
    for (field, offset) in chunk {
        equal(&format!("offsetof(ep_wire_chunk_t, {field})"), offset as u64);
    }
    unit
}

fn compiles(compiler: &str, standard: &str, unit: &str) -> Result<(), String> {
    let language = if compiler == "g++" { "c++" } else { "c" };
    let include = concat!("-I", env!("CARGO_MANIFEST_DIR"), "/kernels/include");
    let mut child = Command::new(compiler)
        .args(["-x", language, &format!("-std={standard}"), "-Wall", "-Wextra", "-Wpedantic", "-Werror"])
        .args([include, "-fsyntax-only", "-"])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|e| format!("{compiler}: {e}"))?;
    child.stdin.take().unwrap().write_all(unit.as_bytes()).map_err(|e| e.to_string())?;
    let output = child.wait_with_output().map_err(|e| e.to_string())?;
    if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&output.stderr).into_owned()) }
}

#[test]
fn the_header_equals_the_rust_mirror_in_c_and_cpp() {
    for (compiler, standard) in [("gcc", "c11"), ("gcc", "c17"), ("g++", "c++17"), ("g++", "c++20")] {
        compiles(compiler, standard, &assertions()).unwrap();
    }
}

#[test]
fn a_difference_is_found() {
    let unit =
        assertions().replace("offsetof(ep_wire_desc_t, op) == 24", "offsetof(ep_wire_desc_t, op) == 28");
    assert_ne!(unit, assertions());
    assert!(compiles("gcc", "c11", &unit).unwrap_err().contains("ep_wire_desc_t, op"));
}
