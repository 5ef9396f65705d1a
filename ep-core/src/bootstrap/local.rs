//! Ranks that are threads of one process.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::{Bootstrap, MAX_BLOB_BYTES, MAX_RANKS, failure, name_ranks, seconds, too_long};
use crate::error::{Error, Result};

/// One rank of a group whose ranks are threads of this process; see [`LocalBootstrap::group`].
///
/// A member that is dropped fails the others' next all-gather with its name. After an error every
/// member returns that same error.
#[derive(Debug)]
pub struct LocalBootstrap {
    rank: usize,
    num_ranks: usize,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    /// How many rounds are complete.
    round: u64,
    /// What each rank gave to the round under way.
    blobs: Vec<Option<Vec<u8>>>,
    num_given: usize,
    /// The latest complete round. The next one cannot complete before every rank has taken it, since
    /// a rank gives to the next round only after that.
    result: Arc<Vec<Vec<u8>>>,
    left: Vec<usize>,
    failed: Option<Error>,
}

impl LocalBootstrap {
    /// Makes the members of a group of `num_ranks` threads, indexed by rank. There are none where
    /// `num_ranks` is 0 or above [`super::MAX_RANKS`].
    pub fn group(num_ranks: usize) -> Vec<LocalBootstrap> {
        if num_ranks > MAX_RANKS {
            return Vec::new();
        }
        let shared = Arc::new(Shared {
            state: Mutex::new(State {
                round: 0,
                blobs: vec![None; num_ranks],
                num_given: 0,
                result: Arc::default(),
                left: Vec::new(),
                failed: None,
            }),
            changed: Condvar::new(),
        });
        (0..num_ranks).map(|rank| LocalBootstrap { rank, num_ranks, shared: Arc::clone(&shared) }).collect()
    }
}

impl Bootstrap for LocalBootstrap {
    fn rank(&self) -> usize {
        self.rank
    }

    fn num_ranks(&self) -> usize {
        self.num_ranks
    }

    fn all_gather(&mut self, mine: &[u8], deadline: Instant) -> Result<Vec<Vec<u8>>> {
        let start = Instant::now();
        let mut state = self.shared.lock();
        let round = state.round;
        if let Some(error) = &state.failed {
            return Err(error.clone());
        }
        if mine.len() > MAX_BLOB_BYTES {
            return Err(self.shared.fail(&mut state, too_long(self.rank, mine.len() as u64)));
        }
        if !state.left.is_empty() {
            let text = state.departure();
            return Err(self.shared.fail(&mut state, text));
        }
        state.give(self.rank, mine.to_vec());
        if state.num_given == self.num_ranks {
            state.complete();
            self.shared.changed.notify_all();
        }
        while state.round == round {
            if let Some(error) = &state.failed {
                return Err(error.clone());
            }
            let now = Instant::now();
            if now >= deadline {
                let text = state.absence(deadline.saturating_duration_since(start));
                return Err(self.shared.fail(&mut state, text));
            }
            let wait = self.shared.changed.wait_timeout(state, deadline - now);
            (state, _) = wait.unwrap_or_else(PoisonError::into_inner);
        }
        let result = Arc::clone(&state.result);
        drop(state);
        Ok(result.as_ref().clone())
    }
}

impl Drop for LocalBootstrap {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.left.push(self.rank);
        state.left.sort_unstable();
        if state.num_given > 0 && state.failed.is_none() {
            let text = state.departure();
            self.shared.fail(&mut state, text);
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing panics while it holds the lock, so a poisoned state is still a consistent one.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Fails the group for good and wakes those who wait.
    fn fail(&self, state: &mut State, text: String) -> Error {
        let error = failure(text);
        state.failed = Some(error.clone());
        state.blobs.fill(None);
        self.changed.notify_all();
        error
    }
}

impl State {
    fn give(&mut self, rank: usize, blob: Vec<u8>) {
        if let Some(slot) = self.blobs.get_mut(rank) {
            *slot = Some(blob);
            self.num_given += 1;
        }
    }

    fn complete(&mut self) {
        self.result = Arc::new(self.blobs.iter_mut().map(|blob| blob.take().unwrap_or_default()).collect());
        self.num_given = 0;
        self.round += 1;
    }

    fn departure(&self) -> String {
        let (names, of) = (name_ranks(&self.left), self.blobs.len());
        format!("{names} of {of} left the group before all-gather round {} was complete", self.round + 1)
    }

    fn absence(&self, waited: std::time::Duration) -> String {
        let missing: Vec<usize> =
            self.blobs.iter().enumerate().filter(|(_, blob)| blob.is_none()).map(|(rank, _)| rank).collect();
        format!(
            "{} of {} did not take part in all-gather round {} within {}",
            name_ranks(&missing),
            self.blobs.len(),
            self.round + 1,
            seconds(waited)
        )
    }
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Duration;

    use super::*;
    use crate::Status;

    fn soon(ms: u64) -> Instant {
        Instant::now() + Duration::from_millis(ms)
    }

    #[test]
    fn every_size_gathers_blobs_of_varying_length() {
        for num_ranks in [1, 2, 3, 7, 256] {
            let far = soon(30_000);
            thread::scope(|scope| {
                for mut member in LocalBootstrap::group(num_ranks) {
                    scope.spawn(move || {
                        for round in 0..5 {
                            let mine = vec![member.rank() as u8; (member.rank() * 7 + round) % 40];
                            let all = member.all_gather(&mine, far).unwrap();
                            assert_eq!(all.len(), num_ranks);
                            for (rank, blob) in all.iter().enumerate() {
                                assert_eq!(blob, &vec![rank as u8; (rank * 7 + round) % 40]);
                            }
                        }
                    });
                }
            });
        }
    }

    #[test]
    fn impossible_sizes_make_no_members() {
        assert!(LocalBootstrap::group(0).is_empty());
        assert!(LocalBootstrap::group(usize::MAX).is_empty());
    }

    #[test]
    fn absent_rank_is_named_at_the_deadline_and_the_error_stays() {
        let mut members = LocalBootstrap::group(3);
        let start = Instant::now();
        let error = members[1].all_gather(b"x", soon(100)).unwrap_err();
        assert!(start.elapsed() < Duration::from_millis(1100));
        assert_eq!(error.status, Status::Bootstrap);
        assert!(error.message.starts_with("ranks 0 and 2 of 3 did not take part"), "{error}");
        assert_eq!(members[1].all_gather(b"x", soon(9000)).unwrap_err(), error);
        assert_eq!(members[0].all_gather(b"x", soon(9000)).unwrap_err(), error);
    }

    #[test]
    fn dropped_member_fails_those_who_wait_and_those_who_come_later() {
        let mut members = LocalBootstrap::group(3);
        let last = members.remove(2);
        let mut late = members.remove(1);
        let mut waiting = members.remove(0);
        thread::scope(|scope| {
            let waiter = scope.spawn(move || waiting.all_gather(b"x", soon(20_000)).unwrap_err());
            thread::sleep(Duration::from_millis(30));
            drop(last);
            let error = waiter.join().unwrap();
            assert!(error.message.starts_with("rank 2 of 3 left"), "{error}");
        });
        let error = late.all_gather(b"x", soon(20_000)).unwrap_err();
        assert!(error.message.starts_with("rank 2 of 3 left"), "{error}");
    }

    #[test]
    fn blob_above_the_limit_is_refused_for_all() {
        let mut members = LocalBootstrap::group(2);
        let error = members[0].all_gather(&vec![0; MAX_BLOB_BYTES + 1], soon(9000)).unwrap_err();
        assert!(error.message.contains("rank 0 gave 67108865 bytes"), "{error}");
        assert_eq!(members[1].all_gather(b"x", soon(9000)).unwrap_err(), error);
    }
}
