//! A call whose blocks run one after the other: all SMs but one are held by a kernel that waits. Needs a device
//! for each rank: blocks of two ranks that share the last SM would wait for each other.

use ep_core::bootstrap::LocalBootstrap;
use ep_core::config::GroupConfig;
use ep_core::engine::{Backend, Group};
use ep_core::{Error, Result, Status};

use crate::arena::Arena;
use crate::case::Case;
use crate::meet::deadline;
use crate::options::Options;
use crate::rank::{Rank, differ};
use crate::run::{Call, Prepared, Side};

const WINDOW: usize = 16 << 20;

pub fn check_alone(rank: &mut Rank, options: &Options) -> std::result::Result<(), String> {
    run(rank, options).map_err(|e| format!("rank {}: with one SM: {e}", rank.rank))
}

fn run(rank: &mut Rank, options: &Options) -> Result<()> {
    let holder = Holder::start(rank, options.seed)?;
    rank.gather(&[])?;
    let mut equal = 0;
    for i in 0..options.cases as u64 {
        let case = Case::random(options.seed * 1000 + i, rank.num_ranks);
        let cuda = rank.cuda.run(&case, 0, options.sms)?;
        if holder.sides[0].group.health(&mut []).is_some() || holder.is_done()? {
            return Err(Error::new(Status::Internal, "the other SMs were not held to the end"));
        }
        differ(&cuda, &rank.host.run(&case, 0, options.sms)?)?;
        equal += 1;
    }
    rank.gather(&[])?;
    holder.stop()?;
    if rank.rank == 0 {
        println!("alone: {equal} cases of {} blocks on one SM, the others held: all equal", options.sms);
    }
    Ok(())
}

/// A group of two ranks of this process. The first dispatches on all SMs but one; the second lets it wait.
struct Holder {
    sides: Vec<Side>,
    prepared: Vec<Prepared>,
}

impl Holder {
    fn start(rank: &Rank, seed: u64) -> Result<Holder> {
        let sms = rank.device.num_sms() as u32 - 1;
        let mut case = Case::large(2 * seed, 2, 8, 64, 1, 2);
        case.static_rows = Some(32);
        let device = &rank.device;
        let join = |meeting: LocalBootstrap| -> Result<Side> {
            let backend = Backend::on(device.clone(), "asked for");
            let config = GroupConfig { backend: 2, timeout_ms: 120_000, ..GroupConfig::default() };
            let group = Group::create_on(backend, &config, Box::new(meeting), deadline())?;
            Ok(Side { arena: Arena::new(&group, Some(device.pool()), WINDOW)?, group })
        };
        let sides: Vec<Result<Side>> = std::thread::scope(|scope| {
            let join = &join;
            let start = |meeting| scope.spawn(move || join(meeting));
            let threads: Vec<_> = LocalBootstrap::group(2).into_iter().map(start).collect();
            let badly = |_| Err(Error::new(Status::Internal, "a thread of the holding group panicked"));
            threads.into_iter().map(|thread| thread.join().unwrap_or_else(badly)).collect()
        });
        let mut sides = sides.into_iter().collect::<Result<Vec<Side>>>()?;
        let mut prepared = Vec::new();
        for (side, sms) in sides.iter_mut().zip([sms, 1]) {
            let ready = side.prepare(&case, 0, sms)?;
            side.refill(&case, &ready)?;
            prepared.push(ready);
        }
        let holder = Holder { sides, prepared };
        for i in 0..2 {
            holder.sides[i].queue(&holder.prepared[i], Call::Update)?;
        }
        holder.sides.iter().try_for_each(|side| side.arena.synchronize())?;
        holder.sides[0].queue(&holder.prepared[0], Call::Dispatch)?;
        // Its blocks are on their SMs long before.
        std::thread::sleep(std::time::Duration::from_millis(50));
        Ok(holder)
    }

    fn is_done(&self) -> Result<bool> {
        self.sides[0].arena.is_done()
    }

    fn stop(&self) -> Result<()> {
        self.sides[1].queue(&self.prepared[1], Call::Dispatch)?;
        self.sides.iter().try_for_each(|side| side.arena.synchronize())
    }
}
