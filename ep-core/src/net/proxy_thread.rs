//! The thread that turns a proxy: it looks for work for a bounded time, then sleeps on the NICs and on the
//! producers' event.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use super::layout::MAX_NICS;
use super::mailbox::{Mailbox, Request};
use super::port::{Port, PortSpec};
use super::proxy::Proxy;
use super::transport::Transport;
use crate::error::{Error, Result};

/// The longest sleep while a NIC is not watched, because it has no descriptor.
const MAX_BLIND: Duration = Duration::from_millis(1);

/// How a proxy's thread behaves.
#[derive(Clone, Debug)]
pub struct ProxyOptions {
    /// How long it looks for work before it sleeps, where there is a core for it. Where there is none, not at all.
    pub spin: Duration,
    /// After how long a link fails none of whose writes is taken.
    pub stuck_after: Duration,
    /// Ranks and proxies on this machine; the thread gets a core of its own if there are more cores than these.
    pub busy_threads: usize,
    /// Which proxy of the process it is: they get different cores.
    pub index: usize,
}

impl Default for ProxyOptions {
    fn default() -> ProxyOptions {
        let (spin, stuck_after) = (Duration::from_micros(50), Duration::from_secs(5));
        ProxyOptions { spin, stuck_after, busy_threads: usize::MAX, index: 0 }
    }
}

/// A running proxy. The thread ends when the last handle and the last port are gone.
#[derive(Clone, Debug)]
pub struct ProxyHandle {
    inner: Arc<Running>,
}

#[derive(Debug)]
struct Running {
    mailbox: Arc<Mailbox>,
    nics: Vec<String>,
    pinning: String,
    /// Disconnects when the thread ends.
    ended: Mutex<Receiver<()>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl ProxyHandle {
    /// Starts the thread that serves `nics`.
    ///
    /// # Errors
    /// Those of [`Proxy::new`]; [`crate::Status::System`] if there can be no thread.
    pub fn start(nics: Vec<Box<dyn Transport>>, options: ProxyOptions) -> Result<ProxyHandle> {
        let proxy = Proxy::new(nics, options.stuck_after)?;
        let (mailbox, nics) = (Arc::clone(proxy.mailbox()), proxy.nic_names());
        let (core, pinning) = choose_core(&options);
        let (alive, ended) = sync_channel::<()>(1);
        let thread = std::thread::Builder::new()
            .name("ep-proxy".into())
            .spawn(move || {
                let _alive = alive;
                run(proxy, &options, core);
            })
            .map_err(|e| Error::system("starting the network's thread", e))?;
        let (ended, thread) = (Mutex::new(ended), Mutex::new(Some(thread)));
        Ok(ProxyHandle { inner: Arc::new(Running { mailbox, nics, pinning, ended, thread }) })
    }

    /// Opens a port for one rank of a group.
    ///
    /// # Errors
    /// Those of [`Proxy::open`]; [`crate::Status::Timeout`] at the deadline.
    pub fn open(&self, spec: PortSpec, deadline: Instant) -> Result<Port> {
        self.inner.mailbox.ask(|reply| Request::Open { spec, reply }).wait(deadline, "opening a port")
    }

    /// The NICs, as [`super::transport::Limits::name`] says.
    pub fn nics(&self) -> &[String] {
        &self.inner.nics
    }

    /// A sentence about the thread's core, and why it has one of its own or not.
    pub fn pinning(&self) -> &str {
        &self.inner.pinning
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.mailbox.tell(Request::Stop);
        // A port that is still open keeps the thread; it then ends by itself.
        let ended = self.ended.get_mut().unwrap_or_else(|poisoned| poisoned.into_inner());
        let stayed =
            ended.recv_timeout(Duration::from_millis(100)) == Err(std::sync::mpsc::RecvTimeoutError::Timeout);
        let thread = self.thread.get_mut().unwrap_or_else(|poisoned| poisoned.into_inner()).take();
        if let Some(thread) = thread.filter(|_| !stayed) {
            // The thread catches its own panics.
            let _ = thread.join();
        }
    }
}

/// A core for the thread, or none, and why.
fn choose_core(options: &ProxyOptions) -> (Option<usize>, String) {
    let Ok(allowed) = sched_getaffinity(None) else {
        return (None, "not pinned: the system does not tell which cores it may use".into());
    };
    let cores: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|&core| allowed.is_set(core)).collect();
    if options.busy_threads == usize::MAX {
        return (None, "not pinned: nobody asked for it".into());
    }
    if cores.len() <= options.busy_threads {
        let text =
            format!("not pinned: {} cores for {} ranks and proxies", cores.len(), options.busy_threads);
        return (None, text);
    }
    // From the last core down: ranks tend to begin at the first.
    let core = cores[cores.len() - 1 - options.index % cores.len()];
    (Some(core), format!("pinned to core {core} of {}", cores.len()))
}

fn run(mut proxy: Proxy, options: &ProxyOptions, core: Option<usize>) {
    if let Some(core) = core {
        let mut set = CpuSet::new();
        set.set(core);
        // Refused by a sandbox, perhaps: the thread runs elsewhere, and no slower than without the wish.
        let _ = sched_setaffinity(None, &set);
    }
    let has_core = core.is_some() || std::thread::available_parallelism().is_ok_and(|cores| cores.get() > 2);
    let spin = if has_core { options.spin } else { options.spin.min(Duration::from_micros(5)) };
    if catch_unwind(AssertUnwindSafe(|| serve(&mut proxy, spin))).is_err() {
        let abandon = || proxy.abandon("the network's thread met a defect of the library and has ended");
        // Nothing is left to tell if even that fails.
        let _ = catch_unwind(AssertUnwindSafe(abandon));
    }
}

fn serve(proxy: &mut Proxy, spin: Duration) {
    let start = Instant::now();
    let mut last_work = start;
    while !proxy.is_done() {
        let now = Instant::now();
        if proxy.turn((now - start).as_nanos() as u64) {
            last_work = now;
        } else if now - last_work >= spin {
            sleep(proxy, now - last_work);
        } else {
            std::hint::spin_loop();
        }
    }
}

/// Sleeps until a producer, a request or a NIC has something, unless one has it already. A NIC that can only be
/// polled is looked at again after half the time for which nothing has happened.
fn sleep(proxy: &mut Proxy, idle: Duration) {
    let waker = Arc::clone(proxy.waker());
    waker.fall_asleep();
    let longest = proxy.longest_sleep();
    // After `fall_asleep`: what was published before its fence is seen here, what comes later wakes.
    let quiet = !proxy.has_work() && proxy.transports().all(|nic| nic.wait_fd().is_none() || nic.may_sleep());
    if quiet {
        let tells = proxy.transports().all(|nic| nic.wait_fd().is_some());
        let timeout = if tells { longest } else { longest.min(idle / 2).min(MAX_BLIND) };
        let timeout = Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: timeout.subsec_nanos().into() };
        let mut nics = proxy.transports().filter_map(|nic| nic.wait_fd());
        // The places that no NIC needs name the event once more.
        let mut fds: [PollFd<'_>; MAX_NICS + 1] = std::array::from_fn(|place| {
            let nic = if place == 0 { None } else { nics.next() };
            PollFd::from_borrowed_fd(nic.unwrap_or(waker.descriptor()), PollFlags::IN)
        });
        // Woken, interrupted or timed out: all mean "look again".
        let _ = poll(&mut fds, Some(&timeout));
    } else {
        std::thread::yield_now();
    }
    waker.stay_awake();
}
