//! `ep demo`: rank processes run the recorded routings, dispatch → experts → combine, and every result
//! is compared with the reference.
//!
//! | module | duty |
//! | --- | --- |
//! | [`job`] | what parent and ranks say to each other |
//! | [`rank`], [`expert`] | the ranks: what a layer of a model does |
//! | [`sheet`] | results, in memory that the parent sees |
//! | [`verify`] | the comparison, in the parent |
//! | [`report`] | table, heat maps, JSON |

mod expert;
mod job;
mod rank;
mod report;
mod sheet;
mod verify;

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};

pub(crate) use job::DemoJob;
pub(crate) use rank::DemoRank;

use crate::cli::DemoArgs;
use crate::heat;
use crate::launch::Ranks;
use crate::output::say;
use crate::progress::Progress;
use crate::rank::Job;
use crate::trace::{self, Trace};
use job::{Done, Ready, Step};
use report::{Layer, Verdict};
use sheet::{Sheet, SheetShape};
use verify::Inputs;

/// Runs the command.
///
/// # Errors
/// If a rank fails or dies, or any bit differs from the reference.
pub(crate) fn run(args: &DemoArgs) -> Result<()> {
    let start = Instant::now();
    let (job, traces) = job_of(args)?;
    let steps: Vec<Step> =
        (0..traces.len()).flat_map(|trace| (0..job.layers).map(move |layer| Step { trace, layer })).collect();
    let timeout = Duration::from_secs(args.timeout);
    let placement = args.between.placement(job.ranks, timeout)?.0;
    if !args.json {
        say(format!(
            "{} rank processes, {} tokens each, {} columns of bf16: dispatch, experts, combine, in two layouts.\n",
            job.ranks, job.tokens, job.hidden
        ))?;
    }
    let mut progress = Progress::new("demo:");
    progress.show("starting ranks", 0.0);
    let mut ranks = Ranks::start(job.ranks, &placement, timeout, &Job::Demo(job.clone()))?;
    let ready: Vec<Ready> = ranks.answers(timeout, &mut |_, _| ())?;
    let sheets = open_sheets(&job, &traces, &ready)?;
    let nodes: Vec<usize> = ready.iter().map(|ready| ready.node).collect();

    let mut layers = Vec::new();
    for (number, &step) in steps.iter().enumerate() {
        let trace = &traces[step.trace];
        let part = number as f64 / steps.len() as f64;
        progress.show(&format!("{} layer {} of {}", trace.name, step.layer + 1, job.layers), part);
        let done: Vec<[Done; 2]> = ranks.ask(&step, timeout)?;
        let inputs = Inputs::new(&job, trace, step, &nodes)?;
        let verified = verify_both(&inputs, &sheets, &done).with_context(|| {
            format!("the result differs from the reference in {} layer {}", trace.name, step.layer)
        })?;
        for (layout, verified) in verified.into_iter().enumerate() {
            let done: Vec<&Done> = done.iter().map(|done| &done[layout]).collect();
            let layer = Layer::new(&job, trace, step, layout, &done, verified);
            if args.json {
                say(serde_json::to_string(&layer)?)?;
            }
            layers.push(layer);
        }
    }
    ranks.finish()?;
    drop(progress);
    let verdict = Verdict::new(&job, &layers, start.elapsed().as_secs_f64());
    if args.json {
        say(serde_json::to_string(&verdict)?)?;
        return Ok(());
    }
    say(format!("{}\n{}\n", report::table(&layers), report::EXPLANATION))?;
    let colour = std::io::stdout().is_terminal();
    say(format!("Rows from rank to rank, expert-major:\n{}\n", heat::legend(colour)))?;
    say(report::heat(&layers, colour))?;
    say(verdict.line())?;
    Ok(())
}

fn job_of(args: &DemoArgs) -> Result<(DemoJob, Vec<Trace>)> {
    let names: Vec<String> = match args.traces.is_empty() {
        true => trace::names().map(str::to_string).to_vec(),
        false => args.traces.clone(),
    };
    let traces: Vec<Trace> = names.iter().map(|name| Trace::load(name)).collect::<Result<_>>()?;
    let share = traces.iter().map(|trace| trace.num_tokens / args.ranks).min().unwrap_or(0);
    let most_layers = traces.iter().map(|trace| trace.num_layers).min().unwrap_or(0);
    let layers = args.layers.unwrap_or(most_layers);
    let tokens = args.tokens.unwrap_or(share.min(DEFAULT_TOKENS));
    ensure!((1..=most_layers).contains(&layers), "--layers {layers}: the traces have {most_layers}");
    ensure!(
        (1..=share).contains(&tokens),
        "--tokens {tokens}: the traces have {share} for each of {} ranks",
        args.ranks
    );
    Ok((DemoJob { ranks: args.ranks, tokens, hidden: args.hidden, traces: names, layers }, traces))
}

/// Tokens of a rank where nobody says otherwise: two blocks of a trace.
const DEFAULT_TOKENS: usize = 2048;

/// Every rank's sheets, one per layout.
fn open_sheets(job: &DemoJob, traces: &[Trace], ready: &[Ready]) -> Result<Vec<[Sheet; 2]>> {
    let experts = traces.iter().map(|trace| trace.num_experts.div_ceil(job.ranks)).max().unwrap_or(0);
    let topk = traces.iter().map(|trace| trace.topk).max().unwrap_or(0);
    let open = |ready: &Ready| -> Result<[Sheet; 2]> {
        let sheet = |layout: usize| {
            let file = ready.sheets[layout];
            let shape = SheetShape {
                capacity: file.capacity,
                tokens: job.tokens,
                row_bytes: job.row_bytes(),
                topk,
                experts,
            };
            Sheet::open(ready.pid, file.fd, shape)
        };
        Ok([sheet(0)?, sheet(1)?])
    };
    ready.iter().map(open).collect()
}

/// Verifies both layouts, each in a thread of its own.
fn verify_both(inputs: &Inputs, sheets: &[[Sheet; 2]], done: &[[Done; 2]]) -> Result<[u64; 2]> {
    let one = |layout: usize| {
        let sheets: Vec<&Sheet> = sheets.iter().map(|sheets| &sheets[layout]).collect();
        let done: Vec<&Done> = done.iter().map(|done| &done[layout]).collect();
        verify::verify(inputs, layout, &sheets, &done)
    };
    std::thread::scope(|scope| {
        let flat = scope.spawn(|| one(0));
        let expert_major = one(1)?;
        let flat = flat.join().map_err(|_| anyhow!("the verification of the flat layout panicked"))??;
        Ok([flat, expert_major])
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::demo::sheet::Part;
    use crate::rank::tests::alone;

    #[test]
    fn a_single_wrong_bit_is_found_wherever_it_is() -> Result<()> {
        let traces = vec![Trace::load("moe64_top8_balanced")?];
        let names = vec![traces[0].name.to_string()];
        let job = DemoJob { ranks: 1, tokens: 20, hidden: 24, traces: names, layers: 1 };
        let step = Step { trace: 0, layer: 0 };
        let mut rank = DemoRank::new(job.clone(), alone()?)?;
        let done = [rank.step(step)?];
        let sheets = open_sheets(&job, &traces, &[rank.ready()?])?;
        let inputs = Inputs::new(&job, &traces[0], step, &[0])?;
        let bytes = verify_both(&inputs, &sheets, &done)?;
        assert!(bytes.iter().all(|&bytes| bytes > (20 * 48 * 2) as u64), "{bytes:?}");

        let flip = |layout: usize, part: Part, at: usize| {
            // SAFETY: the place is inside the part, and nobody else looks at it now.
            unsafe { *sheets[0][layout].address::<u8>(part).add(at) ^= 1 }
        };
        let both =
            [Part::Rows, Part::Weights, Part::SrcRank, Part::SrcToken, Part::Numbers, Part::RowsPerExpert];
        let parts = both.iter().flat_map(|&part| [(0, part), (1, part)]);
        let alone = [(0, Part::Ids), (1, Part::SrcSlot), (1, Part::ExpertOffsets)];
        for (layout, part) in parts.chain(alone).chain([(0, Part::Combined), (1, Part::Combined)]) {
            flip(layout, part, 17);
            let error = verify_both(&inputs, &sheets, &done).expect_err("a bit is wrong");
            assert!(error.to_string().contains("differ first at row"), "{part:?}: {error}");
            flip(layout, part, 17);
        }
        verify_both(&inputs, &sheets, &done)?;
        Ok(())
    }
}
