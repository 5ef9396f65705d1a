//! `kernels/include/ep/args.h` and `launch.h` say the same as their mirrors here, to the byte.

use std::io::Write;
use std::mem::offset_of;
use std::process::{Command, Stdio};

use crate::args::*;
use crate::launch;

/// A C translation unit that fails to compile where a header and Rust differ.
struct Unit(String);

impl Unit {
    fn equal(&mut self, c: &str, rust: usize) {
        self.0.push_str(&format!("EP_WIRE_ASSERT({c} == {rust});\n"));
    }

    /// Size of a struct, and the offset of each field.
    fn layout(&mut self, name: &str, size: usize, fields: &[(&str, usize)]) {
        self.equal(&format!("sizeof({name})"), size);
        for (field, offset) in fields {
            self.equal(&format!("offsetof({name}, {field})"), *offset);
        }
    }
}

macro_rules! layout {
    ($unit:ident, $c:literal, $rust:ident { $($field:ident)* }) => {
        $unit.layout($c, size_of::<$rust>(), &[$((stringify!($field), offset_of!($rust, $field))),*])
    };
}

fn assertions() -> String {
    let mut unit =
        Unit(String::from("#include <stddef.h>\n#include \"ep/args.h\"\n#include \"ep/launch.h\"\n"));
    unit.equal("EP_CUDA_MAX_RANKS", MAX_RANKS);
    unit.equal("EP_CUDA_MAX_WINDOWS", MAX_WINDOWS);
    unit.equal("EP_CUDA_MAX_TOPK", MAX_TOPK);
    unit.equal("EP_CUDA_MAX_CHUNKS", MAX_CHUNKS);
    unit.equal("EP_CUDA_RING_HEADER_BYTES", RING_HEADER_BYTES as usize);
    unit.equal("sizeof(ep_cuda_lane_t)", LANE_BYTES);
    unit.equal("sizeof(ep_cuda_plan_header_t)", PLAN_HEADER_BYTES);
    for (name, value) in [
        ("PLAN_COUNTS", site::PLAN_COUNTS),
        ("DISPATCH_CREDIT", site::DISPATCH_CREDIT),
        ("DISPATCH_ROWS", site::DISPATCH_ROWS),
        ("COMBINE_ROWS", site::COMBINE_ROWS),
        ("COMBINE_READERS", site::COMBINE_READERS),
        ("BAD_PLACE", site::BAD_PLACE),
        ("BAD_ID", site::BAD_ID),
        ("RING_TOO_SMALL", site::RING_TOO_SMALL),
        ("DISPATCH_RING", site::DISPATCH_RING),
        ("COMBINE_RING", site::COMBINE_RING),
        ("FAILED", site::FAILED),
        ("OP", site::OP),
        ("PLAN_HASH", site::PLAN_HASH),
        ("PLAN_EPOCH", site::PLAN_EPOCH),
        ("NUM_PAYLOADS", site::NUM_PAYLOADS),
        ("DTYPES", site::DTYPES),
        ("FLAGS", site::FLAGS),
        ("ROW_BYTES", site::ROW_BYTES),
    ] {
        unit.equal(&format!("EP_CUDA_SITE_{name}"), value as usize);
    }
    layout!(unit, "ep_cuda_report_t", Report {
        state site rank peer lane status epoch expected seen host_abort
    });
    layout!(unit, "ep_cuda_group_t", Group {
        rank num_ranks lane max_local_experts timeout_ns report state windows window_bytes error_offset
        line_offset desc_offset desc_stride ring_offset ring_bytes node_of segments
    });
    layout!(unit, "ep_cuda_plan_t", Plan {
        hash topk num_experts num_local layout alignment max_tokens header owner first expert slot_pos rank_pos
        send_pos chunk_counts column base expert_rows expert_start host_counts
    });
    layout!(unit, "ep_cuda_matrix_t", Matrix { data rows cols element row_pitch col_pitch });
    layout!(unit, "ep_cuda_plan_args_t", PlanArgs {
        group plan topk_idx num_tokens num_chunks chunk_tokens sequence
    });
    layout!(unit, "ep_cuda_dispatch_args_t", DispatchArgs {
        group plan num_payloads dtypes inputs outputs places topk_weights capacity out_idx_element shared_bytes out_idx
        out_weights src_rank src_token src_slot num_rows num_required num_dropped rows_per_expert expert_offsets
    });
    layout!(unit, "ep_cuda_combine_args_t", CombineArgs {
        group plan rows row_weights places topk_weights bias combined combined_weights dtype order wire_bf16
        shared_bytes
    });
    launch_numbers(&mut unit);
    unit.0
}

/// What the build read from `launch.h`, as the C compiler reads it.
fn launch_numbers(unit: &mut Unit) {
    use crate::module::Kernel;
    let plan = launch::plan(Kernel::PlanPlace, 24, 9, 260);
    unit.equal("EP_PLAN_THREADS", plan.block);
    unit.equal("EP_PLAN_SHARED_BYTES(260)", plan.shared);
    unit.equal("EP_PLAN_MAX_BINS", launch::PLAN_MAX_BINS);
    let dispatch = launch::dispatch(24, usize::MAX);
    unit.equal("EP_DISPATCH_THREADS", dispatch.block);
    unit.equal("EP_DISPATCH_SHARED_BYTES", dispatch.shared);
    let combine = launch::combine(24, true, usize::MAX);
    unit.equal("EP_COMBINE_THREADS", combine.block);
    unit.equal("EP_COMBINE_SHARED_BYTES", combine.shared);
}

fn compiles(compiler: &str, standard: &str, unit: &str) -> Result<(), String> {
    let language = if compiler == "g++" { "c++" } else { "c" };
    let include = concat!("-I", env!("CARGO_MANIFEST_DIR"), "/../kernels/include");
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
fn the_headers_equal_the_rust_mirrors_in_c_and_cpp() {
    for (compiler, standard) in [("gcc", "c11"), ("g++", "c++17")] {
        compiles(compiler, standard, &assertions()).unwrap();
    }
}

#[test]
fn a_difference_is_found() {
    let unit = assertions()
        .replace("offsetof(ep_cuda_plan_t, owner) == 40", "offsetof(ep_cuda_plan_t, owner) == 48");
    assert_ne!(unit, assertions());
    assert!(compiles("gcc", "c11", &unit).unwrap_err().contains("ep_cuda_plan_t, owner"));
}
