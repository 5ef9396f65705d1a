//! The oracle: what dispatch and combine mean, in the plainest code that says it.
//!
//! Nothing here is shared with the engine but the names of dtypes, layouts and orders. Every rank's
//! data is in one process, every rule of `include/ep.h` is a loop over all of it, and nothing is fast.
//!
//! - [`Routing`]: who has which experts and where each token goes; lists a rank's rows.
//! - [`mod@dispatch`]: what each rank must find in its outputs.
//! - [`mod@combine`]: what each token's owner must find.
//! - [`float`]: conversions between fp32 and the 16-bit formats.

use std::collections::HashMap;

use crate::config::{Counts, Layout};

pub mod combine;
pub mod dispatch;
pub mod float;

pub use combine::{CombineCase, Combined, combine};
pub use dispatch::{Delivered, DispatchCase, Payload, dispatch};

/// A routing of all ranks, with what a plan's config says about it.
#[derive(Clone, Debug, PartialEq)]
pub struct Routing {
    /// The node of each rank; also says how many ranks there are.
    pub nodes: Vec<usize>,
    /// How many experts each rank has; rank r owns those that follow rank r - 1's.
    pub experts_per_rank: Vec<usize>,
    /// Slots of a token.
    pub topk: usize,
    /// Order of the rows.
    pub layout: Layout,
    /// Each expert's first row is a multiple of this; 1 for flat.
    pub expert_alignment: usize,
    /// Per rank, `tokens * topk` expert ids; -1 is "none".
    pub topk_idx: Vec<Vec<i64>>,
}

/// Where a row comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Source {
    /// The owner of the token.
    pub rank: usize,
    /// The token's row there.
    pub token: usize,
    /// The slot in expert-major layout; None in flat, where a row stands for all slots on the rank.
    pub slot: Option<usize>,
}

/// The rows that a rank would receive with enough capacity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rows {
    /// In order; None is a padding row.
    pub rows: Vec<Option<Source>>,
    /// The local expert of each row in expert-major layout, padding included; empty in flat.
    pub expert_of_row: Vec<usize>,
    /// The first row of each local expert, then the end of the last; all zero in flat.
    pub expert_offsets: Vec<usize>,
}

impl Routing {
    /// How many ranks there are.
    pub fn num_ranks(&self) -> usize {
        self.nodes.len()
    }

    /// How many experts there are, over all ranks.
    pub fn num_experts(&self) -> usize {
        self.experts_per_rank.iter().sum()
    }

    /// How many tokens `rank` has.
    pub fn num_tokens(&self, rank: usize) -> usize {
        self.topk_idx[rank].len() / self.topk
    }

    /// The expert id in a slot; None for -1.
    pub fn expert(&self, rank: usize, token: usize, slot: usize) -> Option<usize> {
        usize::try_from(self.topk_idx[rank][token * self.topk + slot]).ok()
    }

    /// The first expert of `rank`.
    pub fn first_expert(&self, rank: usize) -> usize {
        self.experts_per_rank[..rank].iter().sum()
    }

    /// The rank that has `expert`, and the number it has there.
    pub fn owner(&self, expert: usize) -> (usize, usize) {
        let mut local = expert;
        for (rank, &count) in self.experts_per_rank.iter().enumerate() {
            if local < count {
                return (rank, local);
            }
            local -= count;
        }
        panic!("expert {expert} is not in 0..{}", self.num_experts());
    }

    /// The local expert in a slot if `rank` has it.
    pub fn local_expert(&self, source: usize, token: usize, slot: usize, rank: usize) -> Option<usize> {
        let (owner, local) = self.owner(self.expert(source, token, slot)?);
        (owner == rank).then_some(local)
    }

    /// Every (source rank, token) in ascending order.
    fn tokens(&self) -> impl Iterator<Item = (usize, usize)> {
        (0..self.num_ranks()).flat_map(|rank| (0..self.num_tokens(rank)).map(move |token| (rank, token)))
    }

    /// The rows of `rank`, in order, as if capacity had no end.
    pub fn rows(&self, rank: usize) -> Rows {
        match self.layout {
            Layout::Flat => self.flat_rows(rank),
            Layout::ExpertMajor => self.expert_major_rows(rank),
        }
    }

    fn flat_rows(&self, rank: usize) -> Rows {
        let mut rows = Vec::new();
        for (source, token) in self.tokens() {
            if (0..self.topk).any(|slot| self.local_expert(source, token, slot, rank).is_some()) {
                rows.push(Some(Source { rank: source, token, slot: None }));
            }
        }
        Rows { rows, expert_of_row: Vec::new(), expert_offsets: vec![0; self.experts_per_rank[rank] + 1] }
    }

    fn expert_major_rows(&self, rank: usize) -> Rows {
        let mut rows = Vec::new();
        let mut expert_of_row = Vec::new();
        let mut expert_offsets = vec![0];
        for local in 0..self.experts_per_rank[rank] {
            let expert = (self.first_expert(rank) + local) as i64;
            for source in 0..self.num_ranks() {
                for (place, &id) in self.topk_idx[source].iter().enumerate() {
                    if id == expert {
                        let (token, slot) = (place / self.topk, place % self.topk);
                        rows.push(Some(Source { rank: source, token, slot: Some(slot) }));
                    }
                }
            }
            while !rows.len().is_multiple_of(self.expert_alignment) {
                rows.push(None);
            }
            expert_of_row.resize(rows.len(), local);
            expert_offsets.push(rows.len());
        }
        Rows { rows, expert_of_row, expert_offsets }
    }

    /// What `ep_plan_counts` must answer on `rank`.
    pub fn counts(&self, rank: usize) -> Counts {
        let rows = self.rows(rank).rows;
        let mut counts = Counts {
            rows_per_expert: vec![0; self.experts_per_rank[rank]],
            rows_per_source: vec![0; self.num_ranks()],
            num_rows: rows.len() as i64,
            num_tokens: 0,
        };
        for source in rows.into_iter().flatten() {
            counts.rows_per_source[source.rank] += 1;
        }
        for (source, token) in self.tokens() {
            let here: Vec<usize> =
                (0..self.topk).filter_map(|slot| self.local_expert(source, token, slot, rank)).collect();
            counts.num_tokens += i64::from(!here.is_empty());
            for local in here {
                counts.rows_per_expert[local] += 1;
            }
        }
        counts
    }

    /// Where `rank` finds each row that it receives when `capacity` rows fit.
    fn places(&self, rank: usize, capacity: usize) -> HashMap<Source, usize> {
        let rows = self.rows(rank).rows;
        let delivered = rows.into_iter().take(capacity).enumerate();
        delivered.filter_map(|(place, source)| source.map(|source| (source, place))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two ranks with 2 and 1 experts; rank 0 has two tokens, rank 1 has one.
    pub(super) fn small(layout: Layout, expert_alignment: usize) -> Routing {
        Routing {
            nodes: vec![0, 1],
            experts_per_rank: vec![2, 1],
            topk: 2,
            layout,
            expert_alignment,
            topk_idx: vec![vec![2, 0, 1, 1], vec![0, -1]],
        }
    }

    fn row(rank: usize, token: usize, slot: impl Into<Option<usize>>) -> Option<Source> {
        Some(Source { rank, token, slot: slot.into() })
    }

    #[test]
    fn flat_rows_are_tokens_in_order_of_source() {
        let routing = small(Layout::Flat, 1);
        assert_eq!(routing.rows(0).rows, [row(0, 0, None), row(0, 1, None), row(1, 0, None)]);
        assert_eq!(routing.rows(1).rows, [row(0, 0, None)]);
    }

    #[test]
    fn expert_major_rows_go_by_expert_then_source_token_slot() {
        let rows = small(Layout::ExpertMajor, 1).rows(0);
        assert_eq!(rows.rows, [row(0, 0, 1), row(1, 0, 0), row(0, 1, 0), row(0, 1, 1)]);
        assert_eq!(rows.expert_offsets, [0, 2, 4]);
        assert_eq!(rows.expert_of_row, [0, 0, 1, 1]);
        assert_eq!(small(Layout::ExpertMajor, 1).rows(1).rows, [row(0, 0, 0)]);
    }

    #[test]
    fn each_expert_is_padded_to_the_alignment_and_an_empty_one_takes_nothing() {
        let mut routing = small(Layout::ExpertMajor, 4);
        let rows = routing.rows(0);
        let none = None;
        assert_eq!(rows.expert_offsets, [0, 4, 8]);
        assert_eq!(
            rows.rows,
            [row(0, 0, 1), row(1, 0, 0), none, none, row(0, 1, 0), row(0, 1, 1), none, none]
        );
        routing.topk_idx[0] = vec![2, 1, 1, 1];
        routing.topk_idx[1] = vec![-1, -1];
        assert_eq!(routing.rows(0).expert_offsets, [0, 0, 4]);
    }

    #[test]
    fn counts_tell_assignments_rows_and_tokens_apart() {
        let flat = small(Layout::Flat, 1).counts(0);
        assert_eq!(flat.rows_per_expert, [2, 2]);
        assert_eq!(flat.rows_per_source, [2, 1]);
        assert_eq!((flat.num_rows, flat.num_tokens), (3, 3));
        let expert_major = small(Layout::ExpertMajor, 4).counts(0);
        assert_eq!(expert_major.rows_per_expert, [2, 2]);
        assert_eq!(expert_major.rows_per_source, [3, 1]);
        assert_eq!((expert_major.num_rows, expert_major.num_tokens), (8, 3));
    }

    #[test]
    fn a_rank_without_experts_owns_nothing_and_is_skipped() {
        let mut routing = small(Layout::Flat, 1);
        routing.nodes = vec![0, 0, 0];
        routing.experts_per_rank = vec![2, 0, 1];
        routing.topk_idx.push(Vec::new());
        assert_eq!(routing.owner(1), (0, 1));
        assert_eq!(routing.owner(2), (2, 0));
        assert!(routing.rows(1).rows.is_empty());
        assert_eq!(routing.rows(1).expert_offsets, [0]);
        assert_eq!(routing.counts(1).rows_per_source, [0, 0, 0]);
    }
}
