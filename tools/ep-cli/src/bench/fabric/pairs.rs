//! The raw path under the load of a call: as many pairs of processes at once as there are ranks.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};

use super::pair::{Mode, Pair, Run};
use super::report::median;
use super::{Network, Shape};
use crate::place::Placement;

/// Pairs that write at once: for each rank one, to the node after its own.
pub(crate) struct Pairs {
    pairs: Vec<Pair>,
    /// A way to wait each.
    ways: Vec<Way>,
}

struct Way {
    run: Run,
    /// Bytes per second of all pairs together, round by round.
    rates: Vec<f64>,
}

/// Time of a round of one way.
const ROUND: Duration = Duration::from_millis(100);
/// Writes that are posted, then drained.
const WINDOW: usize = 16;

impl Pairs {
    /// Starts them, and finds out how many writes of `bytes` take a round.
    ///
    /// # Errors
    /// If a process fails.
    pub(crate) fn start(
        network: &Network,
        placement: &Placement,
        num_ranks: usize,
        bytes: usize,
    ) -> Result<Pairs> {
        let pair = |rank| {
            let node = placement.node_of(rank, num_ranks);
            Pair::between(network, placement, [node, (node + 1) % placement.nodes])
        };
        let pairs = (0..num_ranks).map(pair).collect::<Result<Vec<_>>>().context("the raw path")?;
        let shape = Shape { bytes, window: WINDOW, nics: network.addresses.len().max(1) };
        let mut pairs = Pairs { pairs, ways: Vec::new() };
        for mode in [Mode::Sleep, Mode::Spin] {
            let run = Run { shape, writes: 2 * WINDOW, mode };
            // The first writes make connections, and touch the memory.
            pairs.all(run)?;
            let times = ROUND.as_secs_f64() / pairs.all(run)?.as_secs_f64();
            let writes = run.writes * times.clamp(1.0, 1e4) as usize;
            pairs.ways.push(Way { run: Run { writes, ..run }, rates: Vec::new() });
        }
        Ok(pairs)
    }

    /// A round of each way to wait.
    ///
    /// # Errors
    /// If a process fails.
    pub(crate) fn round(&mut self) -> Result<()> {
        for index in 0..self.ways.len() {
            let run = self.ways[index].run;
            let bytes = (self.pairs.len() * run.writes * run.shape.bytes) as f64;
            let time = self.all(run)?;
            self.ways[index].rates.push(bytes / time.as_secs_f64());
        }
        Ok(())
    }

    /// Bytes per second of all pairs together: the median over the rounds of the faster way to wait.
    pub(crate) fn rate(&self) -> f64 {
        self.ways.iter().map(|way| median(&way.rates)).fold(0.0, f64::max)
    }

    /// The time until all have done the run.
    fn all(&mut self, run: Run) -> Result<Duration> {
        let start = Instant::now();
        thread::scope(|scope| -> Result<()> {
            let started: Vec<_> =
                self.pairs.iter_mut().map(|pair| scope.spawn(move || pair.run(run))).collect();
            for thread in started {
                thread.join().map_err(|_| anyhow!("a thread of the raw path panicked"))??;
            }
            Ok(())
        })
        .context("the raw path")?;
        Ok(start.elapsed())
    }
}
