//! The rank's side of a measurement: makes the calls it is told to make and reports their times.

use anyhow::{Result, ensure};
use ep_core::config::{CombineInputs, CombineOutputs, DispatchInputs, DispatchOutputs, Options, PlanConfig};
use ep_core::engine::{Plan, Window};
use ep_core::tensor::{Dtype, RawTensor};
use ep_peer::content::fill_row;
use serde::{Deserialize, Serialize};

use super::limit::{CopyKind, Limit};
use super::routing::rank_routing;
use super::shape::{Op, Output, RowOrder, Shape};
use super::verify::{self, Verified};
use super::wire::Traffic;
use crate::clock::{Span, now_ns};
use crate::launch::Reply;
use crate::memory::Buffer;
use crate::rank::{self, Member};

/// What a rank is told.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Command {
    /// Make `calls` calls, the first with this routing.
    Run {
        /// What to call.
        what: What,
        /// The number of the routing.
        routing: usize,
        /// How often.
        calls: usize,
    },
    /// Make one call with this routing and compare all that it wrote.
    Verify {
        /// The number of the routing.
        routing: usize,
    },
    /// Make one call with this routing and count what it sends to other nodes.
    Count {
        /// The number of the routing.
        routing: usize,
    },
}

/// What a rank measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum What {
    /// The operation of the shape.
    Ours,
    /// Copying as many bytes.
    Copy(CopyKind),
}

/// The first answer of a rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Ready {
    /// Nodes of the group.
    pub(crate) num_nodes: usize,
    /// What is between nodes, and why.
    pub(crate) network: String,
    /// Bytes of a message between nodes; 0: one node.
    pub(crate) chunk_bytes: usize,
    /// Row bytes that a call of each routing sends from this rank to all ranks.
    pub(crate) bytes: Vec<u64>,
}

/// The answer to [`Command::Run`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Times {
    /// When each call began and ended, in nanoseconds of the clock that all processes share.
    pub(crate) spans: Vec<Span>,
}

/// The answer to any command.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Answer {
    /// To [`Command::Run`].
    Times(Times),
    /// To [`Command::Verify`].
    Verified(Verified),
    /// To [`Command::Count`].
    Counted(Traffic),
}

/// Tags of row contents.
pub(super) const INPUT: u64 = 1;
pub(super) const EXPERT: u64 = 2;

/// A rank that measures one shape.
pub(crate) struct BenchRank {
    pub(super) shape: Shape,
    pub(super) member: Member,
    pub(super) plan: Plan,
    /// Of each routing, `[tokens, topk]`.
    ids: Vec<Buffer>,
    pub(super) weights: Vec<Buffer>,
    inputs: Vec<Buffer>,
    /// Most rows that any routing brings here.
    pub(super) rows: Rows,
    pub(super) out_ids: Buffer,
    pub(super) out_weights: Buffer,
    pub(super) combined: Buffer,
    limit: Limit,
    bytes: Vec<u64>,
}

/// The rows of a rank's experts: outputs of a dispatch, inputs of a combine.
pub(super) struct Rows {
    capacity: usize,
    /// Where each payload begins.
    pub(super) payloads: Vec<*mut u8>,
    _window: Option<Window>,
    _own: Vec<Buffer>,
}

impl BenchRank {
    /// Allocates everything. Collective.
    ///
    /// # Errors
    /// Those of the library, and of routings that cannot be had.
    pub(crate) fn new(shape: Shape, member: Member) -> Result<BenchRank> {
        let rank = member.group.rank();
        let config = PlanConfig {
            topk: shape.topk as u32,
            num_experts: shape.experts as u32,
            max_tokens: shape.tokens as u64,
            layout: shape.layout.layout(),
            ..PlanConfig::default()
        };
        // SAFETY: the plan has memory of its own.
        let plan = unsafe { Plan::create(&member.group, &config, None) }?;
        let (mut ids, mut weights) = (Vec::new(), Vec::new());
        for index in 0..shape.routings {
            let routing = rank_routing(&shape, index, rank)?;
            ids.push(Buffer::of(&routing.ids));
            weights.push(Buffer::of(&routing.weights));
        }
        let (mut capacity, mut bytes) = (0, Vec::new());
        for ids in &ids {
            update(&plan, &shape, ids)?;
            let rows = plan.counts(None)?.num_rows as usize;
            capacity = capacity.max(rows);
            bytes.push(bytes_of(&shape, bytemuck::cast_slice(ids.as_slice()), rows) as u64);
        }
        let rows = Rows::new(&shape, &member, capacity)?;
        let per_row = if shape.layout == RowOrder::Flat { shape.topk } else { 1 };
        let most = bytes.iter().copied().max().unwrap_or(0) as usize;
        let combined = if shape.op == Op::Combine { shape.tokens * shape.row_bytes() } else { 0 };
        Ok(BenchRank {
            inputs: if shape.op == Op::Dispatch { make_inputs(&shape, rank) } else { Vec::new() },
            out_ids: Buffer::new(4 * capacity * per_row),
            out_weights: Buffer::new(4 * capacity * per_row),
            combined: Buffer::new(combined),
            limit: Limit::new(&shape, most),
            shape,
            member,
            plan,
            ids,
            weights,
            rows,
            bytes,
        })
    }

    /// Answers commands until there are no more.
    ///
    /// # Errors
    /// The first error of a call.
    pub(crate) fn serve(&mut self) -> Result<()> {
        let info = self.member.group.info();
        rank::reply(&Reply::Done(Ready {
            num_nodes: info.num_nodes,
            network: info.transport_reason,
            chunk_bytes: info.chunk_bytes,
            bytes: self.bytes.clone(),
        }))?;
        while let Some(command) = rank::read()? {
            let answer = match command {
                Command::Run { what, routing, calls } => Answer::Times(self.run(what, routing, calls)?),
                Command::Verify { routing } => Answer::Verified(verify::verify(self, routing)?),
                Command::Count { routing } => Answer::Counted(self.count(routing)?),
            };
            rank::reply(&Reply::Done(answer))?;
        }
        Ok(())
    }

    fn run(&mut self, what: What, routing: usize, calls: usize) -> Result<Times> {
        let mut spans = Vec::with_capacity(calls);
        let timed_plan = self.shape.with_plan || self.shape.op == Op::Plan;
        if what == What::Ours && !timed_plan {
            self.prepare(routing)?;
        }
        let bytes = self.bytes[routing % self.bytes.len()] as usize;
        let num_rows = self.plan.counts(None)?.num_rows as usize;
        for call in 0..calls {
            self.member.barrier.wait(self.member.timeout)?;
            let start = now_ns();
            match what {
                What::Copy(kind) => self.limit.copy(kind, bytes),
                What::Ours if timed_plan => self.call_with_plan((routing + call) % self.ids.len())?,
                What::Ours => self.call(routing, num_rows)?,
            }
            spans.push((start, now_ns()));
        }
        Ok(Times { spans })
    }

    /// What a call sends to other nodes.
    fn count(&mut self, routing: usize) -> Result<Traffic> {
        let Member { timeout, ref group, .. } = self.member;
        let timed_plan = self.shape.with_plan || self.shape.op == Op::Plan;
        if !timed_plan {
            self.prepare(routing)?;
        }
        let num_rows = self.plan.counts(None)?.num_rows as usize;
        self.member.barrier.wait(timeout)?;
        let before = Traffic::of(group, timeout)?;
        // Nobody begins before all have looked.
        self.member.barrier.wait(timeout)?;
        if timed_plan {
            self.call_with_plan(routing)?
        } else {
            self.call(routing, num_rows)?
        }
        self.member.barrier.wait(timeout)?;
        Ok(Traffic::of(group, timeout)?.since(before))
    }

    /// Makes `routing` the plan's.
    pub(super) fn prepare(&self, routing: usize) -> Result<()> {
        update(&self.plan, &self.shape, &self.ids[routing])
    }

    fn call_with_plan(&self, routing: usize) -> Result<()> {
        self.prepare(routing)?;
        let rows = self.plan.counts(None)?.num_rows as usize;
        if self.shape.op == Op::Plan { Ok(()) } else { self.call(routing, rows) }
    }

    /// One call of a dispatch or a combine, its plan being up to date.
    pub(super) fn call(&self, routing: usize, num_rows: usize) -> Result<()> {
        ensure!(num_rows <= self.rows.capacity, "{num_rows} rows, room for {}", self.rows.capacity);
        match self.shape.op {
            Op::Plan => Ok(()),
            Op::Dispatch => self.dispatch(routing, num_rows),
            Op::Combine => self.combine(routing, num_rows),
        }
    }

    fn dispatch(&self, routing: usize, num_rows: usize) -> Result<()> {
        let Shape { tokens, topk, .. } = self.shape;
        let mut inputs = DispatchInputs {
            topk_weights: RawTensor::contiguous(self.weights[routing].address(), Dtype::F32, tokens, topk),
            ..DispatchInputs::default()
        };
        let mut outputs = DispatchOutputs::default();
        for (i, (dtype, cols)) in self.shape.dtype.payloads(self.shape.hidden).into_iter().enumerate() {
            inputs.payloads[i] = RawTensor::contiguous(self.inputs[i].address(), dtype, tokens, cols);
            outputs.payloads[i] = RawTensor::contiguous(self.rows.payloads[i], dtype, num_rows, cols);
            inputs.num_payloads += 1;
            outputs.num_payloads += 1;
        }
        let per_row = match self.shape.layout {
            RowOrder::Flat => {
                outputs.topk_idx = RawTensor::contiguous(self.out_ids.address(), Dtype::I32, num_rows, topk);
                topk
            }
            RowOrder::ExpertMajor => 1,
        };
        outputs.topk_weights =
            RawTensor::contiguous(self.out_weights.address(), Dtype::F32, num_rows, per_row);
        // SAFETY: all buffers are this rank's own, outlive the call and have room for `num_rows` rows.
        Ok(unsafe { self.plan.dispatch(&inputs, &outputs, &Options::default(), None) }?)
    }

    fn combine(&self, routing: usize, num_rows: usize) -> Result<()> {
        let Shape { tokens, topk, hidden, .. } = self.shape;
        let (dtype, _) = self.shape.dtype.payloads(hidden)[0];
        let mut inputs = CombineInputs {
            rows: RawTensor::contiguous(self.rows.payloads[0], dtype, num_rows, hidden),
            ..CombineInputs::default()
        };
        if self.shape.layout == RowOrder::ExpertMajor {
            inputs.topk_weights =
                RawTensor::contiguous(self.weights[routing].address(), Dtype::F32, tokens, topk);
        }
        let outputs = CombineOutputs {
            combined: RawTensor::contiguous(self.combined.address(), dtype, tokens, hidden),
            ..CombineOutputs::default()
        };
        // SAFETY: as in `dispatch`.
        Ok(unsafe { self.plan.combine(&inputs, &outputs, &Options::default(), None) }?)
    }
}

impl Rows {
    fn new(shape: &Shape, member: &Member, capacity: usize) -> Result<Rows> {
        let payloads = if shape.op == Op::Plan { Vec::new() } else { shape.dtype.payloads(shape.hidden) };
        let sizes: Vec<usize> =
            payloads.iter().map(|(dtype, cols)| capacity * cols * dtype.bytes()).collect();
        let (window, own, payload_addresses) = match shape.output {
            Output::Copy => {
                let own: Vec<Buffer> = sizes.iter().map(|&bytes| Buffer::new(bytes)).collect();
                let addresses = own.iter().map(Buffer::address).collect();
                (None, own, addresses)
            }
            Output::Window => {
                let offsets = sizes.iter().scan(0, |next: &mut usize, bytes| {
                    let offset = *next;
                    *next += bytes.next_multiple_of(64);
                    Some(offset)
                });
                let offsets: Vec<usize> = offsets.collect();
                let total = sizes.iter().map(|bytes| bytes.next_multiple_of(64)).sum();
                let window = Window::allocate(&member.group, total)?;
                // SAFETY: every offset is inside the window, or it is empty and the address unused.
                let addresses = offsets.iter().map(|&at| unsafe { window.data().add(at) }).collect();
                (Some(window), Vec::new(), addresses)
            }
        };
        let rows = Rows { capacity, payloads: payload_addresses, _window: window, _own: own };
        if shape.op == Op::Combine {
            rows.fill(shape, member.group.rank());
        }
        Ok(rows)
    }

    /// What the experts return.
    fn fill(&self, shape: &Shape, rank: usize) {
        let bytes = shape.row_bytes();
        let (dtype, _) = shape.dtype.payloads(shape.hidden)[0];
        for row in 0..self.capacity {
            // SAFETY: there is room for `capacity` rows, and no peer reads before all have filled theirs.
            let memory = unsafe { std::slice::from_raw_parts_mut(self.payloads[0].add(row * bytes), bytes) };
            fill_row(memory, dtype, &[shape.seed, EXPERT, rank as u64, row as u64]);
        }
    }

    /// The first `rows` rows of payload `index`.
    pub(super) fn payload(&self, index: usize, bytes: usize) -> &[u8] {
        // SAFETY: the caller asks for rows that fit, and no call is in progress.
        unsafe { std::slice::from_raw_parts(self.payloads[index], bytes) }
    }

    /// Overwrites `bytes` bytes of payload `index`.
    pub(super) fn poison(&mut self, index: usize, bytes: usize) {
        // SAFETY: as in `payload`.
        unsafe { self.payloads[index].write_bytes(0xA5, bytes) }
    }
}

fn update(plan: &Plan, shape: &Shape, ids: &Buffer) -> Result<()> {
    let idx = RawTensor::contiguous(ids.address(), Dtype::I32, shape.tokens, shape.topk);
    // SAFETY: the buffer has all ids and outlives the call.
    Ok(unsafe { plan.update(&idx, &Options::default(), None) }?)
}

fn make_inputs(shape: &Shape, rank: usize) -> Vec<Buffer> {
    let payload = |(index, (dtype, cols)): (usize, (Dtype, usize))| {
        let bytes = dtype.bytes() * cols;
        let mut buffer = Buffer::new(shape.tokens * bytes);
        for (token, row) in buffer.as_mut_slice().chunks_exact_mut(bytes).enumerate() {
            fill_row(row, dtype, &[shape.seed, INPUT, index as u64, rank as u64, token as u64]);
        }
        buffer
    };
    shape.dtype.payloads(shape.hidden).into_iter().enumerate().map(payload).collect()
}

/// Row bytes that a call sends from this rank to all ranks, itself included.
fn bytes_of(shape: &Shape, ids: &[i32], rows_here: usize) -> usize {
    match (shape.op, shape.layout) {
        (Op::Plan, _) => 4 * ids.len(),
        (Op::Combine, _) => rows_here * shape.row_bytes(),
        (Op::Dispatch, RowOrder::ExpertMajor) => ids.len() * shape.row_bytes(),
        (Op::Dispatch, RowOrder::Flat) => {
            let owners = owners(shape);
            let ranks_of = |token: &[i32]| {
                let mut ranks: Vec<usize> = token.iter().map(|&id| owners[id as usize]).collect();
                ranks.sort_unstable();
                ranks.dedup();
                ranks.len()
            };
            ids.chunks(shape.topk).map(ranks_of).sum::<usize>() * shape.row_bytes()
        }
    }
}

/// The rank of each expert.
pub(super) fn owners(shape: &Shape) -> Vec<usize> {
    let of_rank = |(rank, count): (usize, usize)| std::iter::repeat_n(rank, count);
    shape.experts_per_rank().into_iter().enumerate().flat_map(of_rank).collect()
}
