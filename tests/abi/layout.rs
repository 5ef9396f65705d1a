//! Structs: a C compiler compares size, offset and type of every field with those of Rust.

use std::ffi::{c_char, c_void};
use std::fmt::Write;
use std::fs;

use ep::capi::*;
use ep_core::bootstrap::AllGatherFn;

use crate::compile::{GCC, compile, header_structs, scratch};

/// A field's type as C spells it.
trait CType {
    fn name() -> String;
}

macro_rules! c_types {
    ($($rust:ty = $c:literal,)*) => {$(
        impl CType for $rust {
            fn name() -> String {
                $c.to_string()
            }
        }
    )*};
}

c_types! {
    u8 = "uint8_t",
    c_char = "char",
    i32 = "int32_t",
    u32 = "uint32_t",
    i64 = "int64_t",
    u64 = "uint64_t",
    *mut u8 = "void *", // RawTensor::data: bytes in Rust, anything in C
    *mut c_void = "void *",
    *mut i32 = "int32_t *",
    *mut i64 = "int64_t *",
    *const u32 = "const uint32_t *",
    *const c_char = "const char *",
    *const EpUniqueId = "const ep_unique_id_t *",
    Option<AllGatherFn> = "ep_all_gather_fn",
    EpTensor = "ep_tensor_t",
}

impl<T: CType, const N: usize> CType for [T; N] {
    fn name() -> String {
        format!("{}[{N}]", T::name())
    }
}

/// What Rust knows of one field.
struct Field {
    name: &'static str,
    offset: usize,
    bytes: usize,
    c_type: String,
}

struct Layout {
    name: &'static str,
    bytes: usize,
    alignment: usize,
    fields: Vec<Field>,
}

fn field<S, F: CType>(name: &'static str, offset: usize, _get: fn(&S) -> &F) -> Field {
    Field { name, offset, bytes: size_of::<F>(), c_type: F::name() }
}

macro_rules! layouts {
    ($($rust:ident $c:literal { $($field:ident)* })*) => {
        vec![$(Layout {
            name: $c,
            bytes: size_of::<$rust>(),
            alignment: align_of::<$rust>(),
            fields: vec![$(field(
                stringify!($field),
                std::mem::offset_of!($rust, $field),
                |object: &$rust| &object.$field,
            )),*],
        }),*]
    };
}

#[rustfmt::skip]
fn layouts() -> Vec<Layout> {
    layouts! {
        EpTensor "ep_tensor_t" { data dtype reserved rows cols row_stride col_stride }
        EpUniqueId "ep_unique_id_t" { bytes }
        EpBootstrap "ep_bootstrap_t" {
            struct_size reserved_flags rank num_ranks all_gather all_gather_ctx unique_id file timeout_ms
            reserved
        }
        EpGroupConfig "ep_group_config_t" {
            struct_size reserved_flags backend num_lanes timeout_ms node_id max_local_experts ring_bytes
            transport route chunk_bytes chunk_window
        }
        EpErrorInfo "ep_error_info_t" { struct_size status rank peer lane reserved epoch text }
        EpGroupInfo "ep_group_info_t" {
            struct_size rank num_ranks num_nodes node backend num_lanes timeout_ms max_local_experts
            ring_bytes memory_bytes window_bytes backend_reason transport route chunk_bytes chunk_window
            network_bytes transport_reason
        }
        EpPeerStats "ep_peer_stats_t" {
            calls rows_sent bytes_sent rows_received bytes_combined rows_dropped wait_dispatch_ns
            wait_combine_ns
        }
        EpPlanConfig "ep_plan_config_t" {
            struct_size reserved_flags lane topk num_experts num_experts_per_rank experts_per_rank max_tokens
            layout expert_alignment
        }
        EpOptions "ep_options_t" { struct_size reserved_flags timeout_ms num_sms reduce_order wire_dtype }
        EpCounts "ep_counts_t" {
            struct_size num_local_experts num_ranks reserved rows_per_expert rows_per_source num_rows
            num_tokens
        }
        EpDispatchInputs "ep_dispatch_inputs_t" { struct_size num_payloads payloads topk_weights }
        EpDispatchOutputs "ep_dispatch_outputs_t" {
            struct_size num_payloads payloads topk_idx topk_weights src_rank src_token src_slot num_rows
            num_required num_dropped rows_per_expert expert_offsets
        }
        EpCombineInputs "ep_combine_inputs_t" {
            struct_size reserved_flags rows row_weights topk_weights bias
        }
        EpCombineOutputs "ep_combine_outputs_t" { struct_size reserved_flags combined combined_weights }
    }
}

#[test]
fn structs_have_no_padding_and_all_are_compared() {
    let layouts = layouts();
    for layout in &layouts {
        // Fields one behind the other up to the end: none is missing from the list above, here or in C.
        let mut end = 0;
        for field in &layout.fields {
            assert_eq!(field.offset, end, "{} of {}", field.name, layout.name);
            end = field.offset + field.bytes;
        }
        assert_eq!(layout.bytes, end, "{}", layout.name);
    }
    let mut names: Vec<_> = layouts.iter().map(|layout| layout.name.to_string()).collect();
    names.sort();
    assert_eq!(names, header_structs());
}

#[test]
fn the_compiler_agrees_on_every_field() {
    let mut text = String::from("#include \"ep.h\"\n");
    for Layout { name, bytes, alignment, fields } in layouts() {
        let mut claim = |claim: String| {
            writeln!(text, "_Static_assert({claim}, \"{name}\");").expect("strings grow");
        };
        claim(format!("sizeof({name}) == {bytes}"));
        claim(format!("_Alignof({name}) == {alignment}"));
        for field in fields {
            let Field { name: member, offset, bytes, c_type } = field;
            claim(format!("offsetof({name}, {member}) == {offset}"));
            claim(format!("sizeof((({name} *)0)->{member}) == {bytes}"));
            claim(format!("__builtin_types_compatible_p(__typeof__((({name} *)0)->{member}), {c_type})"));
        }
    }
    text.push_str("int unused;\n");
    let source = scratch("layout").join("layout.c");
    fs::write(&source, text).unwrap();
    compile(GCC.c, &["-std=c11", "-fsyntax-only"], &[&source]).unwrap_or_else(|error| panic!("{error}"));
}

#[test]
fn the_callback_has_the_header_s_type() {
    // `AllGatherFn` is the field's type; its own signature is compared here, by assignment in C.
    let text = "#include \"ep.h\"\n\
        _Static_assert(__builtin_types_compatible_p(ep_all_gather_fn,\n    \
        int32_t (*)(void *, const void *, void *, size_t)), \"ep_all_gather_fn\");\nint unused;\n";
    let _same: unsafe extern "C" fn(*mut c_void, *const c_void, *mut c_void, usize) -> i32 = callback;
    let _same: AllGatherFn = callback;
    let source = scratch("callback").join("callback.c");
    fs::write(&source, text).unwrap();
    compile(GCC.c, &["-std=c11", "-fsyntax-only"], &[&source]).unwrap_or_else(|error| panic!("{error}"));
}

unsafe extern "C" fn callback(_: *mut c_void, _: *const c_void, _: *mut c_void, _: usize) -> i32 {
    0
}
