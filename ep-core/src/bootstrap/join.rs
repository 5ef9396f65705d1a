//! How a rank finds the root, proves itself and waits until all ranks have joined.

use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::PollFlags;

use super::auth::{self, Side, Transcript};
use super::root::{self, RootHandle, RootOptions};
use super::unique_id::{self, Hosting, UniqueId};
use super::wire::{self, Frame, Greeting, Join, Kind};
use super::{failure, later, seconds};
use crate::error::{Error, Result};

/// How much longer than its deadline a rank waits for the root to say which ranks are missing.
pub(super) const GRACE: Duration = Duration::from_millis(700);

/// How long the root may take to answer a new connection before the rank tries a fresh one.
const GREETING_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a root with another secret is taken for one that is about to make room for ours.
const OTHER_SECRET_PATIENCE: Duration = Duration::from_secs(1);

/// How often a waiting rank asks whether its id is still the right one.
const WATCH_INTERVAL: Duration = Duration::from_millis(200);

/// Where the id comes from.
pub(super) trait Source {
    /// The id to use now.
    fn find(&mut self) -> Result<Found>;

    /// Whether another id may come, so that a root that refuses is no reason to give up.
    fn may_change(&self) -> bool;
}

/// What a [`Source`] has.
pub(super) enum Found {
    Id(UniqueId),
    /// Nothing yet, and why.
    Nothing(String),
}

/// Who joins.
#[derive(Clone, Copy)]
pub(super) struct Request {
    pub(super) rank: usize,
    pub(super) num_ranks: usize,
    pub(super) deadline: Instant,
    /// How long the rank waits in all.
    pub(super) timeout: Duration,
}

/// How one attempt ended.
enum Outcome {
    Joined(TcpStream),
    /// Not this time.
    Retry(String),
    /// The root was there, and closed the connection before it had let this rank in.
    Left(String),
    /// The root does not share the secret.
    OtherSecret(String),
    /// It never will.
    Fatal(Error),
}

impl From<Error> for Outcome {
    fn from(error: Error) -> Outcome {
        Outcome::Fatal(error)
    }
}

/// Joins the group; returns the connection to its root once all ranks have joined.
pub(super) fn join(source: &mut dyn Source, request: &Request) -> Result<(TcpStream, SocketAddr)> {
    let mut hosted: Option<RootHandle> = None;
    let mut other_secret_since: Option<Instant> = None;
    let mut left_us: Option<String> = None;
    let mut pause = Duration::from_millis(5);
    loop {
        let problem = match source.find()? {
            Found::Nothing(reason) => reason,
            Found::Id(id) => {
                let address = id.address()?;
                let is_occupied = hosted.is_none() && !host(&id, address, request, &mut hosted)?;
                match attempt(&id, address, source, request) {
                    Outcome::Joined(stream) => return Ok((stream, address)),
                    Outcome::Fatal(error) => return Err(error),
                    Outcome::Retry(reason) if is_occupied => {
                        other_secret_since = None;
                        format!("rank 0 cannot listen at {address}, which is in use; {reason}")
                    }
                    Outcome::Retry(reason) => {
                        other_secret_since = None;
                        reason
                    }
                    Outcome::Left(reason) => {
                        other_secret_since = None;
                        left_us = Some(reason.clone());
                        reason
                    }
                    Outcome::OtherSecret(reason) => {
                        let since = *other_secret_since.get_or_insert_with(Instant::now);
                        if !source.may_change() && since.elapsed() >= OTHER_SECRET_PATIENCE {
                            return Err(failure(reason));
                        }
                        reason
                    }
                }
            }
        };
        let left = request.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            if let Some(root) = hosted {
                root.stop();
            }
            let (rank, num_ranks, timeout) = (request.rank, request.num_ranks, seconds(request.timeout));
            let problem = match left_us {
                Some(left_us) if left_us != problem => format!("{left_us}; since then {problem}"),
                _ => problem,
            };
            return Err(failure(format!(
                "rank {rank} of {num_ranks} could not join within {timeout}: {problem}"
            )));
        }
        thread::sleep(pause.min(left));
        pause = (pause * 2).min(WATCH_INTERVAL);
    }
}

/// Starts the root where it is rank 0's to host; false when the address is taken.
fn host(
    id: &UniqueId,
    address: SocketAddr,
    request: &Request,
    hosted: &mut Option<RootHandle>,
) -> Result<bool> {
    let is_anywhere = match id.hosting()? {
        Hosting::Creator => return Ok(true),
        Hosting::Rank0 => false,
        Hosting::Rank0Anywhere => true,
    };
    if request.rank != 0 {
        return Ok(true);
    }
    let listener = match unique_id::bind(address, is_anywhere) {
        Ok(listener) => listener,
        Err(error) if error.kind() == ErrorKind::AddrInUse => return Ok(false),
        Err(error) => return Err(failure(format!("rank 0 could not listen at {address}: {error}"))),
    };
    let idle = request.deadline.saturating_duration_since(Instant::now());
    let options = RootOptions { idle, is_hosted: true, ..RootOptions::default() };
    *hosted = Some(root::start(listener, address, *id.secret(), options)?);
    Ok(true)
}

fn attempt(id: &UniqueId, address: SocketAddr, source: &mut dyn Source, request: &Request) -> Outcome {
    match try_attempt(id, address, source, request) {
        Ok(stream) => Outcome::Joined(stream),
        Err(outcome) => outcome,
    }
}

fn try_attempt(
    id: &UniqueId,
    address: SocketAddr,
    source: &mut dyn Source,
    request: &Request,
) -> std::result::Result<TcpStream, Outcome> {
    let retry = |error: io::Error| Outcome::Retry(unreachable_root(address, &error));
    let stream = connect(address, request.deadline).map_err(retry)?;
    let rank_nonce = auth::nonce()?;
    let root_nonce = greet(&stream, address, rank_nonce, request.deadline)?;

    let give_up = later(request.deadline, GRACE);
    let join = Join {
        rank: u32::try_from(request.rank).unwrap_or(u32::MAX),
        num_ranks: u32::try_from(request.num_ranks).unwrap_or(u32::MAX),
        remaining: request.deadline.saturating_duration_since(Instant::now()),
        timeout: request.timeout,
        process: root::process_token(),
    }
    .encode();
    let transcript = Transcript { rank_nonce: &rank_nonce, root_nonce: &root_nonce, join: &join };
    let proof = auth::prove(id.secret(), Side::Rank, &transcript);
    let left = |error: io::Error| match error.kind() {
        ErrorKind::TimedOut | ErrorKind::WouldBlock => retry(error),
        _ => Outcome::Left(format!(
            "the root {address} gave up: it closed the connection while rank {} was joining ({error}); what \
             the other ranks report says why",
            request.rank
        )),
    };
    wire::write_all(&stream, &[&join[..], &proof].concat(), give_up).map_err(left)?;

    watch(&stream, id, address, source, give_up)?;
    let mut verdict = [0; wire::VERDICT_BYTES];
    wire::read_exact(&stream, &mut verdict, give_up).map_err(left)?;
    let (code, mac) = verdict.split_at(4);
    if code == wire::VERDICT_SECRET.to_le_bytes() {
        return Err(Outcome::OtherSecret(format!(
            "the root {address} refused rank {}: its secret differs; all ranks need the same id or secret",
            request.rank
        )));
    }
    if code != wire::VERDICT_WELCOME.to_le_bytes() || !auth::verify(id.secret(), Side::Root, &transcript, mac)
    {
        return Err(Outcome::OtherSecret(format!(
            "the root {address} could not prove that it knows the secret of rank {}; its secret differs",
            request.rank
        )));
    }
    await_welcome(stream, id, address, source, request)
}

/// Waits until the root says that all ranks have joined.
fn await_welcome(
    stream: TcpStream,
    id: &UniqueId,
    address: SocketAddr,
    source: &mut dyn Source,
    request: &Request,
) -> std::result::Result<TcpStream, Outcome> {
    let give_up = later(request.deadline, GRACE);
    watch(&stream, id, address, source, give_up)?;
    let error = match read_frame(&stream, give_up) {
        Ok((Frame { kind: Kind::Welcome, .. }, _)) => return Ok(stream),
        Ok((Frame { kind: Kind::Failure, round, .. }, text)) => {
            let error = failure(String::from_utf8_lossy(&text));
            let has_successor = source.may_change() || id.hosting()? != Hosting::Creator;
            let is_early = round == wire::TURNED_AWAY && has_successor;
            return Err(if is_early || is_replaced(id, source)? {
                Outcome::Retry(error.message)
            } else {
                Outcome::Fatal(error)
            });
        }
        Ok(_) => return Err(Outcome::Fatal(failure(format!("the root {address} sent garbage")))),
        Err(error) => error,
    };
    let text = lost_root(address, request.rank, &error);
    Err(if source.may_change() { Outcome::Retry(text) } else { Outcome::Fatal(failure(text)) })
}

/// Connects, and makes the socket non-blocking.
fn connect(address: SocketAddr, deadline: Instant) -> io::Result<TcpStream> {
    // 2 s: a lost SYN is sent again after 1 s, and a root that has just started is found soon.
    // 1 ms: zero is refused, and a deadline that has passed still gets one try.
    let left = deadline.saturating_duration_since(Instant::now());
    let stream =
        TcpStream::connect_timeout(&address, left.clamp(Duration::from_millis(1), Duration::from_secs(2)))?;
    // A connection to a free local port can meet itself, when its own port is that one.
    if stream.local_addr()? == stream.peer_addr()? {
        return Err(ErrorKind::ConnectionRefused.into());
    }
    root::prepare(&stream)?;
    Ok(stream)
}

/// Exchanges nonces and versions; returns the root's nonce.
fn greet(
    stream: &TcpStream,
    address: SocketAddr,
    nonce: auth::Nonce,
    deadline: Instant,
) -> std::result::Result<auth::Nonce, Outcome> {
    let until = later(Instant::now(), GREETING_TIMEOUT).min(later(deadline, GRACE));
    let mut answer = [0; wire::GREETING_BYTES];
    wire::write_all(stream, &Greeting::new(nonce).encode(), until)
        .and_then(|()| wire::read_exact(stream, &mut answer, until))
        .map_err(|error| Outcome::Retry(unreachable_root(address, &error)))?;
    let challenge = Greeting::decode(&answer)
        .ok_or_else(|| Outcome::Retry(format!("what listens at {address} is not a root of libep")))?;
    if challenge.version != wire::VERSION {
        return Err(Outcome::Fatal(failure(format!(
            "the root {address} speaks version {} of the bootstrap protocol, this rank version {}; use the same \
             libep on all ranks",
            challenge.version,
            wire::VERSION
        ))));
    }
    Ok(challenge.nonce)
}

/// Waits until the root has sent something, and gives up when the id is replaced meanwhile.
fn watch(
    stream: &TcpStream,
    id: &UniqueId,
    address: SocketAddr,
    source: &mut dyn Source,
    give_up: Instant,
) -> std::result::Result<(), Outcome> {
    loop {
        let until = later(Instant::now(), WATCH_INTERVAL).min(give_up);
        match wire::wait(stream, PollFlags::IN, until) {
            Ok(true) => return Ok(()),
            // The read that follows times out and says so.
            Ok(false) if Instant::now() >= give_up => return Ok(()),
            Ok(false) => {}
            Err(error) => return Err(Outcome::Retry(unreachable_root(address, &error))),
        }
        if is_replaced(id, source)? {
            return Err(Outcome::Retry(format!("the root {address} was replaced by another")));
        }
    }
}

/// Whether the source has another id by now.
fn is_replaced(id: &UniqueId, source: &mut dyn Source) -> Result<bool> {
    Ok(source.may_change() && matches!(source.find()?, Found::Id(other) if other != *id))
}

/// Reads a frame from the root; the payload of a Result is left to the caller.
pub(super) fn read_frame(stream: &TcpStream, give_up: Instant) -> io::Result<(Frame, Vec<u8>)> {
    let mut head = [0; wire::FRAME_BYTES];
    wire::read_exact(stream, &mut head, give_up)?;
    let frame = Frame::decode(&head).ok_or(ErrorKind::InvalidData)?;
    let bytes = match frame.kind {
        Kind::Result => 0,
        Kind::Failure if frame.bytes <= wire::MAX_TEXT_BYTES as u64 => frame.bytes as usize,
        Kind::Welcome if frame.bytes == 0 => 0,
        Kind::Failure | Kind::Welcome | Kind::Gather => return Err(ErrorKind::InvalidData.into()),
    };
    Ok((frame, wire::read_vec(stream, bytes, give_up)?))
}

fn unreachable_root(address: SocketAddr, error: &io::Error) -> String {
    let reason = match error.kind() {
        ErrorKind::TimedOut | ErrorKind::WouldBlock => "it does not answer".to_string(),
        ErrorKind::UnexpectedEof => "it closed the connection".to_string(),
        _ => error.to_string(),
    };
    format!(
        "the root {address} cannot be reached ({reason}); check that its process was started, that this host \
         can reach it and that its group has not ended"
    )
}

/// The sentence for a root that was there and is no more.
pub(super) fn lost_root(address: SocketAddr, rank: usize, error: &io::Error) -> String {
    match error.kind() {
        ErrorKind::TimedOut => {
            format!("the root {address} did not answer rank {rank} before the deadline; its process may hang")
        }
        ErrorKind::InvalidData => format!("the root {address} sent garbage to rank {rank}"),
        ErrorKind::OutOfMemory => format!("rank {rank} has no memory for what the root {address} sends"),
        _ => format!(
            "rank {rank} lost the root {address} ({error}); the process that hosts the root has ended or left"
        ),
    }
}
