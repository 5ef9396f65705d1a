//! The recorded routing in `tests/data/routing`.

use std::path::PathBuf;

use ep_core::config::Layout;
use ep_core::reference::{Routing, float};

/// The traces that there are.
pub const NAMES: [&str; 3] = ["moe64_top8_balanced", "moe256_top8_balanced", "moe256_top8_skewed"];

/// `[layer][rank][token][topk]` of every array.
const LAYERS: usize = 4;
const RANKS: usize = 8;
const TOKENS: usize = 1024;
const TOPK: usize = 8;

/// Reads one layer of a trace for ranks on these nodes, `tokens` of each of the trace's ranks, and its
/// weights. More ranks than the trace has take later tokens.
pub fn load(
    name: &str,
    layer: usize,
    nodes: &[usize],
    layout: Layout,
    tokens: usize,
) -> (Routing, Vec<Vec<f32>>) {
    let ids = read(&format!("{name}.topk_idx.npy"), "'<i2'");
    let weights = read(&format!("{name}.topk_weights.npy"), "'<f2'");
    let num_experts: usize = if name.starts_with("moe64") { 64 } else { 256 };
    let num_ranks = nodes.len();
    let part = |array: &[u16], rank: usize| -> Vec<u16> {
        let first = ((layer * RANKS + rank % RANKS) * TOKENS + rank / RANKS * tokens) * TOPK;
        array[first..][..tokens * TOPK].to_vec()
    };
    let of_rank = |rank| num_experts / num_ranks + usize::from(rank < num_experts % num_ranks);
    let routing = Routing {
        nodes: nodes.to_vec(),
        experts_per_rank: (0..num_ranks).map(of_rank).collect(),
        topk: TOPK,
        layout,
        expert_alignment: if layout == Layout::Flat { 1 } else { 16 },
        topk_idx: (0..num_ranks)
            .map(|rank| part(&ids, rank).into_iter().map(|id| i64::from(id as i16)).collect())
            .collect(),
    };
    let weights = (0..num_ranks)
        .map(|rank| part(&weights, rank).into_iter().map(float::f16_to_f32).collect())
        .collect();
    (routing, weights)
}

/// The two-byte elements of a version 1 `.npy` file in C order.
fn read(file: &str, descr: &str) -> Vec<u16> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data/routing").join(file);
    let bytes = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    assert_eq!(bytes[..8], *b"\x93NUMPY\x01\x00", "{file} is not an npy file of version 1");
    let header_bytes = usize::from(u16::from_le_bytes([bytes[8], bytes[9]]));
    let header = String::from_utf8_lossy(&bytes[10..][..header_bytes]);
    for part in [descr, "'fortran_order': False", &format!("({LAYERS}, {RANKS}, {TOKENS}, {TOPK})")] {
        assert!(header.contains(part), "{file}: header {header} lacks {part}");
    }
    let data = &bytes[10 + header_bytes..];
    data.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn traces_have_distinct_experts_and_weights_that_sum_to_one() {
        for name in NAMES {
            let (routing, weights) = load(name, 3, &[0; 8], Layout::Flat, TOKENS);
            for token in routing.topk_idx[5].chunks(TOPK) {
                let mut ids = token.to_vec();
                ids.sort_unstable();
                ids.dedup();
                assert_eq!(ids.len(), TOPK, "{name}: {token:?}");
                assert!(ids[0] >= 0 && (ids[TOPK - 1] as usize) < routing.num_experts());
            }
            for token in weights[5].chunks(TOPK) {
                let sum: f32 = token.iter().sum();
                assert!((sum - 1.0).abs() < 0.01, "{name}: {token:?}");
            }
        }
    }
}
