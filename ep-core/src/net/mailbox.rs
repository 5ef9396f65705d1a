//! What callers ask of a proxy besides messages: to open, connect, test and close ports. Not the data path.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use super::port::{Closed, Port, PortSpec, Shared};
use super::waker::Waker;
use crate::error::{Error, Result, Status};

/// Where an answer goes. The asker may have given up, so nothing depends on its being taken.
pub(super) type Reply<T> = SyncSender<Result<T>>;

/// One request.
#[derive(Debug)]
pub(super) enum Request {
    Open { spec: PortSpec, reply: Reply<Port> },
    Connect { port: Arc<Shared>, offers: Vec<Vec<u8>>, reply: Reply<Option<String>> },
    Probe { port: Arc<Shared>, deadline: Instant, reply: Reply<()> },
    Close { port: Arc<Shared>, deadline: Instant, reply: Option<Reply<Closed>> },
    Stop,
}

/// The requests that the proxy has not taken yet.
#[derive(Debug)]
pub(super) struct Mailbox {
    requests: Mutex<Requests>,
    filled: AtomicBool,
    waker: Arc<Waker>,
}

#[derive(Debug, Default)]
struct Requests {
    queue: VecDeque<Request>,
    /// Why nobody will take any more.
    ended: Option<String>,
}

impl Mailbox {
    pub(super) fn new(waker: Arc<Waker>) -> Mailbox {
        Mailbox { requests: Mutex::default(), filled: AtomicBool::new(false), waker }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Requests> {
        self.requests.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Puts a request in and returns where its answer will be.
    pub(super) fn ask<T>(self: &Arc<Mailbox>, request: impl FnOnce(Reply<T>) -> Request) -> Pending<T> {
        let (reply, answer) = sync_channel(1);
        self.tell(request(reply));
        Pending { answer, mailbox: Arc::clone(self) }
    }

    /// Puts a request in. Dropped if the proxy has ended: its reply then disconnects.
    pub(super) fn tell(&self, request: Request) {
        {
            let mut requests = self.lock();
            if requests.ended.is_some() {
                return;
            }
            requests.queue.push_back(request);
            // Release: pairs with the acquire in `take`.
            self.filled.store(true, Ordering::Release);
        }
        self.waker.wake_if_asleep();
    }

    /// Proxy: the next request, if there is one. A load when there is none.
    pub(super) fn take(&self) -> Option<Request> {
        // Acquire: pairs with the release in `tell`.
        if !self.filled.load(Ordering::Acquire) {
            return None;
        }
        let mut requests = self.lock();
        let request = requests.queue.pop_front();
        // Relaxed: under the lock, under which it is set.
        self.filled.store(!requests.queue.is_empty(), Ordering::Relaxed);
        request
    }

    /// Proxy: true if [`Mailbox::take`] would find something.
    pub(super) fn is_filled(&self) -> bool {
        // Acquire: as in `take`.
        self.filled.load(Ordering::Acquire)
    }

    /// Proxy: takes nothing any more, because of `reason`. Those who wait are told.
    pub(super) fn end(&self, reason: &str) {
        let mut requests = self.lock();
        requests.ended.get_or_insert_with(|| reason.to_string());
        requests.queue.clear();
        // Relaxed: under the lock, under which it is set.
        self.filled.store(false, Ordering::Relaxed);
    }
}

/// An answer that will come.
#[derive(Debug)]
pub struct Pending<T> {
    answer: Receiver<Result<T>>,
    mailbox: Arc<Mailbox>,
}

impl<T> Pending<T> {
    /// The answer, if it is there. Once.
    pub fn try_take(&mut self) -> Option<Result<T>> {
        match self.answer.try_recv() {
            Ok(answer) => Some(answer),
            Err(TryRecvError::Empty) => None,
            Err(TryRecvError::Disconnected) => Some(Err(self.gone())),
        }
    }

    /// Waits for the answer.
    ///
    /// # Errors
    /// The proxy's, or [`Status::Timeout`] saying that `what` did not end.
    pub fn wait(self, deadline: Instant, what: &str) -> Result<T> {
        // The proxy observes the same deadline and knows more about the reason, so it gets a little longer.
        let patience =
            deadline.saturating_duration_since(Instant::now()) + std::time::Duration::from_millis(200);
        match self.answer.recv_timeout(patience) {
            Ok(answer) => answer,
            Err(RecvTimeoutError::Disconnected) => Err(self.gone()),
            Err(RecvTimeoutError::Timeout) => {
                let text = format!("{what}: the network's thread did not answer before the deadline");
                Err(Error::new(Status::Timeout, text))
            }
        }
    }

    fn gone(&self) -> Error {
        let ended = self.mailbox.lock().ended.clone();
        let reason = ended.as_deref().unwrap_or("it was told to stop");
        Error::new(Status::Internal, format!("the network's thread has ended: {reason}"))
    }
}
