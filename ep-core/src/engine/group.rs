//! A group as one of its ranks sees it: its own segment, its peers' segments, lanes and windows.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;

use super::device::{Backend, DeviceGroup};
use super::fault;
use super::join::{BACKEND_HOST, Joined, chosen, join};
use super::lane::Lane;
use super::link::Link;
use super::share::Reach;
use super::window::WindowShared;
use crate::bootstrap::{Bootstrap, Interrupter};
use crate::config::{DEFAULT_TIMEOUT, ErrorInfo, GroupConfig, GroupInfo, PeerStats};
use crate::error::{Error, Result, Status};
use crate::host::{Doorbell, Patience};
use crate::layout::{self, SegmentLayout};
use crate::mem::Words;
use crate::perturb::Perturb;

/// The alive word of a rank that is a member.
pub(super) const ALIVE: u32 = 1;
/// The alive word of a rank that has left.
const LEFT: u32 = 2;

/// The members, memory and lanes of one group, as this rank sees them.
pub struct Group {
    pub(crate) rank: usize,
    pub(crate) num_ranks: usize,
    /// No zero defaults are left in it.
    pub(crate) config: GroupConfig,
    pub(crate) layout: SegmentLayout,
    /// Every rank's segment, this rank's own included.
    pub(crate) segments: Vec<Words>,
    /// None for this rank, and for ranks of this process.
    links: Vec<Option<Link>>,
    /// The node of each rank, numbered from 0 in order of first appearance.
    pub(crate) node_of: Vec<usize>,
    pub(crate) lanes: Vec<Lane>,
    pub(super) windows: ArcSwap<Vec<Arc<WindowShared>>>,
    /// Windows that were asked for, from 1: alike on all ranks, unlike their numbers it never repeats.
    pub(super) next_window: AtomicU32,
    pub(super) backend: Backend,
    /// None: the group's calls run on the host.
    pub(super) device: Option<Box<dyn DeviceGroup>>,
    pub(super) bootstrap: Mutex<Box<dyn Bootstrap>>,
    /// Ends a meeting of this rank in `bootstrap`, whoever holds that.
    interrupter: Option<Interrupter>,
    pub(crate) patience: Patience,
    pub(crate) perturb: Perturb,
    /// Calls that hold a lane at this moment.
    calls_in_progress: AtomicUsize,
    closed: AtomicBool,
    /// This rank's error, where a peer has begun to write one into the record here and did not finish: it
    /// may have died.
    own_error: OnceLock<ErrorInfo>,
}

impl Group {
    /// Makes the group, on the host. Collective; returns by `deadline`.
    ///
    /// # Errors
    /// [`Status::InvalidArgument`], [`Status::Mismatch`], [`Status::Bootstrap`], [`Status::OutOfMemory`],
    /// [`Status::System`], [`Status::Unsupported`]; nothing is left behind.
    pub fn create(
        config: &GroupConfig,
        bootstrap: Box<dyn Bootstrap>,
        deadline: Instant,
    ) -> Result<Arc<Group>> {
        Group::create_perturbed(config, bootstrap, deadline, Perturb::none())
    }

    /// Makes the group on a backend, which every rank chose alike. Collective; returns by `deadline`.
    ///
    /// # Errors
    /// As [`Group::create`], and those of the device.
    pub fn create_on(
        backend: Backend,
        config: &GroupConfig,
        bootstrap: Box<dyn Bootstrap>,
        deadline: Instant,
    ) -> Result<Arc<Group>> {
        Group::make(backend, config, bootstrap, deadline, Perturb::none())
    }

    /// As [`Group::create`], with seeded delays and failures at the protocol's steps, for tests.
    ///
    /// # Errors
    /// As [`Group::create`].
    pub fn create_perturbed(
        config: &GroupConfig,
        bootstrap: Box<dyn Bootstrap>,
        deadline: Instant,
        perturb: Perturb,
    ) -> Result<Arc<Group>> {
        Group::make(Backend::host(""), config, bootstrap, deadline, perturb)
    }

    fn make(
        backend: Backend,
        config: &GroupConfig,
        mut bootstrap: Box<dyn Bootstrap>,
        deadline: Instant,
        perturb: Perturb,
    ) -> Result<Arc<Group>> {
        let Joined { config, segments, links, device, node_of, ranks_here } =
            join(config, &backend, &mut *bootstrap, deadline)?;
        let (rank, num_ranks) = (bootstrap.rank(), bootstrap.num_ranks());
        let layout = SegmentLayout::new(&config, num_ranks);
        let lanes = (0..config.num_lanes as usize).map(|_| Lane::new(num_ranks)).collect();
        Ok(Arc::new(Group {
            rank,
            num_ranks,
            layout,
            segments,
            links,
            node_of,
            lanes,
            windows: ArcSwap::from_pointee(Vec::new()),
            next_window: AtomicU32::new(1),
            backend,
            device,
            interrupter: bootstrap.interrupter(),
            bootstrap: Mutex::new(bootstrap),
            patience: Patience::for_ranks(ranks_here),
            perturb,
            calls_in_progress: AtomicUsize::new(0),
            closed: AtomicBool::new(false),
            own_error: OnceLock::new(),
            config,
        }))
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Number of ranks.
    pub fn num_ranks(&self) -> usize {
        self.num_ranks
    }

    /// True if the group's calls run on a device other than the host.
    pub fn is_on_device(&self) -> bool {
        self.device.is_some()
    }

    /// The deadline of collective calls that do not choose one.
    pub fn default_timeout(&self) -> Duration {
        Duration::from_millis(self.config.timeout_ms.into())
    }

    /// Breaks the group, here and on the peers, and ends a window allocation that is in progress here. Never
    /// waits.
    pub fn abort(&self) {
        let text = format!("ep_group_abort was called on rank {}", self.rank);
        self.fail(&self.error_info(Status::Aborted, None, None, 0, text));
        if let Some(interrupt) = &self.interrupter {
            interrupt();
        }
    }

    /// Breaks the group because a panic was caught in one of its calls.
    pub fn poison(&self, text: &str) {
        let text = format!("a defect of the library was caught on rank {}: {text}", self.rank);
        self.fail(&self.error_info(Status::Internal, None, None, 0, text));
    }

    pub(crate) fn error_info(
        &self,
        status: Status,
        peer: Option<usize>,
        lane: Option<usize>,
        epoch: u64,
        text: String,
    ) -> ErrorInfo {
        ErrorInfo { status, rank: self.rank, peer, lane, epoch, text }
    }

    /// Breaks the group: records the error here first, then with every peer. A root cause that a peer has
    /// already recorded goes before this rank's own, which may be its consequence. Returns what this rank
    /// reports.
    pub(crate) fn fail(&self, info: &ErrorInfo) -> Error {
        let known = self.segments.iter().find_map(fault::read);
        fault::record(&self.segments[self.rank], known.as_ref().unwrap_or(info));
        let first = fault::read(&self.segments[self.rank]);
        let first =
            first.unwrap_or_else(|| self.own_error.get_or_init(|| known.unwrap_or(info.clone())).clone());
        for segment in &self.segments {
            fault::record(segment, &first);
        }
        if let Some(device) = &self.device {
            device.abort(&first);
        }
        for rank in 0..self.num_ranks {
            for lane in 0..self.lanes.len() {
                self.doorbell(rank, lane).ring();
            }
        }
        fault::as_error(&first, self.rank)
    }

    /// Takes over what the device found out: an error there becomes the group's.
    pub(super) fn poll_device(&self) {
        if let Some(device) = &self.device
            && let Some(info) = device.error()
            && !fault::is_set(&self.segments[self.rank])
        {
            self.fail(&info);
        }
    }

    /// How this rank exchanges memory with its peers.
    pub(super) fn reach(&self, deadline: Instant) -> Reach<'_> {
        Reach { rank: self.rank, links: &self.links, device: self.backend.device.as_deref(), deadline }
    }

    /// The error that broke the group, as this rank reports it.
    pub(crate) fn broken(&self) -> Option<Error> {
        self.first_error().map(|info| fault::as_error(&info, self.rank))
    }

    /// A rank whose record is only claimed is broken all the same; its peers may know why.
    fn first_error(&self) -> Option<ErrorInfo> {
        if let Some(info) = self.own_error.get() {
            return Some(info.clone());
        }
        if !fault::is_set(&self.segments[self.rank]) {
            return None;
        }
        let known = fault::read(&self.segments[self.rank]);
        known.or_else(|| self.segments.iter().find_map(fault::read)).or_else(|| Some(fault::unfinished()))
    }

    /// Refuses a call on a group that is broken or closed.
    ///
    /// # Errors
    /// [`Status::Aborted`] repeating why, or [`Status::BadHandle`].
    pub(crate) fn check_usable(&self) -> Result<()> {
        self.check_open()?;
        self.poll_device();
        match self.first_error() {
            None => Ok(()),
            Some(info) => {
                let error = fault::as_error(&info, self.rank);
                let status = if info.status == Status::Internal { Status::Internal } else { Status::Aborted };
                Err(Error::new(
                    status,
                    format!("the group is broken, destroy it and make a new one. Why: {}", error.message),
                ))
            }
        }
    }

    /// Refuses a call on a group that is closed.
    ///
    /// # Errors
    /// [`Status::BadHandle`].
    pub(super) fn check_open(&self) -> Result<()> {
        // SeqCst: pairs with the store in `close`, see `enter`.
        if self.closed.load(Ordering::SeqCst) {
            return Err(Error::new(Status::BadHandle, "the group was destroyed"));
        }
        Ok(())
    }

    /// The first error that broke the group, and per rank whether it is alive. Lock-free.
    pub fn health(&self, alive: &mut [bool]) -> Option<ErrorInfo> {
        self.poll_device();
        for (rank, alive) in alive.iter_mut().enumerate().take(self.num_ranks) {
            *alive = !self.has_left(rank);
        }
        self.first_error().or_else(|| self.device.as_ref()?.take_call_error())
    }

    /// True once `rank` has left the group or its process has ended.
    pub(crate) fn has_left(&self, rank: usize) -> bool {
        // Acquire: pairs with the release in `leave`; what the rank wrote before it left is visible.
        self.segments[rank].u32(layout::ALIVE).load(Ordering::Acquire) != ALIVE
            || self.links[rank].as_ref().is_some_and(Link::is_closed)
    }

    pub(crate) fn doorbell(&self, rank: usize, lane: usize) -> Doorbell<'_> {
        Doorbell::new(&self.segments[rank], self.layout.doorbell(lane), self.layout.sleeping(lane))
    }

    pub(super) fn links(&self) -> &[Option<Link>] {
        &self.links
    }

    /// Sizes and choices.
    pub fn info(&self) -> GroupInfo {
        let window_bytes = self.windows.load().iter().map(|window| window.own_bytes() as u64).sum();
        GroupInfo {
            rank: self.rank,
            num_ranks: self.num_ranks,
            num_nodes: self.node_of.iter().max().map_or(0, |node| node + 1),
            node: self.node_of[self.rank],
            backend: chosen(&self.backend),
            num_lanes: self.lanes.len(),
            timeout_ms: self.config.timeout_ms,
            max_local_experts: self.config.max_local_experts as usize,
            ring_bytes: self.config.ring_bytes as usize,
            memory_bytes: self.layout.bytes() as u64 * if self.device.is_some() { 2 } else { 1 },
            window_bytes,
            backend_reason: self.backend_reason(),
        }
    }

    fn backend_reason(&self) -> String {
        let why = match self.config.backend {
            BACKEND_HOST => "asked for",
            _ if self.backend.reason.is_empty() => "made there",
            _ => &self.backend.reason,
        };
        let what = self.backend.device.as_ref().map_or(String::from("host"), |device| device.describe());
        let in_process = self.links.iter().filter(|link| link.is_none()).count();
        format!(
            "{what}: {why}; all {} ranks map each other's memory ({in_process} of them in this process)",
            self.num_ranks
        )
    }

    /// What this rank did with each peer.
    pub fn stats(&self) -> Vec<PeerStats> {
        let mut stats = vec![PeerStats::default(); self.num_ranks];
        for lane in &self.lanes {
            for (sum, counters) in stats.iter_mut().zip(&lane.counters) {
                counters.add_to(sum);
            }
        }
        stats
    }

    /// A call waits on a stream; `call_done` ends it.
    pub(super) fn call_queued(&self) {
        // Relaxed: the call counts itself again when it begins, see `enter`.
        self.calls_in_progress.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn call_done(&self) {
        // Release: as in `InProgress::drop`.
        self.calls_in_progress.fetch_sub(1, Ordering::Release);
    }

    /// A call begins; the returned guard counts it until dropped.
    ///
    /// # Errors
    /// [`Status::BadHandle`] if the group was closed since the call looked.
    pub(crate) fn enter(&self) -> Result<InProgress<'_>> {
        // SeqCst: pairs with the store of `closed` in `close`. Either that sees this call and waits for it, or
        // this call sees that the group is closed.
        self.calls_in_progress.fetch_add(1, Ordering::SeqCst);
        let in_progress = InProgress { group: self };
        self.check_open()?;
        Ok(in_progress)
    }

    /// Ends this rank's membership. Waits up to `timeout` for its own calls, then aborts the group.
    ///
    /// # Errors
    /// [`Status::Timeout`] if a call was still in progress after the abort; the group is closed anyway.
    pub fn close(&self, timeout: Duration) -> Result<()> {
        let idle_by = |deadline: Instant| {
            // SeqCst: see `enter`; the lane guard's release orders what the call did.
            while self.calls_in_progress.load(Ordering::SeqCst) != 0
                || self.device.as_ref().is_some_and(|device| !device.is_idle().unwrap_or(true))
            {
                if Instant::now() >= deadline {
                    return false;
                }
                std::thread::sleep(Duration::from_micros(200));
            }
            true
        };
        let mut idle = idle_by(Instant::now() + timeout);
        if !idle {
            self.abort();
            idle = idle_by(Instant::now() + Duration::from_secs(1));
        }
        // SeqCst: pairs with the load in `check_open`. From here on calls are refused; one that began before
        // is waited for.
        self.closed.store(true, Ordering::SeqCst);
        if idle && !idle_by(Instant::now() + timeout) {
            self.abort();
            idle = idle_by(Instant::now() + Duration::from_secs(1));
        }
        self.leave();
        if idle {
            return Ok(());
        }
        Err(Error::new(
            Status::Timeout,
            format!("a call of rank {} was still in progress when its group was destroyed", self.rank),
        ))
    }

    fn leave(&self) {
        // Release: pairs with the acquire in `has_left`; all this rank's words are final.
        if self.segments[self.rank].u32(layout::ALIVE).swap(LEFT, Ordering::Release) == LEFT {
            return;
        }
        for rank in 0..self.num_ranks {
            for lane in 0..self.lanes.len() {
                self.doorbell(rank, lane).ring();
            }
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.leave();
    }
}

/// Counts a call of this rank while it lives.
pub(crate) struct InProgress<'a> {
    group: &'a Group,
}

impl Drop for InProgress<'_> {
    fn drop(&mut self) {
        // Release: pairs with the load in `close`, which goes on when no call is left.
        self.group.calls_in_progress.fetch_sub(1, Ordering::Release);
    }
}

/// The time at which a call with this option is over.
pub(crate) fn deadline_after(timeout_ms: u32, default: Duration) -> Instant {
    let timeout = if timeout_ms == 0 { default } else { Duration::from_millis(timeout_ms.into()) };
    Instant::now() + timeout
}

/// Used where a timeout of 0 means the library's default.
pub fn timeout_or_default(timeout_ms: u32) -> Duration {
    if timeout_ms == 0 { DEFAULT_TIMEOUT } else { Duration::from_millis(timeout_ms.into()) }
}
