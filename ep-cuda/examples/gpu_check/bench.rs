//! Measures calls by events on the stream: the mean of many back to back, and the median of single ones, on
//! the slowest rank.

use std::time::{Duration, Instant};

use cudarc::driver::sys;
use ep_core::config::{
    CombineInputs, CombineOutputs, DispatchInputs, DispatchOutputs, Options as CallOptions,
};
use ep_core::engine::Plan;
use ep_core::tensor::{Dtype, RawTensor};
use ep_core::{Error, Result};
use ep_cuda::driver::check;
use ep_cuda::stream::Event;

use crate::arena::Block;
use crate::case::Case;
use crate::options::Options;
use crate::rank::Rank;

const BACK_TO_BACK: usize = 30;
const SINGLE: usize = 21;
const PATIENCE: Duration = Duration::from_secs(60);

/// Tensors of one dispatch and its combine.
struct Workload {
    plan: Plan,
    idx: RawTensor,
    inputs: DispatchInputs,
    outputs: DispatchOutputs,
    combine_inputs: CombineInputs,
    combine_outputs: CombineOutputs,
    options: CallOptions,
    /// Rows that arrive here, and their payload bytes.
    rows: usize,
    row_bytes: usize,
    _blocks: Vec<Block>,
}

struct Row {
    name: String,
    outcome: Result<Times>,
    /// Payload bytes that arrive at a rank, on average; 0: no rate.
    bytes: f64,
}

struct Times {
    mean: f64,
    /// Of single calls: least, median, most.
    single: [f64; 3],
}

pub fn run(rank: &mut Rank, options: &Options) -> std::result::Result<(), String> {
    let rows = measure(rank, options).map_err(|e| format!("rank {}: {e}", rank.rank))?;
    if rank.rank == 0 {
        print(rank, options, &rows);
    }
    match rows.iter().find_map(|row| row.outcome.as_ref().err()) {
        None => Ok(()),
        Some(error) => Err(error.to_string()),
    }
}

fn measure(rank: &mut Rank, options: &Options) -> Result<Vec<Row>> {
    let copy = copy_limit(rank)?;
    let mut rows = vec![Row {
        name: String::from("copy, device to device, alone"),
        bytes: COPY_BYTES as f64,
        outcome: Ok(copy),
    }];
    let pair = rank.num_ranks == 2;
    for kind in Kind::ALL.into_iter().filter(|kind| !kind.away || pair) {
        let work = Workload::new(rank, options, kind)?;
        let bytes = average(rank, (work.rows * work.row_bytes) as f64)?;
        let mut measure = |name: &str, steps: &[Step]| {
            if !format!("{name} {}", kind.name()).starts_with(&options.only) {
                return;
            }
            let outcome = time(rank, &work, steps);
            rows.push(Row { name: format!("{name} {}", kind.name()), bytes, outcome });
        };
        if kind == Kind::PLAIN {
            measure("plan update,", &[Step::Update]);
        }
        measure("dispatch", &[Step::Dispatch]);
        if !kind.fp8 && !kind.origins {
            measure("combine", &[Step::Combine]);
        }
        if !kind.window {
            measure("update + dispatch", &[Step::Update, Step::Dispatch]);
        }
        if kind == Kind::PLAIN && "update to counts".starts_with(&options.only) {
            let outcome = time_counts(rank, &work);
            rows.push(Row {
                name: String::from("update to counts on the host, its clock"),
                bytes: 0.0,
                outcome,
            });
        }
        if rank.cuda.group.health(&mut []).is_some() {
            break;
        }
    }
    Ok(rows)
}

/// What is dispatched, and where to.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Kind {
    fp8: bool,
    window: bool,
    /// Ids and weights of each row are wanted, outside the window.
    origins: bool,
    /// Two ranks send every token to each other.
    away: bool,
}

impl Kind {
    const PLAIN: Kind = Kind { fp8: false, window: true, origins: false, away: false };
    const ALL: [Kind; 7] = [
        Kind::PLAIN,
        Kind { fp8: true, ..Kind::PLAIN },
        Kind { origins: true, ..Kind::PLAIN },
        Kind { window: false, ..Kind::PLAIN },
        Kind { window: false, fp8: true, ..Kind::PLAIN },
        Kind { window: false, origins: true, ..Kind::PLAIN },
        Kind { away: true, ..Kind::PLAIN },
    ];

    fn name(self) -> String {
        let what = if self.fp8 { "fp8 + scales" } else { "bf16" };
        let place = if self.window { "window" } else { "ordinary memory" };
        let origins = if self.origins { ", ids and weights" } else { "" };
        format!("{what}, {place}{origins}{}", if self.away { ", all to the other rank" } else { "" })
    }
}

#[derive(Clone, Copy)]
enum Step {
    Update,
    Dispatch,
    Combine,
}

impl Workload {
    fn new(rank: &mut Rank, options: &Options, kind: Kind) -> Result<Workload> {
        let Kind { fp8, window, origins, away } = kind;
        let Options { tokens, hidden, seed, .. } = *options;
        // Everything to the other rank: one expert each, and each token to that of the other.
        let (topk, experts) = if away { (1, 2) } else { (options.topk, options.experts) };
        let case = Case::large(seed + 1, rank.num_ranks, tokens, hidden, topk, experts);
        let side = &mut rank.cuda;
        side.arena.reset_window();
        // SAFETY: the plan has memory of its own.
        let plan = unsafe { Plan::create(&side.group, &case.plan(0), None) }?;
        let call = CallOptions { num_sms: options.sms, ..CallOptions::default() };
        let ids = if away { vec![1 - rank.rank as i64; tokens] } else { case.ids(rank.rank) };
        let mut blocks = vec![side.arena.holding(bytemuck::cast_slice(&ids), false)?];
        let idx = RawTensor::contiguous(blocks[0].address, Dtype::I64, tokens, topk);
        // SAFETY: the ids live as long as the workload.
        unsafe { side.update(&plan, &idx, &call) }?;
        let rows = plan.counts(Some(PATIENCE))?.num_rows as usize;

        let payloads: Vec<(Dtype, usize)> = match fp8 {
            true => vec![(Dtype::F8E4M3, hidden), (Dtype::F32, hidden.div_ceil(128))],
            false => vec![(Dtype::Bf16, hidden)],
        };
        let count = payloads.len() as u32;
        let mut inputs = DispatchInputs { num_payloads: count, ..DispatchInputs::default() };
        let mut outputs = DispatchOutputs { num_payloads: count, ..DispatchOutputs::default() };
        let mut row_bytes = 0;
        for (i, (dtype, cols)) in payloads.into_iter().enumerate() {
            row_bytes += cols * dtype.bytes();
            blocks.push(side.arena.holding(&case.data(rank.rank, 1, dtype, tokens * cols), false)?);
            inputs.payloads[i] = RawTensor::contiguous(blocks[blocks.len() - 1].address, dtype, tokens, cols);
            blocks.push(side.arena.block(rows * cols * dtype.bytes(), window)?);
            outputs.payloads[i] = RawTensor::contiguous(blocks[blocks.len() - 1].address, dtype, rows, cols);
        }
        if origins {
            blocks.push(side.arena.holding(&case.data(rank.rank, 2, Dtype::F32, tokens * topk), false)?);
            inputs.topk_weights =
                RawTensor::contiguous(blocks[blocks.len() - 1].address, Dtype::F32, tokens, topk);
            blocks.push(side.arena.block(4 * rows * topk, false)?);
            outputs.topk_weights =
                RawTensor::contiguous(blocks[blocks.len() - 1].address, Dtype::F32, rows, topk);
            blocks.push(side.arena.block(8 * rows * topk, false)?);
            outputs.topk_idx =
                RawTensor::contiguous(blocks[blocks.len() - 1].address, Dtype::I64, rows, topk);
        }
        blocks.push(side.arena.block(2 * tokens * hidden, false)?);
        let combined = RawTensor::contiguous(blocks[blocks.len() - 1].address, Dtype::Bf16, tokens, hidden);
        Ok(Workload {
            plan,
            idx,
            inputs,
            outputs,
            // What was dispatched comes back.
            combine_inputs: CombineInputs { rows: outputs.payloads[0], ..CombineInputs::default() },
            combine_outputs: CombineOutputs { combined, ..CombineOutputs::default() },
            options: call,
            rows,
            row_bytes,
            _blocks: blocks,
        })
    }

    fn queue(&self, rank: &Rank, step: Step) -> Result<()> {
        let stream = rank.cuda.arena.stream();
        // SAFETY: all memory lives as long as the workload, which outlives the stream's work.
        unsafe {
            match step {
                Step::Update => self.plan.update_on(&self.idx, &self.options, stream),
                Step::Dispatch => self.plan.dispatch_on(&self.inputs, &self.outputs, &self.options, stream),
                Step::Combine => {
                    self.plan.combine_on(&self.combine_inputs, &self.combine_outputs, &self.options, stream)
                }
            }
        }
    }

    fn run(&self, rank: &Rank, steps: &[Step], times: usize) -> Result<f64> {
        let context = rank.device.context();
        let (start, end) = (Event::new(context, true)?, Event::new(context, true)?);
        let _entered = context.enter()?;
        let stream = rank.cuda.arena.stream().cast();
        // SAFETY: the arena's stream is of this context.
        unsafe { start.record(stream) }?;
        for _ in 0..times {
            for &step in steps {
                self.queue(rank, step)?;
            }
        }
        // SAFETY: as above.
        unsafe { end.record(stream) }?;
        end.wait(PATIENCE)?;
        Ok(end.since(&start)?.as_secs_f64() * 1e6 / times as f64)
    }
}

/// Microseconds of a call on the slowest rank.
fn time(rank: &mut Rank, work: &Workload, steps: &[Step]) -> Result<Times> {
    rank.gather(&[])?;
    let mean = work.run(rank, steps, 3).and_then(|_| work.run(rank, steps, BACK_TO_BACK));
    let mean = slowest(rank, mean)?;
    let mut single = Vec::with_capacity(SINGLE);
    for _ in 0..SINGLE {
        rank.gather(&[])?;
        let one = work.run(rank, steps, 1);
        single.push(slowest(rank, one)?);
    }
    single.sort_by(f64::total_cmp);
    if let Some(error) = rank.cuda.group.health(&mut []) {
        return Err(Error::new(error.status, error.text));
    }
    Ok(Times { mean, single: [single[0], single[single.len() / 2], single[single.len() - 1]] })
}

/// Microseconds of the host's clock from an update's call to its counts.
fn time_counts(rank: &mut Rank, work: &Workload) -> Result<Times> {
    let mut single = Vec::with_capacity(2 * SINGLE);
    for _ in 0..2 * SINGLE {
        rank.gather(&[])?;
        let started = Instant::now();
        let counted = work.queue(rank, Step::Update).and_then(|()| work.plan.counts(Some(PATIENCE)));
        let took = started.elapsed().as_secs_f64() * 1e6;
        single.push(slowest(rank, counted.map(|_| took))?);
    }
    let mean = single.iter().sum::<f64>() / single.len() as f64;
    single.sort_by(f64::total_cmp);
    Ok(Times { mean, single: [single[0], single[single.len() / 2], single[single.len() - 1]] })
}

/// The largest of all ranks' numbers; an error of one is everyone's.
fn slowest(rank: &mut Rank, own: Result<f64>) -> Result<f64> {
    let all = rank.gather(&[*own.as_ref().unwrap_or(&f64::INFINITY)])?;
    let worst = all.iter().filter_map(|numbers| numbers.first()).copied().fold(0.0, f64::max);
    match own {
        Err(error) => Err(error),
        Ok(_) if worst.is_infinite() => {
            let why = rank.cuda.group.health(&mut []).map_or(String::new(), |error| error.text);
            Err(Error::invalid(format!("another rank failed: {why}")))
        }
        Ok(_) => Ok(worst),
    }
}

fn average(rank: &mut Rank, own: f64) -> Result<f64> {
    let all = rank.gather(&[own])?;
    Ok(all.iter().filter_map(|numbers| numbers.first()).sum::<f64>() / all.len() as f64)
}

const COPY_BYTES: usize = 512 << 20;

/// What the device's own copy reaches while nobody else works.
fn copy_limit(rank: &mut Rank) -> Result<Times> {
    rank.gather(&[])?;
    let outcome = if rank.rank == 0 { copy_alone(rank) } else { Ok(0.0) };
    let micros = slowest(rank, outcome)?;
    Ok(Times { mean: micros, single: [micros; 3] })
}

fn copy_alone(rank: &Rank) -> Result<f64> {
    let (from, to) = (rank.cuda.arena.ordinary(COPY_BYTES)?, rank.cuda.arena.ordinary(COPY_BYTES)?);
    let context = rank.device.context();
    let (start, end) = (Event::new(context, true)?, Event::new(context, true)?);
    let _entered = context.enter()?;
    let stream: sys::CUstream = rank.cuda.arena.stream().cast();
    let (from, to) = (from.address.addr() as u64, to.address.addr() as u64);
    for round in 0..22 {
        if round == 2 {
            // SAFETY: the arena's stream is of this context.
            unsafe { start.record(stream) }?;
        }
        // SAFETY: both blocks are as long as said, and live until the end was waited for.
        check(unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, COPY_BYTES, stream) }, "cuMemcpyDtoDAsync")?;
    }
    // SAFETY: as above.
    unsafe { end.record(stream) }?;
    end.wait(PATIENCE)?;
    Ok(end.since(&start)?.as_secs_f64() * 1e6 / 20.0)
}

fn print(rank: &Rank, options: &Options, rows: &[Row]) {
    let Options { ranks, tokens, hidden, topk, experts, sms, .. } = options;
    println!();
    println!(
        "{ranks} ranks x {sms} SMs, {tokens} tokens x {hidden}, top-{topk} of {experts}; kernels {}, {} SMs",
        option_env!("EP_GPU_TREE").unwrap_or("of an unnamed tree"),
        rank.device.num_sms()
    );
    println!(
        "slowest rank, us: mean of {BACK_TO_BACK} back to back; of {SINGLE} single ones; GB/s a rank by the mean"
    );
    println!("| call | mean us | single: least, median, most us | MB a rank | GB/s |");
    println!("| --- | ---: | ---: | ---: | ---: |");
    for row in rows {
        match &row.outcome {
            Ok(Times { mean, single: [least, median, most] }) => println!(
                "| {} | {mean:.1} | {least:.1}, {median:.1}, {most:.1} | {:.1} | {:.0} |",
                row.name,
                row.bytes / 1e6,
                row.bytes / mean / 1e3
            ),
            Err(error) => println!("| {} | {error} | | | |", row.name),
        }
    }
}
