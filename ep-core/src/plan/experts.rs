//! Which rank owns which expert.

use crate::config::{MAX_EXPERTS, PlanConfig};
use crate::error::{Error, Result, Status};

/// Rank `r` owns the experts `first(r)..first(r + 1)`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertMap {
    first: Vec<u32>,
    owner: Vec<u32>,
}

impl ExpertMap {
    /// Places the experts of `config` on `num_ranks` ranks.
    ///
    /// # Errors
    /// [`Status::InvalidArgument`] naming the field; [`Status::Capacity`] if a rank gets more than
    /// `max_local_experts`.
    pub fn new(config: &PlanConfig, num_ranks: usize, max_local_experts: usize) -> Result<ExpertMap> {
        let num_experts = config.num_experts as usize;
        if num_experts == 0 || num_experts > MAX_EXPERTS {
            return Err(Error::invalid(format!("num_experts is {num_experts}, expected 1 to {MAX_EXPERTS}")));
        }
        let even = |rank: usize| num_experts / num_ranks + usize::from(rank < num_experts % num_ranks);
        let per_rank: Vec<usize> = match &config.experts_per_rank {
            None => (0..num_ranks).map(even).collect(),
            Some(given) => given.iter().map(|&experts| experts as usize).collect(),
        };
        if per_rank.len() != num_ranks {
            return Err(Error::invalid(format!(
                "experts_per_rank has {} entries, expected one for each of the {num_ranks} ranks",
                per_rank.len()
            )));
        }
        let sum: usize = per_rank.iter().sum();
        if sum != num_experts {
            return Err(Error::invalid(format!(
                "experts_per_rank adds up to {sum}, expected num_experts, {num_experts}"
            )));
        }
        if let Some(rank) = per_rank.iter().position(|&experts| experts > max_local_experts) {
            return Err(Error::new(
                Status::Capacity,
                format!(
                    "rank {rank} has {} experts, the group was made for at most {max_local_experts} on a rank; \
                     raise max_local_experts in its config",
                    per_rank[rank]
                ),
            ));
        }
        let mut first = vec![0u32; num_ranks + 1];
        let mut owner = Vec::with_capacity(num_experts);
        for (rank, &experts) in per_rank.iter().enumerate() {
            first[rank + 1] = first[rank] + experts as u32;
            owner.resize(owner.len() + experts, rank as u32);
        }
        Ok(ExpertMap { first, owner })
    }

    /// Experts over all ranks.
    pub fn num_experts(&self) -> usize {
        self.owner.len()
    }

    /// Number of ranks.
    pub fn num_ranks(&self) -> usize {
        self.first.len() - 1
    }

    /// Experts of `rank`.
    pub fn num_local(&self, rank: usize) -> usize {
        (self.first[rank + 1] - self.first[rank]) as usize
    }

    /// The first expert of `rank`.
    pub fn first(&self, rank: usize) -> u32 {
        self.first[rank]
    }

    /// The rank of `expert`.
    pub fn owner(&self, expert: i32) -> usize {
        self.owner[expert as usize] as usize
    }

    /// The rank of each expert.
    pub fn owners(&self) -> &[u32] {
        &self.owner
    }
}
