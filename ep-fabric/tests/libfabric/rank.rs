//! One rank of a scene: its NICs, its memory, and what it knows of the other rank.

use std::env;
use std::io::{ErrorKind, Read, Write as _};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use ep_fabric::transport::{
    Completion, FaultClass, PeerId, Posted, Region, RegionId, Registered, RemoteRegion, Transport, Write,
};
use ep_fabric::{Library, Nic, Selection, Settings};

use crate::cell::RANK;

/// No step of a scene may take longer.
const DEADLINE: Duration = Duration::from_secs(60);
/// What memory holds before anything is written.
pub(crate) const POISON: u8 = 0xcd;

/// A NIC with registered memory, connected to the same NIC of the other rank.
pub(crate) struct Rank {
    pub(crate) number: usize,
    pub(crate) nic: Nic,
    pub(crate) peer: PeerId,
    pub(crate) local: RegionId,
    /// The other rank's memory.
    pub(crate) remote: RemoteRegion,
    pub(crate) sent: Vec<u64>,
    pub(crate) arrived: Vec<u32>,
    pub(crate) failed: Vec<(Option<u64>, FaultClass, String)>,
    /// Writes that were answered [`Posted::Again`].
    pub(crate) again: u64,
    memory: Box<[u8]>,
    socket: UnixStream,
    found: Vec<Completion>,
}

pub(crate) fn number() -> usize {
    env::var(RANK).expect("set by the parent").parse().expect("a rank")
}

pub(crate) fn selection() -> (Selection, Settings) {
    let library = Library::open().expect("the parent chose one that opens");
    let settings = Settings::from_env().expect("the parent set them");
    (Selection::make(&library, &settings, false).expect("the parent chose one"), settings)
}

impl Rank {
    /// Opens NIC `nic_idx` with `bytes` of memory and meets the other rank.
    pub(crate) fn meet(nic_idx: usize, bytes: usize) -> Rank {
        let (selection, settings) = selection();
        let mut nic = Nic::open(&selection, nic_idx, &settings).expect("the NIC opens");
        let mut memory = vec![POISON; bytes].into_boxed_slice();
        // SAFETY: the memory goes with the rank, whose NIC is dropped before it, and is read and written by pointer
        // while the other rank may write it.
        let region = unsafe { Region::new(memory.as_mut_ptr(), bytes as u64, None) };
        let Registered { id, remote } = nic.register(&region).expect("memory is registered");
        let socket = std::io::stdin().as_fd().try_clone_to_owned().expect("the socket of the parent");
        let mut rank = Rank {
            number: number(),
            nic,
            peer: PeerId(0),
            local: id,
            remote,
            sent: Vec::new(),
            arrived: Vec::new(),
            failed: Vec::new(),
            again: 0,
            memory,
            socket: UnixStream::from(socket),
            found: Vec::with_capacity(64),
        };
        let address = rank.nic.address();
        let numbers = [remote.key, remote.base, remote.bytes].map(u64::to_le_bytes).concat();
        let told = rank.exchange(&[&numbers[..], &address].concat());
        let number = |at: usize| u64::from_le_bytes(told[8 * at..8 * at + 8].try_into().expect("8 bytes"));
        rank.remote = RemoteRegion { key: number(0), base: number(1), bytes: number(2) };
        rank.peer = rank.nic.connect(&told[24..]).expect("the other rank's address is one");
        // Both know each other before the first write: EFA demands it, and others do not mind.
        rank.exchange(b"connected");
        rank
    }

    /// Sends bytes to the other rank outside the network, and returns its.
    fn exchange(&mut self, own: &[u8]) -> Vec<u8> {
        self.socket.set_read_timeout(Some(DEADLINE)).expect("a socket has timeouts");
        self.socket.write_all(&(own.len() as u32).to_le_bytes()).expect("the other rank is there");
        self.socket.write_all(own).expect("the other rank is there");
        let mut len = [0; 4];
        self.socket.read_exact(&mut len).expect("the other rank answers");
        let mut other = vec![0; u32::from_le_bytes(len) as usize];
        self.socket.read_exact(&mut other).expect("the other rank answers");
        other
    }

    /// A write of `bytes` from and to `offset`.
    pub(crate) fn write_of(&self, offset: u64, bytes: u64, immediate: u32, context: u64) -> Write {
        Write {
            peer: self.peer,
            local: self.local,
            local_offset: offset,
            remote: self.remote,
            remote_offset: offset,
            bytes,
            immediate,
            context,
        }
    }

    /// Posts a write, polling as long as there is no room.
    pub(crate) fn post(&mut self, write: &Write) {
        let deadline = Instant::now() + DEADLINE;
        while self.nic.write(write).expect("a good write") == Posted::Again {
            self.again += 1;
            self.poll();
            assert!(Instant::now() < deadline, "no room for {write:?}: {:?}", self.failed);
        }
    }

    pub(crate) fn poll(&mut self) {
        self.nic.poll(&mut self.found).expect("the NIC lives");
        if self.found.is_empty() {
            std::thread::yield_now();
        }
        for completion in self.found.drain(..) {
            match completion {
                Completion::Sent { context } => self.sent.push(context),
                Completion::Arrived { immediate } => self.arrived.push(immediate),
                Completion::Failed { context, class, text } => self.failed.push((context, class, text)),
            }
        }
    }

    /// Polls until `done`, or fails after the deadline.
    pub(crate) fn poll_until(&mut self, what: &str, done: impl Fn(&Rank) -> bool) {
        let deadline = Instant::now() + DEADLINE;
        while !done(self) {
            self.poll();
            let (sent, arrived) = (self.sent.len(), self.arrived.len());
            assert!(Instant::now() < deadline, "{what}: {sent} sent, {arrived} arrived, {:?}", self.failed);
        }
    }

    /// Waits for the other rank, and polls: its writes may need this side's help.
    pub(crate) fn barrier(&mut self) {
        let deadline = Instant::now() + DEADLINE;
        self.socket.write_all(b"b").expect("the other rank is there");
        self.socket.set_nonblocking(true).expect("a socket can be polled");
        let mut byte = [0];
        loop {
            match self.socket.read(&mut byte) {
                Ok(1) => break,
                Err(error) if error.kind() == ErrorKind::WouldBlock => self.poll(),
                other => panic!("the other rank left: {other:?}"),
            }
            assert!(Instant::now() < deadline, "the other rank did not come");
        }
        self.socket.set_nonblocking(false).expect("a socket can be waited for");
    }

    /// Own memory, while nobody writes to it.
    pub(crate) fn memory(&mut self) -> &mut [u8] {
        &mut self.memory
    }
}
