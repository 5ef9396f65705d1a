//! Connections between the ranks of one machine: each rank hands its memory to the others as a
//! descriptor over a Unix socket, and notices a peer's death when the socket closes or its process ends.
//!
//! The sockets have abstract addresses: nothing in any file system, gone with the process. A stranger
//! may connect but gets nothing: the peer must be of the same user and know a random secret that
//! travelled through the bootstrap.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

use super::peer::{is_same_user, process_of};
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
    /// The peer's process: children that it forked keep its sockets open. None where the system has none.
    process: Option<OwnedFd>,
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

    /// Accepts the connections of the ranks in `asking`, to which [`Listener::ask`] has connected. Returns links by
    /// rank.
    ///
    /// # Errors
    /// [`Status::Bootstrap`] naming the first peer that gave up, or is missing at the deadline.
    pub(super) fn connect(
        self,
        asking: Vec<(usize, OwnedFd)>,
        deadline: Instant,
    ) -> Result<Vec<(usize, Link)>> {
        let mut answering: Vec<Option<OwnedFd>> = asking.iter().map(|_| None).collect();
        while let Some(missing) = answering.iter().position(Option::is_none) {
            let (peer, socket) = &asking[missing];
            self.wait_connection(socket.as_fd(), deadline, *peer)?;
            if let Some((rank, socket)) = self.accept(deadline)?
                && let Some(index) = asking.iter().position(|peer| peer.0 == rank)
            {
                answering[index] = Some(socket);
            }
        }
        let pairs = asking.into_iter().zip(answering.into_iter().flatten());
        let link = |((rank, asking), answering): ((usize, OwnedFd), OwnedFd)| {
            let process = process_of(answering.as_fd());
            (rank, Link { asking, answering, process })
        };
        Ok(pairs.map(link).collect())
    }

    /// Waits for a connection. `asking` goes to a peer that has not connected yet: it is closed when that
    /// peer closes its own listener without having accepted, which means that it failed.
    fn wait_connection(&self, asking: BorrowedFd<'_>, deadline: Instant, peer: usize) -> Result<()> {
        let mut fds = [
            PollFd::from_borrowed_fd(self.socket.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(asking, PollFlags::RDHUP),
        ];
        poll_until(&mut fds, deadline, peer)?;
        if fds[0].revents().is_empty() {
            let text = format!("rank {peer} gave up before it connected to this rank's memory");
            return Err(Error::new(Status::Bootstrap, text));
        }
        Ok(())
    }

    /// Connects to a peer's listener.
    ///
    /// # Errors
    /// [`Status::Unsupported`] if its address does not exist here: it is on another machine.
    /// [`Status::Bootstrap`] or [`Status::System`] otherwise.
    pub(super) fn ask(&self, own_rank: usize, peer: usize, secret: &SegmentId) -> Result<OwnedFd> {
        let socket = socket()?;
        rustix::net::connect(&socket, &address(secret)?).map_err(|e| {
            Error::new(
                Status::Unsupported,
                format!(
                    "rank {own_rank} cannot reach the shared memory of rank {peer} ({e}): it runs on another \
                     machine or in another network namespace, and there is no network transport between them"
                ),
            )
        })?;
        // The name can be seen by all users: one who took it after its owner has gone gets no secret.
        if !is_same_user(socket.as_fd()) {
            let text = format!("the socket of rank {peer} belongs to another user");
            return Err(Error::new(Status::Bootstrap, text));
        }
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
        let socket = match rustix::net::accept_with(&self.socket, flags) {
            Ok(socket) => socket,
            // The connection is gone again, or a signal came.
            Err(Errno::AGAIN | Errno::CONNABORTED | Errno::INTR) => return Ok(None),
            Err(e) => return Err(Error::system("accept(AF_UNIX)", e)),
        };
        // A peer sends its greeting before this rank accepts; a stranger who sends nothing costs 100 ms.
        let patience = deadline.min(Instant::now() + std::time::Duration::from_millis(100));
        if !is_same_user(socket.as_fd()) || wait_readable(socket.as_fd(), patience, usize::MAX).is_err() {
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
    /// Where descriptors come from.
    pub(super) fn asking(&self) -> BorrowedFd<'_> {
        self.asking.as_fd()
    }

    /// Sends a descriptor to the peer together with a number that says what it is. False: not now.
    ///
    /// # Errors
    /// [`Status::PeerLost`] if the peer is gone.
    pub(super) fn give(&self, peer: usize, tag: u64, fd: BorrowedFd<'_>) -> Result<bool> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds = [fd];
        control.push(SendAncillaryMessage::ScmRights(&fds));
        let tag = tag.to_le_bytes();
        let slices = [IoSlice::new(&tag)];
        match rustix::net::sendmsg(&self.answering, &slices, &mut control, SendFlags::NOSIGNAL) {
            Ok(_) => Ok(true),
            // The socket's buffer is full, or too many descriptors of this user are under way.
            Err(Errno::AGAIN | Errno::TOOMANYREFS | Errno::INTR | Errno::NOBUFS) => Ok(false),
            Err(e) => Err(lost(peer, &e)),
        }
    }

    /// Takes the descriptor that the peer sent with `tag`. None: not yet.
    ///
    /// # Errors
    /// [`Status::PeerLost`] if the peer is gone, [`Status::System`] if there is no room for a descriptor.
    pub(super) fn take(&self, peer: usize, tag: u64) -> Result<Option<OwnedFd>> {
        while let Some((found, fd)) = self.take_any(peer)? {
            match fd {
                // Of an allocation that failed before this rank had taken all descriptors.
                _ if found < tag => {}
                Some(fd) if found == tag => return Ok(Some(fd)),
                Some(_) => {
                    return Err(Error::new(
                        Status::PeerLost,
                        format!("rank {peer} is {} allocations of windows ahead of this rank", found - tag),
                    ));
                }
                None => {
                    let call = format!("taking the memory of rank {peer}");
                    return Err(Error::system(&call, "this process has no descriptor left"));
                }
            }
        }
        Ok(None)
    }

    /// The next descriptor and its tag; the system drops a descriptor for which the process has no room.
    fn take_any(&self, peer: usize) -> Result<Option<(u64, Option<OwnedFd>)>> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut tag = [0u8; 8];
        let mut slices = [IoSliceMut::new(&mut tag)];
        let received = rustix::net::recvmsg(&self.asking, &mut slices, &mut control, RecvFlags::CMSG_CLOEXEC);
        let bytes = match received {
            Ok(message) => message.bytes,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
            Err(e) => return Err(lost(peer, &e)),
        };
        if bytes != size_of::<u64>() {
            return Err(lost(peer, &Errno::CONNRESET));
        }
        let fd = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
            _ => None,
        });
        Ok(Some((u64::from_le_bytes(tag), fd)))
    }

    /// True once the peer's process has closed its side: it left or died.
    pub(super) fn is_closed(&self) -> bool {
        let (process, what) = match &self.process {
            Some(process) => (process, PollFlags::IN),
            None => (&self.asking, PollFlags::empty()),
        };
        let mut fds = [PollFd::new(&self.asking, PollFlags::RDHUP), PollFd::new(process, what)];
        let now = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
        let ended = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
        poll(&mut fds, Some(&now)).is_ok()
            && (fds[0].revents().intersects(ended) || fds[1].revents().intersects(ended | PollFlags::IN))
    }
}

fn lost(peer: usize, source: &Errno) -> Error {
    Error::new(Status::PeerLost, format!("rank {peer} left while its memory was being mapped ({source})"))
}

fn wait_readable(fd: BorrowedFd<'_>, deadline: Instant, peer: usize) -> Result<()> {
    poll_until(&mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)], deadline, peer)
}

/// Waits until one of `fds` has what it was asked for.
fn poll_until(fds: &mut [PollFd<'_>], deadline: Instant, peer: usize) -> Result<()> {
    loop {
        let time = deadline.saturating_duration_since(Instant::now());
        let timeout =
            rustix::time::Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() };
        match poll(fds, Some(&timeout)) {
            Ok(0) => {
                return Err(Error::new(
                    Status::Bootstrap,
                    format!("rank {peer} did not connect to this rank's memory before the deadline"),
                ));
            }
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(e) => return Err(Error::system("poll", e)),
        }
    }
}
