//! Compares every output of a step, bit for bit, with what the reference says about all ranks at once.

use anyhow::{Result, ensure};
use bytemuck::Pod;
use ep_core::config::{Counts, Layout, ReduceOrder};
use ep_core::reference::{
    self, CombineCase, Combined, Delivered, DispatchCase, Payload, Routing, combine, dispatch,
};
use ep_core::tensor::Dtype;
use ep_peer::content::fill_row;

use super::expert;
use super::job::{DemoJob, Done, LAYOUTS, Step, experts_of_row, routing, row_name};
use super::sheet::{Part, Sheet};
use crate::trace::Trace;

/// The inputs of all ranks in one step.
pub(crate) struct Inputs {
    step: Step,
    hidden: usize,
    topk: usize,
    num_experts: usize,
    nodes: Vec<usize>,
    ids: Vec<Vec<i64>>,
    weights: Vec<Vec<f32>>,
    payload: Payload,
}

impl Inputs {
    /// Works them out from the job, as each rank did for itself.
    ///
    /// # Errors
    /// If the trace does not fit the job.
    pub(crate) fn new(job: &DemoJob, trace: &Trace, step: Step, nodes: &[usize]) -> Result<Inputs> {
        let (mut ids, mut weights, mut data) = (Vec::new(), Vec::new(), Vec::new());
        for rank in 0..job.ranks {
            let part = trace.part(step.layer, rank, job.ranks, job.tokens)?;
            ids.push(part.ids.into_iter().map(i64::from).collect());
            weights.push(part.weights);
            let mut rows = vec![0; job.tokens * job.row_bytes()];
            for (token, row) in rows.chunks_exact_mut(job.row_bytes()).enumerate() {
                fill_row(row, Dtype::Bf16, &row_name(step, rank, token));
            }
            data.push(rows);
        }
        Ok(Inputs {
            step,
            hidden: job.hidden,
            topk: trace.topk,
            num_experts: trace.num_experts,
            nodes: nodes.to_vec(),
            ids,
            weights,
            payload: Payload { row_bytes: job.row_bytes(), data },
        })
    }
}

/// Compares one layout of a step; returns how many bytes agreed.
///
/// # Errors
/// The first difference, with its place.
pub(crate) fn verify(inputs: &Inputs, layout: usize, sheets: &[&Sheet], done: &[&Done]) -> Result<u64> {
    let ids = inputs.ids.clone();
    let routing = routing(inputs.nodes.clone(), LAYOUTS[layout], inputs.topk, inputs.num_experts, ids);
    let mut delivered = dispatch(&DispatchCase {
        routing: &routing,
        payloads: std::slice::from_ref(&inputs.payload),
        topk_weights: Some(&inputs.weights),
        capacity: &vec![None; sheets.len()],
    });
    let mut compared = 0;
    for (rank, expected) in delivered.iter().enumerate() {
        let mut check = Check { sheet: sheets[rank], rank, inputs, layout, bytes: 0 };
        check.counts(&routing.counts(rank), done[rank])?;
        check.dispatched(expected)?;
        compared += check.bytes;
    }
    let rows: Vec<Vec<u8>> = delivered
        .iter_mut()
        .enumerate()
        .map(|(rank, delivered)| experts(&routing, rank, delivered))
        .collect();
    let expert_major = routing.layout == Layout::ExpertMajor;
    let factors: Vec<Option<Vec<f32>>> = inputs.weights.iter().cloned().map(Some).collect();
    let sums = combine(&CombineCase {
        routing: &routing,
        dtype: Dtype::Bf16,
        cols: inputs.hidden,
        rows: &rows,
        row_weights: None,
        topk_weights: if expert_major { &factors } else { &[] },
        bias: &[],
        order: if expert_major { ReduceOrder::TopkSlot } else { ReduceOrder::Rank },
        wire_bf16: false,
    });
    for (rank, Combined { combined, .. }) in sums.iter().enumerate() {
        let mut check = Check { sheet: sheets[rank], rank, inputs, layout, bytes: 0 };
        check.part("sums", Part::Combined, combined, inputs.payload.row_bytes)?;
        compared += check.bytes;
    }
    Ok(compared)
}

/// What the experts of a rank make of its rows.
fn experts(routing: &Routing, rank: usize, delivered: &mut Delivered) -> Vec<u8> {
    let first = routing.first_expert(rank);
    let mut rows = std::mem::take(&mut delivered.payloads[0]);
    let row_bytes = rows.len() / delivered.num_rows.max(1);
    if rows.is_empty() {
        return rows;
    }
    match routing.layout {
        Layout::Flat => {
            let weights = delivered.topk_weights.as_deref().unwrap_or_default();
            for (row, data) in rows.chunks_exact_mut(row_bytes).enumerate() {
                let slots = row * routing.topk..(row + 1) * routing.topk;
                let ids = delivered.topk_idx[slots.clone()].iter().copied();
                expert::apply_weighted(data, &experts_of_row(first, ids.zip(weights[slots].iter().copied())));
            }
        }
        Layout::ExpertMajor => {
            let experts = routing.rows(rank).expert_of_row;
            for (local, data) in experts.into_iter().zip(rows.chunks_exact_mut(row_bytes)) {
                expert::apply(data, first + local);
            }
        }
    }
    rows
}

struct Check<'a> {
    sheet: &'a Sheet,
    rank: usize,
    inputs: &'a Inputs,
    layout: usize,
    bytes: u64,
}

impl Check<'_> {
    fn counts(&mut self, expected: &Counts, done: &Done) -> Result<()> {
        let found = Counts {
            rows_per_expert: done.rows_per_expert.clone(),
            rows_per_source: done.rows_per_source.clone(),
            num_rows: done.num_rows as i64,
            num_tokens: done.num_tokens,
        };
        ensure!(found == *expected, "{}: counts {found:?}, expected {expected:?}", self.place());
        Ok(())
    }

    fn dispatched(&mut self, expected: &reference::Delivered) -> Result<()> {
        self.part("rows", Part::Rows, &expected.payloads[0], self.inputs.payload.row_bytes)?;
        let ids: Vec<i32> = expected.topk_idx.iter().map(|&id| id as i32).collect();
        self.part("ids", Part::Ids, &ids, self.inputs.topk)?;
        let weights = expected.topk_weights.as_deref().unwrap_or_default();
        let per_row = if LAYOUTS[self.layout] == Layout::Flat { self.inputs.topk } else { 1 };
        let bits: Vec<u32> = weights.iter().map(|weight| weight.to_bits()).collect();
        self.part("weights", Part::Weights, &bits, per_row)?;
        self.part("source ranks", Part::SrcRank, &expected.src_rank, 1)?;
        self.part("source tokens", Part::SrcToken, &expected.src_token, 1)?;
        self.part("source slots", Part::SrcSlot, &expected.src_slot, 1)?;
        let numbers = [expected.num_rows, expected.num_required, expected.num_dropped].map(|n| n as i64);
        self.part("numbers of rows", Part::Numbers, &numbers, 1)?;
        self.part("rows per expert", Part::RowsPerExpert, &expected.rows_per_expert, 1)?;
        self.part("expert offsets", Part::ExpertOffsets, &expected.expert_offsets, 1)
    }

    /// Compares the beginning of a part with all of `expected`, which has `width` elements a row.
    fn part<T: Pod + PartialEq>(
        &mut self,
        what: &str,
        part: Part,
        expected: &[T],
        width: usize,
    ) -> Result<()> {
        let found = self.sheet.read::<T>(part, expected.len());
        if found != expected {
            let at = found.iter().zip(expected).position(|(found, expected)| found != expected).unwrap_or(0);
            anyhow::bail!(
                "{}: {what} differ first at row {}, element {}",
                self.place(),
                at / width,
                at % width
            );
        }
        self.bytes += size_of_val(expected) as u64;
        Ok(())
    }

    fn place(&self) -> String {
        let Step { trace, layer } = self.inputs.step;
        format!("trace {trace}, layer {layer}, {:?}, rank {}", LAYOUTS[self.layout], self.rank)
    }
}
