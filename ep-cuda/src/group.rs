//! A group as its rank's CUDA device sees it: what every call of it is given.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use bytemuck::Zeroable;
use cudarc::driver::sys::CUstream;
use ep_core::config::ErrorInfo;
use ep_core::engine::{DeviceGroup, DevicePlan, How, Membership, body_of};
use ep_core::layout;
use ep_core::mem::Memory;
use ep_core::plan::PlanShape;
use ep_core::wire::{ERROR_BYTES, ErrorBody};
use ep_core::{Error, Result};

use crate::args::{self, LANE_BYTES, MAX_WINDOWS};
use crate::check;
use crate::context::Entered;
use crate::device::CudaDevice;
use crate::launch::DEFAULT_SMS;
use crate::pinned::Pinned;
use crate::plan::{CudaPlan, plan_bytes};
use crate::pool::Buffer;
use crate::report::{ReportBox, describe};
use crate::stream::Event;

/// The state word of an error record that is complete: kernels of a peer see it and give up.
const RECORD_SET: u32 = 2;

/// An error record as it lies in a segment.
#[repr(C)]
struct Record {
    state: u32,
    body: ErrorBody,
}
const _: () = assert!(size_of::<Record>() == ERROR_BYTES);

/// The group's side of the seam.
pub(crate) struct CudaGroup {
    shared: Arc<Shared>,
}

/// What plans share with their group.
pub(crate) struct Shared {
    pub(crate) device: Arc<CudaDevice>,
    pub(crate) num_ranks: usize,
    /// By lane: what does not change between its calls.
    lanes: Vec<Lane>,
    report: ReportBox,
    /// The [`Record`] that an abort copies to the peers.
    record: Pinned,
    window_bases: Buffer,
    window_sizes: Buffer,
    segments: Vec<Memory>,
    aborted: AtomicBool,
    /// Errors of single calls, by lane, until someone asks.
    call_errors: Mutex<Vec<Option<ErrorInfo>>>,
    _lane_states: Buffer,
}

struct Lane {
    args: args::Group,
    /// Behind the last call that was not captured into a graph.
    last: Event,
}

impl CudaGroup {
    pub(crate) fn new(device: Arc<CudaDevice>, membership: Membership) -> Result<CudaGroup> {
        let num_lanes = membership.config.num_lanes as usize;
        let table = MAX_WINDOWS * membership.num_ranks * 8;
        let lane_states = device.pool.allocate(num_lanes * LANE_BYTES)?;
        let window_bases = device.pool.allocate(table)?;
        let window_sizes = device.pool.allocate(table)?;
        let report = ReportBox::new(device.pinned.allocate(size_of::<args::Report>())?);
        let record = device.pinned.allocate(size_of::<Record>())?;
        let addresses = [report.device(), lane_states.base(), window_bases.base(), window_sizes.base()];
        let lanes = (0..num_lanes)
            .map(|lane| {
                let args = lane_args(&membership, lane, addresses);
                Ok(Lane { args, last: Event::new(&device.context, false)? })
            })
            .collect::<Result<Vec<Lane>>>()?;
        let shared = Shared {
            num_ranks: membership.num_ranks,
            lanes,
            report,
            record,
            window_bases,
            window_sizes,
            segments: membership.segments,
            aborted: AtomicBool::new(false),
            call_errors: Mutex::new(vec![None; num_lanes]),
            _lane_states: lane_states,
            device,
        };
        Ok(CudaGroup { shared: Arc::new(shared) })
    }
}

/// What the kernels of a lane are told about the group. `addresses`: report, lanes, window tables.
fn lane_args(membership: &Membership, lane: usize, addresses: [u64; 4]) -> args::Group {
    let Membership { rank, num_ranks, config, layout, node_of, segments } = membership;
    let [report, states, windows, window_bytes] = addresses;
    let mut group = args::Group {
        rank: *rank as u32,
        num_ranks: *num_ranks as u32,
        lane: lane as u32,
        max_local_experts: config.max_local_experts,
        report,
        state: states + (lane * LANE_BYTES) as u64,
        windows,
        window_bytes,
        error_offset: layout::ERROR as u64,
        line_offset: layout.line(lane, 0) as u64,
        desc_offset: layout.desc(lane, 0, 0) as u64,
        desc_stride: (layout.desc(lane, 0, 1) - layout.desc(lane, 0, 0)) as u64,
        ring_offset: layout.ring(lane, 0) as u64,
        ring_bytes: layout.ring_bytes() as u64,
        ..args::Group::zeroed()
    };
    for (to, node) in group.node_of.iter_mut().zip(node_of) {
        *to = *node as u32;
    }
    for (to, segment) in group.segments.iter_mut().zip(segments) {
        *to = segment.base().addr() as u64;
    }
    group
}

/// A call that is about to be queued: its stream is checked, its context current.
pub(crate) struct Start<'a> {
    pub(crate) group: args::Group,
    pub(crate) stream: CUstream,
    pub(crate) num_sms: usize,
    capturing: bool,
    lane: &'a Lane,
    _entered: Entered<'a>,
}

impl Shared {
    /// Begins a call of `lane`.
    ///
    /// # Errors
    /// [`ep_core::Status::InvalidArgument`] for a stream of another context.
    ///
    /// # Safety
    /// `how.stream` is a stream.
    pub(crate) unsafe fn start(&self, lane: usize, how: &How) -> Result<Start<'_>> {
        let entered = self.device.context.enter()?;
        let stream: CUstream = how.stream.cast();
        // SAFETY: by the caller's word.
        let capturing = unsafe { check::stream(&self.device.context, stream) }?;
        let lane = &self.lanes[lane];
        let mut group = lane.args;
        group.timeout_ns = u64::try_from(how.timeout.as_nanos()).unwrap_or(u64::MAX);
        let asked = if how.options.num_sms == 0 { DEFAULT_SMS } else { how.options.num_sms as usize };
        let num_sms = asked.min(self.device.num_sms);
        Ok(Start { group, stream, num_sms, capturing, lane, _entered: entered })
    }

    fn call_errors(&self) -> MutexGuard<'_, Vec<Option<ErrorInfo>>> {
        self.call_errors.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Reads the report: an error of one call is kept for its lane, one that breaks the group returned.
    pub(crate) fn poll(&self) -> Option<ErrorInfo> {
        self.report.read()?;
        let mut kept = self.call_errors();
        // Once more, under the lock: another thread may have taken it.
        let info = describe(&self.report.read()?);
        if info.status.code() >= 200 {
            return Some(info);
        }
        if let Some(slot) = info.lane.and_then(|lane| kept.get_mut(lane)) {
            slot.get_or_insert(info);
        }
        self.report.clear();
        None
    }

    /// The error of a call of `lane`, if a kernel reported one; it is forgotten then.
    pub(crate) fn take_call_error(&self, lane: usize) -> Option<Error> {
        let _ = self.poll();
        let info = self.call_errors().get_mut(lane)?.take()?;
        Some(Error::new(info.status, info.text))
    }

    fn is_idle(&self) -> Result<bool> {
        let mut idle = true;
        for lane in &self.lanes {
            idle &= lane.last.is_done()?;
        }
        Ok(idle)
    }
}

impl Start<'_> {
    /// Marks the end of the call, so that destroying the group can wait for it.
    pub(crate) fn finish(&self) -> Result<()> {
        if self.capturing {
            return Ok(());
        }
        // SAFETY: the stream was checked to be of this context.
        unsafe { self.lane.last.record(self.stream) }
    }
}

impl DeviceGroup for CudaGroup {
    fn set_window(&self, id: u32, parts: Option<&[Option<Memory>]>) -> Result<()> {
        let (shared, ranks) = (&self.shared, self.shared.num_ranks);
        let row = (id as usize).saturating_sub(1) * ranks * 8;
        let part = |rank: usize| parts.and_then(|parts| parts.get(rank)?.as_ref());
        let bases: Vec<u64> = (0..ranks).map(|r| part(r).map_or(0, |p| p.base().addr() as u64)).collect();
        let sizes: Vec<u64> = (0..ranks).map(|r| part(r).map_or(0, |p| p.bytes() as u64)).collect();
        shared.window_sizes.write(row, bytemuck::cast_slice(&sizes))?;
        shared.window_bases.write(row, bytemuck::cast_slice(&bases))
    }

    fn plan_bytes(&self, shape: &PlanShape) -> Result<usize> {
        plan_bytes(shape)
    }

    fn create_plan(&self, shape: &PlanShape, memory: Option<(u64, usize)>) -> Result<Box<dyn DevicePlan>> {
        Ok(Box::new(CudaPlan::new(self.shared.clone(), shape, memory)?))
    }

    fn error(&self) -> Option<ErrorInfo> {
        self.shared.poll()
    }

    fn take_call_error(&self) -> Option<ErrorInfo> {
        self.shared.call_errors().iter_mut().find_map(Option::take)
    }

    fn abort(&self, info: &ErrorInfo) {
        let shared = &self.shared;
        shared.report.abort();
        // Relaxed: whoever is first does it; nothing else depends on the flag.
        if shared.aborted.swap(true, Ordering::Relaxed) {
            return;
        }
        let record = shared.record.host();
        // SAFETY: the block is larger, aligned, and no copy reads it yet: this runs once.
        unsafe { record.cast::<Record>().write(Record { state: RECORD_SET, body: body_of(info) }) };
        for segment in &shared.segments {
            let to = (segment.base().addr() + layout::ERROR) as u64;
            // The state last: it publishes the record. A peer that cannot be told waits for its deadline.
            for part in [4..ERROR_BYTES, 0..4] {
                // SAFETY: inside the block, which is pinned and lives as long as the group.
                let _ = unsafe {
                    shared.device.pool.queue_write(to + part.start as u64, record.add(part.start), part.len())
                };
            }
        }
    }

    fn is_idle(&self) -> Result<bool> {
        self.shared.is_idle()
    }
}

impl Drop for CudaGroup {
    fn drop(&mut self) {
        // Relaxed: as in `abort`. Its copies to the peers are short.
        if self.shared.aborted.load(Ordering::Relaxed) {
            let _ = self.shared.device.pool.synchronize();
        }
        if !self.shared.is_idle().unwrap_or(true) {
            // A kernel still runs: unmapping what it uses would end the context. The memory stays.
            std::mem::forget(self.shared.clone());
        }
    }
}
