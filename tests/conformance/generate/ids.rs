//! Shapes of plans, and the ids that fill them.

use ep_core::config::Layout;
use ep_core::reference::Routing;

use super::Wishes;
use crate::rng::Rng;
use crate::world::GroupSpec;

/// How ids are spread over experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// Distinct experts, as a gate gives.
    Distinct,
    /// Any experts, repeated ones too.
    Any,
    /// Many -1.
    Sparse,
    /// -1 only.
    Nothing,
    /// One expert in every slot of every token.
    OneExpert,
    /// The experts of one rank only.
    OneRank,
    /// Each token names one expert in all its slots.
    Repeated,
    /// Each rank sends to itself only.
    OwnRank,
    /// Each rank sends to the next rank only.
    NextRank,
    /// A few experts get nearly everything.
    Skewed,
    /// Slot k goes to rank k % ranks: every token reaches as many ranks as it can.
    Spread,
}

impl Pattern {
    /// All of them.
    pub const ALL: [Pattern; 11] = [
        Pattern::Distinct,
        Pattern::Any,
        Pattern::Sparse,
        Pattern::Nothing,
        Pattern::OneExpert,
        Pattern::OneRank,
        Pattern::Repeated,
        Pattern::OwnRank,
        Pattern::NextRank,
        Pattern::Skewed,
        Pattern::Spread,
    ];
}

/// Experts per rank as a plan without a list has them.
pub fn even_experts(num_experts: usize, num_ranks: usize) -> Vec<usize> {
    (0..num_ranks).map(|rank| num_experts / num_ranks + usize::from(rank < num_experts % num_ranks)).collect()
}

fn experts_per_rank(rng: &mut Rng, group: &GroupSpec) -> Vec<usize> {
    let num_ranks = group.members.len();
    if group.max_local_experts > 256 && rng.once_in(4) {
        return vec![group.max_local_experts as usize - rng.below(2); num_ranks];
    }
    let experts = match rng.below(6) {
        0 | 1 => even_experts(num_ranks * rng.within(1..=8), num_ranks),
        2 => even_experts(rng.within(1..=4 * num_ranks), num_ranks),
        3 => even_experts(rng.pick(&[64, 128, 256]), num_ranks.max(2)),
        _ => (0..num_ranks).map(|_| rng.pick(&[0, 1, 2, 3, 5, 17])).collect(),
    };
    let mut experts: Vec<usize> = experts.into_iter().take(num_ranks).collect();
    if experts.iter().all(|&count| count == 0) {
        let lucky = rng.below(num_ranks);
        experts[lucky] = rng.within(1..=3);
    }
    experts
}

/// A plan's shape and its first ids.
pub fn first_routing(rng: &mut Rng, group: &GroupSpec, wishes: &Wishes) -> Routing {
    let layout = wishes.layout.unwrap_or_else(|| rng.pick(&[Layout::Flat, Layout::ExpertMajor]));
    let alignment = wishes.alignment.unwrap_or_else(|| rng.pick(&[1, 1, 4, 7, 16, 128]));
    let topk = wishes.topk.unwrap_or_else(|| match rng.below(12) {
        0 => rng.pick(&[33, 64, 64, 100, 256]),
        1..=4 => rng.pick(&[1, 2, 8]),
        _ => rng.within(1..=16),
    });
    let experts_per_rank = experts_per_rank(rng, group);
    let mut routing = Routing {
        nodes: group.nodes(),
        experts_per_rank,
        topk,
        layout,
        expert_alignment: if layout == Layout::Flat { 1 } else { alignment },
        topk_idx: Vec::new(),
    };
    routing.topk_idx = ids(rng, &routing, wishes);
    routing
}

/// Ids of all ranks for a plan of this shape.
pub fn ids(rng: &mut Rng, routing: &Routing, wishes: &Wishes) -> Vec<Vec<i64>> {
    let num_ranks = routing.num_ranks();
    let pattern = wishes.pattern.unwrap_or_else(|| match rng.below(3) {
        0 => rng.pick(&Pattern::ALL),
        _ => rng.pick(&[Pattern::Distinct, Pattern::Any, Pattern::Sparse]),
    });
    // At most this many assignments over all ranks, so that a case stays a matter of milliseconds.
    let most = (12_000 / (num_ranks * routing.topk)).max(1);
    let crowd = rng.pick(&[1, 4, 20, 20, 70, 300]).min(most);
    let shy = rng.pick(&[0, 0, 1, 2]);
    let chosen = rng.below(num_ranks);
    let tokens: Vec<usize> = (0..num_ranks)
        .map(|rank| match rng.below(5) {
            _ if shy == 1 && rank != chosen => 0,
            _ if shy == 2 && rank == chosen => 0,
            0 => rng.below(3).min(crowd),
            1 => crowd,
            _ => rng.within(0..=crowd),
        })
        .collect();
    (0..num_ranks).map(|rank| ids_of(rng, routing, pattern, rank, tokens[rank])).collect()
}

fn ids_of(rng: &mut Rng, routing: &Routing, pattern: Pattern, rank: usize, tokens: usize) -> Vec<i64> {
    let num_experts = routing.num_experts();
    let topk = routing.topk;
    let of_rank = |rng: &mut Rng, rank: usize| match routing.experts_per_rank[rank] {
        0 => -1,
        count => (routing.first_expert(rank) + rng.below(count)) as i64,
    };
    // Chosen from what all ranks know, so that they agree.
    let favourite = topk * 7 % num_experts;
    let busy_rank = routing.owner(favourite).0;
    let mut ids = Vec::with_capacity(tokens * topk);
    for _ in 0..tokens {
        let only = rng.below(num_experts) as i64;
        let mut token: Vec<i64> = (0..topk)
            .map(|slot| match pattern {
                Pattern::Distinct => -1,
                Pattern::Any => rng.below(num_experts) as i64,
                Pattern::Sparse if rng.once_in(2) => -1,
                Pattern::Sparse => rng.below(num_experts) as i64,
                Pattern::Nothing => -1,
                Pattern::OneExpert => favourite as i64,
                Pattern::OneRank => of_rank(rng, busy_rank),
                Pattern::Repeated => only,
                Pattern::OwnRank => of_rank(rng, rank),
                Pattern::NextRank => of_rank(rng, (rank + 1) % routing.num_ranks()),
                Pattern::Skewed if rng.once_in(8) => rng.below(num_experts) as i64,
                Pattern::Skewed => ((favourite + rng.below(2)) % num_experts) as i64,
                Pattern::Spread => of_rank(rng, (rank + slot) % routing.num_ranks()),
            })
            .collect();
        if pattern == Pattern::Distinct {
            let mut experts: Vec<i64> = (0..num_experts as i64).collect();
            for slot in 0..topk.min(num_experts) {
                experts.swap(slot, rng.within(slot..=num_experts - 1));
                token[slot] = experts[slot];
            }
        }
        ids.extend(token);
    }
    ids
}
