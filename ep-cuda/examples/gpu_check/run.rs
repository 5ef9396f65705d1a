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
    /// None: nobody asked.
    pub counts: Option<Counts>,
    pub blocks: Vec<(String, Vec<u8>)>,
}

/// A group with its memory.
pub struct Side {
    pub group: Arc<Group>,
    pub arena: Arena,
}

/// Bytes that outputs hold before a call.
const FILL: u8 = 0xa5;
const PATIENCE: Duration = Duration::from_secs(20);

/// What an input holds: the same case fills it again with the same bytes.
enum Content {
    Ids,
    Data { what: u64, dtype: Dtype, elements: usize },
}

/// A call of each kind with all its memory, to be run any number of times.
pub struct Prepared {
    plan: Plan,
    options: Options,
    idx: RawTensor,
    dispatch: (DispatchInputs, DispatchOutputs),
    combine: (CombineInputs, CombineOutputs),
    counts: Option<Counts>,
    inputs: Vec<(Block, Content)>,
    outputs: Vec<(String, Block)>,
}

/// A call of a prepared case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    Update,
    Dispatch,
    Combine,
}

/// Makes the tensors of a case.
struct Maker<'a> {
    case: &'a Case,
    arena: &'a mut Arena,
    inputs: Vec<(Block, Content)>,
    outputs: Vec<(String, Block)>,
}

impl Maker<'_> {
    fn input(
        &mut self,
        what: u64,
        dtype: Dtype,
        rows: usize,
        cols: usize,
        window: bool,
    ) -> Result<RawTensor> {
        let block = self.arena.block(rows * cols * dtype.bytes(), window)?;
        let tensor = RawTensor::contiguous(block.address, dtype, rows, cols);
        self.inputs.push((block, Content::Data { what, dtype, elements: rows * cols }));
        Ok(tensor)
    }

    fn output(&mut self, name: impl Into<String>, bytes: usize, window: bool) -> Result<*mut u8> {
        let block = self.arena.block(bytes, window)?;
        let address = block.address;
        self.outputs.push((name.into(), block));
        Ok(address)
    }

    fn tensor(
        &mut self,
        name: &str,
        dtype: Dtype,
        rows: usize,
        cols: usize,
        window: bool,
    ) -> Result<RawTensor> {
        let address = self.output(name, rows * cols * dtype.bytes(), window)?;
        Ok(RawTensor::contiguous(address, dtype, rows, cols))
    }

    fn dispatch(
        &mut self,
        plan: &Plan,
        tokens: usize,
        capacity: usize,
    ) -> Result<(DispatchInputs, DispatchOutputs)> {
        let case = self.case;
        let num_payloads = case.payloads.len() as u32;
        let mut inputs = DispatchInputs { num_payloads, ..DispatchInputs::default() };
        let mut outputs = DispatchOutputs { num_payloads, ..DispatchOutputs::default() };
        for (i, payload) in case.payloads.iter().enumerate() {
            let (dtype, cols) = (payload.dtype, payload.cols);
            inputs.payloads[i] = self.input(i as u64, dtype, tokens, cols, false)?;
            outputs.payloads[i] =
                self.tensor(&format!("payload {i}"), dtype, capacity, cols, payload.window)?;
        }
        let flat = case.layout == Layout::Flat;
        if case.weights {
            inputs.topk_weights = self.input(50, Dtype::F32, tokens, case.topk, false)?;
            let cols = if flat { case.topk } else { 1 };
            outputs.topk_weights = self.tensor("topk_weights", Dtype::F32, capacity, cols, false)?;
        }
        if case.origins {
            if flat {
                let dtype = if case.ids64 { Dtype::I64 } else { Dtype::I32 };
                outputs.topk_idx = self.tensor("topk_idx", dtype, capacity, case.topk, false)?;
            } else {
                outputs.src_slot = self.output("src_slot", 4 * capacity, false)?.cast();
                let bytes = 8 * (plan.num_local_experts() + 1);
                outputs.expert_offsets = self.output("expert_offsets", bytes, false)?.cast();
            }
            outputs.src_rank = self.output("src_rank", 4 * capacity, false)?.cast();
            outputs.src_token = self.output("src_token", 4 * capacity, false)?.cast();
        }
        outputs.num_rows = self.output("num_rows", 8, false)?.cast();
        outputs.num_required = self.output("num_required", 8, false)?.cast();
        outputs.num_dropped = self.output("num_dropped", 8, false)?.cast();
        outputs.rows_per_expert = self.output("rows_per_expert", 8 * plan.num_local_experts(), false)?.cast();
        Ok((inputs, outputs))
    }

    fn combine(&mut self, tokens: usize, rows: usize) -> Result<(CombineInputs, CombineOutputs)> {
        let case = self.case;
        let (dtype, cols, window) = (case.combine_dtype, case.combine_cols, case.combine_window);
        let flat = case.layout == Layout::Flat;
        let mut inputs =
            CombineInputs { rows: self.input(60, dtype, rows, cols, window)?, ..CombineInputs::default() };
        if case.weights && !flat {
            inputs.topk_weights = self.input(61, Dtype::F32, tokens, case.topk, false)?;
        }
        for i in 0..case.bias {
            inputs.bias[i] = self.input(62 + i as u64, dtype, tokens, cols, false)?;
        }
        let combined = self.tensor("combined", dtype, tokens, cols, false)?;
        let mut outputs = CombineOutputs { combined, ..CombineOutputs::default() };
        if case.return_weights {
            let per_row = if flat { case.topk } else { 1 };
            inputs.row_weights = self.input(65, Dtype::F32, rows, per_row, window)?;
            outputs.combined_weights =
                self.tensor("combined_weights", Dtype::F32, tokens, case.topk, false)?;
        }
        Ok((inputs, outputs))
    }
}

fn id_bytes(case: &Case, rank: usize) -> Vec<u8> {
    let ids = case.ids(rank);
    match case.ids64 {
        true => bytemuck::cast_slice(&ids).to_vec(),
        false => ids.iter().flat_map(|&id| (id as i32).to_le_bytes()).collect(),
    }
}

impl Side {
    /// Runs update, dispatch and combine.
    pub fn run(&mut self, case: &Case, lane: u32, sms: u32) -> Result<Outputs> {
        let prepared = self.prepare(case, lane, sms)?;
        self.refill(case, &prepared)?;
        if prepared.counts.is_none() {
            self.queue(&prepared, Call::Update)?;
        }
        self.queue(&prepared, Call::Dispatch)?;
        self.queue(&prepared, Call::Combine)?;
        self.collect(&prepared)
    }

    /// Makes plan and tensors. Unless the case says how many rows to make room for, the plan has been
    /// updated by then.
    pub fn prepare(&mut self, case: &Case, lane: u32, sms: u32) -> Result<Prepared> {
        self.arena.reset_window();
        let rank = self.group.rank();
        let tokens = case.tokens[rank];
        // SAFETY: the plan has memory of its own.
        let plan = unsafe { Plan::create(&self.group, &case.plan(lane), None) }?;
        let options = Options { num_sms: sms, ..Options::default() };
        let ids = self.arena.holding(&id_bytes(case, rank), false)?;
        let dtype = if case.ids64 { Dtype::I64 } else { Dtype::I32 };
        let idx = RawTensor::contiguous(ids.address, dtype, tokens, case.topk);
        let (counts, capacity, rows) = match case.static_rows {
            Some(room) => (None, room, room),
            None => {
                // SAFETY: the ids live until the counts are there.
                unsafe { self.update(&plan, &idx, &options) }?;
                let known = plan.counts(Some(PATIENCE))?;
                let rows = known.num_rows as usize;
                (Some(known), (rows * case.capacity).div_ceil(1000), rows)
            }
        };
        let mut maker =
            Maker { case, arena: &mut self.arena, inputs: vec![(ids, Content::Ids)], outputs: Vec::new() };
        let dispatch = maker.dispatch(&plan, tokens, capacity)?;
        let combine = maker.combine(tokens, rows)?;
        let Maker { inputs, outputs, .. } = maker;
        let options = Options { reduce_order: case.order, ..options };
        Ok(Prepared { plan, options, idx, dispatch, combine, counts, inputs, outputs })
    }

    /// Gives the inputs what `case` says, which has the shapes of the prepared one, and spoils the outputs.
    pub fn refill(&self, case: &Case, prepared: &Prepared) -> Result<()> {
        let rank = self.group.rank();
        for (block, content) in &prepared.inputs {
            let bytes = match content {
                Content::Ids => id_bytes(case, rank),
                Content::Data { what, dtype, elements } => case.data(rank, *what, *dtype, *elements),
            };
            self.arena.write(block, &bytes)?;
        }
        prepared.outputs.iter().try_for_each(|(_, block)| self.arena.write(block, &vec![FILL; block.bytes]))
    }

    /// Names an expert that there is not.
    pub fn spoil_ids(&self, prepared: &Prepared, id: i64) -> Result<()> {
        match prepared.inputs.iter().find(|(_, content)| matches!(content, Content::Ids)) {
            Some((block, _)) => self.arena.write(block, &id.to_le_bytes()),
            None => Ok(()),
        }
    }

    /// Queues a call on the arena's stream, or runs it.
    pub fn queue(&self, prepared: &Prepared, call: Call) -> Result<()> {
        let Prepared { plan, options, idx, dispatch, combine, .. } = prepared;
        let stream = self.arena.stream();
        // SAFETY: the memory is the prepared case's, which is kept until the stream was synchronised.
        unsafe {
            match (call, plan.is_on_device()) {
                (Call::Update, _) => self.update(plan, idx, options),
                (Call::Dispatch, true) => plan.dispatch_on(&dispatch.0, &dispatch.1, options, stream),
                (Call::Dispatch, false) => plan.dispatch(&dispatch.0, &dispatch.1, options, None),
                (Call::Combine, true) => plan.combine_on(&combine.0, &combine.1, options, stream),
                (Call::Combine, false) => plan.combine(&combine.0, &combine.1, options, None),
            }
        }
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

    /// Waits for the calls and reads their outputs.
    pub fn collect(&self, prepared: &Prepared) -> Result<Outputs> {
        self.arena.synchronize()?;
        let read = |(name, block): &(String, Block)| Ok((name.clone(), self.arena.read(block)?));
        let blocks = prepared.outputs.iter().map(read).collect::<Result<Vec<_>>>()?;
        Ok(Outputs { counts: prepared.counts.clone(), blocks })
    }
}

impl Prepared {
    pub fn plan(&self) -> &Plan {
        &self.plan
    }
}
