//! Cells: ways to run ranks. Every cell runs the same jobs.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use ep::capi::EpBootstrap;

use crate::job::{Job, JobId};
use crate::memory::Device;
use crate::rank::{Member, Trouble, run_job};
use crate::world::World;

pub mod processes;
pub mod threads;

/// A way to run the ranks of a world: threads or processes, on a backend.
pub trait Cell {
    /// For reports.
    fn name(&self) -> String;

    /// Makes the world's groups once and runs the jobs over them, until one breaks them.
    fn run(&self, world: &World, jobs: &[JobId]) -> Outcome;
}

/// What ranks found.
#[derive(Debug, Default)]
pub struct Outcome {
    /// The index of the job, and what is wrong.
    pub failures: Vec<(usize, String)>,
    /// The first job that broke the groups; those behind it did not run. `usize::MAX`: none.
    pub broken_at: Option<usize>,
}

impl Outcome {
    /// Takes in what a rank found.
    fn add(&mut self, rank: usize, found: RankOutcome) {
        for (job, trouble) in found {
            if let Trouble::Broken(_) = trouble {
                self.broken_at = Some(self.broken_at.map_or(job, |at| at.min(job)));
            }
            self.failures.push((job, format!("rank {rank}: {}", trouble.text())));
        }
    }

    /// Drops what only follows from something else: what came after a break, and that a group is aborted
    /// if there is a failure that says why.
    fn settle(mut self) -> Outcome {
        let follows = |text: &str| text.contains("EP_ERR_ABORTED");
        if let Some(at) = self.broken_at {
            self.failures.retain(|(job, _)| *job <= at);
            if self.failures.iter().any(|(job, text)| *job == at && !follows(text)) {
                self.failures.retain(|(_, text)| !follows(text));
            }
        }
        self.failures.sort();
        self
    }
}

/// Per trouble, the index of its job.
type RankOutcome = Vec<(usize, Trouble)>;

/// The life of a rank: joins its groups, runs jobs, leaves. `bootstrap` says how members of a group meet.
fn live(
    device: &dyn Device,
    world: &World,
    rank: usize,
    bootstrap: impl Fn(usize, usize) -> EpBootstrap,
    jobs: impl Iterator<Item = Arc<Job>>,
) -> RankOutcome {
    let mut members = Vec::new();
    for (index, spec) in world.groups.iter().enumerate() {
        let Some(place) = spec.members.iter().position(|&member| member == rank) else {
            members.push(None);
            continue;
        };
        match Member::join(device, spec, place, &bootstrap(index, place)) {
            Ok(member) => members.push(Some(member)),
            Err(text) => return vec![(0, Trouble::Broken(format!("group {index}: {text}")))],
        }
    }
    let mut found = Vec::new();
    let mut last = 0;
    for (index, job) in jobs.enumerate() {
        last = index;
        let troubles = catch_unwind(AssertUnwindSafe(|| run_job(&job, &members))).unwrap_or_else(|_| {
            members.iter().flatten().for_each(Member::abort);
            vec![Trouble::Broken("the test panicked".to_string())]
        });
        found.extend(troubles.into_iter().map(|trouble| (index, trouble)));
        if found.iter().any(|(_, trouble)| matches!(trouble, Trouble::Broken(_))) {
            members.iter().flatten().for_each(Member::abort);
            break;
        }
    }
    for member in members.into_iter().flatten() {
        if let Err(text) = member.leave() {
            found.push((last, Trouble::Wrong(text)));
        }
    }
    found
}

/// Runs all jobs, worlds one after the other, and panics with what is wrong and how to see it again.
pub fn run_all(cell: &dyn Cell, jobs: &[JobId]) {
    let mut worlds: Vec<World> = Vec::new();
    let mut by_world: HashMap<World, Vec<JobId>> = HashMap::new();
    for job in jobs {
        let world = job.world();
        if !by_world.contains_key(&world) {
            worlds.push(world.clone());
        }
        by_world.entry(world).or_default().push(*job);
    }
    let mut report = Vec::new();
    for world in &worlds {
        let mut jobs = &by_world[world][..];
        while !jobs.is_empty() && report.len() < 40 {
            let outcome = cell.run(world, jobs);
            for (index, text) in outcome.failures {
                report.push(format!("EP_TEST_SEED={} {}: {text}", jobs[index], cell.name()));
            }
            jobs = outcome.broken_at.map_or(&[], |at| &jobs[at + 1..]);
        }
    }
    let all: Vec<String> = jobs.iter().map(JobId::to_string).collect();
    println!("{}: {} jobs: {}", cell.name(), all.len(), all.join(" "));
    assert!(report.is_empty(), "{} failures:\n{}", report.len(), report.join("\n"));
}
