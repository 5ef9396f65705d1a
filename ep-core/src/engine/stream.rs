//! Streams of the host backend: a thread that runs collective calls in order.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::plan::PlanCore;
use crate::error::{Error, Result, Status};
use crate::host::{CombineCall, DispatchCall, UpdateCall};

/// Calls that a stream holds; one more waits for room.
const DEPTH: usize = 64;

/// A queued call. It owns its plan; the caller keeps the tensors' memory valid.
#[expect(clippy::large_enum_variant, reason = "the queue holds 64; boxing would allocate per call")]
pub(super) enum Job {
    Update(Arc<PlanCore>, UpdateCall),
    Dispatch(Arc<PlanCore>, DispatchCall),
    Combine(Arc<PlanCore>, CombineCall),
}

impl Job {
    fn parts(&self) -> (&PlanCore, Instant) {
        match self {
            Job::Update(core, call) => (core, call.deadline),
            Job::Dispatch(core, call) => (core, call.deadline),
            Job::Combine(core, call) => (core, call.deadline),
        }
    }
}

/// How far a stream is.
#[derive(Default)]
struct Progress {
    pushed: u64,
    done: u64,
    /// The first error since the last `synchronize`; while it is kept, calls are skipped.
    error: Option<Error>,
}

/// A thread that runs collective calls in order.
pub struct Stream {
    queue: Option<SyncSender<Job>>,
    progress: Arc<(Mutex<Progress>, Condvar)>,
    thread: Option<JoinHandle<()>>,
}

fn lock(progress: &(Mutex<Progress>, Condvar)) -> MutexGuard<'_, Progress> {
    progress.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl Stream {
    /// Starts the thread.
    ///
    /// # Errors
    /// [`Status::System`] if the system has no thread to give.
    pub fn new() -> Result<Stream> {
        let (queue, jobs) = sync_channel(DEPTH);
        let progress = Arc::new((Mutex::new(Progress::default()), Condvar::new()));
        let shared = progress.clone();
        let thread = std::thread::Builder::new()
            .name(String::from("ep-stream"))
            .spawn(move || run(&jobs, &shared))
            .map_err(|e| Error::system("starting a stream's thread", e))?;
        Ok(Stream { queue: Some(queue), progress, thread: Some(thread) })
    }

    pub(super) fn push(&self, job: Job) -> Result<()> {
        // Counted until it is done, so that `Group::close` waits for it.
        let group = job.parts().0.group.clone();
        group.call_queued();
        lock(&self.progress).pushed += 1;
        let sent = self.queue.as_ref().is_some_and(|queue| queue.send(job).is_ok());
        if sent {
            return Ok(());
        }
        group.call_done();
        lock(&self.progress).pushed -= 1;
        Err(Error::new(Status::BadHandle, "the stream has ended"))
    }

    /// True while an error is kept, so that calls are skipped.
    pub(super) fn has_failed(&self) -> bool {
        lock(&self.progress).error.is_some()
    }

    /// Waits until all queued calls are done; the first error among them, cleared.
    ///
    /// # Errors
    /// [`Status::NotReady`] when time is up, or that error.
    pub fn synchronize(&self, timeout: Duration) -> Result<()> {
        let deadline = Instant::now() + timeout;
        let mut progress = lock(&self.progress);
        let target = progress.pushed;
        while progress.done < target {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::new(
                    Status::NotReady,
                    format!("{} calls are still queued or running on the stream", target - progress.done),
                ));
            }
            let waited = self.progress.1.wait_timeout(progress, left);
            progress = waited.unwrap_or_else(|poisoned| poisoned.into_inner()).0;
        }
        progress.error.take().map_or(Ok(()), Err)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // Closing the queue ends the thread after the calls in it, each of which has a deadline.
        self.queue = None;
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was caught in `run`, so there is nothing to pass on.
            let _ = thread.join();
        }
    }
}

fn run(jobs: &Receiver<Job>, progress: &(Mutex<Progress>, Condvar)) {
    while let Ok(job) = jobs.recv() {
        let failed_before = lock(progress).error.clone();
        let result = match failed_before {
            Some(error) => {
                refuse(&job);
                Err(error)
            }
            None => run_guarded(&job).inspect_err(|error| {
                // Kept before a plan says that its update is done: whoever sees that sees this.
                lock(progress).error.get_or_insert_with(|| error.clone());
            }),
        };
        if let Job::Update(core, _) = &job {
            core.finish_queued(&result);
        }
        job.parts().0.group.call_done();
        lock(progress).done += 1;
        progress.1.notify_all();
    }
}

/// Takes the place of a call that failed before it took part in its lane, or is not run since an earlier one
/// failed. What fails here broke the group, which says so itself.
fn refuse(job: &Job) {
    let (core, deadline) = job.parts();
    if core.group.check_usable().is_ok() {
        let _ = core.refuse(deadline);
    }
}

/// Runs a call; a panic becomes an error and poisons the group.
fn run_guarded(job: &Job) -> Result<()> {
    let (core, _) = job.parts();
    let call = || {
        core.group.check_usable()?;
        // SAFETY: whoever queued the call vouches for its memory until it is done.
        unsafe {
            match job {
                Job::Update(core, call) => core.update(call),
                Job::Dispatch(core, call) => core.dispatch(call),
                Job::Combine(core, call) => core.combine(call),
            }
        }
    };
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(call)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or(panic.downcast_ref::<&str>().map(|text| text.to_string())).unwrap_or_default();
        core.group.poison(&text);
        Err(Error::new(Status::Internal, text))
    });
    // A caller's mistake is found before the call takes part: only then has it no epoch yet.
    if let Err(error) = &result
        && error.status.code() < Status::Mismatch.code()
    {
        refuse(job);
    }
    result
}
