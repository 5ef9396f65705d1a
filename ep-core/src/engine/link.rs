//! Connections between the ranks of one machine: each rank hands its memory to the others as a
//! descriptor over a Unix socket, and notices a peer's death when the socket closes.
//!
//! The sockets have abstract addresses: nothing in any file system, gone with the process. A stranger
//! may connect but gets nothing: the peer must be of the same user and know a random secret that
//! travelled through the bootstrap.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

use crate::error::{Error, Result, Status};
use crate::mem::SegmentId;

/// A rank's listening socket, before its peers are connected.
pub(super) struct Listener {
    socket: OwnedFd,
    secret: SegmentId,
}

/// Both connections to one peer: over one each side asks, over the other it answers.
pub(super) struct Link {
    /// To the peer's listener: descriptors come from here.
    asking: OwnedFd,
    /// From the peer: descriptors go out here.
    answering: OwnedFd,
}

const HELLO_BYTES: usize = 20;

fn socket() -> Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        .map_err(|e| Error::system("socket(AF_UNIX)", e))
}

fn address(secret: &SegmentId) -> Result<SocketAddrUnix> {
    // The address is derived from the secret's first half only: knowing it does not give the rest.
    let name: String = secret[..8].iter().map(|byte| format!("{byte:02x}")).collect();
    SocketAddrUnix::new_abstract_name(format!("libep-{name}").as_bytes())
        .map_err(|e| Error::system("making an abstract socket address", e))
}

impl Listener {
    /// Listens under an address that `secret` names.
    ///
    /// # Errors
    /// [`Status::System`] naming the call.
    pub(super) fn new(secret: SegmentId) -> Result<Listener> {
        let socket = socket()?;
        rustix::net::bind(&socket, &address(&secret)?).map_err(|e| Error::system("bind(AF_UNIX)", e))?;
        rustix::net::listen(&socket, 4096).map_err(|e| Error::system("listen(AF_UNIX)", e))?;
        Ok(Listener { socket, secret })
    }

    /// Connects to `peers` (rank, secret) and accepts their connections. Returns links by rank.
    ///
    /// # Errors
    /// [`Status::Bootstrap`] naming the first peer that is missing at the deadline,
    /// [`Status::Unsupported`] if a peer's address does not exist here: it is on another machine.
    pub(super) fn connect(
        self,
        own_rank: usize,
        peers: &[(usize, SegmentId)],
        deadline: Instant,
    ) -> Result<Vec<(usize, Link)>> {
        let mut asking = Vec::with_capacity(peers.len());
        for (rank, secret) in peers {
            asking.push(self.ask(own_rank, *rank, secret)?);
        }
        let mut answering: Vec<Option<OwnedFd>> = peers.iter().map(|_| None).collect();
        while let Some(missing) = answering.iter().position(Option::is_none) {
            wait_readable(self.socket.as_fd(), deadline, peers[missing].0)?;
            if let Some((rank, socket)) = self.accept(deadline)?
                && let Some(index) = peers.iter().position(|peer| peer.0 == rank)
            {
                answering[index] = Some(socket);
            }
        }
        let pairs = asking.into_iter().zip(answering.into_iter().flatten());
        Ok(peers
            .iter()
            .zip(pairs)
            .map(|(peer, (asking, answering))| (peer.0, Link { asking, answering }))
            .collect())
    }

    fn ask(&self, own_rank: usize, peer: usize, secret: &SegmentId) -> Result<OwnedFd> {
        let socket = socket()?;
        rustix::net::connect(&socket, &address(secret)?).map_err(|e| {
            Error::new(
                Status::Unsupported,
                format!(
                    "rank {own_rank} cannot reach the shared memory of rank {peer} ({e}): it runs on another \
                     machine or in another network namespace, and this build has no network transport"
                ),
            )
        })?;
        let mut hello = [0u8; HELLO_BYTES];
        hello[..16].copy_from_slice(secret);
        hello[16..].copy_from_slice(&(own_rank as u32).to_le_bytes());
        rustix::net::send(&socket, &hello, SendFlags::NOSIGNAL)
            .map_err(|e| Error::system(&format!("greeting rank {peer}"), e))?;
        Ok(socket)
    }

    /// One connection, if it is a peer's: strangers are dropped.
    fn accept(&self, deadline: Instant) -> Result<Option<(usize, OwnedFd)>> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let Ok(socket) = rustix::net::accept_with(&self.socket, flags) else {
            return Ok(None);
        };
        let same_user = rustix::net::sockopt::socket_peercred(&socket)
            .is_ok_and(|peer| peer.uid == rustix::process::geteuid());
        // A peer sends its greeting before this rank accepts; a stranger who sends nothing costs 100 ms.
        let patience = deadline.min(Instant::now() + std::time::Duration::from_millis(100));
        if !same_user || wait_readable(socket.as_fd(), patience, usize::MAX).is_err() {
            return Ok(None);
        }
        let mut hello = [0u8; HELLO_BYTES];
        match rustix::net::recv(&socket, &mut hello[..], RecvFlags::empty()) {
            Ok((HELLO_BYTES, _)) if hello[..16] == self.secret => {
                let rank = u32::from_le_bytes([hello[16], hello[17], hello[18], hello[19]]);
                Ok(Some((rank as usize, socket)))
            }
            _ => Ok(None),
        }
    }
}

impl Link {
    /// Sends a descriptor to the peer together with a number that says what it is.
    ///
    /// # Errors
    /// [`Status::PeerLost`] if the peer is gone.
    pub(super) fn send_fd(&self, peer: usize, tag: u64, fd: BorrowedFd<'_>) -> Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds = [fd];
        control.push(SendAncillaryMessage::ScmRights(&fds));
        rustix::net::sendmsg(
            &self.answering,
            &[IoSlice::new(&tag.to_le_bytes())],
            &mut control,
            SendFlags::NOSIGNAL,
        )
        .map_err(|e| lost(peer, &e))?;
        Ok(())
    }

    /// Receives the descriptor that the peer sent with `tag`.
    ///
    /// # Errors
    /// [`Status::Bootstrap`] at the deadline, [`Status::PeerLost`] if the peer is gone.
    pub(super) fn receive_fd(&self, peer: usize, tag: u64, deadline: Instant) -> Result<OwnedFd> {
        wait_readable(self.asking.as_fd(), deadline, peer)?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut bytes = [0u8; 8];
        let flags = RecvFlags::CMSG_CLOEXEC;
        let message =
            rustix::net::recvmsg(&self.asking, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags)
                .map_err(|e| lost(peer, &e))?;
        let fd = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
            _ => None,
        });
        match fd {
            Some(fd) if message.bytes == 8 && u64::from_le_bytes(bytes) == tag => Ok(fd),
            _ => Err(Error::new(
                Status::PeerLost,
                format!("rank {peer} left, or sent something else, while its memory was being mapped"),
            )),
        }
    }

    /// True once the peer's process has closed its side: it left or died.
    pub(super) fn is_closed(&self) -> bool {
        let mut fds = [PollFd::new(&self.asking, PollFlags::RDHUP)];
        let now = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut fds, Some(&now)).is_ok()
            && fds[0].revents().intersects(PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR)
    }
}

fn lost(peer: usize, source: &rustix::io::Errno) -> Error {
    Error::new(Status::PeerLost, format!("rank {peer} left while its memory was being mapped ({source})"))
}

fn wait_readable(fd: BorrowedFd<'_>, deadline: Instant, peer: usize) -> Result<()> {
    loop {
        let time = deadline.saturating_duration_since(Instant::now());
        let timeout =
            rustix::time::Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() };
        let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
        match poll(&mut fds, Some(&timeout)) {
            Ok(0) => {
                return Err(Error::new(
                    Status::Bootstrap,
                    format!("rank {peer} did not connect to this rank's memory before the deadline"),
                ));
            }
            Ok(_) => return Ok(()),
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(Error::system("poll", e)),
        }
    }
}
