//! How the ranks of a group meet before they share memory.
//!
//! | type | ranks are | meet through |
//! |---|---|---|
//! | [`TcpBootstrap`] | processes anywhere | a [`UniqueId`] that every rank has |
//! | [`FileBootstrap`] | processes that share a directory | a path |
//! | [`LocalBootstrap`] | threads of one process | memory |
//! | [`CallbackBootstrap`] | whatever the caller has | the caller's own all-gather |
//!
//! `root`, `group` and `conn` are the server of a rendezvous; `join` is the client; `auth` and `wire`
//! are what both speak.

use std::time::{Duration, Instant};

use crate::error::{Error, Result, Status};

mod auth;
mod callback;
mod conn;
mod file;
mod group;
mod join;
mod local;
mod root;
mod tcp;
mod unique_id;
mod wire;

pub use callback::{AllGatherFn, CallbackBootstrap};
pub use file::FileBootstrap;
pub use local::LocalBootstrap;
pub use tcp::TcpBootstrap;
pub use unique_id::UniqueId;

#[cfg(test)]
mod hostile_tests;
#[cfg(test)]
mod leak_tests;
#[cfg(test)]
mod process_tests;
#[cfg(test)]
mod tcp_tests;

/// The most bytes one rank may give to one all-gather: 64 MiB.
pub const MAX_BLOB_BYTES: usize = 64 << 20;

/// The most bytes all ranks together may give to one all-gather: 4 GiB.
pub const MAX_ROUND_BYTES: usize = 4 << 30;

/// The most ranks of one group.
pub const MAX_RANKS: usize = 16384;

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

    /// What ends an all-gather of this rank that is in progress, and fails all later ones, from any thread and
    /// without waiting. None: nothing but its deadline does.
    fn interrupter(&self) -> Option<Interrupter> {
        None
    }
}

/// See [`Bootstrap::interrupter`].
pub type Interrupter = Box<dyn Fn() + Send + Sync>;

/// An error with [`Status::Bootstrap`].
fn failure(message: impl Into<String>) -> Error {
    Error::new(Status::Bootstrap, message)
}

/// Checks what can be checked without asking another rank.
fn check_num_ranks(num_ranks: usize) -> Result<()> {
    if num_ranks == 0 || num_ranks > MAX_RANKS {
        return Err(Error::invalid(format!("num_ranks is {num_ranks}; it must be 1 to {MAX_RANKS}")));
    }
    Ok(())
}

/// Checks that `rank` is one of `num_ranks`.
fn check_rank(rank: usize, num_ranks: usize) -> Result<()> {
    check_num_ranks(num_ranks)?;
    if rank >= num_ranks {
        return Err(Error::invalid(out_of_range(rank, num_ranks)));
    }
    Ok(())
}

/// The sentence for a rank that the group does not have.
fn out_of_range(rank: usize, num_ranks: usize) -> String {
    format!("rank {rank} is out of range: the {num_ranks} ranks are 0 to {}", num_ranks.saturating_sub(1))
}

/// The sentence for a blob above [`MAX_BLOB_BYTES`].
fn too_long(rank: usize, bytes: u64) -> String {
    format!("rank {rank} gave {bytes} bytes to an all-gather; the limit is {MAX_BLOB_BYTES} bytes")
}

/// Names ranks for a person: "rank 2", "ranks 2 and 5", "ranks 2, 5 and 7".
fn name_ranks(ranks: &[usize]) -> String {
    // 16: a line stays readable, and error texts stay below their bound in `wire`.
    const MAX_NAMED: usize = 16;
    match ranks {
        [] => "no rank".to_string(),
        [only] => format!("rank {only}"),
        [head @ .., last] if ranks.len() <= MAX_NAMED => format!("ranks {} and {last}", join_numbers(head)),
        _ => {
            let named = join_numbers(ranks.get(..MAX_NAMED).unwrap_or(ranks));
            format!("ranks {named} and {} more", ranks.len() - MAX_NAMED)
        }
    }
}

fn join_numbers(numbers: &[usize]) -> String {
    numbers.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")
}

/// A duration for a person: "30.0 s".
fn seconds(duration: Duration) -> String {
    format!("{:.1} s", duration.as_secs_f64())
}

/// `now` plus `duration`, or the farthest instant that can be told (a year) where that overflows.
fn later(now: Instant, duration: Duration) -> Instant {
    const YEAR: Duration = Duration::from_secs(365 * 24 * 3600);
    now.checked_add(duration.min(YEAR)).unwrap_or(now)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_named_as_a_person_would() {
        assert_eq!(name_ranks(&[2]), "rank 2");
        assert_eq!(name_ranks(&[2, 5]), "ranks 2 and 5");
        assert_eq!(name_ranks(&[2, 5, 7]), "ranks 2, 5 and 7");
        let many: Vec<usize> = (0..100).collect();
        assert!(name_ranks(&many).ends_with("14, 15 and 84 more"));
    }

    #[test]
    fn sizes_are_checked() {
        assert!(check_rank(0, 0).is_err());
        assert!(check_rank(0, MAX_RANKS + 1).is_err());
        assert!(check_rank(4, 4).unwrap_err().message.contains("rank 4"));
        assert!(check_rank(3, 4).is_ok());
    }
}
