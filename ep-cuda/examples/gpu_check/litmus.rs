//! A stress of the order across ranks: rounds of a dispatch and a combine that give back what went in, over
//! memory that is poisoned before each. A row that is read too early, or written too late, changes the data for
//! good, and is seen at the end.

use std::time::Instant;

use cudarc::driver::sys;
use ep_core::config::{
    CombineInputs, CombineOutputs, DispatchInputs, DispatchOutputs, Options as CallOptions,
};
use ep_core::engine::Plan;
use ep_core::tensor::{Dtype, RawTensor};
use ep_core::{Error, Result, Status};
use ep_cuda::driver::check;

use crate::arena::Block;
use crate::case::{Case, Rng};
use crate::graph::Graph;
use crate::options::Options;
use crate::rank::Rank;

const TOKENS: usize = 16;
const COLS: usize = 512;
/// Rounds of a graph, and launches that may be under way.
const ROUNDS: usize = 50;
const LAUNCHES: usize = 40;
/// Of the memory that a rank clears now and then to come late.
const DELAY: usize = 8 << 20;

pub fn check_order(rank: &mut Rank, options: &Options) -> std::result::Result<(), String> {
    for window in [true, false] {
        stress(rank, options, window).map_err(|e| format!("rank {}: litmus: {e}", rank.rank))?;
    }
    Ok(())
}

fn stress(rank: &mut Rank, options: &Options, window: bool) -> Result<()> {
    // An even seed has no empty slots: every token comes back, once.
    let case = Case::large(2 * options.seed, rank.num_ranks, TOKENS, COLS, 1, 4 * rank.num_ranks);
    rank.cuda.arena.reset_window();
    // SAFETY: the plan has memory of its own.
    let plan = unsafe { Plan::create(&rank.cuda.group, &case.plan(0), None) }?;
    let call = CallOptions { num_sms: options.sms, ..CallOptions::default() };
    let ids = rank.cuda.arena.holding(bytemuck::cast_slice(&case.ids(rank.rank)), false)?;
    // SAFETY: the ids live until the counts are there.
    unsafe { rank.cuda.update(&plan, &RawTensor::contiguous(ids.address, Dtype::I64, TOKENS, 1), &call) }?;
    let rows = plan.counts(None)?.num_rows as usize;
    let start = case.data(rank.rank, 1, Dtype::Bf16, TOKENS * COLS);
    let data = rank.cuda.arena.holding(&start, false)?;
    let middle = rank.cuda.arena.block(2 * rows.max(1) * COLS, window)?;
    let delay = rank.cuda.arena.ordinary(DELAY)?;
    let round = Round {
        plan,
        call,
        data: RawTensor::contiguous(data.address, Dtype::Bf16, TOKENS, COLS),
        middle: RawTensor::contiguous(middle.address, Dtype::Bf16, rows, COLS),
    };
    let mut rng = Rng::new(options.seed, rank.rank, 5);
    let graph =
        Graph::of(rank, || (0..ROUNDS).try_for_each(|_| round.queue(rank, &middle, &delay, &mut rng)))?;
    rank.gather(&[])?;
    let started = Instant::now();
    let launches = (options.rounds / 2).div_ceil(ROUNDS);
    for launch in 0..launches {
        graph.launch(rank)?;
        if launch % LAUNCHES == LAUNCHES - 1 {
            rank.cuda.arena.synchronize()?;
        }
    }
    rank.cuda.arena.synchronize()?;
    if let Some(error) = rank.cuda.group.health(&mut []) {
        return Err(Error::new(error.status, error.text));
    }
    if rank.cuda.arena.read(&data)? != start {
        return Err(Error::new(Status::Internal, "the data changed: a row was read or written out of order"));
    }
    rank.gather(&[])?;
    if rank.rank == 0 {
        let place = if window { "a window" } else { "ordinary memory" };
        println!(
            "litmus: {} rounds through {place} in {:.1?}, unchanged",
            launches * ROUNDS,
            started.elapsed()
        );
    }
    Ok(())
}

struct Round {
    plan: Plan,
    call: CallOptions,
    data: RawTensor,
    middle: RawTensor,
}

impl Round {
    /// Poisons what lies between, comes late now and then, sends the data there and takes it back.
    fn queue(&self, rank: &Rank, middle: &Block, delay: &Block, rng: &mut Rng) -> Result<()> {
        let stream = rank.cuda.arena.stream();
        clear(middle, middle.bytes, stream)?;
        if rng.one_in(4) {
            clear(delay, 1 + rng.below(DELAY), stream)?;
        }
        let mut inputs = DispatchInputs { num_payloads: 1, ..DispatchInputs::default() };
        let mut outputs = DispatchOutputs { num_payloads: 1, ..DispatchOutputs::default() };
        (inputs.payloads[0], outputs.payloads[0]) = (self.data, self.middle);
        let rows = CombineInputs { rows: self.middle, ..CombineInputs::default() };
        let combined = CombineOutputs { combined: self.data, ..CombineOutputs::default() };
        // SAFETY: all memory lives until the stream was synchronised.
        unsafe {
            self.plan.dispatch_on(&inputs, &outputs, &self.call, stream)?;
            self.plan.combine_on(&rows, &combined, &self.call, stream)
        }
    }
}

/// Sets bytes to what is no number.
fn clear(block: &Block, bytes: usize, stream: *mut std::ffi::c_void) -> Result<()> {
    // SAFETY: the block is as long; the stream is of the current context, which the capture entered.
    let code = unsafe { sys::cuMemsetD8Async(block.address.addr() as u64, 0xff, bytes, stream.cast()) };
    check(code, "cuMemsetD8Async")
}
