//! Two processes that write to each other. Ours and those of the raw peer answer the same lines, see `peer.c`.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use serde::Serialize;

use super::{FABRIC_COMMAND, Network, Rounds, Shape};
use crate::place::Placement;

/// How completions are waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Mode {
    /// Looked for all the time.
    Spin,
    /// Slept for, if a few looks found none.
    Sleep,
}

/// One run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    pub(super) shape: Shape,
    pub(super) writes: usize,
    pub(super) mode: Mode,
}

/// Most writes of a round.
const MAX_WRITES: usize = 1 << 22;
/// Most writes that are compared.
const MAX_VERIFIED: usize = 4096;
/// Time of a trial, as a part of a round's.
const TRIAL_PART: u32 = 4;
/// A mode that is slower by this factor in its trial is not measured; less may be what else the machine does.
const CLOSE: f64 = 20.0;

struct Process {
    child: Child,
    input: Option<ChildStdin>,
    lines: Receiver<String>,
}

/// The processes; dropping it ends them.
pub(super) struct Pair {
    who: &'static str,
    processes: Vec<Process>,
    timeout: Duration,
}

impl Pair {
    /// Two processes of this program.
    ///
    /// # Errors
    /// If one does not start or finds no network.
    pub(super) fn ours(network: &Network, nics: usize) -> Result<Pair> {
        Pair::start("ours", network, |_| {
            let place = Placement::here().with("EP_FABRIC_PROVIDER", &network.provider);
            let place = place.with("EP_FABRIC_NICS", &network.addresses[..nics].join(","));
            let mut command = place.command(0, 0)?;
            command.arg(FABRIC_COMMAND);
            Ok(command)
        })
    }

    /// A process of this program on each of two nodes.
    ///
    /// # Errors
    /// As [`Pair::ours`].
    pub(super) fn between(network: &Network, placement: &Placement, nodes: [usize; 2]) -> Result<Pair> {
        Pair::start("the raw path", network, |process| {
            let mut command = placement.command(process, nodes[process])?;
            command.arg(FABRIC_COMMAND);
            Ok(command)
        })
    }

    /// Two processes of the raw peer.
    ///
    /// # Errors
    /// If one does not start or finds no network.
    pub(super) fn raw(program: &Path, network: &Network, nics: usize) -> Result<Pair> {
        Pair::start("the raw peer", network, |_| {
            let mut command = Command::new(program);
            command.arg(&network.provider).args(&network.addresses[..nics]);
            // The same library as ours, whichever the loader would find.
            command.envs(network.preload.iter().map(|path| ("LD_PRELOAD", path)));
            Ok(command)
        })
    }

    fn start(
        who: &'static str,
        network: &Network,
        command: impl Fn(usize) -> Result<Command>,
    ) -> Result<Pair> {
        let mut pair = Pair { who, processes: Vec::new(), timeout: network.timeout };
        for process in 0..2 {
            let mut child = command(process)?
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .with_context(|| format!("starting {who}"))?;
            let (input, output) = (child.stdin.take(), child.stdout.take().context("a pipe")?);
            let (into, lines) = channel();
            // Ends with the process: nothing else holds the pipe.
            std::thread::spawn(move || {
                for line in BufReader::new(output).lines().map_while(Result::ok) {
                    if into.send(line).is_err() {
                        break;
                    }
                }
            });
            pair.processes.push(Process { child, input, lines });
        }
        let nics = [pair.answer(0)?, pair.answer(1)?];
        pair.tell(0, &nics[1]);
        pair.tell(1, &nics[0]);
        Ok(pair)
    }

    fn tell(&mut self, process: usize, line: &str) {
        if let Some(input) = &mut self.processes[process].input {
            // What a lost process does not read, its silence tells below.
            let _ = writeln!(input, "{line}");
        }
    }

    fn answer(&mut self, process: usize) -> Result<String> {
        let who = self.who;
        match self.processes[process].lines.recv_timeout(self.timeout) {
            Ok(line) if line.starts_with("failed") => Err(anyhow!("{who}: {line}")),
            Ok(line) => Ok(line),
            Err(_) => Err(anyhow!("{who}: process {process} {}", self.obituary(process))),
        }
    }

    fn obituary(&mut self, process: usize) -> String {
        let child = &mut self.processes[process].child;
        match child.try_wait() {
            Ok(Some(status)) => {
                let mut text = String::new();
                // What cannot be read is not said.
                let _ = child.stderr.take().map(|pipe| pipe.take(4096).read_to_string(&mut text));
                format!("ended ({status}): {}", text.trim())
            }
            _ => format!("did not answer within {:?}", self.timeout),
        }
    }

    /// Process 0 writes to process 1; nanoseconds until all of it was complete.
    ///
    /// # Errors
    /// If a process fails or is silent.
    pub(super) fn run(&mut self, run: Run) -> Result<u64> {
        let Shape { bytes, window, .. } = run.shape;
        let tail = format!("{bytes} {window} {} {}", run.writes, u8::from(run.mode == Mode::Sleep));
        self.tell(1, &format!("take {tail}"));
        self.tell(0, &format!("send {tail}"));
        let sent = self.answer(0)?;
        self.answer(1)?;
        sent.trim().parse().with_context(|| format!("{} answered {sent:?}", self.who))
    }

    /// The modes that may be the fastest, each with as many writes as take about `round`.
    ///
    /// # Errors
    /// As [`Pair::run`].
    pub(super) fn trial(&mut self, shape: Shape, round: Duration) -> Result<Vec<Rounds>> {
        // The first writes make connections, and touch the memory.
        self.run(Run { shape, writes: shape.window, mode: Mode::Sleep })?;
        let enough = (round / TRIAL_PART).as_nanos() as u64;
        let mut tries = Vec::new();
        for mode in [Mode::Sleep, Mode::Spin] {
            let mut writes = shape.window;
            let per_write = loop {
                let ns = self.run(Run { shape, writes, mode })?.max(1);
                if ns >= enough || writes >= MAX_WRITES {
                    break ns as f64 / writes as f64;
                }
                let factor = (enough as f64 / ns as f64 * 1.2).clamp(2.0, 8.0);
                writes = ((writes as f64 * factor) as usize).min(MAX_WRITES);
            };
            tries.push((mode, per_write));
        }
        let least = tries.iter().map(|(_, per_write)| *per_write).fold(f64::INFINITY, f64::min);
        let close = tries.into_iter().filter(|(_, per_write)| *per_write <= CLOSE * least);
        let rounds = close.map(|(mode, per_write)| {
            let batches = (round.as_nanos() as f64 / per_write / shape.window as f64).ceil() as usize;
            Rounds { mode, writes: (batches.max(1) * shape.window).min(MAX_WRITES), ns: Vec::new() }
        });
        Ok(rounds.collect())
    }

    /// Fills the buffers, writes places once, and has process 1 look. For our processes only.
    ///
    /// # Errors
    /// If another byte arrived than was sent.
    pub(super) fn verify(&mut self, shape: Shape, mode: Mode) -> Result<()> {
        let writes = super::rank::slots(shape.bytes).min(MAX_VERIFIED);
        for (process, seed) in [(0, 3), (1, 4)] {
            self.tell(process, &format!("fill {seed}"));
            self.answer(process)?;
        }
        self.run(Run { shape, writes, mode })?;
        self.tell(1, &format!("check {} {writes} 3 4", shape.bytes));
        let verdict = self.answer(1)?;
        ensure!(verdict == "good", "another byte arrived than was sent: {verdict}");
        Ok(())
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        for process in &mut self.processes {
            // It ends when its input does, or is ended: it measures nothing any more.
            process.input = None;
        }
        for process in &mut self.processes {
            for _ in 0..100 {
                if !matches!(process.child.try_wait(), Ok(None)) {
                    break;
                }
                std::thread::sleep(Duration::from_millis(5));
            }
            let _ = process.child.kill();
            let _ = process.child.wait();
        }
    }
}
