//! `ep bench`: measures calls among rank processes of this machine.
//!
//! | module | duty |
//! | --- | --- |
//! | [`shape`], [`routing`] | what is measured |
//! | [`measure`], [`stats`] | the parent: rounds, times, percentiles |
//! | [`rank`], [`limit`], [`verify`] | the ranks: calls, copies to compare with, the check of results |
//! | [`mpi`] | the MPI peer |
//! | [`report`] | JSON and the table |

use std::time::Duration;

use anyhow::{Context, Result, ensure};

pub(crate) mod limit;
pub(crate) mod measure;
pub(crate) mod mpi;
pub(crate) mod rank;
pub(crate) mod report;
pub(crate) mod routing;
pub(crate) mod shape;
pub(crate) mod stats;
pub(crate) mod verify;

pub(crate) use rank::BenchRank;

use crate::cli::{BenchArgs, PeerKind};
use crate::progress::Progress;
use crate::trace::Trace;
use measure::{Effort, measure};
use report::Line;
use shape::{Op, RoutingSource, Shape};

/// Runs the command.
///
/// # Errors
/// If arguments contradict each other, a rank fails, or a result is wrong.
pub(crate) fn run(args: &BenchArgs) -> Result<()> {
    let shapes = shapes(args)?;
    let effort = Effort {
        min_calls: args.iters.max(1),
        time: Duration::from_secs_f64(args.time),
        timeout: Duration::from_secs(args.timeout),
        mpi: args.peer == Some(PeerKind::Mpi),
    };
    let mut lines = Vec::new();
    for (number, shape) in shapes.iter().enumerate() {
        let title =
            format!("[{}/{}] {} {} x {}", number + 1, shapes.len(), shape.op, shape.tokens, shape.hidden);
        let mut progress = Progress::new(title.clone());
        let measured = measure(shape, &effort, &mut |what, part| progress.show(what, part))
            .with_context(|| title.clone())?;
        drop(progress);
        let line = Line::new(&measured);
        if args.json {
            println!("{}", serde_json::to_string(&line)?);
        }
        lines.push(line);
    }
    if !args.json {
        print!("{}", report::table(&lines));
        println!("\n{}", report::EXPLANATION);
    }
    Ok(())
}

/// The shapes that the arguments name: every op with every size.
fn shapes(args: &BenchArgs) -> Result<Vec<Shape>> {
    let ops = args.op.map_or(vec![Op::Plan, Op::Dispatch, Op::Combine], |op| vec![op]);
    let routing = match args.routing.strip_prefix("trace:") {
        Some(name) => RoutingSource::Trace(name.to_string()),
        None => RoutingSource::Random,
    };
    let (topk, experts) = match &routing {
        RoutingSource::Trace(name) => {
            let trace = Trace::load(name)?;
            (trace.topk, trace.num_experts)
        }
        RoutingSource::Random => (args.topk, args.experts),
    };
    ensure!(topk <= experts, "--topk {topk} needs at least as many experts, --experts is {experts}");
    let mut shapes = Vec::new();
    for &op in &ops {
        for &output in &args.output {
            for &dtype in &args.dtype {
                ensure!(
                    op != Op::Combine || dtype.addable().is_some() || args.op.is_none(),
                    "a combine adds bf16, f16 or f32, not {dtype}"
                );
                if op == Op::Combine && dtype.addable().is_none() {
                    continue;
                }
                for &tokens in &args.tokens {
                    shapes.push(Shape {
                        op,
                        ranks: args.ranks,
                        tokens,
                        hidden: args.hidden,
                        topk,
                        experts,
                        dtype,
                        output,
                        layout: args.layout,
                        routing: routing.clone(),
                        with_plan: args.with_plan && op == Op::Dispatch,
                        routings: 4,
                        seed: args.seed,
                    });
                }
            }
            if op == Op::Plan {
                break;
            }
        }
    }
    Ok(shapes)
}
