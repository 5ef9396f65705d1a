//! The rank's side of the demonstration: what a layer of a model does.

use std::ops::Range;

use anyhow::{Result, ensure};
use ep_core::config::{
    CombineInputs, CombineOutputs, Counts, DispatchInputs, DispatchOutputs, Layout, Options, PlanConfig,
};
use ep_core::engine::{Plan, Window};
use ep_core::tensor::{Dtype, RawTensor};
use ep_peer::content::fill_row;

use super::expert;
use super::job::{
    ALIGNMENT, DemoJob, Done, LAYOUTS, Ready, Step, experts_of_row, experts_per_rank, row_name,
};
use super::sheet::{Part, Sheet, SheetShape};
use crate::clock::{Span, now_ns};
use crate::launch::Reply;
use crate::memory::Buffer;
use crate::rank::{self, Member};
use crate::trace::Trace;

/// A rank of the demonstration.
pub(crate) struct DemoRank {
    job: DemoJob,
    member: Member,
    traces: Vec<Trace>,
    /// Per trace, one per layout.
    plans: Vec<[Plan; 2]>,
    /// Where rows arrive, experts work and combines read.
    window: Window,
    sheets: [Sheet; 2],
    input: Buffer,
}

/// The tensors of one step.
struct Tokens {
    ids: Buffer,
    weights: Buffer,
}

impl DemoRank {
    /// Makes plans, the window and the sheets. Collective.
    ///
    /// # Errors
    /// Those of the library, and of traces that do not fit the job.
    pub(crate) fn new(job: DemoJob, member: Member) -> Result<DemoRank> {
        let traces: Vec<Trace> = job.traces.iter().map(|name| Trace::load(name)).collect::<Result<_>>()?;
        let plan = |trace: &Trace, layout| {
            let config = PlanConfig {
                topk: trace.topk as u32,
                num_experts: trace.num_experts as u32,
                max_tokens: job.tokens as u64,
                layout,
                expert_alignment: if layout == Layout::Flat { 0 } else { ALIGNMENT as u32 },
                ..PlanConfig::default()
            };
            // SAFETY: the plan has memory of its own.
            unsafe { Plan::create(&member.group, &config, None) }
        };
        let mut plans = Vec::new();
        for trace in &traces {
            plans.push([plan(trace, LAYOUTS[0])?, plan(trace, LAYOUTS[1])?]);
        }
        let mut capacity = [0; 2];
        for (trace, plans) in traces.iter().zip(&plans) {
            for layer in 0..job.layers {
                let tokens = Tokens::of(trace, layer, &job, member.group.rank())?;
                for (plan, capacity) in plans.iter().zip(&mut capacity) {
                    let counts = update(plan, &tokens, &job, trace.topk)?;
                    *capacity = counts.num_rows.max(*capacity as i64) as usize;
                }
            }
        }
        let row_bytes = job.row_bytes();
        let most_experts =
            traces.iter().map(|trace| trace.num_experts.div_ceil(job.ranks)).max().unwrap_or(0);
        let topk = traces.iter().map(|trace| trace.topk).max().unwrap_or(0);
        let sheet = |capacity| {
            Sheet::create(SheetShape { capacity, tokens: job.tokens, row_bytes, topk, experts: most_experts })
        };
        Ok(DemoRank {
            window: Window::allocate(&member.group, capacity[0].max(capacity[1]) * row_bytes)?,
            sheets: [sheet(capacity[0])?, sheet(capacity[1])?],
            input: Buffer::new(job.tokens * row_bytes),
            job,
            member,
            traces,
            plans,
        })
    }

    /// Takes steps until there are no more.
    ///
    /// # Errors
    /// The first error of a call.
    pub(crate) fn serve(&mut self) -> Result<()> {
        rank::reply(&Reply::Done(self.ready()?))?;
        while let Some(step) = rank::read()? {
            let done = self.step(step)?;
            rank::reply(&Reply::Done(done))?;
        }
        Ok(())
    }

    /// How the parent finds this rank's results.
    pub(super) fn ready(&self) -> Result<Ready> {
        let sheets = [self.sheets[0].file()?, self.sheets[1].file()?];
        Ok(Ready { pid: std::process::id(), node: self.member.group.info().node, sheets })
    }

    /// One layer of the model, in each layout.
    pub(super) fn step(&mut self, step: Step) -> Result<[Done; 2]> {
        let rank = self.member.group.rank();
        for (token, row) in self.input.as_mut_slice().chunks_exact_mut(self.job.row_bytes()).enumerate() {
            fill_row(row, Dtype::Bf16, &row_name(step, rank, token));
        }
        let tokens = Tokens::of(&self.traces[step.trace], step.layer, &self.job, rank)?;
        Ok([self.layer(step, 0, &tokens)?, self.layer(step, 1, &tokens)?])
    }

    /// Plan, dispatch, experts, combine.
    fn layer(&mut self, step: Step, layout: usize, tokens: &Tokens) -> Result<Done> {
        let plan = &self.plans[step.trace][layout];
        let topk = self.traces[step.trace].topk;
        self.sheets[layout].spoil();
        // SAFETY: every peer is done with the last step, and the barrier below keeps the next one out.
        unsafe { self.window.data().write_bytes(0xA5, self.window.bytes()) };
        let wait = || self.member.barrier.wait(self.member.timeout);

        wait()?;
        let start = now_ns();
        let counts = update(plan, tokens, &self.job, topk)?;
        let plan_span = (start, now_ns());
        let num_rows = counts.num_rows as usize;
        ensure!(
            num_rows * self.job.row_bytes() <= self.window.bytes(),
            "{num_rows} rows do not fit the window"
        );
        wait()?;
        let dispatch = self.dispatch(plan, layout, tokens, num_rows)?;
        self.keep_rows(layout, num_rows);
        self.experts(step, layout, num_rows);
        wait()?;
        let combine = self.combine(plan, layout, tokens, num_rows)?;
        Ok(Done {
            num_rows,
            rows_per_source: counts.rows_per_source,
            rows_per_expert: counts.rows_per_expert,
            num_tokens: counts.num_tokens,
            plan: plan_span,
            dispatch,
            combine,
        })
    }

    fn dispatch(&self, plan: &Plan, layout: usize, tokens: &Tokens, num_rows: usize) -> Result<Span> {
        let (sheet, flat) = (&self.sheets[layout], LAYOUTS[layout] == Layout::Flat);
        let (weights, topk) = tokens.weights(&self.job);
        let mut inputs =
            DispatchInputs { num_payloads: 1, topk_weights: weights, ..DispatchInputs::default() };
        inputs.payloads[0] = self.job.rows(self.input.address(), self.job.tokens);
        let per_row = if flat { topk } else { 1 };
        let numbers = sheet.address::<i64>(Part::Numbers);
        let mut outputs = DispatchOutputs {
            num_payloads: 1,
            topk_weights: RawTensor::contiguous(sheet.address(Part::Weights), Dtype::F32, num_rows, per_row),
            src_rank: sheet.address(Part::SrcRank),
            src_token: sheet.address(Part::SrcToken),
            num_rows: numbers,
            num_required: numbers.wrapping_add(1),
            num_dropped: numbers.wrapping_add(2),
            rows_per_expert: sheet.address(Part::RowsPerExpert),
            ..DispatchOutputs::default()
        };
        outputs.payloads[0] = self.job.rows(self.window.data(), num_rows);
        if flat {
            outputs.topk_idx = RawTensor::contiguous(sheet.address(Part::Ids), Dtype::I32, num_rows, topk);
        } else {
            outputs.src_slot = sheet.address(Part::SrcSlot);
            outputs.expert_offsets = sheet.address(Part::ExpertOffsets);
        }
        let start = now_ns();
        // SAFETY: window and sheet have room for `num_rows` rows, and everything outlives the call.
        unsafe { plan.dispatch(&inputs, &outputs, &Options::default(), None) }?;
        Ok((start, now_ns()))
    }

    /// Copies the rows to where the parent sees them, before the experts change them.
    fn keep_rows(&self, layout: usize, num_rows: usize) {
        let bytes = num_rows * self.job.row_bytes();
        // SAFETY: both have room for `num_rows` rows.
        unsafe {
            std::ptr::copy_nonoverlapping(self.window.data(), self.sheets[layout].address(Part::Rows), bytes);
        }
    }

    /// The experts of this rank work on the rows where they arrived.
    fn experts(&self, step: Step, layout: usize, num_rows: usize) {
        let (trace, rank) = (&self.traces[step.trace], self.member.group.rank());
        let per_rank = experts_per_rank(trace.num_experts, self.job.ranks);
        let first: usize = per_rank[..rank].iter().sum();
        let row_bytes = self.job.row_bytes();
        // SAFETY: the rows are this rank's until the combine, and no call is in progress.
        let rows = unsafe { std::slice::from_raw_parts_mut(self.window.data(), num_rows * row_bytes) };
        let sheet = &self.sheets[layout];
        match LAYOUTS[layout] {
            Layout::Flat => {
                let ids = sheet.read::<i32>(Part::Ids, num_rows * trace.topk);
                let weights = sheet.read::<f32>(Part::Weights, num_rows * trace.topk);
                for (row, data) in rows.chunks_exact_mut(row_bytes).enumerate() {
                    let slots: Range<usize> = row * trace.topk..(row + 1) * trace.topk;
                    let ids = ids[slots.clone()].iter().map(|&id| i64::from(id));
                    let ids = ids.zip(weights[slots].iter().copied());
                    expert::apply_weighted(data, &experts_of_row(first, ids));
                }
            }
            Layout::ExpertMajor => {
                let offsets = sheet.read::<i64>(Part::ExpertOffsets, per_rank[rank] + 1);
                for (local, range) in offsets.windows(2).enumerate() {
                    let range = range[0] as usize * row_bytes..range[1] as usize * row_bytes;
                    rows[range].chunks_exact_mut(row_bytes).for_each(|row| expert::apply(row, first + local));
                }
            }
        }
    }

    fn combine(&self, plan: &Plan, layout: usize, tokens: &Tokens, num_rows: usize) -> Result<Span> {
        let mut inputs =
            CombineInputs { rows: self.job.rows(self.window.data(), num_rows), ..CombineInputs::default() };
        if LAYOUTS[layout] == Layout::ExpertMajor {
            inputs.topk_weights = tokens.weights(&self.job).0;
        }
        let combined = self.sheets[layout].address(Part::Combined);
        let outputs = CombineOutputs {
            combined: self.job.rows(combined, self.job.tokens),
            ..CombineOutputs::default()
        };
        let start = now_ns();
        // SAFETY: as in `dispatch`.
        unsafe { plan.combine(&inputs, &outputs, &Options::default(), None) }?;
        Ok((start, now_ns()))
    }
}

impl Tokens {
    fn of(trace: &Trace, layer: usize, job: &DemoJob, rank: usize) -> Result<Tokens> {
        let part = trace.part(layer, rank, job.ranks, job.tokens)?;
        Ok(Tokens { ids: Buffer::of(&part.ids), weights: Buffer::of(&part.weights) })
    }

    /// The weights of the slots, and how many a token has.
    fn weights(&self, job: &DemoJob) -> (RawTensor, usize) {
        let topk = self.weights.bytes() / 4 / job.tokens;
        (RawTensor::contiguous(self.weights.address(), Dtype::F32, job.tokens, topk), topk)
    }
}

fn update(plan: &Plan, tokens: &Tokens, job: &DemoJob, topk: usize) -> Result<Counts> {
    let ids = RawTensor::contiguous(tokens.ids.address(), Dtype::I32, job.tokens, topk);
    // SAFETY: the buffer has all ids and outlives the call.
    unsafe { plan.update(&ids, &Options::default(), None) }?;
    Ok(plan.counts(None)?)
}

impl DemoJob {
    /// Bytes of a row.
    pub(crate) fn row_bytes(&self) -> usize {
        2 * self.hidden
    }

    fn rows(&self, data: *mut u8, count: usize) -> RawTensor {
        RawTensor::contiguous(data, Dtype::Bf16, count, self.hidden)
    }
}
