//! Runs one case on one group, and gives back every output as bytes.

use std::sync::Arc;
use std::time::Duration;

use ep_core::Result;
use ep_core::config::{
    CombineInputs, CombineOutputs, Counts, DispatchInputs, DispatchOutputs, Layout, Options,
};
use ep_core::engine::{Group, Plan};
use ep_core::tensor::{Dtype, RawTensor};

use crate::arena::{Arena, Block};
use crate::case::Case;

/// What a case left, by name.
pub struct Outputs {
    pub counts: Counts,
    pub blocks: Vec<(String, Vec<u8>)>,
}

/// A group with its memory.
pub struct Side {
    pub group: Arc<Group>,
    pub arena: Arena,
}

/// Bytes that outputs hold before a call.
const FILL: u8 = 0xa5;

/// The named outputs of a call.
struct Outs<'a> {
    arena: &'a mut Arena,
    made: Vec<(String, Block)>,
}

impl Outs<'_> {
    fn make(&mut self, name: impl Into<String>, bytes: usize, window: bool) -> Result<*mut u8> {
        let block = self.arena.holding(&vec![FILL; bytes], window)?;
        let address = block.address;
        self.made.push((name.into(), block));
        Ok(address)
    }

    fn tensor(
        &mut self,
        name: &str,
        dtype: Dtype,
        (rows, cols): (usize, usize),
        window: bool,
    ) -> Result<RawTensor> {
        let address = self.make(name, rows * cols * dtype.bytes(), window)?;
        Ok(RawTensor::contiguous(address, dtype, rows, cols))
    }
}

impl Side {
    /// Runs update, dispatch and combine.
    pub fn run(&mut self, case: &Case, lane: u32, sms: u32) -> Result<Outputs> {
        self.arena.reset_window();
        let rank = self.group.rank();
        // SAFETY: the plan has memory of its own.
        let plan = unsafe { Plan::create(&self.group, &case.plan(lane), None) }?;
        let options = Options { num_sms: sms, ..Options::default() };
        let ids = case.ids(rank);
        let (dtype, bytes) = match case.ids64 {
            true => (Dtype::I64, bytemuck::cast_slice(&ids).to_vec()),
            false => (Dtype::I32, ids.iter().flat_map(|&id| (id as i32).to_le_bytes()).collect()),
        };
        let ids = self.arena.holding(&bytes, false)?;
        let tokens = case.tokens[rank];
        let idx = RawTensor::contiguous(ids.address, dtype, tokens, case.topk);
        // SAFETY: the ids live until the stream was synchronised.
        unsafe { self.update(&plan, &idx, &options) }?;
        let counts = plan.counts(Some(Duration::from_secs(20)))?;
        let mut blocks = Vec::new();
        self.dispatch(case, &plan, &options, &counts, &mut blocks)?;
        self.combine(case, &plan, &options, &counts, &mut blocks)?;
        Ok(Outputs { counts, blocks })
    }

    /// # Safety
    /// As of `Plan::update`.
    pub unsafe fn update(&self, plan: &Plan, idx: &RawTensor, options: &Options) -> Result<()> {
        match plan.is_on_device() {
            // SAFETY: by the caller's word; the stream is the arena's.
            true => unsafe { plan.update_on(idx, options, self.arena.stream()) },
            // SAFETY: by the caller's word.
            false => unsafe { plan.update(idx, options, None) },
        }
    }

    fn dispatch(
        &mut self,
        case: &Case,
        plan: &Plan,
        options: &Options,
        counts: &Counts,
        blocks: &mut Vec<(String, Vec<u8>)>,
    ) -> Result<()> {
        let rank = self.group.rank();
        let tokens = case.tokens[rank];
        let capacity = (counts.num_rows as usize * case.capacity).div_ceil(1000);
        let mut inputs =
            DispatchInputs { num_payloads: case.payloads.len() as u32, ..DispatchInputs::default() };
        let mut outputs =
            DispatchOutputs { num_payloads: case.payloads.len() as u32, ..DispatchOutputs::default() };
        let mut kept = Vec::new();
        let mut outs = Outs { arena: &mut self.arena, made: Vec::new() };
        for (i, payload) in case.payloads.iter().enumerate() {
            let data = case.data(rank, i as u64, payload.dtype, tokens * payload.cols);
            let block = outs.arena.holding(&data, false)?;
            inputs.payloads[i] = RawTensor::contiguous(block.address, payload.dtype, tokens, payload.cols);
            kept.push(block);
            let shape = (capacity, payload.cols);
            outputs.payloads[i] =
                outs.tensor(&format!("payload {i}"), payload.dtype, shape, payload.window)?;
        }
        let flat = case.layout == Layout::Flat;
        if case.weights {
            let data = case.data(rank, 50, Dtype::F32, tokens * case.topk);
            let block = outs.arena.holding(&data, false)?;
            inputs.topk_weights = RawTensor::contiguous(block.address, Dtype::F32, tokens, case.topk);
            kept.push(block);
            let shape = (capacity, if flat { case.topk } else { 1 });
            outputs.topk_weights = outs.tensor("topk_weights", Dtype::F32, shape, false)?;
        }
        if case.origins {
            if flat {
                let dtype = if case.ids64 { Dtype::I64 } else { Dtype::I32 };
                outputs.topk_idx = outs.tensor("topk_idx", dtype, (capacity, case.topk), false)?;
            } else {
                outputs.src_slot = outs.make("src_slot", 4 * capacity, false)?.cast();
                let bytes = 8 * (plan.num_local_experts() + 1);
                outputs.expert_offsets = outs.make("expert_offsets", bytes, false)?.cast();
            }
            outputs.src_rank = outs.make("src_rank", 4 * capacity, false)?.cast();
            outputs.src_token = outs.make("src_token", 4 * capacity, false)?.cast();
        }
        outputs.num_rows = outs.make("num_rows", 8, false)?.cast();
        outputs.num_required = outs.make("num_required", 8, false)?.cast();
        outputs.num_dropped = outs.make("num_dropped", 8, false)?.cast();
        outputs.rows_per_expert = outs.make("rows_per_expert", 8 * plan.num_local_experts(), false)?.cast();
        let made = outs.made;
        match plan.is_on_device() {
            // SAFETY: inputs and outputs live until the stream was synchronised.
            true => unsafe { plan.dispatch_on(&inputs, &outputs, options, self.arena.stream()) }?,
            // SAFETY: they live until the call returns.
            false => unsafe { plan.dispatch(&inputs, &outputs, options, None) }?,
        }
        self.collect(made, blocks)
    }

    fn combine(
        &mut self,
        case: &Case,
        plan: &Plan,
        options: &Options,
        counts: &Counts,
        blocks: &mut Vec<(String, Vec<u8>)>,
    ) -> Result<()> {
        let rank = self.group.rank();
        let (tokens, rows) = (case.tokens[rank], counts.num_rows as usize);
        let (dtype, cols) = (case.combine_dtype, case.combine_cols);
        let data = case.data(rank, 60, dtype, rows * cols);
        let from = self.arena.holding(&data, case.combine_window)?;
        let mut inputs = CombineInputs {
            rows: RawTensor::contiguous(from.address, dtype, rows, cols),
            ..CombineInputs::default()
        };
        let mut kept = Vec::new();
        let flat = case.layout == Layout::Flat;
        if case.weights && !flat {
            kept.push(self.arena.holding(&case.data(rank, 61, Dtype::F32, tokens * case.topk), false)?);
            let address = kept[kept.len() - 1].address;
            inputs.topk_weights = RawTensor::contiguous(address, Dtype::F32, tokens, case.topk);
        }
        for i in 0..case.bias {
            kept.push(self.arena.holding(&case.data(rank, 62 + i as u64, dtype, tokens * cols), false)?);
            inputs.bias[i] = RawTensor::contiguous(kept[kept.len() - 1].address, dtype, tokens, cols);
        }
        let mut outs = Outs { arena: &mut self.arena, made: Vec::new() };
        let combined = outs.tensor("combined", dtype, (tokens, cols), false)?;
        let mut outputs = CombineOutputs { combined, ..CombineOutputs::default() };
        if case.return_weights {
            let per_row = if flat { case.topk } else { 1 };
            let data = case.data(rank, 65, Dtype::F32, rows * per_row);
            kept.push(outs.arena.holding(&data, case.combine_window)?);
            let address = kept[kept.len() - 1].address;
            inputs.row_weights = RawTensor::contiguous(address, Dtype::F32, rows, per_row);
            outputs.combined_weights =
                outs.tensor("combined_weights", Dtype::F32, (tokens, case.topk), false)?;
        }
        let made = outs.made;
        let options = Options { reduce_order: case.order, ..*options };
        match plan.is_on_device() {
            // SAFETY: inputs and outputs live until the stream was synchronised.
            true => unsafe { plan.combine_on(&inputs, &outputs, &options, self.arena.stream()) }?,
            // SAFETY: they live until the call returns.
            false => unsafe { plan.combine(&inputs, &outputs, &options, None) }?,
        }
        self.collect(made, blocks)
    }

    /// Waits for the call and reads its outputs.
    fn collect(&self, made: Vec<(String, Block)>, blocks: &mut Vec<(String, Vec<u8>)>) -> Result<()> {
        self.arena.synchronize()?;
        for (name, block) in made {
            blocks.push((name, self.arena.read(&block)?));
        }
        Ok(())
    }
}
