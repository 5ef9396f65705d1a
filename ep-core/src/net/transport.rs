//! The seam to a network: what the proxy needs of a NIC, and nothing else.
//!
//! A [`Transport`] is one NIC of this process: an endpoint that talks to all peers, and its completion
//! queue. One thread owns it, the proxy's. The contract is that of EFA's SRD, the weakest network served:
//!
//! - a write arrives completely or fails; never twice, never in part without a failure at its sender;
//! - two writes, also of one sender to one peer, arrive in any order, and so do their completions;
//! - the receiver learns of a write only by its 32-bit immediate, which comes once per write and after all of
//!   its bytes; nothing else about the bytes' order may be used.

use std::os::fd::BorrowedFd;

use crate::error::Result;

/// The longest address of a NIC.
pub const MAX_ADDRESS_BYTES: usize = 64;

/// One NIC of this process.
///
/// [`Transport::write`] and [`Transport::poll`] are the data path: they neither block nor allocate nor lock.
pub trait Transport: Send {
    /// What peers need for their [`Transport::connect`], at most [`MAX_ADDRESS_BYTES`].
    fn address(&self) -> Vec<u8>;

    /// What the NIC can do. The same every time.
    fn limits(&self) -> Limits;

    /// Registers memory, to be read by own writes and written by peers.
    ///
    /// # Errors
    /// [`crate::Status::System`] or [`crate::Status::OutOfMemory`] naming the call; nothing stays registered.
    fn register(&mut self, region: &Region<'_>) -> Result<Registered>;

    /// Ends a registration. A peer's write that comes later fails at the peer.
    ///
    /// The caller has no write of this region in flight.
    ///
    /// # Errors
    /// [`crate::Status::System`] naming the call; the memory then must not be freed.
    fn deregister(&mut self, id: RegionId) -> Result<()>;

    /// Makes a peer's NIC known, for writes to it and for writes from it. The same address twice gives ids that
    /// are disconnected each for itself.
    ///
    /// # Errors
    /// [`crate::Status::Bootstrap`] if the bytes are no address, or one that this NIC cannot reach.
    fn connect(&mut self, address: &[u8]) -> Result<PeerId>;

    /// Forgets a peer. The caller has no write to it in flight.
    fn disconnect(&mut self, peer: PeerId);

    /// Posts one write. Its completion comes by [`Transport::poll`], once, unless this returns
    /// [`Posted::Again`] or an error.
    ///
    /// # Errors
    /// Any: the write can never be posted, because the peer, the region or the NIC is broken. Nothing was posted.
    fn write(&mut self, write: &Write) -> Result<Posted>;

    /// Appends completions to `out`, as many as are there and as its spare capacity takes.
    ///
    /// # Errors
    /// The NIC is lost (its completion queue overflowed, the device is gone): nothing on it completes any more.
    fn poll(&mut self, out: &mut Vec<Completion>) -> Result<()>;

    /// What to wait for with poll(2), for reading, after [`Transport::may_sleep`] returned true. None: this NIC can
    /// only be polled, so the proxy sleeps a bounded part of the time for which nothing has happened.
    fn wait_fd(&self) -> Option<BorrowedFd<'_>>;

    /// True if nothing is left to poll and the descriptor will become readable with the next completion. Not asked
    /// where there is no descriptor.
    fn may_sleep(&mut self) -> bool;
}

/// What a NIC can do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of the largest write.
    pub max_write: u64,
    /// Writes that may be posted and not completed.
    pub tx_depth: usize,
    /// Completions, of both kinds, that may be there and not polled. More are fatal to the NIC.
    pub cq_depth: usize,
    /// Which NIC it is, for people: `tcp 10.0.0.1 (libfabric 1.17)`.
    pub name: String,
}

/// Memory to register.
#[derive(Clone, Copy, Debug)]
pub struct Region<'a> {
    address: *mut u8,
    bytes: u64,
    dmabuf: Option<DmaBuf<'a>>,
}

/// Memory of a device, as the value that its driver exports.
#[derive(Clone, Copy, Debug)]
pub struct DmaBuf<'a> {
    /// The exported descriptor.
    pub fd: BorrowedFd<'a>,
    /// Where the region begins in it, in bytes.
    pub offset: u64,
}

impl<'a> Region<'a> {
    /// Names `bytes` bytes at `address`, of the host unless `dmabuf` says otherwise.
    ///
    /// # Safety
    /// The memory stays mapped until it was deregistered, or the transport dropped. Until then peers may store
    /// into any byte of it at any time, so it is accessed by pointer only, under a protocol that orders it.
    pub unsafe fn new(address: *mut u8, bytes: u64, dmabuf: Option<DmaBuf<'a>>) -> Region<'a> {
        Region { address, bytes, dmabuf }
    }

    /// First address.
    pub fn address(&self) -> *mut u8 {
        self.address
    }

    /// Size in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The device's export, if it is a device's memory.
    pub fn dmabuf(&self) -> Option<DmaBuf<'a>> {
        self.dmabuf
    }
}

/// A registration: its name here, and what peers must know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Registered {
    /// For this NIC's own writes.
    pub id: RegionId,
    /// For peers' writes.
    pub remote: RemoteRegion,
}

/// A registration of one NIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionId(pub u32);

/// A peer's NIC, as one NIC knows it. Small and dense; not used again while writes to it are in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerId(pub u32);

/// A registered region as its peers name it. Plain data, sent at connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RemoteRegion {
    /// The key.
    pub key: u64,
    /// What offset 0 is to the network: an address, or 0 where it counts from the region's beginning.
    pub base: u64,
    /// Its size. Some networks answer a write that leaves it by silence, so it is checked before it is posted.
    pub bytes: u64,
}

/// One write with an immediate.
#[derive(Clone, Copy, Debug)]
pub struct Write {
    /// Who receives it.
    pub peer: PeerId,
    /// Where the bytes are.
    pub local: RegionId,
    /// Offset in `local`, in bytes.
    pub local_offset: u64,
    /// Where they go.
    pub remote: RemoteRegion,
    /// Offset in `remote`, in bytes.
    pub remote_offset: u64,
    /// How many; may be 0, and `local` and `remote` are valid even then.
    pub bytes: u64,
    /// Comes to the receiver behind the bytes.
    pub immediate: u32,
    /// Comes back with the completion.
    pub context: u64,
}

/// What became of a write that was to be posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Posted {
    /// It is on its way.
    Yes,
    /// Nothing was posted: a queue is full or a connection is being made. Poll, and try again.
    Again,
}

/// What a NIC has to tell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Completion {
    /// An own write: its bytes lie in the peer's memory, and the source may be overwritten.
    Sent {
        /// The write's.
        context: u64,
    },
    /// A peer's write lies here completely.
    Arrived {
        /// The write's.
        immediate: u32,
    },
    /// An own write failed; with no context, something else of this NIC did. What arrived of it is unknown.
    Failed {
        /// The write's.
        context: Option<u64>,
        /// Whose fault it is.
        class: FaultClass,
        /// The network's own words and number.
        text: String,
    },
}

/// Whose fault a failure is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultClass {
    /// The peer's process or NIC is gone or cannot be reached.
    PeerDead,
    /// The peer refused the address, the key or the bounds.
    BadAddress,
    /// The peer does not know this NIC: it has not connected.
    UnknownPeer,
    /// This NIC is being closed or reset.
    Ours,
    /// Writes could not be posted until the deadline.
    Stuck,
    /// The peer sent what the protocol excludes.
    Protocol,
    /// Anything else.
    Other,
}

impl FaultClass {
    /// Half a sentence for messages.
    pub const fn describe(self) -> &'static str {
        match self {
            FaultClass::PeerDead => "the peer's process or NIC is gone or unreachable",
            FaultClass::BadAddress => "the peer's NIC refused the address or the key",
            FaultClass::UnknownPeer => "the peer's NIC does not know this one",
            FaultClass::Ours => "this NIC is being closed",
            FaultClass::Stuck => "the NIC took no write until the deadline",
            FaultClass::Protocol => "the peer broke the protocol",
            FaultClass::Other => "the NIC reported an error",
        }
    }
}
