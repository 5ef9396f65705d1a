//! Work that takes each rank its own time, between two meetings of all ranks.

use std::time::{Duration, Instant};

use crate::bootstrap::Bootstrap;
use crate::error::{Error, Result, Status};

/// First byte of a rank's message: it has work left; it is done, what it has to tell follows; it failed, its sentence
/// follows.
const MORE: u8 = 0;
const DONE: u8 = 1;
const FAILED: u8 = 2;

/// Lets ranks work in pieces and meet after each quarter of the timeout, until all are done. So a rank whose work
/// takes long makes nobody's deadline pass, one that is silent does, and one that fails is named to all.
pub(super) struct Rounds<'a> {
    pub(super) bootstrap: &'a mut dyn Bootstrap,
    /// For a meeting.
    pub(super) timeout: Duration,
    /// Looked at between pieces; an error ends the work.
    pub(super) is_usable: &'a dyn Fn() -> Result<()>,
}

impl Rounds<'_> {
    /// Calls `step` on this rank's `work` until it returns true. Returns the work, and what `tell` says of it on
    /// every rank, by rank. Collective, and over after the same round on all ranks.
    ///
    /// # Errors
    /// This rank's own; [`Status::OutOfMemory`] naming a rank that failed to do `what`; those of the bootstrap, with
    /// `what` the ranks were doing.
    pub(super) fn run<W>(
        &mut self,
        what: &str,
        work: Result<W>,
        mut step: impl FnMut(&mut W) -> Result<bool>,
        tell: impl Fn(&W) -> Vec<u8>,
    ) -> Result<(W, Vec<Vec<u8>>)> {
        let mut state = work.map(|work| (work, false));
        loop {
            state = state.and_then(|(work, is_done)| self.slice(work, is_done, &mut step));
            let message = match &state {
                Ok((_, false)) => vec![MORE],
                Ok((work, true)) => [&[DONE][..], &tell(work)].concat(),
                Err(error) => [&[FAILED][..], error.message.as_bytes()].concat(),
            };
            let answers = match self.bootstrap.all_gather(&message, Instant::now() + self.timeout) {
                Ok(answers) => answers,
                // Whom this rank waited for says more than who was then late.
                Err(error) => {
                    return Err(own_error(state, Status::Bootstrap).unwrap_or_else(|| late(&error, what)));
                }
            };
            let (work, _) = state?;
            if let Some(rank) = first(&answers, FAILED) {
                let text = String::from_utf8_lossy(&answers[rank][1..]).into_owned();
                return Err(Error::new(Status::OutOfMemory, format!("rank {rank} could not {what}: {text}")));
            }
            if answers.iter().all(|answer| answer.first() == Some(&DONE)) {
                return Ok((work, answers.into_iter().map(|mut answer| answer.split_off(1)).collect()));
            }
            let is_done = message[0] == DONE;
            state = Ok((work, is_done));
        }
    }

    /// Works until there is no more to do, or for as long as the peers shall wait for a word.
    fn slice<W>(
        &self,
        mut work: W,
        mut is_done: bool,
        step: &mut impl FnMut(&mut W) -> Result<bool>,
    ) -> Result<(W, bool)> {
        let until = Instant::now() + self.timeout / 4;
        while !is_done {
            (self.is_usable)()?;
            is_done = step(&mut work)?;
            if Instant::now() >= until {
                break;
            }
        }
        Ok((work, is_done))
    }
}

fn own_error<T>(state: Result<T>, status: Status) -> Option<Error> {
    state.err().filter(|own| own.status == status)
}

fn first(answers: &[Vec<u8>], kind: u8) -> Option<usize> {
    answers.iter().position(|answer| answer.first() == Some(&kind))
}

fn late(error: &Error, what: &str) -> Error {
    let text = format!("{}; each rank was to {what}", error.message);
    Error::new(error.status, text)
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::bootstrap::LocalBootstrap;

    const TIMEOUT: Duration = Duration::from_secs(2);

    /// What `body` returns on each of three ranks.
    fn on_ranks<T: Send>(body: impl Fn(&mut LocalBootstrap) -> T + Sync) -> Vec<T> {
        thread::scope(|scope| {
            let body = &body;
            let spawn = |mut bootstrap: LocalBootstrap| scope.spawn(move || body(&mut bootstrap));
            let ranks: Vec<_> = LocalBootstrap::group(3).into_iter().map(spawn).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    /// Pieces of 50 ms; returns how many there were.
    fn pieces(
        bootstrap: &mut LocalBootstrap,
        pieces: usize,
        fails: bool,
        is_usable: &dyn Fn() -> Result<()>,
    ) -> Result<(usize, Vec<Vec<u8>>)> {
        let mut rounds = Rounds { bootstrap, timeout: TIMEOUT, is_usable };
        let step = |done: &mut usize| {
            *done += 1;
            thread::sleep(Duration::from_millis(50));
            match fails && *done == pieces {
                true => Err(Error::new(Status::OutOfMemory, "there is none")),
                false => Ok(*done >= pieces),
            }
        };
        rounds.run("do its work", Ok(0), step, |done| vec![*done as u8])
    }

    #[test]
    fn a_rank_may_work_longer_than_the_others_would_wait() {
        let all = on_ranks(|bootstrap| {
            let long = if bootstrap.rank() == 1 { 50 } else { 1 };
            pieces(bootstrap, long, false, &|| Ok(()))
        });
        for (rank, one) in all.into_iter().enumerate() {
            let told = vec![vec![1], vec![50], vec![1]];
            assert_eq!(one, Ok((if rank == 1 { 50 } else { 1 }, told)));
        }
    }

    #[test]
    fn a_rank_that_fails_is_named_to_all() {
        let all = on_ranks(|bootstrap| {
            let is_odd = bootstrap.rank() == 2;
            let error = pieces(bootstrap, 13, is_odd, &|| Ok(())).unwrap_err();
            // All are in step: the next meeting works.
            bootstrap.all_gather(b"x", Instant::now() + TIMEOUT).unwrap();
            error
        });
        let named = "rank 2 could not do its work: there is none";
        assert_eq!(all.map_messages(), [named, named, "there is none"]);
    }

    trait Messages {
        fn map_messages(&self) -> Vec<&str>;
    }

    impl Messages for Vec<Error> {
        fn map_messages(&self) -> Vec<&str> {
            self.iter().map(|error| error.message.as_str()).collect()
        }
    }

    #[test]
    fn work_ends_when_the_group_is_aborted() {
        let started = Instant::now();
        let all = on_ranks(|bootstrap| {
            let is_usable = || match started.elapsed() > Duration::from_millis(200) {
                true => Err(Error::new(Status::Aborted, "aborted")),
                false => Ok(()),
            };
            pieces(bootstrap, 100_000, false, &is_usable).unwrap_err()
        });
        assert!(all.iter().all(|error| error.status == Status::Aborted), "{all:?}");
        assert!(started.elapsed() < Duration::from_secs(20));
    }

    #[test]
    fn a_rank_that_does_not_come_is_late_for_a_step_that_is_named() {
        let all = on_ranks(|bootstrap| {
            if bootstrap.rank() == 0 {
                thread::sleep(TIMEOUT + Duration::from_millis(500));
                return None;
            }
            Some(pieces(bootstrap, 1, false, &|| Ok(())).unwrap_err())
        });
        for error in all.into_iter().flatten() {
            assert_eq!(error.status, Status::Bootstrap);
            assert!(error.message.contains("each rank was to do its work"), "{error}");
        }
    }
}
