//! Handing memory over: each rank gives its descriptor to its peers and takes theirs, both at a time. The
//! system limits how many descriptors of a user may be under way, so a rank that cannot send takes first.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};

use super::link::Link;
use crate::error::{Error, Result, Status};

/// How soon to try again what the system refused for now.
const RETRY: Duration = Duration::from_millis(2);

/// Gives `own`, if there is one, to every peer that has a link, and takes a descriptor from each peer for
/// which `expected` holds, both with the number `tag`; `take` gets what comes. After an error it goes on,
/// so that no peer waits for this rank, and returns the first one.
///
/// # Errors
/// [`Status::Bootstrap`] naming a peer that is missing at the deadline, [`Status::PeerLost`] naming one
/// that is gone, [`Status::System`], and those of `take`.
pub(super) fn hand_over(
    links: &[Option<Link>],
    tag: u64,
    own: Option<BorrowedFd<'_>>,
    expected: impl Fn(usize) -> bool,
    deadline: Instant,
    mut take: impl FnMut(usize, OwnedFd) -> Result<()>,
) -> Result<()> {
    let linked = |peer: &usize| links[*peer].is_some();
    let mut to_give: Vec<usize> = (0..links.len()).filter(|peer| linked(peer) && own.is_some()).collect();
    let mut to_take: Vec<usize> = (0..links.len()).filter(|peer| linked(peer) && expected(*peer)).collect();
    let mut failed = Ok(());
    loop {
        let before = to_give.len() + to_take.len();
        to_give.retain(|&peer| match (&links[peer], own) {
            (Some(link), Some(own)) => !settled(link.give(peer, tag, own), &mut failed),
            _ => false,
        });
        to_take.retain(|&peer| match &links[peer] {
            Some(link) => {
                let taken = link.take(peer, tag).and_then(|fd| match fd {
                    Some(fd) => take(peer, fd).map(|()| true),
                    None => Ok(false),
                });
                !settled(taken, &mut failed)
            }
            None => false,
        });
        let left = to_give.len() + to_take.len();
        if left == 0 {
            return failed;
        }
        if left == before {
            wait(links, &to_give, &to_take, deadline)?;
        }
    }
}

/// True once there is nothing more to do with a peer; keeps the first error.
fn settled(result: Result<bool>, failed: &mut Result<()>) -> bool {
    match result {
        Ok(done) => done,
        Err(error) => {
            if failed.is_ok() {
                *failed = Err(error);
            }
            true
        }
    }
}

fn wait(links: &[Option<Link>], to_give: &[usize], to_take: &[usize], deadline: Instant) -> Result<()> {
    let mut time = deadline.saturating_duration_since(Instant::now());
    if time.is_zero() {
        let text = match (to_take.first(), to_give.first()) {
            (Some(peer), _) => format!("rank {peer} did not hand over its memory before the deadline"),
            (None, peer) => {
                format!("the system let no descriptor through to rank {peer:?} before the deadline")
            }
        };
        return Err(Error::new(Status::Bootstrap, text));
    }
    if !to_give.is_empty() {
        time = time.min(RETRY);
    }
    let timeout =
        rustix::time::Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() };
    let links = to_take.iter().filter_map(|&peer| links[peer].as_ref());
    let mut fds: Vec<PollFd<'_>> =
        links.map(|link| PollFd::from_borrowed_fd(link.asking(), PollFlags::IN)).collect();
    match poll(&mut fds, Some(&timeout)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(e) => Err(Error::system("poll", e)),
    }
}
