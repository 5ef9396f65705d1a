//! The arguments of the command.

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::bench::shape::{Element, Op, Output, RowOrder};
use crate::launch::RANK_COMMAND;

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
    Bench(BenchArgs),
    /// Run recorded routings among processes of this machine and compare every bit with a reference
    Demo(DemoArgs),
    /// A rank of `ep demo` or `ep bench`
    #[command(name = RANK_COMMAND, hide = true)]
    Rank,
}

/// Whom to compare with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum PeerKind {
    /// `MPI_Alltoallv` of the Open MPI that is installed
    Mpi,
}

/// Arguments of `ep bench`.
#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    /// What to measure; all of it when absent
    pub(crate) op: Option<Op>,
    /// Rank processes
    #[arg(long, default_value_t = 4)]
    pub(crate) ranks: usize,
    /// Tokens of each rank; a list is a sweep
    #[arg(long, value_delimiter = ',', default_value = "1024")]
    pub(crate) tokens: Vec<usize>,
    /// Columns of a row
    #[arg(long, default_value_t = 7168)]
    pub(crate) hidden: usize,
    /// Experts of each token
    #[arg(long, default_value_t = 8)]
    pub(crate) topk: usize,
    /// Experts over all ranks
    #[arg(long, default_value_t = 256)]
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
    /// At least so many calls
    #[arg(long, default_value_t = 30)]
    pub(crate) iters: usize,
    /// About so many seconds of calls
    #[arg(long, default_value_t = 2.0)]
    pub(crate) time: f64,
    /// Of random routings and rows
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// Seconds after which a silent rank is given up
    #[arg(long, default_value_t = 30)]
    pub(crate) timeout: u64,
    /// Measure an MPI program that does the same, in turns with ours
    #[arg(long)]
    pub(crate) peer: Option<PeerKind>,
    /// One JSON object a line
    #[arg(long)]
    pub(crate) json: bool,
}

/// Arguments of `ep demo`.
#[derive(Debug, Args)]
pub(crate) struct DemoArgs {
    /// Rank processes
    #[arg(long, default_value_t = 4)]
    pub(crate) ranks: usize,
    /// Tokens of each rank; when absent, as many as the traces have, at most 2048
    #[arg(long)]
    pub(crate) tokens: Option<usize>,
    /// Columns of a row, in bf16
    #[arg(long, default_value_t = 1024)]
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
