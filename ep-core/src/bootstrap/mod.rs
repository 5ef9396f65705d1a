//! How the ranks of a group meet before they share memory.

use std::time::Instant;

use crate::error::Result;

/// An all-gather among the ranks of one group. Collective and blocking; used while a group is made
/// and when windows are allocated, never on the data path.
pub trait Bootstrap: Send {
    /// The rank of the caller, `0..num_ranks`.
    fn rank(&self) -> usize;

    /// How many ranks meet.
    fn num_ranks(&self) -> usize;

    /// Gives `mine` to every rank and returns every rank's bytes, indexed by rank.
    /// Lengths may differ between ranks.
    ///
    /// # Errors
    /// [`crate::Status::Bootstrap`] naming the ranks that did not take part before `deadline`.
    fn all_gather(&mut self, mine: &[u8], deadline: Instant) -> Result<Vec<Vec<u8>>>;
}
