//! Rank processes: starts them, talks to them in lines of JSON, and says what became of a lost one.
//!
//! A rank is this program again with a hidden subcommand. It reads a [`Hello`] and then commands from its
//! standard input and answers each with one line on its standard output.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use ep_core::bootstrap::UniqueId;
use ep_core::mem::Mapping;
use serde::de::{DeserializeOwned, IgnoredAny};
use serde::{Deserialize, Serialize};

use crate::memory::BARRIER_BYTES;
use crate::place::Placement;

/// The hidden subcommand.
pub(crate) const RANK_COMMAND: &str = "rank-process";

/// Bytes of a rank's standard error that are kept: its end.
const STDERR_KEPT: usize = 16 << 10;

/// How long the ranks that see a peer fail may take to say so.
const GRACE: Duration = Duration::from_secs(2);

/// Ranks whose view of a failure is shown.
const MOST_TOLD: usize = 8;

/// The first line that a rank reads.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Hello<Job> {
    /// The rank it is.
    pub(crate) rank: usize,
    /// How many there are.
    pub(crate) num_ranks: usize,
    /// The id of its node; 0: all ranks share memory.
    pub(crate) node_id: u32,
    /// The unique id in hexadecimal digits.
    pub(crate) unique_id: String,
    /// Deadline of meeting and of every call.
    pub(crate) timeout_ms: u32,
    /// The file of the barrier.
    pub(crate) barrier: PathBuf,
    /// What to do.
    pub(crate) job: Job,
}

/// One line that a rank writes.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Reply<T> {
    /// The answer to a command.
    Done(T),
    /// How far it is.
    Progress(f64),
    /// Why the rank ends.
    Failed(Failure),
}

/// Why a rank ends.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Failure {
    /// For the user.
    pub(crate) text: String,
    /// Another rank came to harm first, as far as this one can tell.
    pub(crate) is_consequence: bool,
}

enum Event {
    Line(String),
    /// The standard output was closed: the rank has ended, or will soon.
    Closed,
}

struct Rank {
    child: Child,
    input: Option<ChildStdin>,
    stderr: Arc<Mutex<Vec<u8>>>,
}

/// Rank processes that are running; dropping it ends them.
pub(crate) struct Ranks {
    ranks: Vec<Rank>,
    events: Receiver<(usize, Event)>,
    timeout: Duration,
    /// The ranks open it by way of this process.
    _barrier: OwnedFd,
}

impl Ranks {
    /// Starts `num_ranks` processes where `placement` says, each of which gets `job`.
    ///
    /// # Errors
    /// If the system refuses a file or a process.
    pub(crate) fn start<Job: Serialize>(
        num_ranks: usize,
        placement: &Placement,
        timeout: Duration,
        job: &Job,
    ) -> Result<Ranks> {
        let command = |rank| {
            let node = placement.node_of(rank, num_ranks);
            let mut command = placement.command(rank, node)?;
            command.arg(RANK_COMMAND);
            Ok((command, if placement.nodes == 1 { 0 } else { 1 + node as u32 }))
        };
        Ranks::start_with(num_ranks, timeout, job, &command)
    }

    /// As [`Ranks::start`], with another program for each rank, and the id of its node.
    fn start_with<Job: Serialize>(
        num_ranks: usize,
        timeout: Duration,
        job: &Job,
        command: &dyn Fn(usize) -> Result<(Command, u32)>,
    ) -> Result<Ranks> {
        // Memory without a name, which goes with its last user: nothing is left, however this process ends.
        let (_, memory) = Mapping::create(BARRIER_BYTES as usize)?;
        let barrier = PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), memory.as_raw_fd()));
        let id = UniqueId::create()?;
        let unique_id: String = bytemuck::bytes_of(&id).iter().map(|byte| format!("{byte:02x}")).collect();
        let (events_in, events) = channel();
        let mut started = Ranks { ranks: Vec::new(), events, timeout, _barrier: memory };
        for rank in 0..num_ranks {
            let (command, node_id) = command(rank)?;
            let hello = Hello {
                rank,
                num_ranks,
                node_id,
                unique_id: unique_id.clone(),
                timeout_ms: timeout.as_millis() as u32,
                barrier: barrier.clone(),
                job,
            };
            started.ranks.push(start_rank(command, rank, &events_in)?);
            started.tell(rank, &hello)?;
        }
        Ok(started)
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.ranks.len()
    }

    /// Sends a line to one rank.
    fn tell<T: Serialize>(&mut self, rank: usize, message: &T) -> Result<()> {
        let mut line = serde_json::to_string(message)?;
        line.push('\n');
        let Some(input) = &mut self.ranks[rank].input else { bail!("rank {rank} was told to end already") };
        if input.write_all(line.as_bytes()).and_then(|()| input.flush()).is_err() {
            return Err(self.obituary(rank));
        }
        Ok(())
    }

    /// Sends `command` to every rank and returns every rank's answer.
    ///
    /// # Errors
    /// If a rank dies, fails, or does not answer within `patience`; the text names it.
    pub(crate) fn ask<C: Serialize, T: DeserializeOwned>(
        &mut self,
        command: &C,
        patience: Duration,
    ) -> Result<Vec<T>> {
        for rank in 0..self.len() {
            self.tell(rank, command)?;
        }
        self.answers(patience, &mut |_, _| ())
    }

    /// Waits for one answer of every rank. `progress` is told how far each rank is.
    ///
    /// # Errors
    /// As [`Ranks::ask`].
    pub(crate) fn answers<T: DeserializeOwned>(
        &mut self,
        patience: Duration,
        progress: &mut dyn FnMut(usize, f64),
    ) -> Result<Vec<T>> {
        let deadline = Instant::now() + patience + self.timeout;
        let mut answers: Vec<Option<T>> = (0..self.len()).map(|_| None).collect();
        while answers.iter().any(Option::is_none) {
            let left = deadline.saturating_duration_since(Instant::now());
            let (rank, event) = match self.events.recv_timeout(left) {
                Ok(event) => event,
                Err(RecvTimeoutError::Timeout) => {
                    let silent: Vec<usize> =
                        (0..self.len()).filter(|&rank| answers[rank].is_none()).collect();
                    bail!(
                        "no answer from rank(s) {silent:?} within {:.0} s",
                        (patience + self.timeout).as_secs_f64()
                    );
                }
                Err(RecvTimeoutError::Disconnected) => bail!("every rank process has ended"),
            };
            let Event::Line(line) = event else { return Err(self.root_cause(Vec::new(), Some(rank))) };
            match serde_json::from_str::<Reply<T>>(&line) {
                Ok(Reply::Done(answer)) => answers[rank] = Some(answer),
                Ok(Reply::Progress(part)) => progress(rank, part),
                Ok(Reply::Failed(failure)) => return Err(self.root_cause(vec![(rank, failure)], None)),
                Err(error) => bail!("rank {rank} answered {line:?}: {error}"),
            }
        }
        Ok(answers.into_iter().flatten().collect())
    }

    /// Ranks failed or died. If some did because another one failed or died, that one is what the user wants to know
    /// about first, and then what the others saw.
    fn root_cause(&mut self, mut failed: Vec<(usize, Failure)>, mut dead: Option<usize>) -> anyhow::Error {
        let deadline = Instant::now() + GRACE;
        let is_own = |(_, failure): &(usize, Failure)| !failure.is_consequence;
        while failed.len() + usize::from(dead.is_some()) < self.len() && !failed.iter().any(is_own) {
            let left = deadline.saturating_duration_since(Instant::now());
            let Ok((other, event)) = self.events.recv_timeout(left) else { break };
            match event {
                Event::Closed if failed.iter().all(|(rank, _)| *rank != other) => {
                    dead = dead.or(Some(other));
                }
                Event::Line(line) => {
                    if let Ok(Reply::Failed(failure)) = serde_json::from_str::<Reply<IgnoredAny>>(&line) {
                        failed.push((other, failure));
                    }
                }
                Event::Closed => {}
            }
        }
        if let Some((rank, failure)) = failed.iter().find(|failed| is_own(failed)) {
            return anyhow!("rank {rank}: {}", failure.text);
        }
        failed.sort_by_key(|(rank, _)| *rank);
        let seen =
            failed.iter().take(MOST_TOLD).map(|(rank, failure)| format!("rank {rank}: {}", failure.text));
        let lines: Vec<String> =
            dead.map(|rank| self.obituary(rank).to_string()).into_iter().chain(seen).collect();
        anyhow!(lines.join("\n"))
    }

    /// Says how a rank ended, with the end of its standard error.
    fn obituary(&mut self, rank: usize) -> anyhow::Error {
        let deadline = Instant::now() + GRACE;
        let child = &mut self.ranks[rank].child;
        let status = loop {
            match child.try_wait() {
                Ok(Some(status)) => break status.to_string(),
                Ok(None) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(5)),
                Ok(None) => break String::from("closed its output but still runs"),
                Err(error) => break error.to_string(),
            }
        };
        let stderr = self.ranks[rank].stderr.lock().map(|text| String::from_utf8_lossy(&text).into_owned());
        let stderr = stderr.unwrap_or_default();
        let stderr =
            if stderr.trim().is_empty() { String::from("nothing") } else { stderr.trim().to_string() };
        anyhow!("the process of rank {rank} ended too early ({status}); on its standard error: {stderr}")
    }

    /// Lets the ranks end by themselves, and ends those that do not.
    ///
    /// # Errors
    /// If a rank ended with a failure.
    pub(crate) fn finish(mut self) -> Result<()> {
        for rank in &mut self.ranks {
            rank.input = None;
        }
        let deadline = Instant::now() + self.timeout;
        for rank in 0..self.len() {
            loop {
                match self.ranks[rank].child.try_wait()? {
                    Some(status) if status.success() => break,
                    Some(_) => return Err(self.obituary(rank)),
                    None if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(1)),
                    None => bail!("rank {rank} does not end"),
                }
            }
        }
        Ok(())
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for rank in &mut self.ranks {
            rank.input = None;
            // A rank that has ended already cannot be killed, and that is fine.
            let _ = rank.child.kill();
            let _ = rank.child.wait();
        }
    }
}

fn start_rank(mut command: Command, rank: usize, events: &Sender<(usize, Event)>) -> Result<Rank> {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("starting the process of rank {rank}"))?;
    let stderr = Arc::new(Mutex::new(Vec::new()));
    if let Some(output) = child.stdout.take() {
        let events = events.clone();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(std::result::Result::ok) {
                if events.send((rank, Event::Line(line))).is_err() {
                    return;
                }
            }
            // Nobody listens any more: nobody minds.
            let _ = events.send((rank, Event::Closed));
        });
    }
    if let Some(errors) = child.stderr.take() {
        let kept = stderr.clone();
        std::thread::spawn(move || keep_end(errors, &kept));
    }
    let input = child.stdin.take();
    Ok(Rank { child, input, stderr })
}

fn keep_end(mut from: impl Read, kept: &Mutex<Vec<u8>>) {
    let mut piece = [0; 4096];
    while let Ok(bytes) = from.read(&mut piece) {
        let (1.., Ok(mut kept)) = (bytes, kept.lock()) else { return };
        kept.extend_from_slice(&piece[..bytes]);
        let excess = kept.len().saturating_sub(STDERR_KEPT);
        kept.drain(..excess);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ranks that run `script` after they have read their job.
    fn ranks(num_ranks: usize, script: &'static str) -> Ranks {
        let command = move |_| {
            let mut command = Command::new("sh");
            command.args(["-c", &format!("read job; {script}")]);
            Ok((command, 0))
        };
        Ranks::start_with(num_ranks, Duration::from_millis(300), &"job", &command).unwrap()
    }

    fn answers(ranks: &mut Ranks) -> Result<Vec<u32>> {
        ranks.answers(Duration::from_millis(300), &mut |_, _| ())
    }

    /// A script for one rank among others.
    const ONLY_RANK_1: &str = r#"case $job in *'"rank":1'*) "#;

    #[test]
    fn answers_come_by_rank_and_the_end_is_orderly() -> Result<()> {
        let mut ranks = ranks(3, r#"n=${job#*rank\":}; echo "{\"done\":${n%%,*}}"; read end || exit 0"#);
        assert_eq!(answers(&mut ranks)?, [0, 1, 2]);
        ranks.finish()
    }

    #[test]
    fn a_rank_that_is_killed_is_named_with_its_signal_and_its_standard_error() {
        let script = format!("{ONLY_RANK_1} echo 'out of luck' >&2; kill -9 $$;; esac; read more");
        let error = answers(&mut ranks(3, script.leak())).unwrap_err().to_string();
        assert!(error.contains("rank 1") && error.contains("signal: 9"), "{error}");
        assert!(error.contains("out of luck"), "{error}");
    }

    #[test]
    fn a_dead_rank_is_blamed_before_those_that_miss_it() {
        let script = format!(
            r#"{ONLY_RANK_1} sleep 0.2; echo gone >&2; exit 3;; esac
            echo '{{"failed":{{"text":"a peer is lost","is_consequence":true}}}}'; read more"#
        );
        let error = answers(&mut ranks(2, script.leak())).unwrap_err().to_string();
        assert!(error.contains("rank 1") && error.contains("gone"), "{error}");
        assert!(error.contains("rank 0: a peer is lost"), "{error}");
    }

    #[test]
    fn a_failure_is_told_with_its_rank() {
        let script = format!(
            r#"{ONLY_RANK_1} echo '{{"failed":{{"text":"no room","is_consequence":false}}}}';; esac; read more"#
        );
        let error = answers(&mut ranks(2, script.leak())).unwrap_err().to_string();
        assert!(error.contains("rank 1: no room"), "{error}");
    }

    #[test]
    fn a_rank_that_failed_by_itself_is_blamed_before_those_that_miss_it() {
        let script = r#"case $job in *'"rank":1'*) sleep 0.2; text='no room'; other=false;;
            *) text='a peer is lost'; other=true;; esac
            echo "{\"failed\":{\"text\":\"$text\",\"is_consequence\":$other}}"; read more"#;
        let error = answers(&mut ranks(3, script)).unwrap_err().to_string();
        assert!(error.contains("rank 1: no room"), "{error}");
    }

    #[test]
    fn silence_and_nonsense_end_at_the_deadline_or_before() {
        let start = Instant::now();
        let error = answers(&mut ranks(2, "read more")).unwrap_err().to_string();
        assert!(error.contains("[0, 1]"), "{error}");
        let error = answers(&mut ranks(1, "echo nonsense; read more")).unwrap_err().to_string();
        assert!(error.contains("nonsense"), "{error}");
        assert!(start.elapsed() < Duration::from_secs(10));
    }
}
