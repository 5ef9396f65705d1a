//! Checks the CUDA backend on a machine with a GPU, and measures it.
//!
//! ```text
//! gpu_check [ranks=4] [tokens=4096] [hidden=7168] [topk=8] [experts=256] [sms=24] [what=all|check|bench]
//!           [cases=N] [seed=1] [timeout_ms=10000]
//! ```
//!
//! Starts `ranks` processes. Each makes a group on CUDA and one on the host, runs the same calls on both,
//! and compares every byte of every output; then it measures. Rank r uses device r % devices: several
//! ranks on one device need MPS. Prints one table last; the exit status is 1 if anything differed.

#![expect(unreachable_pub, reason = "a program: nothing of it is reachable")]

mod arena;
mod bench;
mod case;
mod options;
mod rank;
mod run;

use std::process::{Child, Command, ExitCode};
use std::time::{Duration, Instant};

use bytemuck::cast;
use ep_core::bootstrap::UniqueId;

use crate::options::{Options, What};

/// Rank and the ids of three meetings, in the environment of a rank's process.
const RANK: &str = "GPU_CHECK_RANK";
const IDS: &str = "GPU_CHECK_IDS";
const MEETINGS: usize = 3;
/// How long all ranks together may take.
const PATIENCE: Duration = Duration::from_secs(540);

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let outcome = Options::parse(&arguments).and_then(|options| match std::env::var(RANK) {
        Ok(rank) => run_rank(&options, &rank),
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
    let ids: [UniqueId; MEETINGS] = ids.try_into().map_err(|_| "an id is missing")?;
    let mut rank = rank::Rank::join(options, rank, &ids).map_err(|e| format!("rank {rank}: {e}"))?;
    if options.what != What::Bench {
        rank.check(options)?;
    }
    if options.what != What::Check {
        bench::run(&mut rank, options)?;
    }
    Ok(())
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
            Ok(Some(status)) if status.success() => false,
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
