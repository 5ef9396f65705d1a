//! Whether two calls match, and what differs for a person.

use crate::config::Layout;
use crate::tensor::Dtype;
use crate::wire::{
    DescBody, FLAG_ORDER_SHIFT, FLAG_ROW_WEIGHTS, FLAG_TOPK_WEIGHTS, FLAG_WIRE_BF16, MAX_PAYLOADS,
    OP_COMBINE, OP_DISPATCH, OP_FAILED, OP_PLAN,
};

/// The entry of a descriptor's operation.
pub fn op_name(op: u32) -> &'static str {
    match op {
        OP_PLAN => "ep_plan_update",
        OP_DISPATCH => "ep_dispatch",
        OP_COMBINE => "ep_combine",
        OP_FAILED => "a queued call that failed",
        _ => "an unknown call",
    }
}

/// How two signatures differ, for a person; None if they are equal.
pub(super) fn difference(own: &DescBody, peer: &DescBody) -> Option<String> {
    if own.op == OP_FAILED || peer.op == OP_FAILED {
        return Some(String::from(
            "the queued call of one of them failed before it began; its stream says why",
        ));
    }
    if own.op != peer.op {
        return Some(format!("one is in {}, the other in {}", op_name(own.op), op_name(peer.op)));
    }
    if own.plan_hash != peer.plan_hash {
        return Some(configs_differ(&own.plan_fields, &peer.plan_fields));
    }
    if own.plan_epoch != peer.plan_epoch {
        return Some(format!(
            "their plans were updated in different calls, {} and {}",
            own.plan_epoch, peer.plan_epoch
        ));
    }
    if own.num_payloads != peer.num_payloads {
        return Some(format!("num_payloads: {} and {}", own.num_payloads, peer.num_payloads));
    }
    if own.dtypes != peer.dtypes {
        return Some(dtypes_differ(own.dtypes, peer.dtypes, |i| name_of_row(own.op, i)));
    }
    let mut rows = own.row_bytes.iter().zip(&peer.row_bytes).enumerate();
    if let Some((i, (own_bytes, peer_bytes))) = rows.find(|(_, (own, peer))| own != peer) {
        return Some(format!("bytes of a row of {}: {own_bytes} and {peer_bytes}", name_of_row(own.op, i)));
    }
    let options = [
        (FLAG_TOPK_WEIGHTS, "one carries inputs.topk_weights, the other does not"),
        (FLAG_ROW_WEIGHTS, "one returns inputs.row_weights, the other does not"),
        (3 << FLAG_ORDER_SHIFT, "their reduce_order differs"),
        (FLAG_WIRE_BF16, "their wire_dtype differs"),
    ];
    let differing = own.flags ^ peer.flags;
    let found = options.into_iter().find(|(bits, _)| differing & bits != 0);
    found.map(|(_, text)| String::from(text))
}

/// What a combine's rows, or a dispatch's payload `i`, are called in a text.
fn name_of_row(op: u32, i: usize) -> String {
    if op == OP_COMBINE { String::from("inputs.rows") } else { format!("payloads[{i}]") }
}

/// How the dtypes of two calls' payloads, a byte each, differ, for a person; `name_of` names a payload.
pub fn dtypes_differ(own: u32, peer: u32, name_of: impl Fn(usize) -> String) -> String {
    let code = |dtypes: u32, i: usize| dtypes >> (8 * i) & 0xFF;
    let name = |dtypes: u32, i: usize| match code(dtypes, i) {
        0 => "absent",
        code => Dtype::from_code(code as i32).map_or("an unknown dtype", Dtype::name),
    };
    let i = (0..MAX_PAYLOADS).find(|&i| code(own, i) != code(peer, i)).unwrap_or(0);
    format!("dtype of {}: {} and {}", name_of(i), name(own, i), name(peer, i))
}

/// The field in which two plans' configs differ.
fn configs_differ(own: &[u32; 4], peer: &[u32; 4]) -> String {
    let names = ["topk", "num_experts", "layout", "expert_alignment"];
    let value = |name: &str, value: u32| match (name, value) {
        ("layout", value) if value == Layout::Flat as u32 => String::from("EP_LAYOUT_FLAT"),
        ("layout", value) if value == Layout::ExpertMajor as u32 => String::from("EP_LAYOUT_EXPERT_MAJOR"),
        _ => value.to_string(),
    };
    let mut fields = names.into_iter().zip(own.iter().zip(peer));
    match fields.find(|(_, (own, peer))| own != peer) {
        Some((name, (own, peer))) => {
            format!(
                "their plans have different configs, {name}: {} and {}",
                value(name, *own),
                value(name, *peer)
            )
        }
        None => String::from("their plans have different configs, experts_per_rank"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Both ways, since either rank may be the one that finds it.
    fn assert_says(own: DescBody, peer: DescBody, texts: [&str; 2]) {
        assert_eq!(difference(&own, &peer).as_deref(), Some(texts[0]));
        assert_eq!(difference(&peer, &own).as_deref(), Some(texts[1]));
        assert_eq!(difference(&own, &own), None);
    }

    #[test]
    fn configs_are_named_by_field_and_value() {
        let body =
            |plan_hash, plan_fields| DescBody { op: OP_PLAN, plan_hash, plan_fields, ..DescBody::default() };
        let base = body(1, [8, 256, 0, 1]);
        let configs = "their plans have different configs,";
        for (fields, field, own, peer) in [
            ([4, 256, 0, 1], "topk", "8", "4"),
            ([8, 128, 0, 1], "num_experts", "256", "128"),
            ([8, 256, 1, 1], "layout", "EP_LAYOUT_FLAT", "EP_LAYOUT_EXPERT_MAJOR"),
            ([8, 256, 0, 128], "expert_alignment", "1", "128"),
        ] {
            let texts = [(own, peer), (peer, own)].map(|(a, b)| format!("{configs} {field}: {a} and {b}"));
            assert_says(base, body(2, fields), [&texts[0], &texts[1]]);
        }
        let rest = format!("{configs} experts_per_rank");
        assert_says(base, body(2, base.plan_fields), [&rest, &rest]);
    }

    #[test]
    fn dtypes_are_named_with_their_payload() {
        let body = |op, dtypes| DescBody { op, dtypes, num_payloads: 2, ..DescBody::default() };
        let (bf16, f16, f32) = (Dtype::Bf16 as u32, Dtype::F16 as u32, Dtype::F32 as u32);
        assert_says(
            body(OP_DISPATCH, bf16 | f32 << 8),
            body(OP_DISPATCH, bf16 | f16 << 8),
            [
                "dtype of payloads[1]: EP_DTYPE_F32 and EP_DTYPE_F16",
                "dtype of payloads[1]: EP_DTYPE_F16 and EP_DTYPE_F32",
            ],
        );
        assert_says(
            body(OP_COMBINE, bf16),
            body(OP_COMBINE, f16),
            [
                "dtype of inputs.rows: EP_DTYPE_BF16 and EP_DTYPE_F16",
                "dtype of inputs.rows: EP_DTYPE_F16 and EP_DTYPE_BF16",
            ],
        );
    }

    #[test]
    fn rows_are_named_as_the_call_names_them() {
        let body = |op, i: usize, bytes| {
            let mut row_bytes = [0; MAX_PAYLOADS];
            row_bytes[i] = bytes;
            DescBody { op, row_bytes, ..DescBody::default() }
        };
        let says = |op, i, name: &str| {
            let texts = ["64 and 32", "32 and 64"].map(|bytes| format!("bytes of a row of {name}: {bytes}"));
            assert_says(body(op, i, 64), body(op, i, 32), [&texts[0], &texts[1]]);
        };
        says(OP_DISPATCH, 2, "payloads[2]");
        says(OP_COMBINE, 0, "inputs.rows");
    }
}
