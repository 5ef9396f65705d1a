//! Jobs: what a cell runs. A job is named by its id and made from it alone, in any process.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use ep_core::config::{Layout, ReduceOrder};
use ep_core::tensor::Dtype;

use crate::case::{Case, PayloadSpec};
use crate::generate::{self, Capacity, Pattern, Wishes};
use crate::rng::Rng;
use crate::trace;
use crate::world::{self, World};

/// The kinds of jobs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// One case, everything chosen by the seed.
    Random,
    /// One case for every pattern, layout, capacity and world in turn.
    Pattern,
    /// One case for every dtype, order, wire and layout in turn.
    Order,
    /// One case for every payload set in turn.
    Payload,
    /// One case of which rows are many times larger than a small ring.
    Large,
    /// Three plans of one lane, alive together.
    Plans,
    /// Plans of two lanes on two streams, issued in an order of each rank's own.
    Lanes,
    /// Groups of different members in the same processes, in turn.
    Groups,
    /// Routing of a real gate.
    Trace,
    /// Payloads side by side in records, such as values with their scales.
    Records,
    /// One random case, after which all counters of `ep_group_stats` are compared.
    Stats,
}

impl Kind {
    const ALL: [Kind; 11] = [
        Kind::Random,
        Kind::Pattern,
        Kind::Order,
        Kind::Payload,
        Kind::Large,
        Kind::Plans,
        Kind::Lanes,
        Kind::Groups,
        Kind::Trace,
        Kind::Records,
        Kind::Stats,
    ];
}

/// Names a job, as `kind:seed`, or `kind+net:seed` if it runs in a world with a network between nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct JobId {
    pub kind: Kind,
    pub seed: u64,
    pub networked: bool,
}

impl fmt::Display for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let net = if self.networked { "+net" } else { "" };
        write!(f, "{}{net}:{}", format!("{:?}", self.kind).to_lowercase(), self.seed)
    }
}

impl FromStr for JobId {
    type Err = String;

    fn from_str(text: &str) -> Result<JobId, String> {
        let (kind, seed) = text.split_once(':').unwrap_or(("random", text));
        let (kind, networked) = kind.strip_suffix("+net").map_or((kind, false), |kind| (kind, true));
        let found = Kind::ALL.into_iter().find(|other| format!("{other:?}").eq_ignore_ascii_case(kind));
        let kind = found.ok_or_else(|| format!("job kind {kind:?}, expected one of {:?}", Kind::ALL))?;
        let seed = seed.parse().map_err(|e| format!("seed {seed:?}: {e}"))?;
        Ok(JobId { kind, seed, networked })
    }
}

/// In which order a rank makes the calls of a job's cases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Schedule {
    /// Case after case.
    InTurn,
    /// One call of each case, then the next call of each.
    Interleaved,
    /// A few calls of each case are queued, cases in an order of the rank's own, then all are awaited.
    Overlapped,
}

/// What a cell runs in one go.
#[derive(Debug)]
pub struct Job {
    pub id: JobId,
    pub cases: Vec<Case>,
    pub schedule: Schedule,
}

impl JobId {
    /// The world the job runs in; a pure function of the id.
    pub fn world(&self) -> World {
        let mut rng = Rng::part(self.seed, 2);
        let worlds = if self.networked { world::networked() } else { world::single() };
        match self.kind {
            Kind::Groups if self.networked => pick(&world::several_networked(), self.seed as usize),
            Kind::Groups => pick(&world::several(), self.seed as usize),
            Kind::Pattern | Kind::Plans | Kind::Lanes | Kind::Order | Kind::Payload | Kind::Records => {
                pick(&worlds, self.seed as usize)
            }
            Kind::Large => pick(&[worlds[5].clone(), worlds[9].clone()], self.seed as usize),
            Kind::Trace => pick(&worlds[8..], self.seed as usize),
            Kind::Random | Kind::Stats => {
                // Small worlds more often: they are cheaper.
                let at = rng.below(worlds.len()).min(rng.below(worlds.len() + 4));
                worlds[at].clone()
            }
        }
    }

    /// Makes the job, its data and all expected results.
    pub fn build(&self) -> Job {
        let world = self.world();
        let seed = self.seed ^ (self.kind as u64) << 40;
        let turn = self.seed as usize;
        let one = |wishes: Wishes| vec![generate::case(seed, &world.groups[0], &wishes)];
        let several = |lanes: &[u32], streamed: Option<bool>| {
            let mut cases = Vec::new();
            for (part, &lane) in lanes.iter().enumerate() {
                let lane = Some(lane % world.groups[0].num_lanes);
                let wishes = Wishes { lane, streamed, budget: 60_000, ..Wishes::default() };
                cases.push(generate::case(seed + 1000 * part as u64, &world.groups[0], &wishes));
            }
            cases
        };
        let (cases, schedule) = match self.kind {
            Kind::Random | Kind::Stats => (one(Wishes::default()), Schedule::InTurn),
            Kind::Records => (one(record_wishes(turn)), Schedule::InTurn),
            Kind::Pattern => (one(pattern_wishes(turn)), Schedule::InTurn),
            Kind::Order => (one(order_wishes(turn)), Schedule::InTurn),
            Kind::Payload => (one(payload_wishes(turn)), Schedule::InTurn),
            Kind::Large => (one(Wishes { budget: 6_000_000, ..Wishes::default() }), Schedule::InTurn),
            Kind::Trace => (one(trace_wishes(turn, &world)), Schedule::InTurn),
            Kind::Plans => (several(&[0, 0, 0], None), Schedule::Interleaved),
            Kind::Lanes => (several(&[0, 1, 1], Some(true)), Schedule::Overlapped),
            Kind::Groups => {
                let groups = world.groups.iter().enumerate().map(|(at, group)| {
                    let wishes = Wishes { group: at, budget: 100_000, ..Wishes::default() };
                    generate::case(seed + 1000 * at as u64, group, &wishes)
                });
                (groups.collect(), Schedule::Interleaved)
            }
        };
        Job { id: *self, cases, schedule }
    }
}

fn pick<T: Clone>(choices: &[T], at: usize) -> T {
    choices[at % choices.len()].clone()
}

/// How many seeds go through all of `pattern_wishes` in all worlds.
pub const PATTERN_TURNS: usize = 12 * Pattern::ALL.len();

/// Worlds change with every turn (there are 12), the pattern every 12 turns.
fn pattern_wishes(turn: usize) -> Wishes {
    let around = turn / 12;
    let layout = pick(&[Layout::Flat, Layout::ExpertMajor], turn + around);
    let capacities = [Capacity::Exact, Capacity::Over, Capacity::Under, Capacity::Mixed, Capacity::Zero];
    Wishes {
        pattern: Some(pick(&Pattern::ALL, around)),
        layout: Some(layout),
        capacity: Some(pick(&capacities, turn / 2 + around)),
        budget: 50_000,
        ..Wishes::default()
    }
}

/// How many seeds go through all of `order_wishes` in some world.
pub const ORDER_TURNS: usize = 3 * 8;

fn order_wishes(turn: usize) -> Wishes {
    let (layout, order, wire_bf16) = pick(
        &[
            (Layout::Flat, ReduceOrder::Rank, false),
            (Layout::Flat, ReduceOrder::NodeRank, false),
            (Layout::Flat, ReduceOrder::NodeRank, true),
            (Layout::ExpertMajor, ReduceOrder::TopkSlot, false),
            (Layout::ExpertMajor, ReduceOrder::Rank, false),
            (Layout::ExpertMajor, ReduceOrder::NodeRank, false),
            (Layout::ExpertMajor, ReduceOrder::NodeRank, true),
            (Layout::ExpertMajor, ReduceOrder::TopkSlot, true),
        ],
        turn / 3,
    );
    Wishes {
        layout: Some(layout),
        order: Some((order, wire_bf16)),
        combine_dtype: Some(pick(&[Dtype::Bf16, Dtype::F16, Dtype::F32], turn)),
        pattern: Some(pick(&[Pattern::Any, Pattern::Spread, Pattern::Skewed], turn / 2)),
        budget: 100_000,
        ..Wishes::default()
    }
}

/// How many seeds go through all of `payload_wishes` in some world.
pub const PAYLOAD_TURNS: usize = 20;

fn payload_wishes(turn: usize) -> Wishes {
    let rows = PayloadSpec::rows;
    let columns = |dtype, cols| PayloadSpec { dtype, cols, column_major: true };
    let sets: [Vec<PayloadSpec>; 10] = [
        vec![rows(Dtype::F8E4M3, 896), rows(Dtype::F32, 7)],
        vec![rows(Dtype::F8E4M3, 896), columns(Dtype::F32, 7)],
        vec![rows(Dtype::F8E4M3, 1000), columns(Dtype::I32, 2)],
        vec![rows(Dtype::F8E5M2, 333), columns(Dtype::Ue8m0, 11), rows(Dtype::Bf16, 5)],
        vec![rows(Dtype::Opaque, 16)],
        vec![rows(Dtype::Opaque, 4096)],
        vec![rows(Dtype::Opaque, 32), rows(Dtype::I64, 1), rows(Dtype::Bf16, 129), rows(Dtype::F8E5M2, 1)],
        vec![rows(Dtype::Bf16, 7168)],
        vec![rows(Dtype::F32, 1), rows(Dtype::F32, 1), rows(Dtype::F32, 1), rows(Dtype::F32, 1)],
        vec![columns(Dtype::Bf16, 64), columns(Dtype::I64, 3)],
    ];
    Wishes {
        specs: Some(pick(&sets, turn)),
        layout: Some(pick(&[Layout::Flat, Layout::ExpertMajor], turn / 10)),
        topk: Some(pick(&[2, 4, 8], turn)),
        alignment: Some(pick(&[1, 4], turn)),
        pattern: Some(Pattern::Distinct),
        budget: 50_000,
        ..Wishes::default()
    }
}

fn record_wishes(turn: usize) -> Wishes {
    let rows = PayloadSpec::rows;
    let sets: [Vec<PayloadSpec>; 4] = [
        vec![rows(Dtype::F8E4M3, 896), rows(Dtype::F32, 7)],
        vec![rows(Dtype::Bf16, 33), rows(Dtype::I32, 1)],
        vec![rows(Dtype::Opaque, 48), rows(Dtype::I64, 2), rows(Dtype::Ue8m0, 5)],
        vec![rows(Dtype::F32, 1), rows(Dtype::F32, 2), rows(Dtype::F32, 3), rows(Dtype::F32, 4)],
    ];
    Wishes { specs: Some(pick(&sets, turn)), budget: 50_000, records: true, ..Wishes::default() }
}

/// How many seeds go through all of `trace_wishes`.
pub const TRACE_TURNS: usize = 12;

fn trace_wishes(turn: usize, world: &World) -> Wishes {
    let layout = pick(&[Layout::ExpertMajor, Layout::Flat], turn / 6);
    let trace = pick(&trace::NAMES, turn);
    let (routing, weights) = trace::load(trace, turn % 4, &world.groups[0].nodes(), layout, 64);
    Wishes {
        routing: Some(Arc::new(routing)),
        topk_weights: Some(weights),
        budget: 2_000_000,
        ..Wishes::default()
    }
}
