//! Checks the CUDA backend on a machine with a GPU, and measures it.
//!
//! ```text
//! gpu_check [what=all|check|bench|graph|faults|litmus|alone] [ranks=4] [tokens=4096] [hidden=7168] [topk=8]
//!           [experts=256] [sms=24] [cases=24] [seed=1] [rounds=1000000] [timeout_ms=10000] [threads=0]
//!           [only=combine_bf16]
//! ```
//!
//! Starts `ranks` processes. Each makes a group on CUDA and one on the host, runs the same calls on both,
//! and compares every byte of every output; then it measures. Rank r uses device r % devices: several
//! ranks on one device need MPS. Prints one table last; the exit status is 1 if anything differed.
//!
//! `graph` replays captured calls with other data and in other orders. `litmus` stresses the order across ranks,
//! `alone` leaves one SM to each rank's calls. `faults` lets calls differ, a rank not come, abort and be killed
//! (last, since it may leave MPS in a bad state). `threads=1`: the ranks are threads of this
//! process, which needs CUDA_DEVICE_MAX_CONNECTIONS of several streams a rank, and no MPS.

#![expect(unreachable_pub, reason = "a program: nothing of it is reachable")]

mod alone;
mod arena;
mod bench;
mod case;
mod faults;
mod graph;
mod litmus;
mod meet;
mod options;
mod rank;
mod run;

use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitCode, ExitStatus};
use std::time::{Duration, Instant};

use bytemuck::cast;
use ep_core::bootstrap::{LocalBootstrap, UniqueId};

use crate::meet::{MEETINGS, Meetings};
use crate::options::{Options, What};
use crate::rank::Rank;

/// Rank and the ids of all meetings, in the environment of a rank's process.
const RANK: &str = "GPU_CHECK_RANK";
const IDS: &str = "GPU_CHECK_IDS";
/// How long all ranks together may take.
const PATIENCE: Duration = Duration::from_secs(540);

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let outcome = Options::parse(&arguments).and_then(|options| match std::env::var(RANK) {
        Ok(rank) => run_rank(&options, &rank),
        Err(_) if options.threads => run_threads(&options),
        Err(_) => run_all(&options, &arguments),
    });
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("gpu_check: {why}");
            ExitCode::FAILURE
        }
    }
}

fn run_rank(options: &Options, rank: &str) -> Result<(), String> {
    let rank: usize = rank.parse().map_err(|_| format!("{RANK} is '{rank}'"))?;
    let ids = std::env::var(IDS).map_err(|_| format!("{IDS} is not set"))?;
    let ids: Vec<UniqueId> = ids.split(',').map(from_hex).collect::<Option<_>>().ok_or("an id is damaged")?;
    work(options, rank, Meetings::Processes(ids))
}

/// What one rank does.
fn work(options: &Options, rank: usize, meetings: Meetings) -> Result<(), String> {
    let mut rank = Rank::join(options, rank, meetings).map_err(|e| format!("rank {rank}: {e}"))?;
    match options.what {
        What::Check => rank.check(options),
        What::Bench => bench::run(&mut rank, options),
        What::Graph => graph::check_graphs(&mut rank, options),
        What::Litmus => litmus::check_order(&mut rank, options),
        What::Alone => alone::check_alone(&mut rank, options),
        What::Faults => faults::check_faults(&mut rank, options),
        What::All => rank.check(options).and_then(|()| bench::run(&mut rank, options)),
    }
}

/// The ranks as threads of this process.
fn run_threads(options: &Options) -> Result<(), String> {
    let mut meetings: Vec<Vec<LocalBootstrap>> = (0..options.ranks).map(|_| Vec::new()).collect();
    for _ in 0..MEETINGS {
        for (own, meeting) in meetings.iter_mut().zip(LocalBootstrap::group(options.ranks)) {
            own.push(meeting);
        }
    }
    std::thread::scope(|scope| {
        let start = |(rank, meetings)| scope.spawn(move || work(options, rank, Meetings::Threads(meetings)));
        let ranks: Vec<_> = meetings.into_iter().enumerate().map(start).collect();
        let ended =
            ranks.into_iter().map(|rank| rank.join().unwrap_or_else(|_| Err(String::from("a panic"))));
        // All are waited for, whatever the first one says.
        ended.collect::<Vec<_>>().into_iter().collect()
    })
}

fn run_all(options: &Options, arguments: &[String]) -> Result<(), String> {
    let ids = (0..MEETINGS).map(|_| UniqueId::create()).collect::<Result<Vec<_>, _>>();
    let ids: Vec<String> = ids.map_err(|e| e.to_string())?.into_iter().map(to_hex).collect();
    let program = std::env::current_exe().map_err(|e| e.to_string())?;
    let start = |rank: usize| {
        Command::new(&program)
            .args(arguments)
            .env(RANK, rank.to_string())
            .env(IDS, ids.join(","))
            .spawn()
            .map_err(|e| format!("starting rank {rank}: {e}"))
    };
    let mut ranks = (0..options.ranks).map(start).collect::<Result<Vec<Child>, String>>()?;
    let deadline = Instant::now() + PATIENCE;
    let mut failed = Vec::new();
    let mut running: Vec<usize> = (0..ranks.len()).collect();
    let mut give_up = deadline;
    while !running.is_empty() {
        running.retain(|&rank| match ranks[rank].try_wait() {
            Ok(None) => true,
            Ok(Some(status)) if status.success() || expected(options, rank, status) => false,
            Ok(Some(status)) => {
                failed.push(format!("rank {rank}: {status}"));
                // The others learn of it within their own deadlines.
                give_up = give_up.min(Instant::now() + Duration::from_secs(40));
                false
            }
            Err(e) => {
                failed.push(format!("rank {rank}: {e}"));
                false
            }
        });
        if Instant::now() > give_up {
            for &rank in &running {
                let _ = ranks[rank].kill();
                failed.push(format!("rank {rank}: killed, it did not end"));
            }
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    if failed.is_empty() { Ok(()) } else { Err(failed.join("; ")) }
}

/// The last rank of `faults` kills itself.
fn expected(options: &Options, rank: usize, status: ExitStatus) -> bool {
    let victim = options.what == What::Faults && rank == options.ranks - 1;
    victim && status.signal() == Some(9)
}

fn to_hex(id: UniqueId) -> String {
    let bytes: [u8; 128] = cast(id);
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(text: &str) -> Option<UniqueId> {
    let mut bytes = [0u8; 128];
    for (i, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(text.get(2 * i..2 * i + 2)?, 16).ok()?;
    }
    Some(cast(bytes))
}
