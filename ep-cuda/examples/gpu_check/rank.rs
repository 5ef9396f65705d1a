//! One rank: its two groups, and the comparison.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ep_core::bootstrap::Bootstrap;
use ep_core::config::GroupConfig;
use ep_core::engine::{Backend, Device, Group};
use ep_core::{Error, Result, Status};
use ep_cuda::CudaDevice;

use crate::arena::Arena;
use crate::case::Case;
use crate::meet::{Meetings, deadline};
use crate::options::Options;
use crate::run::{Outputs, Side};

pub struct Rank {
    pub rank: usize,
    pub num_ranks: usize,
    pub device: Arc<CudaDevice>,
    pub cuda: Side,
    pub host: Side,
    pub meetings: Meetings,
    barrier: Box<dyn Bootstrap>,
}

/// Room for the random cases; what does not fit lies outside the window.
const WINDOW: usize = 192 << 20;

impl Rank {
    pub fn join(options: &Options, rank: usize, mut meetings: Meetings) -> Result<Rank> {
        let num_ranks = options.ranks;
        let mut barrier = meetings.next(rank, num_ranks)?;
        let devices = ep_cuda::driver::open()?.num_devices.max(1);
        let device = CudaDevice::open((rank % devices) as i32)?;
        let config = GroupConfig {
            timeout_ms: options.timeout_ms,
            max_local_experts: options.experts.max(256) as u32,
            ..GroupConfig::default()
        };
        let backend = Backend::on(device.clone(), "asked for");
        let on_cuda = GroupConfig { backend: 2, ..config };
        let cuda = Group::create_on(backend, &on_cuda, meetings.next(rank, num_ranks)?, deadline())?;
        let host = Group::create(&config, meetings.next(rank, num_ranks)?, deadline())?;
        // Rows of the large case, of its dispatch and of its combine.
        let rows = options.tokens * options.ranks.min(options.topk) + 1024;
        let window = (2 * rows * options.hidden * 2).max(WINDOW);
        let cuda = Side { arena: Arena::new(&cuda, Some(device.pool()), window)?, group: cuda };
        let host = Side { arena: Arena::new(&host, None, window)?, group: host };
        if rank == 0 {
            println!("{}; {}", device.describe(), cuda.group.info().backend_reason);
        }
        barrier.all_gather(&[], deadline())?;
        Ok(Rank { rank, num_ranks, device, cuda, host, meetings, barrier })
    }

    /// Waits for the other ranks, and gives each rank's numbers.
    pub fn gather(&mut self, numbers: &[f64]) -> Result<Vec<Vec<f64>>> {
        let deadline = Instant::now() + Duration::from_secs(120);
        let blobs = self.barrier.all_gather(bytemuck::cast_slice(numbers), deadline)?;
        let number = |bytes: &[u8]| f64::from_ne_bytes(bytes.try_into().unwrap_or_default());
        Ok(blobs.iter().map(|blob| blob.chunks(8).map(number).collect()).collect())
    }

    /// Compares the backends over random cases and the large one.
    pub fn check(&mut self, options: &Options) -> std::result::Result<(), String> {
        let started = Instant::now();
        let mut cases: Vec<Case> = (0..options.cases)
            .map(|i| Case::random(options.seed * 1000 + i as u64, self.num_ranks))
            .collect();
        let Options { tokens, hidden, topk, experts, .. } = *options;
        cases.push(Case::large(options.seed, self.num_ranks, tokens, hidden, topk, experts));
        let mut failed = 0;
        for (i, case) in cases.iter().enumerate() {
            let outcome = self.compare(case, (i % 2) as u32, options.sms);
            let worst = self.gather(&[f64::from(u8::from(outcome.is_err()))]).map_err(|e| e.to_string())?;
            if let Err(why) = &outcome {
                println!("rank {}: case {i} {case:?}\n  {why}", self.rank);
            }
            if worst.iter().any(|rank| rank.first() != Some(&0.0)) {
                failed += 1;
            }
            // A group that is broken stays so.
            if self.cuda.group.health(&mut []).is_some() {
                break;
            }
        }
        if self.rank == 0 {
            let verdict = if failed == 0 { "all equal, bit for bit" } else { "SOME DIFFER" };
            println!("check: {} cases, {failed} failed: {verdict}; {:.1?}", cases.len(), started.elapsed());
        }
        if failed == 0 { Ok(()) } else { Err(format!("{failed} cases failed")) }
    }

    fn compare(&mut self, case: &Case, lane: u32, sms: u32) -> Result<()> {
        let cuda = self.cuda.run(case, lane, sms);
        let host = self.host.run(case, lane, sms);
        differ(&cuda?, &host?)
    }
}

pub fn differ(cuda: &Outputs, host: &Outputs) -> Result<()> {
    let different = |text: String| Err(Error::new(Status::Internal, text));
    if cuda.counts != host.counts {
        return different(format!("counts: {:?}, expected {:?}", cuda.counts, host.counts));
    }
    for ((name, cuda), (_, host)) in cuda.blocks.iter().zip(&host.blocks) {
        if let Some(at) = (0..host.len().max(cuda.len())).find(|&at| cuda.get(at) != host.get(at)) {
            let differs = |at: &usize| cuda.get(*at) != host.get(*at);
            let count = (0..host.len()).filter(differs).count();
            let last = (0..host.len()).rev().find(differs).unwrap_or(at);
            let end = (at + 16).min(host.len());
            return different(format!(
                "{name}: {count} of {} bytes differ, bytes {at} to {last}: {:02x?}, expected {:02x?}",
                host.len(),
                &cuda[at..end.min(cuda.len())],
                &host[at..end]
            ));
        }
    }
    Ok(())
}
