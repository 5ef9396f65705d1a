//! Ranks as threads of this process, each with groups of its own.

use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr::{null, null_mut};
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::time::Duration;

use ep::capi::EpBootstrap;
use ep_core::net::sim::{SimNetwork, SimOptions};

use super::{Cell, Outcome, live};
use crate::abi::size_of;
use crate::job::{Job, JobId};
use crate::memory::Host;
use crate::rank::Trouble;
use crate::world::World;

/// Threads over the host backend, that meet through a callback.
pub struct HostThreads;

/// The same with a simulated network between nodes.
pub struct HostNodes {
    seed: u64,
}

impl HostNodes {
    /// Gives the library the network; the first one in a process is the one that all tests of it use.
    pub fn new(seed: u64) -> HostNodes {
        static GIVEN: OnceLock<()> = OnceLock::new();
        GIVEN.get_or_init(|| {
            let options = SimOptions { seed, again_one_in: 50, cq_depth: 1 << 18, ..SimOptions::default() };
            let network = SimNetwork::start(options, 3, 2).expect("a network");
            ep::network::replace(Arc::new(network), "for tests");
        });
        HostNodes { seed }
    }
}

impl Cell for HostNodes {
    fn name(&self) -> String {
        format!("host-nodes (network seed {} if this test ran alone)", self.seed)
    }

    fn run(&self, world: &World, jobs: &[JobId]) -> Outcome {
        HostThreads.run(world, jobs)
    }
}

impl Cell for HostThreads {
    fn name(&self) -> String {
        "host-threads".to_string()
    }

    fn run(&self, world: &World, jobs: &[JobId]) -> Outcome {
        let hubs: Vec<Hub> = world.groups.iter().map(|group| Hub::new(group.members.len())).collect();
        let mut outcome = Outcome::default();
        std::thread::scope(|scope| {
            let mut senders = Vec::new();
            let mut ranks = Vec::new();
            for rank in 0..world.num_ranks {
                // Jobs are made a little ahead of their use.
                let (sender, receiver) = sync_channel::<Arc<Job>>(2);
                senders.push(sender);
                let hubs = &hubs;
                ranks.push(scope.spawn(move || run_rank(world, rank, hubs, receiver)));
            }
            for job in jobs {
                let job = Arc::new(job.build());
                // A rank that is gone has a reason, which it returns.
                if !senders.iter().all(|sender| sender.send(job.clone()).is_ok()) {
                    break;
                }
            }
            drop(senders);
            for (rank, thread) in ranks.into_iter().enumerate() {
                let found =
                    thread.join().unwrap_or_else(|_| vec![(0, Trouble::Broken("panicked".to_string()))]);
                outcome.add(rank, found);
            }
        });
        outcome.settle()
    }
}

fn run_rank(world: &World, rank: usize, hubs: &[Hub], jobs: Receiver<Arc<Job>>) -> super::RankOutcome {
    // Places of their own, for the library keeps their addresses.
    let seats: Vec<Option<Box<Seat>>> = world
        .groups
        .iter()
        .zip(hubs)
        .map(|(group, hub)| {
            let place = group.members.iter().position(|&member| member == rank)?;
            Some(Box::new(Seat { hub, rank: place, round: Mutex::new(0) }))
        })
        .collect();
    let bootstrap = |group: usize, place: usize| {
        let seat: &Seat = seats[group].as_ref().expect("asked for own groups only");
        EpBootstrap {
            struct_size: size_of::<EpBootstrap>(),
            reserved_flags: 0,
            rank: place as i32,
            num_ranks: seat.hub.num_ranks as i32,
            all_gather: Some(all_gather),
            all_gather_ctx: std::ptr::from_ref(seat).cast_mut().cast(),
            unique_id: null(),
            file: null(),
            timeout_ms: 0,
            reserved: 0,
        }
    };
    live(&Host, world, rank, bootstrap, jobs.into_iter())
}

/// Where the threads of one group exchange bytes.
struct Hub {
    num_ranks: usize,
    /// By round: what each rank gave, and how many have taken it.
    rounds: Mutex<Rounds>,
    changed: Condvar,
}

type Rounds = HashMap<u64, (Vec<Option<Vec<u8>>>, usize)>;

/// One rank's access to a hub.
struct Seat<'h> {
    hub: &'h Hub,
    rank: usize,
    round: Mutex<u64>,
}

impl Hub {
    fn new(num_ranks: usize) -> Hub {
        Hub { num_ranks, rounds: Mutex::default(), changed: Condvar::new() }
    }
}

/// The `ep_all_gather_fn` of a seat.
unsafe extern "C" fn all_gather(
    ctx: *mut c_void,
    send: *const c_void,
    recv: *mut c_void,
    bytes: usize,
) -> i32 {
    // SAFETY: `ctx` is the seat that `run_rank` keeps while its groups live.
    let seat = unsafe { &*ctx.cast::<Seat>() };
    // SAFETY: the library gives `bytes` bytes, and a place for as many of each rank.
    let (send, recv) = unsafe {
        let recv = if bytes == 0 { null_mut() } else { recv.cast::<u8>() };
        (std::slice::from_raw_parts(send.cast::<u8>(), bytes), recv)
    };
    let mut round = seat.round.lock().expect("one thread per rank");
    *round += 1;
    let hub = seat.hub;
    let mut rounds = hub.rounds.lock().expect("nobody panics with it");
    rounds.entry(*round).or_insert_with(|| (vec![None; hub.num_ranks], 0)).0[seat.rank] = Some(send.to_vec());
    hub.changed.notify_all();
    let waiting = |rounds: &mut Rounds| rounds[&*round].0.iter().any(Option::is_none);
    let waited = hub.changed.wait_timeout_while(rounds, Duration::from_secs(30), waiting);
    let (mut rounds, result) = waited.expect("nobody panics with it");
    if result.timed_out() {
        return 1;
    }
    let (given, taken) = rounds.get_mut(&*round).expect("stays until all have taken");
    for (rank, given) in given.iter().flatten().enumerate() {
        assert_eq!(given.len(), bytes, "all ranks give as many bytes");
        if bytes > 0 {
            // SAFETY: `recv` has `num_ranks * bytes` bytes.
            unsafe { std::ptr::copy_nonoverlapping(given.as_ptr(), recv.add(rank * bytes), bytes) };
        }
    }
    *taken += 1;
    if *taken == hub.num_ranks {
        rounds.remove(&*round);
    }
    0
}
