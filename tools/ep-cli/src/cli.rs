//! The arguments of the command.

use std::ops::RangeInclusive;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

use ep_core::config::{MAX_EXPERTS, MAX_TOPK};

use crate::bench::fabric::{FABRIC_COMMAND, MAX_WRITE};
use crate::bench::shape::{Element, Op, Output, RowOrder};
use crate::between::BetweenArgs;
use crate::launch::RANK_COMMAND;

/// The most rank processes that are started on one machine.
const MAX_PROCESSES: usize = 256;

/// A parser of numbers from `least` to `most`.
fn in_range(least: usize, most: usize) -> impl Fn(&str) -> Result<usize, String> + Clone + Send + Sync {
    let range: RangeInclusive<usize> = least..=most;
    move |text| {
        let number = text.parse::<usize>().map_err(|error| error.to_string())?;
        match range.contains(&number) {
            true => Ok(number),
            false => Err(format!("expected {least} to {most}")),
        }
    }
}

/// Bytes, with K or M behind for binary thousands or millions of them.
fn bytes(text: &str) -> Result<usize, String> {
    let (digits, unit) = match text.strip_suffix(['K', 'M']) {
        Some(digits) => (digits, if text.ends_with('K') { 1 << 10 } else { 1 << 20 }),
        None => (text, 1),
    };
    match digits.parse::<usize>().ok().and_then(|number| number.checked_mul(unit)) {
        Some(bytes) if bytes <= MAX_WRITE => Ok(bytes),
        _ => Err(format!("expected 0 to {}M", MAX_WRITE >> 20)),
    }
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number > 0.0 && number <= 86_400.0 => Ok(number),
        _ => Err(String::from("expected a number of seconds, more than 0 and at most a day")),
    }
}

/// Expert-parallel dispatch and combine: demonstration, measurements, facts about this build.
#[derive(Debug, Parser)]
#[command(name = "ep", version, subcommand_required = true, arg_required_else_help = true)]
pub(crate) struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Measure plan, dispatch and combine among processes of this machine
    Bench(Box<BenchArgs>),
    /// Run recorded routings among processes of this machine and compare every bit with a reference
    Demo(DemoArgs),
    /// Version, backends, processors and settings
    Info(InfoArgs),
    /// A rank of `ep demo` or `ep bench`
    #[command(name = RANK_COMMAND, hide = true)]
    Rank,
    /// One of the two processes of `ep bench fabric`
    #[command(name = FABRIC_COMMAND, hide = true)]
    Fabric,
}

/// Arguments of `ep info`.
#[derive(Debug, Args)]
pub(crate) struct InfoArgs {
    /// One JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// Where ranks run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Device {
    /// Processors of this machine, over shared memory
    Host,
}

/// Whom to compare with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum PeerKind {
    /// `MPI_Alltoallv` of the Open MPI that is installed
    Mpi,
}

/// Arguments of `ep bench`.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct BenchArgs {
    /// Something else than calls of the library
    #[command(subcommand)]
    pub(crate) part: Option<BenchPart>,
    /// What to measure; all of it when absent
    pub(crate) op: Option<Op>,
    /// Where ranks run
    #[arg(long, default_value = "host")]
    pub(crate) device: Device,
    /// Rank processes
    #[arg(long, default_value_t = 4, value_parser = in_range(1, MAX_PROCESSES))]
    pub(crate) ranks: usize,
    /// Several nodes
    #[command(flatten)]
    pub(crate) between: BetweenArgs,
    /// Tokens of each rank; a list is a sweep
    #[arg(long, value_delimiter = ',', default_value = "1024", value_parser = in_range(1, 1 << 24))]
    pub(crate) tokens: Vec<usize>,
    /// Columns of a row
    #[arg(long, default_value_t = 7168, value_parser = in_range(1, 1 << 24))]
    pub(crate) hidden: usize,
    /// Experts of each token
    #[arg(long, default_value_t = 8, value_parser = in_range(1, MAX_TOPK))]
    pub(crate) topk: usize,
    /// Experts over all ranks
    #[arg(long, default_value_t = 256, value_parser = in_range(1, MAX_EXPERTS))]
    pub(crate) experts: usize,
    /// What a row is made of; a list measures each
    #[arg(long, value_delimiter = ',', default_value = "bf16")]
    pub(crate) dtype: Vec<Element>,
    /// Where rows arrive and are combined from; a list measures each
    #[arg(long, value_delimiter = ',', default_value = "window")]
    pub(crate) output: Vec<Output>,
    /// The order of rows
    #[arg(long, default_value = "flat")]
    pub(crate) layout: RowOrder,
    /// `random`, or `trace:NAME` for a recorded one
    #[arg(long, default_value = "random")]
    pub(crate) routing: String,
    /// Dispatch: the plan's update and its counts are part of the time
    #[arg(long)]
    pub(crate) with_plan: bool,
    /// Bytes of each staging ring; 0: the library chooses
    #[arg(long, default_value_t = 0)]
    pub(crate) ring_bytes: u32,
    /// At least so many calls
    #[arg(long, default_value_t = 30, value_parser = in_range(1, 1 << 24))]
    pub(crate) iters: usize,
    /// About so many seconds of calls
    #[arg(long, default_value_t = 2.0, value_parser = seconds)]
    pub(crate) time: f64,
    /// Of random routings and rows
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// Seconds after which a silent rank is given up
    #[arg(long, default_value_t = 30)]
    pub(crate) timeout: u64,
    /// Several nodes: leave out the raw path of the network
    #[arg(long)]
    pub(crate) no_raw: bool,
    /// Draw time over tokens
    #[arg(long, value_name = "FILE.svg")]
    pub(crate) plot: Option<PathBuf>,
    /// A smoke run: small shapes of its own, every path once, all results verified
    #[arg(long)]
    pub(crate) quick: bool,
    /// Measure an MPI program that does the same, in turns with ours. It is compiled when it is asked for: that needs
    /// the source tree that this `ep` was built from, cargo, and Open MPI (mpicc, mpirun)
    #[arg(long)]
    pub(crate) peer: Option<PeerKind>,
    /// One JSON object a line
    #[arg(long)]
    pub(crate) json: bool,
}

/// What is measured below the library's calls.
#[derive(Debug, Subcommand)]
pub(crate) enum BenchPart {
    /// Measure writes through libfabric between two processes: the raw path between nodes
    Fabric(FabricArgs),
}

/// Whom to compare the raw path with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum FabricPeer {
    /// A C program that uses libfabric and nothing else, compiled when it is asked for
    Raw,
    /// `fi_rma_bw` of fabtests, which is on PATH
    Fabtests,
}

/// Arguments of `ep bench fabric`.
#[derive(Debug, Args)]
pub(crate) struct FabricArgs {
    /// Bytes of a write, as 8, 64K or 4M; a list is a sweep
    #[arg(long, value_delimiter = ',', default_value = "8,1K,8K,64K,512K,4M", value_parser = bytes)]
    pub(crate) sizes: Vec<usize>,
    /// Writes that are posted, then drained; a list is a sweep
    #[arg(long, value_delimiter = ',', default_value = "16", value_parser = in_range(1, 4096))]
    pub(crate) windows: Vec<usize>,
    /// How many NICs take turns; a list is a sweep
    #[arg(long, value_delimiter = ',', default_value = "1", value_parser = in_range(1, 4))]
    pub(crate) nics: Vec<usize>,
    /// The NICs, as for EP_FABRIC_NICS, which goes before; none: addresses of the loopback interface
    #[arg(long, value_delimiter = ',', default_value = "127.0.0.1,127.0.0.2,127.0.0.3,127.0.0.4")]
    pub(crate) addresses: Vec<String>,
    /// The provider, as for EP_FABRIC_PROVIDER, which goes before
    #[arg(long)]
    pub(crate) provider: Option<String>,
    /// Rounds of each shape, ours and the peer's in turns
    #[arg(long, default_value_t = 20, value_parser = in_range(1, 10_000))]
    pub(crate) rounds: usize,
    /// Milliseconds of a round
    #[arg(long, default_value_t = 100, value_parser = in_range(1, 60_000))]
    pub(crate) round_ms: usize,
    /// Seconds after which a silent process is given up
    #[arg(long, default_value_t = 60)]
    pub(crate) timeout: u64,
    /// Whom to measure in turns with ours
    #[arg(long, value_delimiter = ',')]
    pub(crate) peer: Vec<FabricPeer>,
    /// A smoke run: few sizes, one round each
    #[arg(long)]
    pub(crate) quick: bool,
    /// One JSON object a line
    #[arg(long)]
    pub(crate) json: bool,
}

/// Arguments of `ep demo`.
#[derive(Debug, Args)]
pub(crate) struct DemoArgs {
    /// Rank processes
    #[arg(long, default_value_t = 4, value_parser = in_range(1, MAX_PROCESSES))]
    pub(crate) ranks: usize,
    /// Several nodes
    #[command(flatten)]
    pub(crate) between: BetweenArgs,
    /// Tokens of each rank; when absent, as many as the traces have, at most 2048
    #[arg(long)]
    pub(crate) tokens: Option<usize>,
    /// Columns of a row, in bf16
    #[arg(long, default_value_t = 1024, value_parser = in_range(1, 1 << 24))]
    pub(crate) hidden: usize,
    /// Names of traces; all when absent
    #[arg(long, value_delimiter = ',')]
    pub(crate) traces: Vec<String>,
    /// The first so many layers of each trace; all when absent
    #[arg(long)]
    pub(crate) layers: Option<usize>,
    /// Seconds after which a silent rank is given up
    #[arg(long, default_value_t = 60)]
    pub(crate) timeout: u64,
    /// One JSON object a line
    #[arg(long)]
    pub(crate) json: bool,
}
