//! The routings of a measurement. Every rank can make every other rank's.

use anyhow::{Result, ensure};
use ep_core::reference;
use ep_peer::rng::Rng;

use super::shape::{RoutingSource, Shape};
use crate::trace::Trace;

/// Expert ids and weights of one rank's tokens.
pub(crate) struct RankRouting {
    /// `tokens * topk` ids.
    pub(crate) ids: Vec<i32>,
    /// `tokens * topk` weights.
    pub(crate) weights: Vec<f32>,
}

/// What `rank` uses as routing number `index`.
///
/// # Errors
/// If the trace does not exist or is too short.
pub(crate) fn rank_routing(shape: &Shape, index: usize, rank: usize) -> Result<RankRouting> {
    match &shape.routing {
        RoutingSource::Random => Ok(random(shape, index, rank)),
        RoutingSource::Trace(name) => {
            let trace = Trace::load(name)?;
            ensure!(
                (trace.topk, trace.num_experts) == (shape.topk, shape.experts),
                "trace {name} has topk {} and {} experts",
                trace.topk,
                trace.num_experts
            );
            let part = trace.part(index % trace.num_layers, rank, shape.ranks, shape.tokens)?;
            Ok(RankRouting { ids: part.ids, weights: part.weights })
        }
    }
}

fn random(shape: &Shape, index: usize, rank: usize) -> RankRouting {
    let mut rng = Rng::new(&[shape.seed, index as u64, rank as u64]);
    let mut ids = Vec::with_capacity(shape.tokens * shape.topk);
    let mut weights = Vec::with_capacity(shape.tokens * shape.topk);
    let mut experts: Vec<i32> = (0..shape.experts as i32).collect();
    for _ in 0..shape.tokens {
        // The first topk steps of a shuffle, whatever order the last token left.
        for slot in 0..shape.topk {
            experts.swap(slot, slot + rng.below(shape.experts - slot));
        }
        ids.extend_from_slice(&experts[..shape.topk]);
        let raw: Vec<f32> = (0..shape.topk).map(|_| rng.unit()).collect();
        let sum: f32 = raw.iter().sum();
        weights.extend(raw.iter().map(|weight| weight / sum));
    }
    RankRouting { ids, weights }
}

/// The same routing of all ranks, as the reference takes it.
///
/// # Errors
/// As [`rank_routing`].
pub(crate) fn for_reference(shape: &Shape, index: usize, nodes: Vec<usize>) -> Result<reference::Routing> {
    let ids = |rank| -> Result<Vec<i64>> {
        Ok(rank_routing(shape, index, rank)?.ids.into_iter().map(i64::from).collect())
    };
    Ok(reference::Routing {
        nodes,
        experts_per_rank: shape.experts_per_rank(),
        topk: shape.topk,
        layout: shape.layout.layout(),
        expert_alignment: 1,
        topk_idx: (0..shape.ranks).map(ids).collect::<Result<_>>()?,
    })
}
