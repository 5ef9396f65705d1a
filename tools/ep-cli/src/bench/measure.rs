//! The parent's side of a measurement: rounds of calls and copies, taken in turns, until there are enough.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};

use super::fabric::{Network, Pairs};
use super::limit::CopyKind;
use super::mpi::Peer;
use super::rank::{Answer, Command, Ready, What};
use super::shape::{Op, Shape};
use super::stats::Samples;
use super::verify::Verified;
use super::wire::{self, Traffic, Wire};
use crate::clock::{Span, whole};
use crate::launch::Ranks;
use crate::place::Placement;
use crate::rank::Job;

/// How long, and how often, to measure.
pub(crate) struct Effort {
    /// Where ranks run.
    pub(crate) placement: Placement,
    /// What is between nodes, if there are several.
    pub(crate) network: Option<Network>,
    /// Whether its raw path is measured.
    pub(crate) with_raw: bool,
    /// At least so many calls.
    pub(crate) min_calls: usize,
    /// About this much time in calls that are measured.
    pub(crate) time: Duration,
    /// Deadline of everything that waits.
    pub(crate) timeout: Duration,
    /// The program of the MPI peer, if it runs too.
    pub(crate) mpi: Option<PathBuf>,
}

/// What was found out about a shape.
#[derive(Clone, Debug)]
pub(crate) struct Measured {
    /// The shape.
    pub(crate) shape: Shape,
    /// Nodes of the group.
    pub(crate) num_nodes: usize,
    /// Our calls.
    pub(crate) ours: Samples,
    /// Row bytes of a call: what each rank sends to all ranks, summed over the ranks.
    pub(crate) bytes: f64,
    /// The calls of the MPI peer, if there is one.
    pub(crate) peer: Option<Samples>,
    /// Ways to copy as many bytes, and their times, the best first; none for a plan.
    pub(crate) copies: Vec<(CopyKind, Samples)>,
    /// What was compared with the reference.
    pub(crate) verified: Verified,
    /// What went between nodes, if there are several.
    pub(crate) between: Option<Between>,
}

/// A call between nodes, and the raw path that it is measured against.
#[derive(Clone, Debug)]
pub(crate) struct Between {
    /// The provider of libfabric.
    pub(crate) provider: String,
    /// What the ranks say of their network.
    pub(crate) network: String,
    /// What a call sends.
    pub(crate) wire: Wire,
    /// Bytes per second of the raw path, as many pairs at once as ranks; none if it was not measured.
    pub(crate) raw: Option<f64>,
}

/// Time of one round of calls.
const ROUND: Duration = Duration::from_millis(250);
/// Calls of each way to copy in the trial.
const TRIAL_CALLS: usize = 5;

/// Measures `shape` with processes of its own. `progress` is told the part that is done.
///
/// # Errors
/// If a rank fails or dies, or a result differs from the reference.
pub(crate) fn measure(
    shape: &Shape,
    effort: &Effort,
    progress: &mut dyn FnMut(&str, f64),
) -> Result<Measured> {
    progress("starting ranks", 0.0);
    let mut driver = Driver {
        ranks: Ranks::start(shape.ranks, &effort.placement, effort.timeout, &Job::Bench(shape.clone()))?,
        patience: 4 * effort.time + effort.timeout,
    };
    let ready: Vec<Ready> = driver.ranks.answers(driver.patience, &mut |_, _| ())?;
    let per_routing = |index: usize| ready.iter().map(|ready| ready.bytes[index] as f64).sum::<f64>();
    let bytes = (0..shape.routings).map(per_routing).sum::<f64>() / shape.routings as f64;

    progress("warming up", 0.0);
    let first = driver.run(What::Ours, 0, 3)?;
    let calls = calls_per_round(&first, effort);
    let mut copies = finalists(&mut driver, shape)?;
    let mut peer = None;
    if let Some(program) = effort.mpi.as_deref().filter(|_| shape.op != Op::Plan) {
        progress("starting the MPI peer", 0.0);
        let mut started = Peer::start(program, shape, effort.timeout)?;
        started.run(0, 3)?;
        peer = Some((started, Samples::default()));
    }

    let mut raw = None;
    if let Some(network) = effort.network.as_ref().filter(|_| effort.with_raw && shape.op != Op::Plan) {
        progress("starting the raw path", 0.0);
        raw = Some(Pairs::start(network, &effort.placement, shape.ranks, ready[0].chunk_bytes)?);
    }

    let mut ours = Samples::default();
    let start = Instant::now();
    for round in 0.. {
        let enough = ours.len() >= effort.min_calls && ours.total() >= effort.time;
        if enough || (ours.len() >= effort.min_calls && start.elapsed() > 4 * effort.time) {
            break;
        }
        let routing = round % shape.routings;
        ours.extend(driver.run(What::Ours, routing, calls)?);
        for (kind, samples) in &mut copies {
            let calls = calls_per_round(samples, effort).min(calls);
            let times = driver.run(What::Copy(*kind), routing, calls)?;
            samples.extend(times);
        }
        if let Some((peer, samples)) = &mut peer {
            samples.extend(peer.run(routing, calls)?);
        }
        if let Some(pairs) = &mut raw {
            pairs.round()?;
        }
        let by_time = ours.total().as_secs_f64() / effort.time.as_secs_f64().max(1e-9);
        progress("measuring", by_time.min(ours.len() as f64 / effort.min_calls as f64).min(1.0));
    }
    progress("verifying", 1.0);
    let (verified, checksums) = driver.verify(0)?;
    if let Some((peer, _)) = &mut peer {
        ensure!(peer.checksums(0)? == checksums, "the MPI peer has another result");
    }
    let mut between = None;
    if let Some(network) = &effort.network {
        let wire = wire::compare(shape, 0, ready[0].chunk_bytes, driver.count(0)?)?;
        let raw = raw.map(|pairs| pairs.rate());
        let (provider, network) = (network.provider.clone(), ready[0].network.clone());
        between = Some(Between { provider, network, wire, raw });
    }
    driver.ranks.finish()?;
    copies.sort_by_key(|(_, samples)| samples.percentile(50.0));
    let peer = peer.map(|(_, samples)| samples);
    Ok(Measured {
        shape: shape.clone(),
        num_nodes: ready[0].num_nodes,
        ours,
        bytes,
        peer,
        copies,
        verified,
        between,
    })
}

fn calls_per_round(samples: &Samples, effort: &Effort) -> usize {
    let round = ROUND.min(effort.time / 4).as_nanos().max(1);
    (round / samples.percentile(50.0).as_nanos().max(1)).clamp(1, 2000) as usize
}

/// The ways to copy that had the fastest call in a short trial: one for each kind of source.
fn finalists(driver: &mut Driver, shape: &Shape) -> Result<Vec<(CopyKind, Samples)>> {
    let mut best: Vec<(CopyKind, Samples)> = Vec::new();
    for kind in CopyKind::all(shape.op) {
        driver.run(What::Copy(kind), 0, 1)?;
        let times = driver.run(What::Copy(kind), 0, TRIAL_CALLS)?;
        match best.iter_mut().find(|(other, _)| other.reuse == kind.reuse) {
            Some(other) if times.percentile(0.0) < other.1.percentile(0.0) => *other = (kind, times),
            Some(_) => {}
            None => best.push((kind, times)),
        }
    }
    Ok(best)
}

/// The time of each call, from when its first rank began until its last rank was done. `spans` has the
/// beginnings and ends of each rank.
pub(crate) fn spans_to_samples(spans: &[Vec<Span>], calls: usize) -> Samples {
    let of_call = |call: usize| whole(spans.iter().filter_map(|spans| spans.get(call)).copied());
    Samples::new((0..calls).map(of_call).collect())
}

struct Driver {
    ranks: Ranks,
    patience: Duration,
}

impl Driver {
    /// The time of each call, from when its first rank began until its last rank was done.
    fn run(&mut self, what: What, routing: usize, calls: usize) -> Result<Samples> {
        let answers: Vec<Answer> = self.ranks.ask(&Command::Run { what, routing, calls }, self.patience)?;
        let times = answers.into_iter().map(|answer| match answer {
            Answer::Times(times) => Ok(times.spans),
            Answer::Verified(_) | Answer::Counted(_) => bail!("a rank answered another command"),
        });
        Ok(spans_to_samples(&times.collect::<Result<Vec<_>>>()?, calls))
    }

    /// What a call sends to other nodes, over all ranks.
    fn count(&mut self, routing: usize) -> Result<Traffic> {
        let answers: Vec<Answer> = self.ranks.ask(&Command::Count { routing }, self.patience)?;
        let traffic = answers.into_iter().map(|answer| match answer {
            Answer::Counted(traffic) => Ok(traffic),
            Answer::Times(_) | Answer::Verified(_) => bail!("a rank answered another command"),
        });
        traffic.sum()
    }

    /// What was compared over all ranks, and the checksum of each rank's result.
    fn verify(&mut self, routing: usize) -> Result<(Verified, Vec<u64>)> {
        let answers: Vec<Answer> = self.ranks.ask(&Command::Verify { routing }, self.patience)?;
        let (mut sum, mut checksums) = (Verified::default(), Vec::new());
        for answer in answers {
            let Answer::Verified(verified) = answer else { bail!("a rank answered another command") };
            sum.compared += verified.compared;
            sum.total += verified.total;
            sum.bytes += verified.bytes;
            checksums.push(verified.checksum);
        }
        Ok((sum, checksums))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::super::shape::{Element, Output, RoutingSource, RowOrder};
    use super::*;

    /// A dispatch of 5 us, 10 us by MPI, 4 us by copying.
    pub(crate) fn measured(tokens: usize) -> Measured {
        let shape = Shape {
            op: Op::Dispatch,
            ranks: 4,
            nodes: 1,
            tokens,
            hidden: 7168,
            topk: 8,
            experts: 256,
            dtype: Element::Bf16,
            output: Output::Window,
            layout: RowOrder::Flat,
            routing: RoutingSource::Random,
            with_plan: false,
            routings: 4,
            ring_bytes: 0,
            seed: 1,
        };
        let copy = CopyKind { large: true, streaming: true, reuse: false };
        Measured {
            shape,
            num_nodes: 1,
            ours: Samples::new(vec![5000]),
            bytes: 1e6,
            peer: Some(Samples::new(vec![10_000])),
            copies: vec![(copy, Samples::new(vec![4000]))],
            verified: Verified { compared: 10, total: 10, bytes: 100, checksum: 0 },
            between: None,
        }
    }

    #[test]
    fn a_call_takes_from_the_first_start_to_the_last_end() {
        let spans = [vec![(0, 10), (20, 25)], vec![(5, 12), (18, 24)]];
        let samples = spans_to_samples(&spans, 2);
        assert_eq!(samples.total(), Duration::from_nanos(12 + 7));
    }
}
