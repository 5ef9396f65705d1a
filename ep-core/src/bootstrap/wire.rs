//! The messages between a rank and the root, and blocking I/O that ends at a deadline.
//!
//! ```text
//! rank                                root
//! Hello: magic, version, nonce   →
//!                                ←    Challenge: magic, version, nonce
//! Proof: join, MAC               →
//!                                ←    Verdict: code, MAC
//!                                ←    frame Welcome, when all ranks have joined
//! frame Gather: one blob         →
//!                                ←    frame Result: every rank's length, then every rank's blob
//!                                ←    frame Failure, at any time: a sentence; it is the last frame
//! ```
//!
//! All numbers are little endian. The first 12 bytes of Hello and Challenge are the same in every
//! version, so that two versions can tell each other apart.

use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::MAX_BLOB_BYTES;
use super::auth::{MAC_BYTES, NONCE_BYTES, Nonce};

pub(super) const MAGIC: [u8; 8] = *b"EPBOOTST";
pub(super) const VERSION: u32 = 1;

/// How many connections may wait to be accepted.
pub(super) const LISTEN_BACKLOG: i32 = 4096;

pub(super) const GREETING_BYTES: usize = 12 + NONCE_BYTES;
pub(super) const JOIN_BYTES: usize = 32;
pub(super) const PROOF_BYTES: usize = JOIN_BYTES + MAC_BYTES;
pub(super) const VERDICT_BYTES: usize = 4 + MAC_BYTES;
pub(super) const FRAME_BYTES: usize = 32;

/// The longest sentence of a Failure frame.
pub(super) const MAX_TEXT_BYTES: usize = 4096;

pub(super) const VERDICT_WELCOME: u32 = 0;
pub(super) const VERDICT_SECRET: u32 = 1;

/// Marks a Failure that is for a rank which came twice: where another group may follow at the same
/// address, the rank may be early for that one, and tries again.
pub(super) const TURNED_AWAY: u64 = 1;

/// Copies `N` bytes at `at`; zeros where `bytes` is too short, which the callers rule out.
fn field<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut value = [0; N];
    if let Some(found) = bytes.get(at..at + N) {
        value.copy_from_slice(found);
    }
    value
}

/// Hello and Challenge have one form.
pub(super) struct Greeting {
    pub(super) version: u32,
    pub(super) nonce: Nonce,
}

impl Greeting {
    pub(super) fn new(nonce: Nonce) -> Greeting {
        Greeting { version: VERSION, nonce }
    }

    pub(super) fn encode(&self) -> [u8; GREETING_BYTES] {
        let mut bytes = [0; GREETING_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&self.version.to_le_bytes());
        bytes[12..].copy_from_slice(&self.nonce);
        bytes
    }

    /// `None` when the bytes do not begin with the magic.
    pub(super) fn decode(bytes: &[u8; GREETING_BYTES]) -> Option<Greeting> {
        let version = u32::from_le_bytes(field(bytes, 8));
        (bytes[..8] == MAGIC).then(|| Greeting { version, nonce: field(bytes, 12) })
    }
}

/// What a rank says about itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Join {
    pub(super) rank: u32,
    pub(super) num_ranks: u32,
    /// How long the rank waits from now.
    pub(super) remaining: Duration,
    /// How long it waits in all, for the error text.
    pub(super) timeout: Duration,
    /// Which process the rank lives in.
    pub(super) process: u64,
}

impl Join {
    pub(super) fn encode(&self) -> [u8; JOIN_BYTES] {
        let mut bytes = [0; JOIN_BYTES];
        bytes[..4].copy_from_slice(&self.rank.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.num_ranks.to_le_bytes());
        bytes[8..16].copy_from_slice(&micros(self.remaining).to_le_bytes());
        bytes[16..24].copy_from_slice(&micros(self.timeout).to_le_bytes());
        bytes[24..].copy_from_slice(&self.process.to_le_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8; JOIN_BYTES]) -> Join {
        Join {
            rank: u32::from_le_bytes(field(bytes, 0)),
            num_ranks: u32::from_le_bytes(field(bytes, 4)),
            remaining: Duration::from_micros(u64::from_le_bytes(field(bytes, 8))),
            timeout: Duration::from_micros(u64::from_le_bytes(field(bytes, 16))),
            process: u64::from_le_bytes(field(bytes, 24)),
        }
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Welcome = 1,
    Gather = 2,
    Result = 3,
    Failure = 4,
}

/// The head of a frame; `bytes` of payload follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Frame {
    pub(super) kind: Kind,
    pub(super) bytes: u64,
    /// Of a Failure: 0 or [`TURNED_AWAY`].
    pub(super) round: u64,
    /// Of a Gather: how long the rank waits.
    pub(super) remaining: Duration,
}

impl Frame {
    pub(super) fn encode(&self) -> [u8; FRAME_BYTES] {
        let mut bytes = [0; FRAME_BYTES];
        bytes[..4].copy_from_slice(&(self.kind as u32).to_le_bytes());
        bytes[8..16].copy_from_slice(&self.bytes.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.round.to_le_bytes());
        bytes[24..].copy_from_slice(&micros(self.remaining).to_le_bytes());
        bytes
    }

    /// `None` when the kind is unknown or the reserved word is not zero.
    pub(super) fn decode(bytes: &[u8; FRAME_BYTES]) -> Option<Frame> {
        let kind = match u32::from_le_bytes(field(bytes, 0)) {
            1 => Kind::Welcome,
            2 => Kind::Gather,
            3 => Kind::Result,
            4 => Kind::Failure,
            _ => return None,
        };
        (field(bytes, 4) == [0; 4]).then(|| Frame {
            kind,
            bytes: u64::from_le_bytes(field(bytes, 8)),
            round: u64::from_le_bytes(field(bytes, 16)),
            remaining: Duration::from_micros(u64::from_le_bytes(field(bytes, 24))),
        })
    }

    /// A frame with its payload, ready to be sent.
    pub(super) fn with_payload(kind: Kind, round: u64, payload: &[u8]) -> Vec<u8> {
        let head = Frame { kind, bytes: payload.len() as u64, round, remaining: Duration::ZERO };
        [&head.encode(), payload].concat()
    }
}

/// The payload bytes that a Gather may have.
pub(super) fn gather_bytes(frame: &Frame) -> Option<usize> {
    usize::try_from(frame.bytes).ok().filter(|&bytes| bytes <= MAX_BLOB_BYTES)
}

/// Parts the payload of a Result into `num_ranks` blobs; `None` when the lengths do not add up.
pub(super) fn split_result(payload: &[u8], num_ranks: usize) -> Option<Vec<Vec<u8>>> {
    let (lengths, mut rest) = payload.split_at_checked(num_ranks.checked_mul(8)?)?;
    let mut blobs = Vec::with_capacity(num_ranks);
    for length in lengths.chunks_exact(8) {
        let length = usize::try_from(u64::from_le_bytes(field(length, 0))).ok()?;
        let (blob, next) = rest.split_at_checked(length)?;
        blobs.push(blob.to_vec());
        rest = next;
    }
    rest.is_empty().then_some(blobs)
}

/// Waits until `stream` is ready for `events` or `deadline` has passed; false says the latter.
pub(super) fn wait(stream: &TcpStream, events: PollFlags, deadline: Instant) -> io::Result<bool> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let mut fds = [PollFd::new(stream, events)];
        match poll(&mut fds, Some(&timespec(left))) {
            Ok(0) if Instant::now() >= deadline => return Ok(false),
            Ok(0) | Err(rustix::io::Errno::INTR) => {}
            Ok(_) => return Ok(true),
            Err(error) => return Err(error.into()),
        }
    }
}

/// A poll timeout of at most an hour; the callers look at the clock again.
pub(super) fn timespec(duration: Duration) -> Timespec {
    let bounded = duration.min(Duration::from_secs(3600));
    Timespec { tv_sec: bounded.as_secs() as i64, tv_nsec: i64::from(bounded.subsec_nanos()) }
}

/// Fills `buffer` from a non-blocking stream.
pub(super) fn read_exact(mut stream: &TcpStream, buffer: &mut [u8], deadline: Instant) -> io::Result<()> {
    let mut filled = 0;
    while let Some(rest) = buffer.get_mut(filled..).filter(|rest| !rest.is_empty()) {
        match stream.read(rest) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(count) => filled += count,
            Err(error) => retry(error, stream, PollFlags::IN, deadline)?,
        }
    }
    Ok(())
}

/// Reads `bytes` bytes, allocating as they arrive and not as announced.
pub(super) fn read_vec(stream: &TcpStream, bytes: usize, deadline: Instant) -> io::Result<Vec<u8>> {
    const STEP: usize = 1 << 20;
    let mut data = Vec::new();
    while data.len() < bytes {
        let start = data.len();
        let end = bytes.min(start + STEP.max(start));
        data.try_reserve_exact(end - start).map_err(|_| ErrorKind::OutOfMemory)?;
        data.resize(end, 0);
        read_exact(stream, &mut data[start..], deadline)?;
    }
    Ok(data)
}

/// Writes all of `buffer` to a non-blocking stream.
pub(super) fn write_all(mut stream: &TcpStream, mut buffer: &[u8], deadline: Instant) -> io::Result<()> {
    while !buffer.is_empty() {
        match stream.write(buffer) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(count) => buffer = buffer.get(count..).unwrap_or_default(),
            Err(error) => retry(error, stream, PollFlags::OUT, deadline)?,
        }
    }
    Ok(())
}

/// Waits after an error that only says "not now"; any other error is handed on.
fn retry(error: io::Error, stream: &TcpStream, events: PollFlags, deadline: Instant) -> io::Result<()> {
    match error.kind() {
        ErrorKind::Interrupted => Ok(()),
        ErrorKind::WouldBlock if wait(stream, events, deadline)? => Ok(()),
        ErrorKind::WouldBlock => Err(ErrorKind::TimedOut.into()),
        _ => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_survive_the_bytes() {
        let join = Join {
            rank: 3,
            num_ranks: 8,
            remaining: Duration::from_millis(1500),
            timeout: Duration::from_secs(30),
            process: u64::MAX - 5,
        };
        assert_eq!(Join::decode(&join.encode()), join);
        let frame =
            Frame { kind: Kind::Result, bytes: 1 << 33, round: 9, remaining: Duration::from_micros(7) };
        assert_eq!(Frame::decode(&frame.encode()), Some(frame));
        let greeting = Greeting::decode(&Greeting::new([5; 32]).encode()).unwrap();
        assert_eq!((greeting.version, greeting.nonce), (VERSION, [5; 32]));
    }

    #[test]
    fn garbage_is_not_decoded() {
        assert!(Frame::decode(&[0xff; FRAME_BYTES]).is_none());
        assert!(Greeting::decode(&[0; GREETING_BYTES]).is_none());
        assert!(split_result(&[0; 7], 1).is_none());
        assert!(split_result(&u64::MAX.to_le_bytes(), 1).is_none());
        assert!(split_result(&[0; 9], 1).is_none());
        assert!(split_result(&[], usize::MAX).is_none());
        assert_eq!(split_result(&[0; 16], 2), Some(vec![vec![], vec![]]));
    }

    #[test]
    fn frame_lengths_above_the_limit_are_refused() {
        let frame = |bytes| Frame { kind: Kind::Gather, bytes, round: 0, remaining: Duration::ZERO };
        assert_eq!(gather_bytes(&frame(MAX_BLOB_BYTES as u64)), Some(MAX_BLOB_BYTES));
        assert_eq!(gather_bytes(&frame(MAX_BLOB_BYTES as u64 + 1)), None);
        assert_eq!(gather_bytes(&frame(u64::MAX)), None);
    }
}
