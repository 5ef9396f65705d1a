//! `ep bench fabric`: writes with immediates between two processes, through our transport and, in turns, through
//! libfabric alone.
//!
//! | module | duty |
//! | --- | --- |
//! | [`rank`] | one process of ours: posts or takes writes as told |
//! | [`pair`] | two processes, ours or the raw peer's, which speak the same lines |
//! | [`pairs`] | several of them at once, as ranks of several nodes are |
//! | [`build`] | compiles the raw peer |
//! | [`fabtests`] | `fi_rma_bw` |
//! | [`report`] | JSON, the table |

mod build;
mod fabtests;
mod pair;
mod pairs;
mod rank;
mod report;

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ep_fabric::{Library, Selection, Settings};

use crate::cli::{FabricArgs, FabricPeer};
use crate::output::say;
use crate::progress::Progress;
use pair::{Mode, Pair, Run};
pub(crate) use pairs::Pairs;
pub(crate) use rank::serve;
use report::{Line, median};

/// The hidden subcommand.
pub(crate) const FABRIC_COMMAND: &str = "fabric-process";
/// Bytes of the largest write.
pub(crate) const MAX_WRITE: usize = rank::BUFFER;

/// What is measured.
#[derive(Clone, Copy, Debug)]
struct Shape {
    bytes: usize,
    window: usize,
    nics: usize,
}

/// The network that all processes use.
pub(crate) struct Network {
    pub(crate) provider: String,
    library: String,
    /// What to load before the raw peer's own library.
    preload: Option<String>,
    /// Addresses or names of NICs; none: the library chooses.
    pub(crate) addresses: Vec<String>,
    timeout: Duration,
}

/// The rounds of one side that waits in one way.
struct Rounds {
    mode: Mode,
    /// Of each round.
    writes: usize,
    /// Nanoseconds of a write, round by round.
    ns: Vec<f64>,
}

/// Runs the command.
///
/// # Errors
/// If there is no network, a process fails, or what arrived is not what was sent.
pub(crate) fn run(args: &FabricArgs) -> Result<()> {
    let (network, reason) = network(args)?;
    let raw = if args.peer.contains(&FabricPeer::Raw) { Some(build::build()?) } else { None };
    let fabtests = args.peer.contains(&FabricPeer::Fabtests);
    if fabtests {
        fabtests::find()?;
    }
    if !args.json {
        say(format!("{reason}\n"))?;
    }
    let mut lines = Vec::new();
    for &nics in &args.nics {
        ensure!(
            nics <= network.addresses.len(),
            "--nics {nics}, and there are {} addresses",
            network.addresses.len()
        );
        let mut ours = Pair::ours(&network, nics)?;
        let mut raw = raw.as_deref().map(|program| Pair::raw(program, &network, nics)).transpose()?;
        for &window in &args.windows {
            for &bytes in if args.quick { &[0, 8, 64 << 10][..] } else { &args.sizes } {
                let shape = Shape { bytes, window, nics };
                let title = format!("{bytes} bytes, window {window}, {nics} NICs");
                let progress = Progress::new(title.clone());
                let mut line =
                    measure(&network, shape, args, &mut ours, raw.as_mut()).context(title.clone())?;
                if fabtests && nics == 1 {
                    line.fabtests(&fabtests::run(&network, shape, args.round_ms).context(title)?);
                }
                drop(progress);
                if args.json {
                    say(serde_json::to_string(&line)?)?;
                }
                lines.push(line);
            }
        }
    }
    if !args.json {
        say(report::table(&lines))?;
        say(report::EXPLANATION)?;
    }
    Ok(())
}

/// The network by the arguments and the environment, and the reason for it.
fn network(args: &FabricArgs) -> Result<(Network, String)> {
    let mut settings = Settings::from_env()?;
    settings.provider = settings.provider.or_else(|| args.provider.clone());
    if settings.nics.is_empty() {
        settings.nics.clone_from(&args.addresses);
    }
    Network::find(settings, Duration::from_secs(args.timeout))
}

impl Network {
    /// The network that fits the settings, and the reason for it.
    ///
    /// # Errors
    /// If there is none.
    pub(crate) fn find(settings: Settings, timeout: Duration) -> Result<(Network, String)> {
        let library = Library::open()?;
        let selection = Selection::make(&library, &settings, false)?;
        let (major, minor) = library.version();
        let network = Network {
            provider: selection.kind().to_string(),
            library: format!("{major}.{minor}"),
            preload: library.origin().contains('/').then(|| library.origin().to_string()),
            addresses: settings.nics,
            timeout,
        };
        Ok((network, format!("{}; {library}", selection.reason())))
    }
}

/// Rounds of ours and the peer's in turns, and a check of what arrives. Which way to wait is the faster one is
/// known when all rounds are.
fn measure(
    network: &Network,
    shape: Shape,
    args: &FabricArgs,
    ours: &mut Pair,
    mut raw: Option<&mut Pair>,
) -> Result<Line> {
    let round = Duration::from_millis(if args.quick { 5 } else { args.round_ms as u64 });
    let num_rounds = if args.quick { 1 } else { args.rounds };
    let mut our_rounds = ours.trial(shape, round)?;
    let mut raw_rounds = raw.as_mut().map(|raw| raw.trial(shape, round)).transpose()?.unwrap_or_default();
    let time = |pair: &mut Pair, rounds: &mut Vec<Rounds>| -> Result<()> {
        for rounds in rounds {
            let ns = pair.run(Run { shape, writes: rounds.writes, mode: rounds.mode })?;
            rounds.ns.push(ns as f64 / rounds.writes as f64);
        }
        Ok(())
    };
    for _ in 0..num_rounds {
        time(ours, &mut our_rounds)?;
        if let Some(raw) = &mut raw {
            time(raw, &mut raw_rounds)?;
        }
    }
    let our_rounds = fastest(our_rounds).context("one way to wait is the faster")?;
    ours.verify(shape, our_rounds.mode)?;
    Ok(Line::new(network, shape, &our_rounds, fastest(raw_rounds).as_ref()))
}

/// The rounds with the least median.
fn fastest(rounds: Vec<Rounds>) -> Option<Rounds> {
    rounds.into_iter().min_by(|a, b| median(&a.ns).total_cmp(&median(&b.ns)))
}
