//! Where the ranks meet: processes through ids that their parent made, threads through memory.

use std::time::{Duration, Instant};

use ep_core::Result;
use ep_core::bootstrap::{Bootstrap, LocalBootstrap, TcpBootstrap, UniqueId};
use ep_core::{Error, Status};

/// How often the ranks of a run may meet.
pub const MEETINGS: usize = 11;
const PATIENCE: Duration = Duration::from_secs(60);

pub enum Meetings {
    Processes(Vec<UniqueId>),
    Threads(Vec<LocalBootstrap>),
}

impl Meetings {
    /// The next meeting, as `rank` of `num_ranks`. Threads meet all together only.
    pub fn next(&mut self, rank: usize, num_ranks: usize) -> Result<Box<dyn Bootstrap>> {
        let over = || Error::new(Status::Internal, "the run has no meeting left");
        match self {
            Meetings::Processes(ids) => {
                let id = ids.pop().ok_or_else(over)?;
                Ok(Box::new(TcpBootstrap::connect(&id, rank, num_ranks, deadline())?))
            }
            Meetings::Threads(meetings) => Ok(Box::new(meetings.pop().ok_or_else(over)?)),
        }
    }

    pub fn are_processes(&self) -> bool {
        matches!(self, Meetings::Processes(_))
    }
}

pub fn deadline() -> Instant {
    Instant::now() + PATIENCE
}
