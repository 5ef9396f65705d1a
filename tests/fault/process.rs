//! Ranks as processes: this test binary, run again. A child runs the same test function, which sees that
//! it is a child and plays its role. Parent and child talk by lines: `@@ words` on the child's standard
//! output, plain lines on its standard input.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use ep_core::bootstrap::FileBootstrap;
use ep_core::config::GroupConfig;
use ep_core::engine::{Backend, Group};
use ep_core::perturb::Perturb;

use crate::threads::LONG;

/// Set in a child: its role, in words that its test understands.
pub(crate) const ROLE: &str = "EP_TEST_FAULT_ROLE";
const MARK: &str = "@@ ";

/// The role of this process if it is a child.
pub(crate) fn role() -> Option<Vec<String>> {
    let role = std::env::var(ROLE).ok()?;
    Some(role.split_whitespace().map(String::from).collect())
}

/// Tells the parent something.
pub(crate) fn say(words: impl std::fmt::Display) {
    // One write, so that lines of several threads do not mix.
    let line = format!("{MARK}{words}\n");
    std::io::stdout().write_all(line.as_bytes()).expect("the parent listens");
}

/// Waits for the parent's next line.
pub(crate) fn hear() -> String {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).expect("the parent is there");
    line.trim_end().to_string()
}

/// Ends this process at once, as `kill -9` does.
pub(crate) fn die() -> ! {
    // SAFETY: a signal to this process only.
    unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
    unreachable!("SIGKILL cannot be handled")
}

/// Gives up root for good.
pub(crate) fn become_nobody() {
    const NOBODY: u32 = 65534;
    // SAFETY: plain system calls.
    let dropped = unsafe {
        libc::setgroups(0, std::ptr::null()) == 0 && libc::setgid(NOBODY) == 0 && libc::setuid(NOBODY) == 0
    };
    assert!(dropped, "{}", std::io::Error::last_os_error());
}

/// Makes a group of processes that meet through the file at `path`.
pub(crate) fn meet(
    path: &Path,
    rank: usize,
    num_ranks: usize,
    config: &GroupConfig,
    perturb: Perturb,
) -> Arc<Group> {
    let deadline = Instant::now() + LONG;
    let bootstrap = FileBootstrap::connect(path, rank, num_ranks, deadline).expect("the ranks meet");
    Group::create_perturbed(Backend::host(""), config, Box::new(bootstrap), deadline, perturb)
        .expect("the group is made")
}

/// A directory for one scenario, gone with it. Children have it as their TMPDIR.
pub(crate) struct Scratch(PathBuf);

impl Scratch {
    pub(crate) fn new() -> Scratch {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("fault-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        std::fs::create_dir_all(&path).expect("the target directory is writable");
        Scratch(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A child process.
pub(crate) struct Rank {
    child: Child,
    stdin: ChildStdin,
    lines: Receiver<(Instant, String)>,
    name: String,
}

impl Rank {
    /// Runs `test`, the path of a test function in this binary, in the role of `role`.
    pub(crate) fn spawn(test: &str, role: &str, scratch: &Scratch) -> Rank {
        Rank::spawn_with(test, role, scratch, |_| ())
    }

    /// As `spawn`; `prepare` may change the command.
    pub(crate) fn spawn_with(
        test: &str,
        role: &str,
        scratch: &Scratch,
        prepare: impl FnOnce(&mut Command),
    ) -> Rank {
        let mut command = Command::new(std::env::current_exe().expect("this binary has a path"));
        command
            .args(["--exact", test, "--test-threads=1", "--nocapture", "--include-ignored"])
            .env(ROLE, role)
            .env("TMPDIR", scratch.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        // SAFETY: prctl is async-signal-safe. A child does not outlive the thread that runs its test.
        unsafe {
            command.pre_exec(|| {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                Ok(())
            });
        }
        prepare(&mut command);
        let mut child = command.spawn().expect("this binary runs again");
        let stdin = child.stdin.take().expect("it is piped");
        let stdout = child.stdout.take().expect("it is piped");
        let (sender, lines) = channel();
        thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                // The harness writes the test's name before it, without a line's end.
                if let Some(at) = line.find(MARK)
                    && sender.send((Instant::now(), line[at + MARK.len()..].to_string())).is_err()
                {
                    return;
                }
            }
        });
        Rank { child, stdin, lines, name: format!("{test} ({role})") }
    }

    pub(crate) fn pid(&self) -> libc::pid_t {
        self.child.id() as libc::pid_t
    }

    /// The rest of the next line that begins with `word`, and when it came. Skips others.
    pub(crate) fn await_line(&self, word: &str) -> (Instant, String) {
        let deadline = Instant::now() + LONG;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left) {
                Ok((when, line)) => {
                    if let Some(rest) = line.strip_prefix(word) {
                        return (when, rest.trim().to_string());
                    }
                }
                Err(error) => panic!("{} did not say {word:?}: {error}", self.name),
            }
        }
    }

    /// Sends a line.
    pub(crate) fn tell(&mut self, line: &str) {
        writeln!(self.stdin, "{line}").unwrap_or_else(|error| panic!("{} is gone: {error}", self.name));
    }

    pub(crate) fn signal(&self, signal: i32) {
        // SAFETY: a child of this process that was not waited for, so the number is still its own.
        let result = unsafe { libc::kill(self.pid(), signal) };
        assert_eq!(result, 0, "signal {signal} to {}", self.name);
    }

    /// Stops it, and returns when all its threads have stopped.
    pub(crate) fn stop(&self) {
        self.signal(libc::SIGSTOP);
        let mut status = 0;
        // SAFETY: waits for a change of this process's own child; one that has stopped is not reaped.
        let pid = unsafe { libc::waitpid(self.pid(), &mut status, libc::WUNTRACED) };
        assert!(pid == self.pid() && libc::WIFSTOPPED(status), "{} did not stop: {status:#x}", self.name);
    }

    /// Waits for its end.
    pub(crate) fn wait(mut self) -> ExitStatus {
        self.wait_for_end()
    }

    fn wait_for_end(&mut self) -> ExitStatus {
        let deadline = Instant::now() + LONG;
        loop {
            if let Some(status) = self.child.try_wait().expect("it is this process's child") {
                return status;
            }
            assert!(Instant::now() < deadline, "{} does not end", self.name);
            thread::sleep(Duration::from_millis(2));
        }
    }

    /// Waits for its end, which must be a success.
    pub(crate) fn finish(mut self) {
        let status = self.wait_for_end();
        assert!(status.success(), "{} ended with {status}", self.name);
    }

    /// Waits for its end by SIGKILL.
    pub(crate) fn finish_killed(mut self) {
        let status = self.wait_for_end();
        assert_eq!(status.signal(), Some(libc::SIGKILL), "{} ended with {status}", self.name);
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        // Does nothing to a child that has ended; one of a failed test must not stay.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
