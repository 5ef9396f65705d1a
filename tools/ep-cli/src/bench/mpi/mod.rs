//! The MPI peer: the same exchange by `MPI_Alltoallv`, measured in turns with ours.

mod build;

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

pub(crate) use build::build;

use anyhow::{Context, Result, anyhow, ensure};
use tempfile::TempDir;

use super::measure::spans_to_samples;
use super::routing::rank_routing;
use super::shape::Shape;
use super::stats::Samples;

/// How long a program that has been told to end may take.
const GRACE: Duration = Duration::from_secs(5);

/// The MPI processes of one shape; dropping it ends them.
pub(crate) struct Peer {
    mpirun: Child,
    /// By rank.
    streams: Vec<BufReader<UnixStream>>,
}

impl Peer {
    /// Starts `program`, for a dispatch or a combine of flat rows.
    ///
    /// # Errors
    /// If it does not start.
    pub(crate) fn start(program: &Path, shape: &Shape, timeout: Duration) -> Result<Peer> {
        let dir = TempDir::with_prefix("ep-mpi-").context("a temporary directory")?;
        for index in 0..shape.routings {
            for rank in 0..shape.ranks {
                let routing = rank_routing(shape, index, rank)?;
                let file = |what: &str| dir.path().join(format!("{what}.{index}.{rank}"));
                std::fs::write(file("ids"), bytemuck::cast_slice(&routing.ids))?;
                std::fs::write(file("weights"), bytemuck::cast_slice(&routing.weights))?;
            }
        }
        let listener = UnixListener::bind(dir.path().join("socket"))?;
        let mpirun = mpirun(program, dir.path(), shape).spawn().context("starting mpirun")?;
        let mut peer = Peer { mpirun, streams: Vec::new() };
        peer.meet(&listener, shape.ranks, timeout)?;
        // A rank that has connected has read its files. They go now, so that a signal leaves nothing behind.
        dir.close().context("removing the temporary directory")?;
        Ok(peer)
    }

    /// Waits until every rank has connected.
    fn meet(&mut self, listener: &UnixListener, ranks: usize, timeout: Duration) -> Result<()> {
        let deadline = Instant::now() + timeout;
        listener.set_nonblocking(true)?;
        let mut met: Vec<Option<BufReader<UnixStream>>> = (0..ranks).map(|_| None).collect();
        while met.iter().any(Option::is_none) {
            if self.mpirun.try_wait()?.is_some() {
                return Err(self.obituary("before its ranks had connected"));
            }
            ensure!(Instant::now() < deadline, "the MPI ranks did not start within {timeout:?}");
            let Ok((stream, _)) = listener.accept() else {
                std::thread::sleep(Duration::from_millis(2));
                continue;
            };
            stream.set_nonblocking(false)?;
            stream.set_read_timeout(Some(timeout))?;
            let mut stream = BufReader::new(stream);
            let mut line = String::new();
            stream.read_line(&mut line)?;
            let rank: usize = line.trim().parse().context("the number of an MPI rank")?;
            *met.get_mut(rank).with_context(|| format!("MPI rank {rank} of {ranks}"))? = Some(stream);
        }
        self.streams = met.into_iter().flatten().collect();
        Ok(())
    }

    /// Makes `calls` calls; the time of each, from its first rank's start to its last rank's end.
    ///
    /// # Errors
    /// If a rank does not answer.
    pub(crate) fn run(&mut self, routing: usize, calls: usize) -> Result<Samples> {
        let mut spans = Vec::new();
        for numbers in self.ask(&format!("run {routing} {calls}"))? {
            ensure!(numbers.len() == 2 * calls, "an MPI rank reported {} times", numbers.len());
            spans.push(numbers.chunks(2).map(|pair| (pair[0], pair[1])).collect());
        }
        Ok(spans_to_samples(&spans, calls))
    }

    /// The checksum of each rank's result.
    ///
    /// # Errors
    /// If a rank does not answer.
    pub(crate) fn checksums(&mut self, routing: usize) -> Result<Vec<u64>> {
        let answers = self.ask(&format!("verify {routing}"))?;
        let sums: Option<Vec<u64>> = answers.into_iter().map(|numbers| numbers.first().copied()).collect();
        sums.context("an MPI rank reported no checksum")
    }

    fn ask(&mut self, command: &str) -> Result<Vec<Vec<u64>>> {
        for stream in &mut self.streams {
            // What a lost rank does not read, its silence tells below.
            let _ = stream.get_mut().write_all(format!("{command}\n").as_bytes());
        }
        let mut answers = Vec::new();
        for rank in 0..self.streams.len() {
            let mut line = String::new();
            match self.streams[rank].read_line(&mut line) {
                Ok(1..) => {}
                Ok(0) => return Err(self.obituary(&format!("while rank {rank} was at `{command}`"))),
                Err(error) => return Err(anyhow!("MPI rank {rank} does not answer `{command}`: {error}")),
            }
            let numbers = line.split_whitespace().map(str::parse).collect::<std::result::Result<_, _>>();
            answers.push(numbers.with_context(|| format!("MPI rank {rank} answered {line:?}"))?);
        }
        Ok(answers)
    }

    /// Says how the program ended.
    fn obituary(&mut self, when: &str) -> anyhow::Error {
        let ended = self.wait(GRACE);
        let mut stderr = String::new();
        if let (true, Some(pipe)) = (ended, &mut self.mpirun.stderr) {
            // What cannot be read is not said.
            let _ = pipe.take(16 << 10).read_to_string(&mut stderr);
        }
        anyhow!("the MPI program ended {when}; on its standard error: {}", stderr.trim())
    }

    fn wait(&mut self, patience: Duration) -> bool {
        let deadline = Instant::now() + patience;
        loop {
            match self.mpirun.try_wait() {
                Ok(None) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(5)),
                Ok(None) | Err(_) => return false,
                Ok(Some(_)) => return true,
            }
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // The ranks end when their commands do, and mpirun with them.
        self.streams.clear();
        if !self.wait(GRACE) {
            if let Some(pid) = rustix::process::Pid::from_raw(self.mpirun.id() as i32) {
                // A program that has just ended is no error.
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
            }
            if !self.wait(GRACE) {
                let _ = self.mpirun.kill();
                let _ = self.mpirun.wait();
            }
        }
    }
}

fn mpirun(program: &Path, dir: &Path, shape: &Shape) -> Command {
    let mut command = Command::new("mpirun");
    command.args(["--oversubscribe", "--bind-to", "none", "-n"]).arg(shape.ranks.to_string());
    command.arg(program).arg(dir).arg(shape.op.to_string()).arg(u8::from(shape.with_plan).to_string());
    for number in [shape.tokens, shape.topk, shape.experts, shape.routings] {
        command.arg(number.to_string());
    }
    command.arg(shape.seed.to_string());
    for (dtype, cols) in shape.dtype.payloads(shape.hidden) {
        command.arg(format!("{}:{cols}:{}", dtype as i32, dtype.bytes()));
    }
    if rustix::process::getuid().is_root() {
        command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    }
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    command
}
