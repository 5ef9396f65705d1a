//! `ep bench`: measures calls among rank processes of this machine.
//!
//! | module | duty |
//! | --- | --- |
//! | [`sweep`], [`shape`], [`routing`] | what is measured |
//! | [`mod@measure`], [`stats`] | the parent: rounds, times, percentiles |
//! | [`rank`], [`limit`], [`verify`] | the ranks: calls, copies to compare with, the check of results |
//! | [`wire`] | what goes between nodes, counted and by the formula |
//! | [`mpi`], [`compile`] | the MPI peer; programs in C |
//! | [`fabric`] | the raw path of the network, beside libfabric alone |
//! | [`report`], [`report_wire`], [`plot`] | JSON, the tables, the chart |

use std::time::Duration;

use anyhow::{Context, Result};

pub(crate) mod compile;
pub(crate) mod fabric;
pub(crate) mod limit;
pub(crate) mod measure;
pub(crate) mod mpi;
pub(crate) mod plot;
pub(crate) mod rank;
pub(crate) mod report;
pub(crate) mod report_wire;
pub(crate) mod routing;
pub(crate) mod shape;
pub(crate) mod stats;
pub(crate) mod sweep;
pub(crate) mod verify;
pub(crate) mod wire;

pub(crate) use rank::BenchRank;

use crate::cli::{BenchArgs, BenchPart, PeerKind};
use crate::output::say;
use crate::progress::Progress;
use measure::{Effort, measure};
use report::Line;

/// Time of the calls of each shape of a smoke run.
const QUICK_TIME: Duration = Duration::from_millis(100);

/// Runs the command.
///
/// # Errors
/// If arguments contradict each other, a rank fails, or a result is wrong.
pub(crate) fn run(args: &BenchArgs) -> Result<()> {
    if let Some(BenchPart::Fabric(args)) = &args.part {
        return fabric::run(args);
    }
    if let Some(path) = &args.plot {
        plot::check(path)?;
    }
    let shapes = if args.quick { sweep::quick(args)? } else { sweep::shapes(args)? };
    let timeout = Duration::from_secs(args.timeout);
    let (placement, network) = args.between.placement(args.ranks, timeout)?;
    let effort = Effort {
        placement,
        network,
        with_raw: !args.no_raw,
        min_calls: args.iters,
        time: if args.quick { QUICK_TIME } else { Duration::from_secs_f64(args.time) },
        timeout,
        mpi: match args.peer {
            Some(PeerKind::Mpi) => Some(mpi::build()?),
            None => None,
        },
    };
    let mut results = Vec::new();
    for (number, shape) in shapes.iter().enumerate() {
        let title =
            format!("[{}/{}] {} {} x {}", number + 1, shapes.len(), shape.op, shape.tokens, shape.hidden);
        let mut progress = Progress::new(title.clone());
        progress.show("", 0.0);
        let measured =
            measure(shape, &effort, &mut |what, part| progress.detail(what, part)).context(title)?;
        drop(progress);
        if args.json {
            say(serde_json::to_string(&Line::new(&measured))?)?;
        }
        results.push(measured);
    }
    if !args.json {
        let lines: Vec<Line> = results.iter().map(Line::new).collect();
        say(report::table(&lines))?;
        say(report::EXPLANATION)?;
        if args.between.nodes > 1 {
            say(report_wire::table(&results))?;
            say(report_wire::EXPLANATION)?;
        }
        say(report::verdict(&lines))?;
    }
    if let Some(path) = &args.plot {
        plot::write(path, &results)?;
    }
    Ok(())
}
