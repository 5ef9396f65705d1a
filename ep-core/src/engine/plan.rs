//! A plan as the caller holds it: checks calls and runs them, now or on a stream.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use super::check;
use super::device::DeviceStream;
use super::device_plan::DeviceCore;
use super::group::{Group, deadline_after};
use super::stream::{Job, Stream};
use super::window::WindowTable;
use crate::config::{
    CombineInputs, CombineOutputs, Counts, DispatchInputs, DispatchOutputs, Layout, Options, PlanConfig,
};
use crate::error::{Error, Result, Status};
use crate::host::{self, UpdateCall, Updated};
use crate::plan::{PlanLayout, PlanShape, PlanState, Routing};
use crate::tensor::RawTensor;

/// One routing, reusable.
pub struct Plan {
    core: Core,
}

/// Where the plan is.
enum Core {
    Host(Arc<PlanCore>),
    Device(DeviceCore),
}

/// What a plan's calls share with the streams they are queued on.
pub(super) struct PlanCore {
    pub(super) group: Arc<Group>,
    pub(super) shape: PlanShape,
    layout: PlanLayout,
    memory: PlanMemory,
    /// Odd while an update writes; read with the words below, so that `counts` sees one update's.
    version: AtomicU32,
    epoch: AtomicU64,
    num_tokens: AtomicU64,
    num_rows: AtomicU64,
    /// Rows that fitted the outputs of the last dispatch along this routing; `NEVER` before the first.
    dispatched: AtomicU64,
    /// Updates on streams that are not done.
    queued: AtomicU32,
    /// Wakes `counts` when a queued update is done, with the error of the last one.
    done: (Mutex<Option<Error>>, Condvar),
}

/// In `PlanCore::dispatched`: no dispatch has used the routing yet.
const NEVER: u64 = u64::MAX;

/// The block that holds the plan's arrays.
struct PlanMemory {
    address: *mut u8,
    /// Keeps the library's own block; None: the caller's.
    _own: Option<Vec<Line>>,
}

/// A cache line, for its alignment.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

// SAFETY: the block belongs to the plan, and the lane lets one call use it at a time.
unsafe impl Send for PlanMemory {}
// SAFETY: as above; `counts` reads words only while no update writes them, and checks that.
unsafe impl Sync for PlanMemory {}

fn shape_of(group: &Group, config: &PlanConfig) -> Result<PlanShape> {
    let limits = (group.config.num_lanes as usize, group.config.max_local_experts as usize);
    let shape = PlanShape::new(config, group.rank, group.num_ranks, limits.0, limits.1)?;
    Ok(shape.with_cells(group.topology.cell_of(), group.topology.cells().len()))
}

impl Plan {
    /// Bytes that [`Plan::create`] needs.
    ///
    /// # Errors
    /// Those of a config that [`Plan::create`] refuses.
    pub fn bytes(group: &Group, config: &PlanConfig) -> Result<usize> {
        let shape = shape_of(group, config)?;
        match &group.device {
            None => Ok(PlanLayout::new(&shape).bytes()),
            Some(device) => device.plan_bytes(&shape),
        }
    }

    /// Makes a plan in `memory` (address, bytes), of the device if the group is on one, or in memory of
    /// its own.
    ///
    /// # Errors
    /// [`Status::InvalidArgument`], [`Status::OutOfRange`] or [`Status::Capacity`], naming the field.
    ///
    /// # Safety
    /// `memory` stays valid and unused by others until the plan is dropped.
    pub unsafe fn create(
        group: &Arc<Group>,
        config: &PlanConfig,
        memory: Option<(*mut u8, usize)>,
    ) -> Result<Plan> {
        let shape = shape_of(group, config)?;
        if let Some(device) = &group.device {
            let core = DeviceCore::create(group, &**device, shape, memory)?;
            return Ok(Plan { core: Core::Device(core) });
        }
        let layout = PlanLayout::new(&shape);
        if let Some((address, _)) = memory {
            let range = address.addr()..address.addr().saturating_add(layout.bytes());
            WindowTable::of(group).check("plan memory", &range)?;
        }
        let memory = match memory {
            None => PlanMemory::allocate(layout.bytes())?,
            Some((address, bytes)) => PlanMemory::of_caller(address, bytes, layout.bytes())?,
        };
        let core = PlanCore {
            group: group.clone(),
            shape,
            layout,
            memory,
            version: AtomicU32::new(0),
            epoch: AtomicU64::new(0),
            num_tokens: AtomicU64::new(0),
            num_rows: AtomicU64::new(0),
            dispatched: AtomicU64::new(NEVER),
            queued: AtomicU32::new(0),
            done: (Mutex::new(None), Condvar::new()),
        };
        Ok(Plan { core: Core::Host(Arc::new(core)) })
    }

    /// The group the plan belongs to.
    pub fn group(&self) -> &Arc<Group> {
        match &self.core {
            Core::Host(core) => &core.group,
            Core::Device(core) => core.group(),
        }
    }

    /// Experts on this rank.
    pub fn num_local_experts(&self) -> usize {
        match &self.core {
            Core::Host(core) => core.shape.num_local(),
            Core::Device(core) => core.shape().num_local(),
        }
    }

    /// True if the plan's calls run on a device: then `…_on` take its streams.
    pub fn is_on_device(&self) -> bool {
        matches!(self.core, Core::Device(_))
    }

    /// Takes a routing. `stream` None: done when this returns.
    ///
    /// # Errors
    /// As `ep_plan_update`.
    ///
    /// # Safety
    /// The tensor's memory is readable until the call is done.
    pub unsafe fn update(&self, idx: &RawTensor, options: &Options, stream: Option<&Stream>) -> Result<()> {
        match &self.core {
            // SAFETY: by the caller's word.
            Core::Host(core) => unsafe { core.start_update(idx, options, stream) },
            // SAFETY: as above; NULL is a stream of every device.
            Core::Device(core) => unsafe { core.update(idx, options, device_stream(stream)?) },
        }
    }

    /// As [`Plan::update`], on a stream of the group's device.
    ///
    /// # Errors
    /// As `ep_plan_update`.
    ///
    /// # Safety
    /// The tensor's memory is readable until the call is done, and `stream` is a stream.
    pub unsafe fn update_on(&self, idx: &RawTensor, options: &Options, stream: DeviceStream) -> Result<()> {
        // SAFETY: by the caller's word.
        unsafe { self.on_device()?.update(idx, options, stream) }
    }

    /// Sends rows to their experts.
    ///
    /// # Errors
    /// As `ep_dispatch`.
    ///
    /// # Safety
    /// Inputs are readable and outputs writable until the call is done.
    pub unsafe fn dispatch(
        &self,
        inputs: &DispatchInputs,
        outputs: &DispatchOutputs,
        options: &Options,
        stream: Option<&Stream>,
    ) -> Result<()> {
        match &self.core {
            // SAFETY: by the caller's word.
            Core::Host(core) => unsafe { core.start_dispatch(inputs, outputs, options, stream) },
            // SAFETY: as above; NULL is a stream of every device.
            Core::Device(core) => unsafe { core.dispatch(inputs, outputs, options, device_stream(stream)?) },
        }
    }

    /// As [`Plan::dispatch`], on a stream of the group's device.
    ///
    /// # Errors
    /// As `ep_dispatch`.
    ///
    /// # Safety
    /// Inputs are readable and outputs writable until the call is done, and `stream` is a stream.
    pub unsafe fn dispatch_on(
        &self,
        inputs: &DispatchInputs,
        outputs: &DispatchOutputs,
        options: &Options,
        stream: DeviceStream,
    ) -> Result<()> {
        // SAFETY: by the caller's word.
        unsafe { self.on_device()?.dispatch(inputs, outputs, options, stream) }
    }

    /// Brings rows back and adds them.
    ///
    /// # Errors
    /// As `ep_combine`.
    ///
    /// # Safety
    /// Inputs are readable and outputs writable until the call is done.
    pub unsafe fn combine(
        &self,
        inputs: &CombineInputs,
        outputs: &CombineOutputs,
        options: &Options,
        stream: Option<&Stream>,
    ) -> Result<()> {
        match &self.core {
            // SAFETY: by the caller's word.
            Core::Host(core) => unsafe { core.start_combine(inputs, outputs, options, stream) },
            // SAFETY: as above; NULL is a stream of every device.
            Core::Device(core) => unsafe { core.combine(inputs, outputs, options, device_stream(stream)?) },
        }
    }

    /// As [`Plan::combine`], on a stream of the group's device.
    ///
    /// # Errors
    /// As `ep_combine`.
    ///
    /// # Safety
    /// Inputs are readable and outputs writable until the call is done, and `stream` is a stream.
    pub unsafe fn combine_on(
        &self,
        inputs: &CombineInputs,
        outputs: &CombineOutputs,
        options: &Options,
        stream: DeviceStream,
    ) -> Result<()> {
        // SAFETY: by the caller's word.
        unsafe { self.on_device()?.combine(inputs, outputs, options, stream) }
    }

    /// Waits for the last update and tells what will arrive. None: the group's timeout.
    ///
    /// # Errors
    /// [`Status::InvalidState`], [`Status::NotReady`], or the error of the update.
    pub fn counts(&self, timeout: Option<Duration>) -> Result<Counts> {
        match &self.core {
            Core::Host(core) => core.counts(timeout),
            Core::Device(core) => core.counts(timeout),
        }
    }

    fn on_device(&self) -> Result<&DeviceCore> {
        match &self.core {
            Core::Device(core) => Ok(core),
            Core::Host(_) => Err(Error::invalid("the group is on the host, and the stream is a device's")),
        }
    }
}

fn device_stream(stream: Option<&Stream>) -> Result<DeviceStream> {
    match stream {
        None => Ok(std::ptr::null_mut()),
        Some(_) => Err(Error::invalid("the group is on a device, and the stream is the host's")),
    }
}

pub(super) fn never_updated() -> Error {
    Error::new(
        Status::InvalidState,
        "the plan has no routing: call ep_plan_update, with success, before ep_plan_counts, ep_dispatch and \
         ep_combine",
    )
}

impl PlanCore {
    /// Runs an update, or queues it.
    ///
    /// # Safety
    /// As of [`Plan::update`].
    unsafe fn start_update(
        self: &Arc<Self>,
        idx: &RawTensor,
        options: &Options,
        stream: Option<&Stream>,
    ) -> Result<()> {
        self.group.check_usable()?;
        let routing = Routing::new(check::topk_idx(idx, &WindowTable::of(&self.group))?, &self.shape)?;
        let call = UpdateCall { routing, deadline: self.deadline(options) };
        match stream {
            // SAFETY: by the caller's word.
            None => unsafe { self.update(&call) },
            Some(stream) => {
                // Release: pairs with the acquire in `counts`.
                self.queued.fetch_add(1, Ordering::Release);
                stream.push(Job::Update(self.clone(), call))
            }
        }
    }

    /// Runs a dispatch, or queues it.
    ///
    /// # Safety
    /// As of [`Plan::dispatch`].
    unsafe fn start_dispatch(
        self: &Arc<Self>,
        inputs: &DispatchInputs,
        outputs: &DispatchOutputs,
        options: &Options,
        stream: Option<&Stream>,
    ) -> Result<()> {
        self.group.check_usable()?;
        let tokens = self.known_tokens(stream)?;
        let windows = WindowTable::of(&self.group);
        let deadline = self.deadline(options);
        let call = check::dispatch(&self.shape, inputs, outputs, tokens, &windows, deadline)?;
        match stream {
            // SAFETY: by the caller's word.
            None => unsafe { self.dispatch(&call) },
            Some(stream) => stream.push(Job::Dispatch(self.clone(), call)),
        }
    }

    /// Runs a combine, or queues it.
    ///
    /// # Safety
    /// As of [`Plan::combine`].
    unsafe fn start_combine(
        self: &Arc<Self>,
        inputs: &CombineInputs,
        outputs: &CombineOutputs,
        options: &Options,
        stream: Option<&Stream>,
    ) -> Result<()> {
        self.group.check_usable()?;
        let tokens = self.known_tokens(stream)?;
        let windows = WindowTable::of(&self.group);
        let deadline = self.deadline(options);
        let call = check::combine(&self.shape, inputs, outputs, options, tokens, &windows, deadline)?;
        match stream {
            // SAFETY: by the caller's word.
            None => unsafe { self.combine(&call) },
            Some(stream) => stream.push(Job::Combine(self.clone(), call)),
        }
    }

    fn counts(&self, timeout: Option<Duration>) -> Result<Counts> {
        self.group.check_usable()?;
        self.await_queued(Instant::now() + timeout.unwrap_or(self.group.default_timeout()))?;
        // Acquire: pairs with the release in `PlanCore::update`.
        if self.epoch.load(Ordering::Acquire) == 0 {
            return Err(never_updated());
        }
        self.read_counts()
    }

    fn deadline(&self, options: &Options) -> Instant {
        deadline_after(options.timeout_ms, self.group.default_timeout())
    }

    /// The plan's tokens if that is known now; None while an update is queued on a stream.
    fn known_tokens(&self, stream: Option<&Stream>) -> Result<Option<usize>> {
        // Acquire: pairs with the release in `PlanCore::finish_queued`.
        let queued = self.queued.load(Ordering::Acquire);
        // A call behind a failed one is queued whatever the plan has, and skipped there: the lane would fall
        // out of step if it depended on how far the stream is.
        if stream.is_some_and(|stream| queued != 0 || stream.has_failed()) {
            return Ok(None);
        }
        // Acquire: pairs with the release in `PlanCore::update`.
        if self.epoch.load(Ordering::Acquire) == 0 {
            return Err(never_updated());
        }
        // Acquire: as above.
        Ok(Some(self.num_tokens.load(Ordering::Acquire) as usize))
    }

    /// # Safety
    /// The call's memory is valid.
    pub(super) unsafe fn update(&self, call: &UpdateCall) -> Result<()> {
        let _in_progress = self.group.enter()?;
        // SAFETY: by the caller's word.
        unsafe { call.routing.check(self.shape.experts.num_experts()) }?;
        let mut lane = self.group.lanes[self.shape.lane].enter(self.shape.lane)?;
        // Relaxed store, then the release fence: pairs with the acquire fence in `read_counts`.
        self.version.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::Release);
        // An update that fails leaves the plan without a routing: its arrays are half written.
        self.epoch.store(0, Ordering::Relaxed);
        // Relaxed: as above.
        self.dispatched.store(NEVER, Ordering::Relaxed);
        // SAFETY: the lane is this call's, and with it the plan's memory.
        let mut state = unsafe { PlanState::borrow(self.memory.address, &self.layout) };
        let updated = host::update(&self.group, &mut lane, &self.shape, &mut state, call);
        if let Ok(updated) = &updated {
            // Relaxed: published by the release below.
            self.num_tokens.store(updated.num_tokens as u64, Ordering::Relaxed);
            self.num_rows.store(updated.num_rows, Ordering::Relaxed);
            // Release: pairs with the acquires in `counts` and `known_tokens`.
            self.epoch.store(updated.epoch, Ordering::Release);
        }
        // Release: pairs with the acquire in `read_counts`.
        self.version.fetch_add(1, Ordering::Release);
        updated.map(|_| ())
    }

    /// # Safety
    /// The call's memory is valid.
    pub(super) unsafe fn dispatch(&self, call: &host::DispatchCall) -> Result<()> {
        let _in_progress = self.group.enter()?;
        let mut lane = self.group.lanes[self.shape.lane].enter(self.shape.lane)?;
        let updated = self.updated()?;
        check::dispatch_tokens(call, updated.num_tokens)?;
        // Relaxed: read under the lane's lock.
        self.dispatched.store(call.capacity as u64, Ordering::Relaxed);
        // SAFETY: the lane is this call's, and with it the plan's memory.
        let state = unsafe { PlanState::borrow(self.memory.address, &self.layout) };
        host::dispatch(&self.group, &mut lane, &self.shape, &state, &updated, call)
    }

    /// # Safety
    /// The call's memory is valid.
    pub(super) unsafe fn combine(&self, call: &host::CombineCall) -> Result<()> {
        let _in_progress = self.group.enter()?;
        let mut lane = self.group.lanes[self.shape.lane].enter(self.shape.lane)?;
        let updated = self.updated()?;
        // Relaxed: the lane's lock ordered the last dispatch before this call. Without one the caller alone
        // knows which rows he has.
        let delivered = match self.dispatched.load(Ordering::Relaxed) {
            NEVER => 0,
            capacity => updated.num_rows.min(capacity),
        };
        check::combine_tokens(call, updated.num_tokens, delivered)?;
        // SAFETY: the lane is this call's, and with it the plan's memory.
        let state = unsafe { PlanState::borrow(self.memory.address, &self.layout) };
        host::combine(&self.group, &mut lane, &self.shape, &state, &updated, call)
    }

    /// Lets a queued call fail without its lane falling out of step with the peers'.
    pub(super) fn refuse(&self, deadline: Instant) -> Result<()> {
        let _in_progress = self.group.enter()?;
        let mut lane = self.group.lanes[self.shape.lane].enter(self.shape.lane)?;
        host::refuse(&self.group, &mut lane, self.shape.lane, deadline)
    }

    /// What the last update left; read inside the lane.
    fn updated(&self) -> Result<Updated> {
        // Relaxed: the lane's lock ordered the update before this call.
        let epoch = self.epoch.load(Ordering::Relaxed);
        if epoch == 0 {
            return Err(never_updated());
        }
        // Relaxed: as above, for both.
        let num_tokens = self.num_tokens.load(Ordering::Relaxed) as usize;
        let num_rows = self.num_rows.load(Ordering::Relaxed);
        Ok(Updated { epoch, num_tokens, num_rows })
    }

    /// A queued update is done.
    pub(super) fn finish_queued(&self, result: &Result<()>) {
        let mut error = self.done.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        *error = result.as_ref().err().cloned();
        // Release: pairs with the acquire in `known_tokens` and `await_queued`.
        self.queued.fetch_sub(1, Ordering::Release);
        self.done.1.notify_all();
    }

    fn await_queued(&self, deadline: Instant) -> Result<()> {
        // Acquire: pairs with the release in `finish_queued`. Without streams no lock is taken.
        if self.queued.load(Ordering::Acquire) == 0 && self.epoch.load(Ordering::Acquire) != 0 {
            return Ok(());
        }
        let mut error = self.done.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        // Acquire: as above.
        while self.queued.load(Ordering::Acquire) != 0 {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::new(
                    Status::NotReady,
                    "the plan's update is still queued on its stream; call again, or wait longer",
                ));
            }
            error = self.done.1.wait_timeout(error, left).unwrap_or_else(|poisoned| poisoned.into_inner()).0;
        }
        error.clone().map_or(Ok(()), Err)
    }

    /// Copies the counts of one update, whatever another thread does meanwhile.
    fn read_counts(&self) -> Result<Counts> {
        let (words, local) = (self.shape.column_words(), self.shape.num_local());
        for _ in 0..1000 {
            // Acquire: pairs with the release at the end of `update`.
            let version = self.version.load(Ordering::Acquire);
            // SAFETY: the memory is the plan's; the version below tells whether a word changed meanwhile.
            let column =
                |index: usize| i64::from(unsafe { self.layout.read_column(self.memory.address, index) });
            // SAFETY: as above.
            let expert =
                |index: usize| i64::from(unsafe { self.layout.read_expert_rows(self.memory.address, index) });
            let per_source = |source: usize| match self.shape.layout {
                Layout::Flat => column(source * words),
                Layout::ExpertMajor => (1..words).map(|word| column(source * words + word)).sum(),
            };
            let sources = 0..self.shape.num_ranks();
            let counts = Counts {
                rows_per_expert: (0..local).map(expert).collect(),
                rows_per_source: sources.clone().map(per_source).collect(),
                // Relaxed: read with the arrays, under the same version.
                num_rows: self.num_rows.load(Ordering::Relaxed) as i64,
                num_tokens: sources.map(|source| column(source * words)).sum(),
            };
            // Acquire fence: pairs with the release fence in `update`.
            fence(Ordering::Acquire);
            // Relaxed: ordered by the fence.
            if version.is_multiple_of(2) && self.version.load(Ordering::Relaxed) == version {
                return Ok(counts);
            }
            std::thread::yield_now();
        }
        Err(Error::new(Status::NotReady, "another thread is updating the plan; call again"))
    }
}

/// The callers' blocks that plans of this process are in. Touched when plans are made and destroyed only.
static CALLER_MEMORY: Mutex<Vec<Range<usize>>> = Mutex::new(Vec::new());

fn caller_memory() -> MutexGuard<'static, Vec<Range<usize>>> {
    CALLER_MEMORY.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl Drop for PlanMemory {
    fn drop(&mut self) {
        if self._own.is_none() {
            caller_memory().retain(|range| range.start != self.address.addr());
        }
    }
}

impl PlanMemory {
    fn allocate(bytes: usize) -> Result<PlanMemory> {
        let lines = bytes.div_ceil(64);
        let mut own: Vec<Line> = Vec::new();
        own.try_reserve_exact(lines).map_err(|e| {
            Error::new(Status::OutOfMemory, format!("a plan of {bytes} bytes could not be allocated: {e}"))
        })?;
        own.resize(lines, Line([0; 64]));
        Ok(PlanMemory { address: own.as_mut_ptr().cast(), _own: Some(own) })
    }

    fn of_caller(address: *mut u8, bytes: usize, needed: usize) -> Result<PlanMemory> {
        if address.is_null() || !address.addr().is_multiple_of(64) {
            return Err(Error::invalid(format!(
                "plan memory {address:p} must not be null and must be aligned to 64 bytes"
            )));
        }
        if bytes < needed {
            return Err(Error::new(
                Status::Capacity,
                format!("plan memory has {bytes} bytes, ep_plan_bytes says {needed}"),
            ));
        }
        let range = address.addr()..address.addr() + needed;
        let mut taken = caller_memory();
        if taken.iter().any(|other| other.start < range.end && range.start < other.end) {
            return Err(Error::invalid(format!(
                "plan memory {address:p} overlaps that of a plan that is alive; destroy it first, or give each \
                 its own"
            )));
        }
        taken.push(range);
        Ok(PlanMemory { address, _own: None })
    }
}
