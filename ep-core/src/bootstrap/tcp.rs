//! Ranks that are processes on one or more hosts, over TCP.

use std::io::{self, ErrorKind};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Instant;

use super::join::{self, Found, GRACE, Request, Source};
use super::unique_id::UniqueId;
use super::wire::{self, Frame, Kind};
use super::{
    Bootstrap, Interrupter, MAX_BLOB_BYTES, MAX_ROUND_BYTES, check_num_ranks, failure, later, out_of_range,
};
use crate::error::{Error, Result};

/// One rank of a group that meets over TCP: every rank has one connection, to the root, which collects
/// each round and sends it to all.
///
/// Both ends prove that they know the secret of the id before anything else; what follows is neither
/// encrypted nor authenticated again, so the network itself must be trusted not to alter it. When a
/// call fails, the group is broken for all its ranks, and every later call returns the same error.
#[derive(Debug)]
pub struct TcpBootstrap {
    /// None after an error: the root sees the connection end and tells the others.
    stream: Option<Arc<TcpStream>>,
    root: SocketAddr,
    rank: usize,
    num_ranks: usize,
    round: u64,
    failed: Option<Error>,
}

impl TcpBootstrap {
    /// Joins the group of `id` as `rank` and returns when all `num_ranks` ranks have joined. The root
    /// may start later than this rank. Where rank 0 hosts the root ([`UniqueId::from_address`]), it
    /// does so in a thread of its process, which must live as long as the group meets.
    ///
    /// # Errors
    /// [`crate::Status::Bootstrap`] naming the absent ranks when `deadline` passes, or when the ranks
    /// contradict each other or have different secrets; [`crate::Status::InvalidArgument`] when `id`
    /// holds no id or `num_ranks` is not 1 to [`super::MAX_RANKS`]; [`crate::Status::System`] when the
    /// system refuses a thread or a descriptor.
    pub fn connect(id: &UniqueId, rank: usize, num_ranks: usize, deadline: Instant) -> Result<TcpBootstrap> {
        id.hosting()?;
        TcpBootstrap::connect_from(&mut Fixed(*id), rank, num_ranks, deadline)
    }

    /// As [`TcpBootstrap::connect`], with an id that may change while the rank waits.
    pub(super) fn connect_from(
        source: &mut dyn Source,
        rank: usize,
        num_ranks: usize,
        deadline: Instant,
    ) -> Result<TcpBootstrap> {
        check_num_ranks(num_ranks)?;
        if u32::try_from(rank).is_err() {
            return Err(Error::invalid(out_of_range(rank, num_ranks)));
        }
        // A rank that is merely too high still joins, so that the root can tell all ranks about it.
        let timeout = deadline.saturating_duration_since(Instant::now());
        let request = Request { rank, num_ranks, deadline, timeout };
        let (stream, root) = join::join(source, &request)?;
        Ok(TcpBootstrap { stream: Some(Arc::new(stream)), root, rank, num_ranks, round: 0, failed: None })
    }

    fn exchange(&self, mine: &[u8], deadline: Instant) -> Result<Vec<Vec<u8>>> {
        let lost = |error: io::Error| failure(join::lost_root(self.root, self.rank, &error));
        let stream = self.stream.as_ref().ok_or_else(|| lost(ErrorKind::NotConnected.into()))?;
        let give_up = later(deadline, GRACE);
        // What has arrived before this rank gave anything is the root's last word.
        let sent = match stream.peek(&mut [0]) {
            Ok(_) => Ok(()),
            Err(error) if error.kind() == ErrorKind::WouldBlock => self.give(stream, mine, deadline),
            Err(error) => Err(error),
        };
        // The root may have said why before it closed, so a failed write is not the whole story.
        let (frame, text) =
            join::read_frame(stream, give_up).map_err(|error| lost(sent.err().unwrap_or(error)))?;
        let limit = (MAX_ROUND_BYTES + 8 * self.num_ranks) as u64;
        match frame.kind {
            Kind::Failure => Err(failure(String::from_utf8_lossy(&text))),
            Kind::Result if frame.round == self.round && frame.bytes <= limit => {
                let payload = wire::read_vec(stream, frame.bytes as usize, give_up).map_err(lost)?;
                wire::split_result(&payload, self.num_ranks)
                    .ok_or_else(|| lost(ErrorKind::InvalidData.into()))
            }
            Kind::Result | Kind::Welcome | Kind::Gather => Err(lost(ErrorKind::InvalidData.into())),
        }
    }

    /// Sends this rank's blob. Of one that is too long only the head is sent: the root refuses it and
    /// tells all ranks.
    fn give(&self, stream: &TcpStream, mine: &[u8], deadline: Instant) -> io::Result<()> {
        let remaining = deadline.saturating_duration_since(Instant::now());
        let head =
            Frame { kind: Kind::Gather, bytes: mine.len() as u64, round: self.round, remaining }.encode();
        let give_up = later(deadline, GRACE);
        let blob = if mine.len() > MAX_BLOB_BYTES { &[] } else { mine };
        if blob.len() <= 4096 {
            return wire::write_all(stream, &[&head, blob].concat(), give_up);
        }
        wire::write_all(stream, &head, give_up)?;
        wire::write_all(stream, blob, give_up)
    }
}

impl Bootstrap for TcpBootstrap {
    fn rank(&self) -> usize {
        self.rank
    }

    fn num_ranks(&self) -> usize {
        self.num_ranks
    }

    fn all_gather(&mut self, mine: &[u8], deadline: Instant) -> Result<Vec<Vec<u8>>> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let result = self.exchange(mine, deadline);
        match &result {
            Ok(_) => self.round += 1,
            Err(error) => {
                self.failed = Some(error.clone());
                self.stream = None;
            }
        }
        result
    }

    fn interrupter(&self) -> Option<Interrupter> {
        // Weak: after an error the connection shall close, see `stream`.
        let stream = Arc::downgrade(self.stream.as_ref()?);
        Some(Box::new(move || {
            if let Some(stream) = stream.upgrade() {
                // A connection that has ended already needs no end.
                let _ = stream.shutdown(Shutdown::Both);
            }
        }))
    }
}

/// A [`Source`] with one id for good.
struct Fixed(UniqueId);

impl Source for Fixed {
    fn find(&mut self) -> Result<Found> {
        Ok(Found::Id(self.0))
    }

    fn may_change(&self) -> bool {
        false
    }
}
