//! From arguments to shapes.

use anyhow::{Result, ensure};

use super::shape::{Element, Op, Output, RoutingSource, RowOrder, Shape};
use crate::cli::BenchArgs;
use crate::trace::Trace;

/// Routings that take turns, so that no call sees one that a processor has learnt by heart.
const ROUTINGS: usize = 4;

/// The shapes that the arguments name: every op with every output, dtype and number of tokens.
///
/// # Errors
/// If the arguments contradict each other.
pub(crate) fn shapes(args: &BenchArgs) -> Result<Vec<Shape>> {
    if args.peer.is_some() {
        ensure!(args.op != Some(Op::Plan), "a plan has no MPI peer: dispatch and combine have");
        ensure!(args.layout == RowOrder::Flat, "the MPI peer works in the flat layout only");
    }
    let mut shapes = Vec::new();
    for op in args.op.map_or(vec![Op::Plan, Op::Dispatch, Op::Combine], |op| vec![op]) {
        let first = base(args, op)?;
        if let (Op::Combine, Some(_), Some(dtype)) =
            (op, args.op, args.dtype.iter().find(|dtype| dtype.addable().is_none()))
        {
            anyhow::bail!("a combine adds bf16, f16 or f32, not {dtype}");
        }
        // A plan has no rows: what they are made of and where they lie makes no difference.
        let outputs = if op == Op::Plan { &args.output[..1] } else { &args.output };
        let dtypes = if op == Op::Plan { &args.dtype[..1] } else { &args.dtype };
        for &output in outputs {
            for &dtype in dtypes.iter().filter(|dtype| op != Op::Combine || dtype.addable().is_some()) {
                let of_tokens = |&tokens: &usize| Shape { tokens, dtype, output, ..first.clone() };
                shapes.extend(args.tokens.iter().map(of_tokens));
            }
        }
    }
    ensure!(!shapes.is_empty(), "nothing to measure: a combine adds bf16, f16 or f32");
    Ok(shapes)
}

fn base(args: &BenchArgs, op: Op) -> Result<Shape> {
    let (routing, topk, experts) = match args.routing.split_once(':') {
        Some(("trace", name)) => {
            let trace = Trace::load(name)?;
            let most = args.tokens.iter().copied().max().unwrap_or(0);
            trace.part(0, 0, args.ranks, most)?;
            (RoutingSource::Trace(name.to_string()), trace.topk, trace.num_experts)
        }
        None if args.routing == "random" => (RoutingSource::Random, args.topk, args.experts),
        _ => anyhow::bail!("--routing is {:?}, expected random or trace:NAME", args.routing),
    };
    ensure!(topk <= experts, "--topk {topk} needs as many distinct experts, --experts is {experts}");
    Ok(Shape {
        op,
        ranks: args.ranks,
        nodes: args.between.nodes,
        tokens: 0,
        hidden: args.hidden,
        topk,
        experts,
        dtype: Element::Bf16,
        output: Output::Window,
        layout: args.layout,
        routing,
        with_plan: args.with_plan && op == Op::Dispatch,
        routings: ROUTINGS,
        ring_bytes: args.ring_bytes,
        seed: args.seed,
    })
}

/// Small shapes that touch every path once: a smoke run.
///
/// # Errors
/// If the arguments contradict each other.
pub(crate) fn quick(args: &BenchArgs) -> Result<Vec<Shape>> {
    let small = Shape { tokens: 96, hidden: 512, topk: 4, experts: 32, ..base(args, Op::Dispatch)? };
    let small = Shape { routing: RoutingSource::Random, ..small };
    let trace = Shape {
        routing: RoutingSource::Trace(crate::trace::names()[2].to_string()),
        topk: 8,
        experts: 256,
        ..small.clone()
    };
    let em = RowOrder::ExpertMajor;
    Ok(vec![
        Shape { op: Op::Plan, ..small.clone() },
        small.clone(),
        Shape { output: Output::Copy, ..small.clone() },
        Shape { dtype: Element::Fp8, layout: em, ..trace.clone() },
        Shape { with_plan: true, dtype: Element::F16, ..trace.clone() },
        Shape { op: Op::Combine, ..small.clone() },
        Shape { op: Op::Combine, output: Output::Copy, dtype: Element::F32, ..small },
        Shape { op: Op::Combine, layout: em, ..trace },
    ])
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::{Cli, Command};

    fn shapes_of(arguments: &str) -> Result<Vec<Shape>> {
        let words = ["ep", "bench"].into_iter().chain(arguments.split_whitespace());
        match Cli::try_parse_from(words)?.command {
            Command::Bench(args) => shapes(&args),
            other => anyhow::bail!("parsed as {other:?}"),
        }
    }

    #[test]
    fn lists_are_multiplied_and_a_plan_is_measured_once_per_size() -> Result<()> {
        let shapes = shapes_of("--tokens 1,2,3 --dtype bf16,fp8 --output window,copy")?;
        let count = |op| shapes.iter().filter(|shape| shape.op == op).count();
        assert_eq!((count(Op::Plan), count(Op::Dispatch), count(Op::Combine)), (3, 12, 6));
        Ok(())
    }

    #[test]
    fn a_trace_brings_its_own_sizes() -> Result<()> {
        let shapes = shapes_of("dispatch --routing trace:moe64_top8_balanced --experts 7")?;
        assert_eq!((shapes[0].experts, shapes[0].topk), (64, 8));
        Ok(())
    }

    #[test]
    fn contradictions_are_refused() {
        for arguments in [
            "combine --dtype fp8",
            "--topk 9 --experts 8",
            "--routing trace:nonsense",
            "--routing elsewhere",
            "--routing trace:moe64_top8_balanced --tokens 4096",
            "--ranks 0",
            "--tokens 0",
            "--hidden 0",
            "--time 0",
            "--time nan",
            "--device cuda",
        ] {
            assert!(shapes_of(arguments).is_err(), "{arguments}");
        }
    }
}
