//! A network inside one process that does everything an unordered network may do, and more often: the vehicle for
//! tests of all that stands on [`super::Transport`].
//!
//! Each write is cut in chunks. Each chunk takes a path of its own, with a delay drawn from a heavy tail, so that
//! chunks of all writes interleave, later messages finish first, and completions come in any order. Queues are
//! bounded: a full send queue says "again", an overflowing completion queue is the end of the NIC. Keys, bounds and
//! addresses are checked where the real network checks them, at the target, when the bytes come.
//!
//! Time is virtual: nobody waits for a delay, it only orders what happens. [`SimNet::stepped`] runs in the threads
//! that call it, deterministically; [`SimNet::threaded`] has a thread that lets everything happen.

mod nic;
mod rng;
mod world;

use std::sync::Arc;

pub use self::nic::SimNic;
pub use self::rng::Rng;
use self::world::{Shared, World};

/// How the network behaves.
#[derive(Clone, Copy, Debug)]
pub struct SimOptions {
    /// Decides every delay and permutation; printed by tests.
    pub seed: u64,
    /// Bytes of a chunk.
    pub mtu: usize,
    /// Of every NIC.
    pub tx_depth: usize,
    /// Of every NIC.
    pub cq_depth: usize,
    /// Of every NIC.
    pub max_write: u64,
    /// One post in this many is refused with "again", whatever the queue holds; 0: none.
    pub again_one_in: u64,
    /// The target is filled with [`POISON`] when a write is posted, so that whoever still reads there, or reads too
    /// early, sees it.
    pub poison: bool,
    /// A write's last chunk comes first.
    pub reverse_chunks: bool,
    /// The first write between any two NICs comes after everything else.
    pub hold_first: bool,
    /// Additional delay of everything to and from one NIC: its number and nanoseconds.
    pub slow_nic: Option<(usize, u64)>,
    /// What is left of an immediate: the fault of a real library's release.
    pub immediate_mask: u32,
    /// How long a NIC tries to reach one that does not answer.
    pub dead_after_ns: u64,
}

/// What a target is filled with before its bytes come.
pub const POISON: u8 = 0xFB;

impl Default for SimOptions {
    fn default() -> SimOptions {
        SimOptions {
            seed: 1,
            mtu: 8192,
            tx_depth: 1024,
            cq_depth: 8192,
            max_write: 1 << 30,
            again_one_in: 0,
            poison: true,
            reverse_chunks: false,
            hold_first: false,
            slow_nic: None,
            immediate_mask: u32::MAX,
            dead_after_ns: 1_000_000_000,
        }
    }
}

/// What happened so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SimStats {
    /// Writes that were posted.
    pub writes: u64,
    /// Posts that were refused with "again".
    pub again: u64,
    /// The most completions that any NIC held.
    pub most_completions: usize,
    /// Writes whose immediate came before that of an earlier write between the same NICs.
    pub overtaken: u64,
}

/// A network. Clones are the same network.
#[derive(Clone)]
pub struct SimNet {
    handle: Arc<Handle>,
}

/// Ends the network's thread with the last user.
struct Handle {
    shared: Arc<Shared>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.shared.lock().closed = true;
        self.shared.work.notify_all();
    }
}

impl SimNet {
    /// A network in which something happens only in [`SimNet::step`].
    pub fn stepped(options: SimOptions) -> SimNet {
        SimNet { handle: Arc::new(Handle { shared: Arc::new(Shared::new(World::new(options))) }) }
    }

    /// A network with a thread of its own, in which everything happens as soon as its turn comes.
    pub fn threaded(options: SimOptions) -> SimNet {
        let net = SimNet::stepped(options);
        let shared = Arc::clone(&net.handle.shared);
        std::thread::spawn(move || shared.run());
        net
    }

    /// Adds a NIC. Its number counts from 0.
    pub fn nic(&self) -> SimNic {
        let (id, event) = self.handle.shared.lock().add_nic();
        SimNic::new(self.clone(), id, event)
    }

    /// Lets the next thing happen. False if nothing is left to.
    pub fn step(&self) -> bool {
        self.handle.shared.lock().step()
    }

    /// The virtual time, in nanoseconds.
    pub fn now_ns(&self) -> u64 {
        self.handle.shared.lock().now_ns
    }

    /// Lets time pass in which nothing happens.
    pub fn pass(&self, ns: u64) {
        self.handle.shared.lock().now_ns += ns;
    }

    /// The NIC is gone from one moment to the next, with all that it has in flight. What is written to it fails
    /// after a time.
    pub fn kill(&self, nic: usize) {
        self.handle.shared.lock().kill(nic);
        self.handle.shared.work.notify_all();
    }

    /// A killed NIC comes back as another one: it has another address and knows nobody. What is written to the old
    /// address fails at once.
    pub fn restart(&self, nic: usize) {
        self.handle.shared.lock().restart(nic);
    }

    /// Nothing passes between two NICs any more, in either direction; writes fail after a time.
    pub fn cut(&self, one: usize, other: usize) {
        self.handle.shared.lock().cuts.push((one.min(other), one.max(other)));
    }

    /// Whether posts are refused with "again" from now on: one in so many, 0 for none.
    pub fn set_again_one_in(&self, one_in: u64) {
        self.handle.shared.lock().options.again_one_in = one_in;
    }

    /// What happened so far.
    pub fn stats(&self) -> SimStats {
        self.handle.shared.lock().stats
    }

    fn shared(&self) -> &Arc<Shared> {
        &self.handle.shared
    }
}
