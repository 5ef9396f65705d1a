//! One connection at the root: authentication, framing and queued output, never blocking.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::auth::{self, Nonce, Side, Transcript};
use super::wire::{self, Frame, Greeting, Join, Kind};

/// What a connection brought.
#[derive(Debug)]
pub(super) enum Event {
    /// It knows the secret and says who it is.
    Join(Join),
    Gather {
        rank: usize,
        round: u64,
        remaining: Duration,
        blob: Vec<u8>,
    },
    /// It does not know the secret, and was told so.
    Stranger,
    /// A rank sent what no rank sends; the sentence names it.
    Garbage(String),
}

/// The connection is of no more use.
#[derive(Debug)]
pub(super) struct Closed;

#[derive(Clone, Copy, Debug)]
enum State {
    Hello,
    Proof {
        rank_nonce: Nonce,
        root_nonce: Nonce,
    },
    Member {
        rank: usize,
    },
    /// Nothing is read from it any more; what is queued is sent, and then it is closed.
    Closing,
}

#[derive(Debug)]
pub(super) struct Conn {
    stream: TcpStream,
    state: State,
    process: Option<u64>,
    /// The message that is arriving; never longer than what its state allows.
    input: Vec<u8>,
    output: VecDeque<Arc<Vec<u8>>>,
    /// How much of the first queued output is sent.
    sent: usize,
    is_shut: bool,
    /// When to give it up, unless it becomes a member before.
    expires: Option<Instant>,
}

impl Conn {
    pub(super) fn new(stream: TcpStream, expires: Instant) -> Conn {
        Conn {
            stream,
            state: State::Hello,
            process: None,
            input: Vec::new(),
            output: VecDeque::new(),
            sent: 0,
            is_shut: false,
            expires: Some(expires),
        }
    }

    pub(super) fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// The rank that joined over this connection and is still a member.
    pub(super) fn rank(&self) -> Option<usize> {
        match self.state {
            State::Member { rank } => Some(rank),
            State::Hello | State::Proof { .. } | State::Closing => None,
        }
    }

    /// The process of the rank that joined over this connection, also while it is told the last words.
    pub(super) fn process(&self) -> Option<u64> {
        self.process
    }

    pub(super) fn is_unknown(&self) -> bool {
        matches!(self.state, State::Hello | State::Proof { .. })
    }

    pub(super) fn expires(&self) -> Option<Instant> {
        self.expires
    }

    pub(super) fn has_output(&self) -> bool {
        !self.output.is_empty()
    }

    pub(super) fn queue(&mut self, bytes: &Arc<Vec<u8>>) {
        self.output.push_back(Arc::clone(bytes));
    }

    /// Sends `bytes` as the last ones, and closes.
    pub(super) fn finish(&mut self, bytes: &Arc<Vec<u8>>, expires: Instant) {
        self.queue(bytes);
        self.close(expires);
    }

    fn close(&mut self, expires: Instant) {
        self.state = State::Closing;
        self.input = Vec::new();
        self.expires = Some(expires);
    }

    /// Reads until an event is complete or nothing more has arrived.
    pub(super) fn receive(&mut self, secret: &[u8; 32]) -> Result<Option<Event>, Closed> {
        loop {
            if matches!(self.state, State::Closing) {
                return self.discard().map(|()| None);
            }
            let want = match self.want() {
                Ok(want) => want,
                Err(event) => return Ok(Some(event)),
            };
            if self.input.len() < want {
                match self.read_some(want) {
                    Ok(0) => return Err(Closed),
                    Ok(_) => {}
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                    Err(_) => return Err(Closed),
                }
                continue;
            }
            let message = std::mem::take(&mut self.input);
            if let Some(event) = self.take(message, secret)? {
                return Ok(Some(event));
            }
        }
    }

    /// How long the arriving message is, as far as is known yet.
    fn want(&self) -> Result<usize, Event> {
        match self.state {
            State::Hello => Ok(wire::GREETING_BYTES),
            State::Proof { .. } => Ok(wire::PROOF_BYTES),
            State::Closing => Ok(0),
            State::Member { rank } => {
                let Some(head) = self.input.first_chunk() else {
                    return Ok(wire::FRAME_BYTES);
                };
                let frame = Frame::decode(head).filter(|frame| frame.kind == Kind::Gather);
                let garbage = || Event::Garbage(format!("rank {rank} sent a message that no rank sends"));
                let frame = frame.ok_or_else(garbage)?;
                let bytes = wire::gather_bytes(&frame);
                let too_long = || Event::Garbage(super::too_long(rank, frame.bytes));
                Ok(wire::FRAME_BYTES + bytes.ok_or_else(too_long)?)
            }
        }
    }

    fn read_some(&mut self, want: usize) -> io::Result<usize> {
        // Memory follows what has arrived, not what was announced.
        const STEP: usize = 64 << 10;
        let start = self.input.len();
        let end = want.min(start + STEP.max(start));
        self.input.try_reserve(end - start).map_err(|_| ErrorKind::OutOfMemory)?;
        self.input.resize(end, 0);
        let result = match self.input.get_mut(start..) {
            Some(space) => self.stream.read(space),
            None => Ok(0),
        };
        self.input.truncate(start + result.as_ref().copied().unwrap_or(0));
        result
    }

    /// Reads and forgets, so that closing does not reset the connection under the last words.
    fn discard(&mut self) -> Result<(), Closed> {
        match self.stream.read(&mut [0; 64 << 10]) {
            Ok(0) => Err(Closed),
            Ok(_) => Ok(()),
            Err(error) if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) => Ok(()),
            Err(_) => Err(Closed),
        }
    }

    /// Acts on a complete message.
    fn take(&mut self, mut message: Vec<u8>, secret: &[u8; 32]) -> Result<Option<Event>, Closed> {
        match self.state {
            State::Closing => Ok(None),
            State::Hello => {
                let hello = message.first_chunk().and_then(Greeting::decode).ok_or(Closed)?;
                let root_nonce = auth::nonce().map_err(|_| Closed)?;
                self.queue(&Arc::new(Greeting::new(root_nonce).encode().to_vec()));
                self.state = State::Proof { rank_nonce: hello.nonce, root_nonce };
                if hello.version != wire::VERSION {
                    // The rank reads our version from the Challenge and tells its user.
                    self.close(self.expires.unwrap_or_else(Instant::now));
                }
                Ok(None)
            }
            State::Proof { rank_nonce, root_nonce } => {
                let (join, proof) = message.split_first_chunk().ok_or(Closed)?;
                let transcript = Transcript { rank_nonce: &rank_nonce, root_nonce: &root_nonce, join };
                if !auth::verify(secret, Side::Rank, &transcript, proof) {
                    let verdict = verdict(wire::VERDICT_SECRET, &[0; auth::MAC_BYTES]);
                    self.finish(&verdict, self.expires.unwrap_or_else(Instant::now));
                    return Ok(Some(Event::Stranger));
                }
                let mac = auth::prove(secret, Side::Root, &transcript);
                let join = Join::decode(join);
                self.queue(&verdict(wire::VERDICT_WELCOME, &mac));
                self.state = State::Member { rank: join.rank as usize };
                self.process = Some(join.process);
                self.expires = None;
                Ok(Some(Event::Join(join)))
            }
            State::Member { rank } => {
                let frame = message.first_chunk().and_then(Frame::decode).ok_or(Closed)?;
                let blob = message.split_off(wire::FRAME_BYTES);
                Ok(Some(Event::Gather { rank, round: frame.round, remaining: frame.remaining, blob }))
            }
        }
    }

    /// Sends what the peer takes now.
    pub(super) fn send(&mut self) -> Result<(), Closed> {
        while let Some(front) = self.output.front() {
            let rest = front.get(self.sent..).unwrap_or_default();
            if rest.is_empty() {
                self.output.pop_front();
                self.sent = 0;
                continue;
            }
            match self.stream.write(rest) {
                Ok(0) => return Err(Closed),
                Ok(count) => self.sent += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(_) => return Err(Closed),
            }
        }
        if matches!(self.state, State::Closing) && !self.is_shut {
            self.is_shut = true;
            self.stream.shutdown(Shutdown::Write).map_err(|_| Closed)?;
        }
        Ok(())
    }
}

fn verdict(code: u32, mac: &[u8; auth::MAC_BYTES]) -> Arc<Vec<u8>> {
    Arc::new([&code.to_le_bytes()[..], mac].concat())
}
