//! Makes cases from seeds.

use std::sync::Arc;

use ep_core::config::{Layout, ReduceOrder};
use ep_core::reference::{CombineCase, DispatchCase, Payload, Routing, combine, dispatch};
use ep_core::tensor::Dtype;

use crate::case::{Case, CombineOp, DispatchOp, Op, PayloadSpec, UpdateOp};
use crate::rng::Rng;
use crate::world::GroupSpec;

mod ids;
mod values;

pub use ids::Pattern;
use ids::{even_experts, first_routing, ids};
use values::{Numbers, number, number_bytes, specs};

/// How capacities relate to what is required.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Capacity {
    /// As many as arrive.
    Exact,
    /// More.
    Over,
    /// Fewer.
    Under,
    /// None at all.
    Zero,
    /// Each rank as it likes.
    Mixed,
}

/// What is fixed about a case; the rest is chosen by its seed.
#[derive(Clone, Debug, Default)]
pub struct Wishes {
    pub pattern: Option<Pattern>,
    pub layout: Option<Layout>,
    pub topk: Option<usize>,
    pub alignment: Option<usize>,
    pub capacity: Option<Capacity>,
    pub specs: Option<Vec<PayloadSpec>>,
    pub combine_dtype: Option<Dtype>,
    pub order: Option<(ReduceOrder, bool)>,
    pub lane: Option<u32>,
    pub streamed: Option<bool>,
    pub group: usize,
    /// A ready-made routing, such as a trace, and its weights.
    pub routing: Option<Arc<Routing>>,
    pub topk_weights: Option<Vec<Vec<f32>>>,
    /// Bytes of rows that a call may move, over all ranks; 0: small.
    pub budget: usize,
    /// Payloads lie side by side in records, on ranks that like it.
    pub records: bool,
}

/// Makes the case of a seed.
pub fn case(seed: u64, group: &GroupSpec, wishes: &Wishes) -> Case {
    let mut rng = Rng::part(seed, 1);
    let routing = wishes.routing.clone().unwrap_or_else(|| Arc::new(first_routing(&mut rng, group, wishes)));
    let even = even_experts(routing.num_experts(), routing.num_ranks());
    let mut case = Case {
        group: wishes.group,
        lane: wishes.lane.unwrap_or_else(|| rng.below(group.num_lanes as usize) as u32),
        names_experts: even != routing.experts_per_rank || rng.once_in(2),
        max_tokens: vec![0; routing.num_ranks()],
        streamed: wishes.streamed.unwrap_or_else(|| rng.once_in(4)),
        ops: Vec::new(),
        salt: rng.next(),
        records: wishes.records,
    };
    let mut maker = Maker { rng, routing, capacity: Vec::new(), wishes };
    for letter in
        maker.rng.pick(&["UDC", "UDC", "UKDC", "UDDDCD", "UKDCUDC", "UDCCUUKDCD", "UKDDC", "UC"]).chars()
    {
        match letter {
            'U' => maker.update(&mut case),
            'K' => case.ops.push(maker.counts()),
            'D' => case.ops.push(maker.dispatch()),
            'C' => case.ops.push(maker.combine()),
            other => unreachable!("{other}"),
        }
    }
    for tokens in &mut case.max_tokens {
        *tokens += maker.rng.pick(&[0, 0, 1, 3, 64]);
    }
    case
}

struct Maker<'a> {
    rng: Rng,
    routing: Arc<Routing>,
    /// Of the last dispatch; what its combine brings back. Before any: all that is required.
    capacity: Vec<Option<usize>>,
    wishes: &'a Wishes,
}

impl Maker<'_> {
    fn update(&mut self, case: &mut Case) {
        if !case.ops.is_empty() {
            let topk_idx = ids(&mut self.rng, &self.routing, self.wishes);
            self.routing = Arc::new(Routing { topk_idx, ..Routing::clone(&self.routing) });
        }
        for (rank, most) in case.max_tokens.iter_mut().enumerate() {
            *most = (*most).max(self.routing.num_tokens(rank) as u64);
        }
        self.capacity = vec![None; self.routing.num_ranks()];
        case.ops.push(Op::Update(UpdateOp { routing: self.routing.clone() }));
    }

    fn counts(&self) -> Op {
        let ranks = 0..self.routing.num_ranks();
        Op::Counts(Arc::new(ranks.map(|rank| self.routing.counts(rank)).collect()))
    }

    /// Bytes that a row may have, given how many rows there are.
    fn row_budget(&self, rows: usize) -> usize {
        let budget = if self.wishes.budget == 0 { 300_000 } else { self.wishes.budget };
        (budget / rows.max(1)).clamp(16, 65_536)
    }

    fn dispatch(&mut self) -> Op {
        let routing = self.routing.clone();
        let required: Vec<usize> =
            (0..routing.num_ranks()).map(|rank| routing.rows(rank).rows.len()).collect();
        let wish = self.wishes.capacity.unwrap_or_else(|| {
            self.rng.pick(&[
                Capacity::Exact,
                Capacity::Exact,
                Capacity::Over,
                Capacity::Under,
                Capacity::Mixed,
            ])
        });
        let rng = &mut self.rng;
        self.capacity = required.iter().map(|&rows| capacity(rng, wish, rows)).collect();
        let tokens: usize = (0..routing.num_ranks()).map(|rank| routing.num_tokens(rank)).sum();
        let budget = self.row_budget(required.iter().sum::<usize>() + tokens);
        let specs = self.wishes.specs.clone().unwrap_or_else(|| specs(&mut self.rng, budget));
        let payloads: Vec<Payload> = specs
            .iter()
            .map(|spec| Payload {
                row_bytes: spec.row_bytes(),
                data: (0..routing.num_ranks())
                    .map(|rank| self.rng.bytes(routing.num_tokens(rank) * spec.row_bytes()))
                    .collect(),
            })
            .collect();
        let topk_weights = if self.rng.once_in(4) { None } else { Some(self.topk_weights()) };
        let expected = dispatch(&DispatchCase {
            routing: &routing,
            payloads: &payloads,
            topk_weights: topk_weights.as_deref(),
            capacity: &self.capacity,
        });
        Op::Dispatch(DispatchOp { specs, payloads, topk_weights, expected })
    }

    fn topk_weights(&mut self) -> Vec<Vec<f32>> {
        let lens = self.routing.topk_idx.iter().map(Vec::len);
        if let Some(weights) = &self.wishes.topk_weights
            && lens.clone().eq(weights.iter().map(Vec::len))
        {
            return weights.clone();
        }
        let kind = self.rng.pick(&[Numbers::Normal, Numbers::Normal, Numbers::Wild]);
        lens.map(|len| (0..len).map(|_| number(&mut self.rng, kind)).collect()).collect()
    }

    fn combine(&mut self) -> Op {
        let routing = self.routing.clone();
        let num_ranks = routing.num_ranks();
        let flat = routing.layout == Layout::Flat;
        let dtype = self
            .wishes
            .combine_dtype
            .unwrap_or_else(|| self.rng.pick(&[Dtype::Bf16, Dtype::F16, Dtype::F32]));
        let required: Vec<usize> = (0..num_ranks).map(|rank| routing.rows(rank).rows.len()).collect();
        // What was dispatched, or without the empty rows behind the last.
        let num_rows: Vec<usize> = (0..num_ranks)
            .map(|rank| {
                let capacity = self.capacity[rank].unwrap_or(required[rank]);
                if self.rng.once_in(3) { capacity.min(required[rank]) } else { capacity }
            })
            .collect();
        let tokens: usize = (0..num_ranks).map(|rank| routing.num_tokens(rank)).sum();
        let budget = self.row_budget(num_rows.iter().sum::<usize>() + tokens) / dtype.bytes();
        let cols = self
            .rng
            .pick(&[1, 3, 8, 31, 64, 65, 128, 200, 256, 512, 1024, 2048, 7168, 16_383])
            .min(budget)
            .max(1);
        let kind = self.rng.pick(&[Numbers::Small, Numbers::Normal, Numbers::Normal, Numbers::Wild]);
        let orders = if flat {
            &[ReduceOrder::Rank, ReduceOrder::NodeRank][..]
        } else {
            &[ReduceOrder::TopkSlot, ReduceOrder::Rank, ReduceOrder::NodeRank][..]
        };
        let (order, wire_bf16) =
            self.wishes.order.unwrap_or_else(|| (self.rng.pick(orders), self.rng.once_in(2)));
        let rng = &mut self.rng;
        let rows: Vec<Vec<u8>> =
            num_rows.iter().map(|&rows| number_bytes(rng, kind, dtype, rows * cols)).collect();
        let width = if flat { routing.topk } else { 1 };
        let row_weights = rng.once_in(3).then(|| {
            num_rows
                .iter()
                .map(|&rows| (0..rows * width).map(|_| number(rng, Numbers::Wild)).collect())
                .collect()
        });
        let factors = !flat && !rng.once_in(3);
        let factor_kind = if kind == Numbers::Small { Numbers::Small } else { Numbers::Normal };
        let topk_weights: Vec<Option<Vec<f32>>> = (0..num_ranks)
            .map(|rank| {
                let len = routing.topk_idx[rank].len();
                let factor_kind = if rng.once_in(10) { Numbers::Wild } else { factor_kind };
                (factors && !rng.once_in(8)).then(|| (0..len).map(|_| number(rng, factor_kind)).collect())
            })
            .collect();
        let most = rng.pick(&[0, 0, 1, 2]);
        let bias: Vec<Vec<Vec<u8>>> = (0..num_ranks)
            .map(|rank| {
                let count = if rng.once_in(6) { rng.within(0..=2) } else { most };
                let numbers = routing.num_tokens(rank) * cols;
                (0..count).map(|_| number_bytes(rng, kind, dtype, numbers)).collect()
            })
            .collect();
        let expected = combine(&CombineCase {
            routing: &routing,
            dtype,
            cols,
            rows: &rows,
            row_weights: row_weights.as_deref(),
            topk_weights: &topk_weights,
            bias: &bias,
            order,
            wire_bf16,
        });
        let is_default = order == if flat { ReduceOrder::Rank } else { ReduceOrder::TopkSlot };
        let default_order = is_default && rng.once_in(2);
        Op::Combine(CombineOp {
            dtype,
            cols,
            rows,
            row_weights,
            topk_weights,
            bias,
            order,
            default_order,
            wire_bf16,
            expected,
        })
    }
}

fn capacity(rng: &mut Rng, wish: Capacity, required: usize) -> Option<usize> {
    match wish {
        Capacity::Exact => None,
        Capacity::Over => Some(required + rng.within(1..=50)),
        Capacity::Under => Some(rng.below(required + 1)),
        Capacity::Zero => Some(0),
        Capacity::Mixed => {
            let wish = rng.pick(&[Capacity::Exact, Capacity::Over, Capacity::Under, Capacity::Zero]);
            capacity(rng, wish, required)
        }
    }
}
