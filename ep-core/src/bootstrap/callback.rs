//! Ranks that meet through an all-gather of the caller, for example MPI's.

use std::ffi::c_void;
use std::time::Instant;

use super::{Bootstrap, MAX_BLOB_BYTES, check_rank, failure, too_long};
use crate::error::{Error, Result, Status};

/// A fixed-size all-gather of the caller: every rank gives `bytes` bytes at `send`, and
/// `num_ranks * bytes` bytes, in rank order, are written to `recv`. Returns 0, or anything else when
/// it failed.
pub type AllGatherFn =
    unsafe extern "C" fn(ctx: *mut c_void, send: *const c_void, recv: *mut c_void, bytes: usize) -> i32;

/// A [`Bootstrap`] over the caller's own all-gather.
///
/// The callback cannot be interrupted: the deadline is looked at before and between its calls, and how
/// long one call may block is the callback's own affair. After an error the same error is returned
/// again and the callback is not called.
#[derive(Debug)]
pub struct CallbackBootstrap {
    callback: AllGatherFn,
    ctx: *mut c_void,
    rank: usize,
    num_ranks: usize,
    failed: Option<Error>,
}

// SAFETY: `ctx` is only ever handed back to the callback, never read here, and `CallbackBootstrap::new`
// makes the caller promise that the callback may be called with it from any one thread at a time.
unsafe impl Send for CallbackBootstrap {}

/// What the ranks tell each other first: a mark, so that a callback which gathers something else is
/// noticed, who they are, so that one which gathers in another order or one block twice is, and the length
/// of the blob.
const HEADER_BYTES: usize = 24;
const MARK: [u8; 8] = *b"EPGATHR2";

impl CallbackBootstrap {
    /// Wraps `callback`; `ctx` is passed to it unchanged.
    ///
    /// # Errors
    /// [`Status::InvalidArgument`] when `rank` is not one of `num_ranks`.
    ///
    /// # Safety
    /// For the life of the object, `callback` may be called with `ctx` from any thread, by one thread
    /// at a time, and it reads `bytes` bytes at `send`, writes at most `num_ranks * bytes` bytes at
    /// `recv`, keeps neither pointer, and does not unwind.
    pub unsafe fn new(
        callback: AllGatherFn,
        ctx: *mut c_void,
        rank: usize,
        num_ranks: usize,
    ) -> Result<CallbackBootstrap> {
        check_rank(rank, num_ranks)?;
        Ok(CallbackBootstrap { callback, ctx, rank, num_ranks, failed: None })
    }

    fn gather(&self, mine: &[u8], deadline: Instant) -> Result<Vec<Vec<u8>>> {
        let lengths = self.gather_lengths(mine.len(), deadline)?;
        let longest = lengths.iter().copied().max().unwrap_or(0);
        if longest == 0 {
            return Ok(vec![Vec::new(); self.num_ranks]);
        }
        let mut padded = zeroed(longest)?;
        // In bounds: `gather_lengths` has checked that this rank's length came back unchanged.
        padded[..mine.len()].copy_from_slice(mine);
        let all = self.call(&padded, "data", deadline)?;
        let blobs: Vec<Vec<u8>> =
            all.chunks_exact(longest).zip(&lengths).map(|(blob, &length)| blob[..length].to_vec()).collect();
        if blobs.get(self.rank).map(Vec::as_slice) != Some(mine) {
            return Err(failure(format!(
                "the all-gather callback gave rank {} back other bytes than it sent; \
                 recv must hold the ranks' blocks in rank order",
                self.rank
            )));
        }
        Ok(blobs)
    }

    /// Gathers the lengths of the blobs and checks each. A blob of this rank that is too long is told
    /// to the others all the same, so that all fail with one sentence and none waits.
    fn gather_lengths(&self, mine: usize, deadline: Instant) -> Result<Vec<usize>> {
        let mut header = [0; HEADER_BYTES];
        header[..8].copy_from_slice(&MARK);
        header[8..16].copy_from_slice(&(self.rank as u64).to_le_bytes());
        header[16..].copy_from_slice(&(mine as u64).to_le_bytes());
        let all = self.call(&header, "lengths", deadline)?;
        let mut lengths = Vec::with_capacity(self.num_ranks);
        for (rank, block) in all.chunks_exact(HEADER_BYTES).enumerate() {
            let word = |at: usize| block[at..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
            let (from, length) = (word(8), word(16));
            if block[..8] != MARK || (rank == self.rank && from == rank as u64 && block != header) {
                return Err(failure(format!(
                    "the all-gather callback returned garbage for rank {rank} of {} on rank {}; recv must \
                     hold the ranks' blocks in rank order, and all ranks must run the same libep",
                    self.num_ranks, self.rank
                )));
            }
            if from != rank as u64 {
                return Err(failure(format!(
                    "the all-gather callback gave rank {} the block of rank {from} in the place of rank {rank}'s; \
                     recv must hold the ranks' blocks in rank order, and every rank its own number",
                    self.rank
                )));
            }
            match usize::try_from(length) {
                Ok(bytes) if bytes <= MAX_BLOB_BYTES => lengths.push(bytes),
                _ => return Err(failure(too_long(rank, length))),
            }
        }
        Ok(lengths)
    }

    fn call(&self, send: &[u8], what: &str, deadline: Instant) -> Result<Vec<u8>> {
        if Instant::now() >= deadline {
            let rank = self.rank;
            return Err(failure(format!("the deadline passed before rank {rank} could gather the {what}")));
        }
        let bytes = send.len();
        let mut recv = zeroed(bytes.checked_mul(self.num_ranks).ok_or_else(|| no_memory(usize::MAX))?)?;
        // SAFETY: `send` has `bytes` readable bytes and `recv` has `num_ranks * bytes` writable ones,
        // which is all the callback touches, by the contract of `new`; `&self` is behind the `&mut self`
        // of `all_gather`, so no other thread is in the callback through this object.
        let code =
            unsafe { (self.callback)(self.ctx, send.as_ptr().cast(), recv.as_mut_ptr().cast(), bytes) };
        if code != 0 {
            return Err(failure(format!(
                "the all-gather callback returned {code} on rank {} of {} while gathering the {what}",
                self.rank, self.num_ranks
            )));
        }
        Ok(recv)
    }
}

impl Bootstrap for CallbackBootstrap {
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
        let result = self.gather(mine, deadline);
        self.failed = result.as_ref().err().cloned();
        result
    }
}

fn zeroed(bytes: usize) -> Result<Vec<u8>> {
    let mut buffer = Vec::new();
    buffer.try_reserve_exact(bytes).map_err(|_| no_memory(bytes))?;
    buffer.resize(bytes, 0);
    Ok(buffer)
}

fn no_memory(bytes: usize) -> Error {
    Error::new(Status::OutOfMemory, format!("an all-gather buffer of {bytes} bytes could not be allocated"))
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::thread;
    use std::time::Duration;

    use super::super::LocalBootstrap;
    use super::*;

    /// What the test's callback does besides gathering.
    #[derive(Clone, Copy, PartialEq)]
    enum Fault {
        None,
        Code(i32),
        Nothing,
        Length(u64),
        SwapBlocks,
        /// The others' blocks change places, or are this rank's own again.
        SwapOthers,
        OwnEverywhere,
    }

    struct Ctx {
        inner: Mutex<LocalBootstrap>,
        fault: Fault,
    }

    unsafe extern "C" fn gather(
        ctx: *mut c_void,
        send: *const c_void,
        recv: *mut c_void,
        bytes: usize,
    ) -> i32 {
        // SAFETY: the tests pass a `Ctx` that outlives the bootstrap.
        let ctx = unsafe { &*ctx.cast::<Ctx>() };
        let mut inner = ctx.inner.lock().unwrap();
        let num_ranks = inner.num_ranks();
        // SAFETY: by the contract of `AllGatherFn`.
        let send = unsafe { std::slice::from_raw_parts(send.cast::<u8>(), bytes) };
        // SAFETY: as above; `recv` is initialised, since `call` zeroes it.
        let recv = unsafe { std::slice::from_raw_parts_mut(recv.cast::<u8>(), num_ranks * bytes) };
        match ctx.fault {
            Fault::Code(code) => return code,
            Fault::Nothing => return 0,
            _ => {}
        }
        let all = inner.all_gather(send, Instant::now() + Duration::from_secs(20)).unwrap().concat();
        recv.copy_from_slice(&all);
        match ctx.fault {
            Fault::Length(length) => recv[16..24].copy_from_slice(&length.to_le_bytes()),
            Fault::SwapBlocks => recv.rotate_left(bytes),
            Fault::SwapOthers => recv[bytes..].rotate_left(bytes),
            Fault::OwnEverywhere => {
                recv.chunks_exact_mut(bytes).for_each(|block| block.copy_from_slice(send))
            }
            _ => {}
        }
        0
    }

    fn run(faults: &[Fault], body: impl Fn(&mut CallbackBootstrap) + Sync) {
        let ctxs: Vec<Ctx> = LocalBootstrap::group(faults.len())
            .into_iter()
            .zip(faults)
            .map(|(inner, &fault)| Ctx { inner: Mutex::new(inner), fault })
            .collect();
        let body = &body;
        thread::scope(|scope| {
            for (rank, ctx) in ctxs.iter().enumerate() {
                let num_ranks = faults.len();
                scope.spawn(move || {
                    let pointer = std::ptr::from_ref(ctx).cast_mut().cast();
                    // SAFETY: `gather` keeps its contract and `ctx` outlives the scope.
                    let made = unsafe { CallbackBootstrap::new(gather, pointer, rank, num_ranks) };
                    body(&mut made.unwrap());
                });
            }
        });
    }

    fn far() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    #[test]
    fn blobs_of_varying_length_arrive() {
        for num_ranks in [1, 2, 5, 16] {
            run(&vec![Fault::None; num_ranks], |bootstrap| {
                for round in 0..4 {
                    let mine = vec![bootstrap.rank() as u8; bootstrap.rank() * round * 3];
                    let all = bootstrap.all_gather(&mine, far()).unwrap();
                    assert_eq!(all.len(), num_ranks);
                    for (rank, blob) in all.iter().enumerate() {
                        assert_eq!(blob, &vec![rank as u8; rank * round * 3]);
                    }
                }
            });
        }
    }

    #[test]
    fn non_zero_return_is_an_error_that_stays() {
        run(&[Fault::Code(-7)], |bootstrap| {
            let error = bootstrap.all_gather(b"x", far()).unwrap_err();
            assert_eq!(error.status, Status::Bootstrap);
            assert!(error.message.contains("returned -7 on rank 0 of 1"), "{error}");
            assert_eq!(bootstrap.all_gather(b"x", far()).unwrap_err(), error);
        });
    }

    #[test]
    fn callback_that_writes_nothing_is_noticed() {
        run(&[Fault::Nothing], |bootstrap| {
            assert!(bootstrap.all_gather(b"x", far()).unwrap_err().message.contains("garbage for rank 0"));
        });
    }

    #[test]
    fn garbage_length_is_an_error() {
        for length in [MAX_BLOB_BYTES as u64 + 1, u64::MAX] {
            let faults = [Fault::Length(length), Fault::Length(length)];
            run(&faults, |bootstrap| {
                let error = bootstrap.all_gather(b"x", far()).unwrap_err();
                assert_eq!(error.status, Status::Bootstrap);
                let expected = if bootstrap.rank() == 0 { "garbage for rank 0" } else { "rank 0 gave" };
                assert!(error.message.contains(expected), "{error}");
            });
        }
    }

    #[test]
    fn blocks_in_the_wrong_order_are_noticed() {
        run(&[Fault::SwapBlocks, Fault::SwapBlocks], |bootstrap| {
            let mine = vec![9; bootstrap.rank() + 1];
            assert!(bootstrap.all_gather(&mine, far()).is_err());
        });
    }

    #[test]
    fn a_block_in_the_place_of_another_rank_is_named() {
        let all = |fault| [fault; 3];
        run(&all(Fault::SwapOthers), |bootstrap| {
            let error = bootstrap.all_gather(b"equal", far()).unwrap_err();
            assert_eq!(error.status, Status::Bootstrap);
            assert!(error.message.contains("the block of rank 2 in the place of rank 1's"), "{error}");
        });
        run(&all(Fault::OwnEverywhere), |bootstrap| {
            let rank = bootstrap.rank();
            let other = usize::from(rank == 0);
            let error = bootstrap.all_gather(b"equal", far()).unwrap_err();
            let text = format!("gave rank {rank} the block of rank {rank} in the place of rank {other}'s");
            assert!(error.message.contains(&text), "{error}");
        });
    }

    #[test]
    fn too_long_blob_fails_every_rank_alike() {
        run(&[Fault::None, Fault::None], |bootstrap| {
            let mine = vec![0; if bootstrap.rank() == 1 { MAX_BLOB_BYTES + 1 } else { 3 }];
            let error = bootstrap.all_gather(&mine, far()).unwrap_err();
            assert!(error.message.starts_with("rank 1 gave 67108865 bytes"), "{error}");
        });
    }

    #[test]
    fn passed_deadline_is_an_error_without_a_call() {
        run(&[Fault::None], |bootstrap| {
            let error = bootstrap.all_gather(b"x", Instant::now()).unwrap_err();
            assert!(error.message.contains("deadline"), "{error}");
        });
    }
}
