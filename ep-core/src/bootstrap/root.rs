//! The root of a rendezvous: one thread that serves the connections of one group with `poll`.

use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

use super::conn::{Closed, Conn, Event};
use super::group::{Group, Step};
use super::later;
use super::wire::{self, Frame, Kind};
use crate::error::{Error, Result};

/// How many connections may be unauthenticated at a time; the oldest gives way to a new one.
const MAX_UNKNOWN: usize = 256;

/// How long the last words of a failed group may take to reach the ranks.
const FLUSH: Duration = Duration::from_secs(1);

/// How long a failed root that rank 0 hosts keeps its port to tell late ranks why.
const HOSTED_LINGER: Duration = Duration::from_secs(2);

/// How the root of one id behaves.
#[derive(Clone, Copy, Debug)]
pub(super) struct RootOptions {
    /// When to end if no rank joins.
    pub(super) idle: Duration,
    /// How long a connection may take to authenticate.
    pub(super) handshake: Duration,
    /// The port belongs to the user and is freed as soon as all ranks have joined.
    pub(super) is_hosted: bool,
}

impl Default for RootOptions {
    fn default() -> RootOptions {
        RootOptions { idle: Duration::from_secs(600), handshake: Duration::from_secs(5), is_hosted: false }
    }
}

/// The means to stop a root. Dropping it does not stop the root.
#[derive(Debug)]
pub(super) struct RootHandle {
    wake: Arc<OwnedFd>,
}

impl RootHandle {
    /// Ends the root at once, for an id that will not be used.
    pub(super) fn stop(&self) {
        // An eventfd refuses a write only when it is full, and then the root is awake anyway.
        let _ = rustix::io::write(&*self.wake, &1u64.to_ne_bytes());
    }
}

/// A number that only the ranks of this process know as theirs.
pub(super) fn process_token() -> u64 {
    static RANDOM: OnceLock<u64> = OnceLock::new();
    let random = *RANDOM.get_or_init(|| {
        let mut bytes = [0; 8];
        // Without it the pid alone tells the processes of one host apart, which is what matters.
        let _ = getrandom::fill(&mut bytes);
        u64::from_ne_bytes(bytes)
    });
    // The pid is asked for each time, since a forked child shares `RANDOM`.
    random.wrapping_add(u64::from(std::process::id()))
}

/// Makes a socket of either end ready: never blocking, prompt, and noticing a peer whose host is gone.
pub(super) fn prepare(stream: &TcpStream) -> std::io::Result<()> {
    stream.set_nonblocking(true)?;
    stream.set_nodelay(true)?;
    rustix::net::sockopt::set_socket_keepalive(stream, true)?;
    rustix::net::sockopt::set_tcp_keepidle(stream, Duration::from_secs(30))?;
    Ok(())
}

/// Starts the thread that serves `listener`; `address` is how ranks know it.
pub(super) fn start(
    listener: TcpListener,
    address: SocketAddr,
    secret: [u8; 32],
    options: RootOptions,
) -> Result<RootHandle> {
    listener.set_nonblocking(true).map_err(|error| Error::system("fcntl", error))?;
    let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
        .map_err(|error| Error::system("eventfd", error))?;
    let wake = Arc::new(wake);
    let now = Instant::now();
    let root = Root {
        listener: Some(listener),
        wake: Arc::clone(&wake),
        secret,
        options,
        conns: Vec::new(),
        group: Group::new(address),
        idle_until: later(now, options.idle),
        linger_until: None,
        hold_until: now,
        accept_after: now,
    };
    thread::Builder::new()
        .name("ep-bootstrap".into())
        .spawn(move || root.run())
        .map_err(|error| Error::system("pthread_create", error))?;
    Ok(RootHandle { wake })
}

struct Root {
    /// None once the port is freed.
    listener: Option<TcpListener>,
    wake: Arc<OwnedFd>,
    secret: [u8; 32],
    options: RootOptions,
    conns: Vec<Conn>,
    group: Group,
    idle_until: Instant,
    /// Set when the group has failed: when to end at the latest.
    linger_until: Option<Instant>,
    /// Until when ranks of this process wait for the others' output; see `send`.
    hold_until: Instant,
    /// Accepting pauses until then after the system refused it, for want of descriptors.
    accept_after: Instant,
}

impl Root {
    fn run(mut self) {
        while !self.is_finished(Instant::now()) {
            let Some(ready) = self.wait() else { return };
            self.receive(&ready);
            self.accept();
            let now = Instant::now();
            let step = self.group.tick(now);
            self.apply(step, None, now);
            self.expire(now);
            self.send(now);
        }
    }

    fn is_finished(&self, now: Instant) -> bool {
        if let Some(until) = self.linger_until {
            let is_told = self.group.all_came() && self.conns.iter().all(Conn::is_unknown);
            return is_told || now >= until;
        }
        self.group.is_over() || (self.group.is_untouched() && now >= self.idle_until)
    }

    /// Waits for something to do; returns which connections are ready, or `None` to stop.
    fn wait(&self) -> Option<Vec<bool>> {
        let now = Instant::now();
        let is_accepting = now >= self.accept_after;
        let mut until = self.next_deadline();
        if !is_accepting {
            until = until.min(self.accept_after);
        }
        let is_remote_busy = self.is_remote_busy();
        if is_remote_busy && now < self.hold_until {
            until = until.min(self.hold_until);
        }
        let mut fds = Vec::with_capacity(self.conns.len() + 2);
        fds.push(PollFd::new(&*self.wake, PollFlags::IN));
        for conn in &self.conns {
            let wants_out = conn.has_output() && !self.is_held(conn, is_remote_busy, now);
            let out = if wants_out { PollFlags::OUT } else { PollFlags::empty() };
            fds.push(PollFd::new(conn.stream(), PollFlags::IN | out));
        }
        if let Some(listener) = self.listener.as_ref().filter(|_| is_accepting) {
            fds.push(PollFd::new(listener, PollFlags::IN));
        }
        match poll(&mut fds, Some(&wire::timespec(until.saturating_duration_since(now)))) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => return Some(vec![false; self.conns.len()]),
            // Only want of memory is left; the ranks see the root end and say so.
            Err(_) => return None,
        }
        let mut ready = fds.iter().map(|fd| !fd.revents().is_empty());
        if ready.next() == Some(true) {
            return None;
        }
        Some(ready.take(self.conns.len()).collect())
    }

    fn next_deadline(&self) -> Instant {
        let failed_or = |deadline| if self.group.has_failed() { None } else { deadline };
        let idle = self.group.is_untouched().then_some(self.idle_until);
        let expiries = self.conns.iter().filter_map(Conn::expires);
        let all = [failed_or(self.group.deadline()), idle, self.linger_until].into_iter().flatten();
        all.chain(expiries).min().unwrap_or_else(|| later(Instant::now(), Duration::from_secs(3600)))
    }

    fn accept(&mut self) {
        let now = Instant::now();
        if now < self.accept_after {
            return;
        }
        // 64: a flood of connections does not keep the root from those it has.
        for _ in 0..64 {
            let Some(listener) = &self.listener else { return };
            let stream = match listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) => match error.kind() {
                    ErrorKind::WouldBlock => return,
                    ErrorKind::Interrupted | ErrorKind::ConnectionAborted => continue,
                    _ => {
                        self.accept_after = later(now, Duration::from_millis(50));
                        return;
                    }
                },
            };
            if prepare(&stream).is_err() {
                continue;
            }
            if self.conns.iter().filter(|conn| conn.is_unknown()).count() >= MAX_UNKNOWN
                && let Some(oldest) = self.conns.iter().position(Conn::is_unknown)
            {
                self.conns.remove(oldest);
            }
            self.conns.push(Conn::new(stream, later(now, self.options.handshake)));
        }
    }

    fn receive(&mut self, ready: &[bool]) {
        let mut closed = Vec::new();
        for index in (0..self.conns.len()).filter(|&index| ready.get(index) == Some(&true)) {
            while let Some(conn) = self.conns.get_mut(index) {
                match conn.receive(&self.secret) {
                    Ok(None) => break,
                    Ok(Some(event)) => self.react(event, index),
                    Err(Closed) => {
                        closed.push(index);
                        break;
                    }
                }
            }
        }
        self.remove(closed);
    }

    fn react(&mut self, event: Event, index: usize) {
        let now = Instant::now();
        let step = match event {
            Event::Join(join) => self.group.join(&join, now),
            Event::Gather { rank, round, remaining, blob } => {
                self.group.gather(rank, round, blob, remaining, now)
            }
            Event::Stranger => {
                let address = self.conns.get(index).and_then(|conn| conn.stream().peer_addr().ok());
                self.group.note_stranger(address.map(|address| address.ip()));
                Step::Nothing
            }
            Event::Garbage(text) => self.group.fail(text),
        };
        self.apply(step, Some(index), now);
    }

    fn apply(&mut self, step: Step, index: Option<usize>, now: Instant) {
        match step {
            Step::Nothing => {}
            Step::Welcome => {
                if self.options.is_hosted {
                    // Before any rank hears of it: it may at once listen for its next group here.
                    self.listener = None;
                    self.conns.retain(|conn| conn.rank().is_some());
                }
                self.broadcast(Frame::with_payload(Kind::Welcome, 0, &[]), now);
            }
            Step::Deliver(frame) => self.broadcast(frame, now),
            Step::Refuse(text) => self.refuse(&failure_frame(0, &text), index, now),
            Step::TurnAway(text) => self.refuse(&failure_frame(wire::TURNED_AWAY, &text), index, now),
            Step::Fail(text) => {
                let frame = failure_frame(0, &text);
                let flushed = later(now, FLUSH);
                let until = match self.group.deadline() {
                    _ if self.group.all_came() => flushed,
                    Some(_) if self.options.is_hosted => later(now, HOSTED_LINGER),
                    Some(deadline) => flushed.max(deadline),
                    None => flushed,
                };
                self.linger_until = Some(until);
                self.hold_until = flushed;
                for conn in self.conns.iter_mut().filter(|conn| conn.rank().is_some()) {
                    conn.finish(&frame, flushed);
                }
            }
        }
    }

    fn refuse(&mut self, frame: &Arc<Vec<u8>>, index: Option<usize>, now: Instant) {
        if let Some(conn) = index.and_then(|index| self.conns.get_mut(index)) {
            conn.finish(frame, later(now, FLUSH));
        }
    }

    fn broadcast(&mut self, frame: Vec<u8>, now: Instant) {
        self.hold_until = later(now, FLUSH);
        let frame = Arc::new(frame);
        for conn in self.conns.iter_mut().filter(|conn| conn.rank().is_some()) {
            conn.queue(&frame);
        }
    }

    fn expire(&mut self, now: Instant) {
        let is_expired = |conn: &Conn| conn.expires().is_some_and(|expires| now >= expires);
        self.conns.retain(|conn| !is_expired(conn));
    }

    /// Sends to the ranks of other processes first: when a rank of this process has its result, the
    /// process may exit and take the root with it.
    fn send(&mut self, now: Instant) {
        for is_local in [false, true] {
            let is_remote_busy = self.is_remote_busy();
            let mut closed = Vec::new();
            for index in 0..self.conns.len() {
                let Some(conn) = self.conns.get(index) else { break };
                if (conn.process() == Some(process_token())) != is_local
                    || self.is_held(conn, is_remote_busy, now)
                {
                    continue;
                }
                if self.conns.get_mut(index).is_some_and(|conn| conn.send().is_err()) {
                    closed.push(index);
                }
            }
            self.remove(closed);
        }
    }

    fn is_remote_busy(&self) -> bool {
        let is_remote = |conn: &Conn| conn.process().is_some_and(|process| process != process_token());
        self.conns.iter().any(|conn| is_remote(conn) && conn.has_output())
    }

    fn is_held(&self, conn: &Conn, is_remote_busy: bool, now: Instant) -> bool {
        is_remote_busy && now < self.hold_until && conn.process() == Some(process_token())
    }

    /// Removes connections, by ascending index, and tells the group which ranks left with them.
    fn remove(&mut self, closed: Vec<usize>) {
        let mut ranks = Vec::new();
        for index in closed.into_iter().rev() {
            ranks.extend(self.conns.remove(index).rank());
        }
        for rank in ranks {
            let step = self.group.leave(rank);
            self.apply(step, None, Instant::now());
        }
    }
}

fn failure_frame(reason: u64, text: &str) -> Arc<Vec<u8>> {
    let bytes = text.as_bytes();
    let bytes = bytes.get(..wire::MAX_TEXT_BYTES).unwrap_or(bytes);
    Arc::new(Frame::with_payload(Kind::Failure, reason, bytes))
}
