//! Groups, windows, plans and streams: the Rust API under the C ABI.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::bootstrap::Bootstrap;
use crate::config::*;
use crate::error::{Error, Result, Status};
use crate::tensor::RawTensor;

fn missing<T>() -> Result<T> {
    Err(Error::new(Status::Unsupported, "the engine is being written"))
}

/// The members, memory and lanes of one group, as this rank sees them.
pub struct Group {}

impl Group {
    /// Makes the group. Collective; returns by `deadline`.
    pub fn create(_c: &GroupConfig, _b: Box<dyn Bootstrap>, _deadline: Instant) -> Result<Arc<Group>> {
        missing()
    }
    /// Breaks the group, here and on the peers. Never waits.
    pub fn abort(&self) {}
    /// Breaks the group because a panic was caught in one of its calls; later calls return Internal.
    pub fn poison(&self, _text: &str) {}
    /// The first error, and per rank whether it is alive. Lock-free.
    pub fn health(&self, _alive: &mut [bool]) -> Option<ErrorInfo> {
        None
    }
    /// Number of ranks.
    pub fn num_ranks(&self) -> usize {
        0
    }
    /// Sizes and choices.
    pub fn info(&self) -> GroupInfo {
        unreachable!()
    }
    /// Per peer.
    pub fn stats(&self) -> Vec<PeerStats> {
        Vec::new()
    }
    /// Ends this rank's membership; waits up to `timeout` for its own calls, aborting them if need be.
    pub fn close(&self, _timeout: Duration) -> Result<()> {
        missing()
    }
}

/// This rank's part of a window; dropping it releases it.
pub struct Window {}

impl Window {
    /// Collective.
    pub fn allocate(_group: &Arc<Group>, _bytes: usize) -> Result<Window> {
        missing()
    }
    /// Address; never null.
    pub fn data(&self) -> *mut u8 {
        std::ptr::null_mut()
    }
    /// Size as asked for.
    pub fn bytes(&self) -> usize {
        0
    }
}

/// One routing, reusable.
pub struct Plan {}

impl Plan {
    /// Bytes that [`Plan::create`] needs, 64-byte aligned.
    pub fn bytes(_group: &Group, _config: &PlanConfig) -> Result<usize> {
        missing()
    }
    /// Makes a plan in `memory` (address, bytes), or in memory of its own.
    ///
    /// # Safety
    /// `memory` stays valid and unused by others until the plan is dropped.
    pub unsafe fn create(
        _group: &Arc<Group>,
        _config: &PlanConfig,
        _memory: Option<(*mut u8, usize)>,
    ) -> Result<Plan> {
        missing()
    }
    /// The group the plan belongs to.
    pub fn group(&self) -> &Arc<Group> {
        unreachable!()
    }
    /// Takes a routing. `stream` None: done when this returns.
    ///
    /// # Safety
    /// The tensor's memory is readable until the call is done.
    pub unsafe fn update(&self, _idx: &RawTensor, _o: &Options, _stream: Option<&Stream>) -> Result<()> {
        missing()
    }
    /// Waits for the last update and tells what will arrive. None: the group's timeout.
    pub fn counts(&self, _timeout: Option<Duration>) -> Result<Counts> {
        missing()
    }
    /// Experts on this rank, as the plan's config places them.
    pub fn num_local_experts(&self) -> usize {
        0
    }
    /// Sends rows to their experts.
    ///
    /// # Safety
    /// Inputs are readable and outputs writable until the call is done.
    pub unsafe fn dispatch(
        &self,
        _inputs: &DispatchInputs,
        _outputs: &DispatchOutputs,
        _options: &Options,
        _stream: Option<&Stream>,
    ) -> Result<()> {
        missing()
    }
    /// Brings rows back and adds them.
    ///
    /// # Safety
    /// Inputs are readable and outputs writable until the call is done.
    pub unsafe fn combine(
        &self,
        _inputs: &CombineInputs,
        _outputs: &CombineOutputs,
        _options: &Options,
        _stream: Option<&Stream>,
    ) -> Result<()> {
        missing()
    }
}

/// A thread that runs collective calls in order.
pub struct Stream {}

impl Stream {
    /// Starts the thread.
    pub fn new() -> Result<Stream> {
        missing()
    }
    /// Waits until all queued calls are done; the first error among them, cleared. NotReady on timeout.
    pub fn synchronize(&self, _timeout: Duration) -> Result<()> {
        missing()
    }
}
