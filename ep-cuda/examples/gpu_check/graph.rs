//! Calls captured into graphs, and replayed with other data and in other orders.

use cudarc::driver::sys::{self, CUgraphExec, CUstreamCaptureMode};
use ep_core::config::Layout;
use ep_core::{Error, Result, Status};
use ep_cuda::driver::check;

use crate::case::Case;
use crate::options::Options;
use crate::rank::{Rank, differ};
use crate::run::{Call, Prepared};

/// A graph that can be launched.
pub struct Graph(CUgraphExec);

impl Graph {
    /// Captures calls on the side's stream.
    fn capture(rank: &Rank, prepared: &Prepared, calls: &[Call]) -> Result<Graph> {
        Graph::of(rank, || calls.iter().try_for_each(|&call| rank.cuda.queue(prepared, call)))
    }

    /// Captures what `queue` queues on the stream of the rank's arena.
    pub fn of(rank: &Rank, queue: impl FnOnce() -> Result<()>) -> Result<Graph> {
        let _entered = rank.device.context().enter()?;
        let stream = rank.cuda.arena.stream().cast();
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is of the current context, and nothing captures it yet.
        check(unsafe { sys::cuStreamBeginCapture_v2(stream, mode) }, "cuStreamBeginCapture")?;
        let queued = queue();
        let mut graph = std::ptr::null_mut();
        // SAFETY: this thread began the capture.
        check(unsafe { sys::cuStreamEndCapture(stream, &mut graph) }, "cuStreamEndCapture")?;
        queued?;
        let mut exec = std::ptr::null_mut();
        // SAFETY: the graph was just made.
        check(unsafe { sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0) }, "cuGraphInstantiate")?;
        // SAFETY: what was instantiated does not need it.
        check(unsafe { sys::cuGraphDestroy(graph) }, "cuGraphDestroy")?;
        Ok(Graph(exec))
    }

    pub fn launch(&self, rank: &Rank) -> Result<()> {
        let _entered = rank.device.context().enter()?;
        // SAFETY: the graph exists, and its memory is the prepared case's, which the caller keeps.
        let code = unsafe { sys::cuGraphLaunch(self.0, rank.cuda.arena.stream().cast()) };
        check(code, "cuGraphLaunch")
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: instantiated once; its launches were waited for.
        let _ = unsafe { sys::cuGraphExecDestroy(self.0) };
    }
}

const REPLAYS: u64 = 12;

/// A case of static shapes.
fn shape(rank: &Rank, layout: Layout, seed: u64) -> Case {
    let mut case = Case::large(seed, rank.num_ranks, 96, 512, 4, 4 * rank.num_ranks);
    case.layout = layout;
    case.static_rows = Some(96 * rank.num_ranks * if layout == Layout::Flat { 1 } else { 4 });
    case.tokens.iter_mut().enumerate().for_each(|(rank, tokens)| *tokens -= rank % 3);
    case
}

/// Runs replays, and compares each with the host.
pub fn check_graphs(rank: &mut Rank, options: &Options) -> std::result::Result<(), String> {
    for layout in [Layout::Flat, Layout::ExpertMajor] {
        whole(rank, options, layout).map_err(|e| format!("rank {}: graph of all calls: {e}", rank.rank))?;
        parts(rank, options, layout).map_err(|e| format!("rank {}: graphs of parts: {e}", rank.rank))?;
    }
    turned(rank, options).map_err(|e| format!("rank {}: graphs in opposite order: {e}", rank.rank))?;
    if rank.rank == 0 {
        println!("graphs: {REPLAYS} replays of whole layers and as many of parts, twice, all equal");
    }
    Ok(())
}

fn compare(rank: &mut Rank, prepared: &Prepared, case: &Case, sms: u32) -> Result<()> {
    let cuda = rank.cuda.collect(prepared)?;
    let mut host = rank.host.run(case, 0, sms)?;
    host.counts = None;
    differ(&cuda, &host)
}

/// One graph of a layer, replayed with new routings; eager calls between.
fn whole(rank: &mut Rank, options: &Options, layout: Layout) -> Result<()> {
    let case = shape(rank, layout, options.seed);
    let prepared = rank.cuda.prepare(&case, 0, options.sms)?;
    let layer = [Call::Update, Call::Dispatch, Call::Combine];
    let graph = Graph::capture(rank, &prepared, &layer)?;
    for replay in 0..REPLAYS {
        let case = shape(rank, layout, 100 + replay);
        rank.cuda.refill(&case, &prepared)?;
        match replay % 4 {
            3 => layer.iter().try_for_each(|&call| rank.cuda.queue(&prepared, call))?,
            _ => graph.launch(rank)?,
        }
        compare(rank, &prepared, &case, options.sms)?;
    }
    Ok(())
}

/// The last rank replays two graphs in opposite order: both calls fail everywhere, and the lane goes on.
fn turned(rank: &mut Rank, options: &Options) -> Result<()> {
    let case = shape(rank, Layout::Flat, options.seed);
    let prepared = rank.cuda.prepare(&case, 0, options.sms)?;
    let graph = |call| Graph::capture(rank, &prepared, &[call]);
    let (update, dispatch, combine) = (graph(Call::Update)?, graph(Call::Dispatch)?, graph(Call::Combine)?);
    rank.cuda.refill(&case, &prepared)?;
    update.launch(rank)?;
    let mut order = [&dispatch, &combine];
    if rank.rank == rank.num_ranks - 1 && rank.num_ranks > 1 {
        order.reverse();
    }
    order.iter().try_for_each(|graph| graph.launch(rank))?;
    rank.cuda.arena.synchronize()?;
    let told = rank.cuda.group.health(&mut []);
    let right = told.as_ref().is_some_and(|error| {
        error.status == Status::Mismatch
            && error.text.contains("one is in ep_")
            && error.text.contains("ranks ")
    });
    if rank.num_ranks > 1 && !right {
        return Err(Error::new(Status::Internal, format!("expected a mismatch of two calls, got {told:?}")));
    }
    while rank.cuda.group.health(&mut []).is_some_and(|error| error.status == Status::Mismatch) {}
    rank.gather(&[])?;
    [&dispatch, &combine].iter().try_for_each(|graph| graph.launch(rank))?;
    compare(rank, &prepared, &case, options.sms)?;
    if rank.rank == 0 {
        println!("graphs: replayed in opposite order on one rank: named by all, and the lane goes on");
    }
    Ok(())
}

/// A graph for each call: one routing serves several dispatches and combines, in any order.
fn parts(rank: &mut Rank, options: &Options, layout: Layout) -> Result<()> {
    let case = shape(rank, layout, options.seed);
    let prepared = rank.cuda.prepare(&case, 0, options.sms)?;
    let graph = |call| Graph::capture(rank, &prepared, &[call]);
    let (update, dispatch, combine) = (graph(Call::Update)?, graph(Call::Dispatch)?, graph(Call::Combine)?);
    for replay in 0..REPLAYS {
        let case = shape(rank, layout, 200 + replay);
        rank.cuda.refill(&case, &prepared)?;
        update.launch(rank)?;
        let order = match replay % 3 {
            0 => vec![&dispatch, &combine],
            1 => vec![&combine, &dispatch, &dispatch],
            _ => vec![&dispatch, &combine, &dispatch, &combine],
        };
        order.into_iter().try_for_each(|graph| graph.launch(rank))?;
        compare(rank, &prepared, &case, options.sms)?;
    }
    Ok(())
}
