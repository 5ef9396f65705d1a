//! What the demonstration's parent and its ranks say to each other.

use ep_core::config::Layout;
use ep_core::reference::Routing;
use serde::{Deserialize, Serialize};

use crate::clock::Span;

/// What all ranks do; the same on every rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct DemoJob {
    /// How many ranks.
    pub(crate) ranks: usize,
    /// Tokens of each rank.
    pub(crate) tokens: usize,
    /// Columns of a row, bf16.
    pub(crate) hidden: usize,
    /// Names of traces.
    pub(crate) traces: Vec<String>,
    /// The first so many layers of each trace.
    pub(crate) layers: usize,
}

/// Rows of expert-major layout that an expert's first row is aligned to, as a grouped GEMM would have it.
pub(crate) const ALIGNMENT: usize = 16;

/// The layouts, in the order in which a step takes them.
pub(crate) const LAYOUTS: [Layout; 2] = [Layout::Flat, Layout::ExpertMajor];

/// Dispatch, experts and combine, once in each layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Step {
    /// Index among the job's traces.
    pub(crate) trace: usize,
    /// Layer of the trace.
    pub(crate) layer: usize,
}

/// The first answer of a rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Ready {
    /// The rank's process.
    pub(crate) pid: u32,
    /// The rank's node.
    pub(crate) node: usize,
    /// Its sheets, one per layout.
    pub(crate) sheets: [SheetFile; 2],
}

/// A sheet as the parent can open it.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct SheetFile {
    /// The descriptor in the rank's process.
    pub(crate) fd: i32,
    /// Rows that fit.
    pub(crate) capacity: usize,
}

/// What a rank did in one step and layout.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Done {
    /// Rows that arrived, padding included.
    pub(crate) num_rows: usize,
    /// From each rank, without padding.
    pub(crate) rows_per_source: Vec<i64>,
    /// Assignments to each local expert.
    pub(crate) rows_per_expert: Vec<i64>,
    /// Distinct tokens that arrived.
    pub(crate) num_tokens: i64,
    /// Update of the plan and its counts.
    pub(crate) plan: Span,
    /// The dispatch.
    pub(crate) dispatch: Span,
    /// The combine.
    pub(crate) combine: Span,
}

/// Names what the rows of a token hold.
pub(crate) fn row_name(step: Step, rank: usize, token: usize) -> [u64; 4] {
    [step.trace as u64, step.layer as u64, rank as u64, token as u64]
}

/// Experts of each rank: evenly, the first ones take what is left over.
pub(crate) fn experts_per_rank(num_experts: usize, ranks: usize) -> Vec<usize> {
    (0..ranks).map(|rank| num_experts / ranks + usize::from(rank < num_experts % ranks)).collect()
}

/// The experts and weights of the slots that are on this rank, with the numbers that experts have over
/// all ranks.
pub(crate) fn experts_of_row(first: usize, ids: impl Iterator<Item = (i64, f32)>) -> Vec<(usize, f32)> {
    ids.filter_map(|(id, weight)| Some((first + usize::try_from(id).ok()?, weight))).collect()
}

/// The routing of all ranks as the reference takes it.
pub(crate) fn routing(
    nodes: Vec<usize>,
    layout: Layout,
    topk: usize,
    experts: usize,
    ids: Vec<Vec<i64>>,
) -> Routing {
    let ranks = nodes.len();
    Routing {
        nodes,
        experts_per_rank: experts_per_rank(experts, ranks),
        topk,
        layout,
        expert_alignment: if layout == Layout::Flat { 1 } else { ALIGNMENT },
        topk_idx: ids,
    }
}
