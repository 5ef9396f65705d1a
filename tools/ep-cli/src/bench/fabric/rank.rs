//! One process of ours: the same loop as in `peer.c`, over our transport.

use std::io::{BufRead, Write as _};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use ep_fabric::transport::{Completion, PeerId, Posted, Region, RegionId, RemoteRegion, Transport, Write};
use ep_fabric::{Library, Nic, Selection, Settings};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Signal, set_parent_process_death_signal};

use crate::memory::Buffer;

/// Bytes of the memory that is written from and to.
pub(super) const BUFFER: usize = 16 << 20;
/// Looks that find nothing before a sleep, and between looks at the clock and turns for others.
const SPINS: u64 = 200;
const YIELD_SPINS: u64 = 2000;
const DEADLINE: Duration = Duration::from_secs(20);
/// A sleep ends after this long, to look at the deadline.
const NAP: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// Bytes from one place to the next.
fn stride(bytes: usize) -> usize {
    bytes.next_multiple_of(64).max(64)
}

/// Places of the buffer that writes of this size take in turn.
pub(super) fn slots(bytes: usize) -> usize {
    BUFFER / stride(bytes)
}

fn place(bytes: usize, number: usize) -> usize {
    number % slots(bytes) * stride(bytes)
}

/// What the byte at `at` is after a fill.
fn content(seed: u64, at: usize) -> u8 {
    let mixed = (at as u64 ^ seed << 32).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> 56) as u8
}

struct Side {
    nic: Nic,
    peer: PeerId,
    region: RegionId,
    remote: RemoteRegion,
}

struct Process {
    // The NICs are dropped before the memory that they know.
    sides: Vec<Side>,
    buffer: Buffer,
    found: Vec<Completion>,
    done: usize,
    taken: usize,
}

/// Serves until the input ends.
///
/// # Errors
/// What the network failed with; it is told to the parent too.
pub(crate) fn serve() -> Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    let result = converse();
    if let Err(error) = &result {
        reply(&format!("failed: {error:#}"))?;
    }
    result
}

fn reply(line: &str) -> Result<()> {
    let mut output = std::io::stdout().lock();
    writeln!(output, "{line}")?;
    Ok(output.flush()?)
}

fn converse() -> Result<()> {
    let mut process = Process::open()?;
    let mut input = std::io::stdin().lock().lines();
    let told = input.next().context("the other process's NICs")??;
    process.connect(&told)?;
    for line in input {
        let line = line?;
        let words: Vec<&str> = line.split_whitespace().collect();
        let numbers: Vec<usize> = words.iter().skip(1).filter_map(|word| word.parse().ok()).collect();
        let answer = match (words.first().copied(), &numbers[..]) {
            (Some("send"), &[bytes, window, writes, sleeps]) => {
                process.send(bytes, window, writes, sleeps == 1)?
            }
            (Some("take"), &[_, _, writes, sleeps]) => process.take(writes, sleeps == 1)?,
            (Some("fill"), &[seed]) => process.fill(seed as u64),
            (Some("check"), &[bytes, writes, seed, old]) => {
                process.check(bytes, writes, [seed as u64, old as u64])
            }
            _ => bail!("no command: {line:?}"),
        };
        reply(&answer)?;
    }
    Ok(())
}

impl Process {
    fn open() -> Result<Process> {
        let settings = Settings::from_env()?;
        let selection = Selection::make(&Library::open()?, &settings, false)?;
        // Aligned as the raw peer's is: processors copy what is not many times more slowly.
        let buffer = Buffer::new(BUFFER);
        let mut sides = Vec::new();
        let mut line = String::new();
        for nic_idx in 0..selection.nics().len() {
            let mut nic = Nic::open(&selection, nic_idx, &settings)?;
            // SAFETY: the buffer goes after the NICs and does not move; it is read and filled between the runs.
            let region = unsafe { Region::new(buffer.address(), BUFFER as u64, None) };
            let registered = nic.register(&region)?;
            let address: String = nic.address().iter().map(|byte| format!("{byte:02x}")).collect();
            line += &format!("{address}:{:x}:{:x} ", registered.remote.key, registered.remote.base);
            sides.push(Side { nic, peer: PeerId(0), region: registered.id, remote: registered.remote });
        }
        reply(&line)?;
        Ok(Process { sides, buffer, found: Vec::with_capacity(32), done: 0, taken: 0 })
    }

    fn connect(&mut self, told: &str) -> Result<()> {
        let others: Vec<&str> = told.split_whitespace().collect();
        ensure!(others.len() == self.sides.len(), "the other process has {} NICs: {told}", others.len());
        for (side, other) in self.sides.iter_mut().zip(others) {
            let parts: Vec<&str> = other.split(':').collect();
            let [address, key, base] = parts[..] else { bail!("no NIC: {other:?}") };
            let digits =
                (0..address.len() / 2).map(|at| u8::from_str_radix(&address[2 * at..2 * at + 2], 16));
            side.peer = side.nic.connect(&digits.collect::<std::result::Result<Vec<u8>, _>>()?)?;
            side.remote = RemoteRegion {
                key: u64::from_str_radix(key, 16)?,
                base: u64::from_str_radix(base, 16)?,
                bytes: BUFFER as u64,
            };
        }
        Ok(())
    }

    fn send(&mut self, bytes: usize, window: usize, writes: usize, sleeps: bool) -> Result<String> {
        let start = Instant::now();
        let mut number = 0;
        while number < writes {
            let end = (number + window).min(writes);
            while number < end {
                self.post(bytes, number)?;
                number += 1;
            }
            self.wait(sleeps, |process| process.done >= number)?;
        }
        self.finish(start)
    }

    fn take(&mut self, writes: usize, sleeps: bool) -> Result<String> {
        let start = Instant::now();
        self.wait(sleeps, |process| process.taken >= writes)?;
        self.finish(start)
    }

    fn finish(&mut self, start: Instant) -> Result<String> {
        (self.done, self.taken) = (0, 0);
        Ok(start.elapsed().as_nanos().to_string())
    }

    fn post(&mut self, bytes: usize, number: usize) -> Result<()> {
        let at = number % self.sides.len();
        let side = &mut self.sides[at];
        let offset = place(bytes, number) as u64;
        let write = Write {
            peer: side.peer,
            local: side.region,
            local_offset: offset,
            remote: side.remote,
            remote_offset: offset,
            bytes: bytes as u64,
            immediate: number as u32,
            context: number as u64,
        };
        while side.nic.write(&write)? == Posted::Again {
            look(side, &mut self.found, &mut self.done, &mut self.taken)?;
        }
        Ok(())
    }

    fn wait(&mut self, sleeps: bool, is_done: impl Fn(&Process) -> bool) -> Result<()> {
        let sleeps = sleeps && self.sides.iter().all(|side| side.nic.wait_fd().is_some());
        let (mut idle, mut quiet) = (0u64, None);
        while !is_done(self) {
            let before = self.done + self.taken;
            for side in &mut self.sides {
                look(side, &mut self.found, &mut self.done, &mut self.taken)?;
            }
            if self.done + self.taken > before {
                (idle, quiet) = (0, None);
                continue;
            }
            idle += 1;
            let sleeps = sleeps && idle >= SPINS;
            if !sleeps && !idle.is_multiple_of(YIELD_SPINS) {
                continue;
            }
            let since = *quiet.get_or_insert_with(Instant::now);
            let (done, taken) = (self.done, self.taken);
            ensure!(
                since.elapsed() < DEADLINE,
                "nothing for {DEADLINE:?}: {done} completed and {taken} arrived"
            );
            if sleeps {
                self.sleep()?;
            } else {
                std::thread::yield_now();
            }
        }
        Ok(())
    }

    fn sleep(&mut self) -> Result<()> {
        if !self.sides.iter_mut().all(|side| side.nic.may_sleep()) {
            return Ok(());
        }
        let fds = self.sides.iter().filter_map(|side| side.nic.wait_fd());
        let mut fds: Vec<PollFd> = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        match poll(&mut fds, Some(&NAP)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(anyhow!("poll: {error}")),
        }
    }

    fn fill(&mut self, seed: u64) -> String {
        self.buffer.as_mut_slice().iter_mut().enumerate().for_each(|(at, byte)| *byte = content(seed, at));
        String::from("filled")
    }

    /// Looks whether each place has what was sent, and all between them what was there.
    fn check(&self, bytes: usize, writes: usize, [sent, old]: [u64; 2]) -> String {
        let written = |at: usize| at / stride(bytes) < writes.min(slots(bytes)) && at % stride(bytes) < bytes;
        let expected = |at: usize| content(if written(at) { sent } else { old }, at);
        match self.buffer.as_slice().iter().enumerate().find(|&(at, &byte)| byte != expected(at)) {
            None => String::from("good"),
            Some((at, byte)) => format!("byte {at} is {byte:#x}, expected {:#x}", expected(at)),
        }
    }
}

/// Counts what a NIC has to tell.
fn look(side: &mut Side, found: &mut Vec<Completion>, done: &mut usize, taken: &mut usize) -> Result<()> {
    side.nic.poll(found)?;
    for completion in found.drain(..) {
        match completion {
            Completion::Sent { .. } => *done += 1,
            Completion::Arrived { .. } => *taken += 1,
            Completion::Failed { text, .. } => bail!("a write failed: {text}"),
        }
    }
    Ok(())
}
