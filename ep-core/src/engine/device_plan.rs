//! A plan whose calls run on a device: checks them as on the host, then queues them there.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::check;
use super::device::{DeviceGroup, DevicePlan, DeviceStream, How};
use super::group::{Group, deadline_after};
use super::plan::never_updated;
use super::window::WindowTable;
use crate::config::{
    CombineInputs, CombineOutputs, Counts, DispatchInputs, DispatchOutputs, MAX_PAYLOADS, Options,
};
use crate::error::{Error, Result, Status};
use crate::host::UpdateCall;
use crate::plan::{PlanShape, Routing};
use crate::tensor::RawTensor;
use crate::wire::Place;

/// In `num_tokens`: no update was queued yet.
const NEVER: u64 = u64::MAX;

/// How long `counts` spins before it sleeps between looks: an update takes tens of microseconds.
const SPIN: Duration = Duration::from_micros(200);
const NAP: Duration = Duration::from_micros(20);
/// How often it looks for peers that left and for a lost device, and how long a peer may be gone while an
/// update is on its way.
const LOOK_ABOUT: Duration = Duration::from_millis(20);
const PEER_GRACE: Duration = Duration::from_millis(200);

/// A plan on a device.
pub(super) struct DeviceCore {
    /// Dropped before the group, whose device it uses.
    plan: Box<dyn DevicePlan>,
    group: Arc<Group>,
    shape: PlanShape,
    /// Of the last update that was queued.
    num_tokens: AtomicU64,
}

impl DeviceCore {
    pub(super) fn create(
        group: &Arc<Group>,
        device: &dyn DeviceGroup,
        shape: PlanShape,
        memory: Option<(*mut u8, usize)>,
    ) -> Result<DeviceCore> {
        let memory = memory.map(|(address, bytes)| (address.addr() as u64, bytes));
        let plan = device.create_plan(&shape, memory)?;
        Ok(DeviceCore { plan, group: group.clone(), shape, num_tokens: AtomicU64::new(NEVER) })
    }

    pub(super) fn group(&self) -> &Arc<Group> {
        &self.group
    }

    pub(super) fn shape(&self) -> &PlanShape {
        &self.shape
    }

    /// # Safety
    /// As of `Plan::update_on`.
    pub(super) unsafe fn update(
        &self,
        idx: &RawTensor,
        options: &Options,
        stream: DeviceStream,
    ) -> Result<()> {
        self.group.check_usable()?;
        let routing = Routing::new(check::topk_idx(idx, &WindowTable::of(&self.group))?, &self.shape)?;
        let call = UpdateCall { routing, deadline: self.deadline(options) };
        let _in_progress = self.group.enter()?;
        let _lane = self.group.lanes[self.shape.lane].enter(self.shape.lane)?;
        // SAFETY: by the caller's word.
        self.told(unsafe { self.plan.update(&call, &how(options, call.deadline, stream)) })?;
        // Relaxed: the lane orders the calls that use it.
        self.num_tokens.store(routing.num_tokens() as u64, Ordering::Relaxed);
        Ok(())
    }

    /// # Safety
    /// As of `Plan::dispatch_on`.
    pub(super) unsafe fn dispatch(
        &self,
        inputs: &DispatchInputs,
        outputs: &DispatchOutputs,
        options: &Options,
        stream: DeviceStream,
    ) -> Result<()> {
        self.group.check_usable()?;
        let deadline = self.deadline(options);
        let windows = WindowTable::of(&self.group);
        let tokens = Some(self.known_tokens()?);
        let call = check::dispatch(&self.shape, inputs, outputs, tokens, &windows, deadline)?;
        let mut places = [Place::default(); MAX_PAYLOADS];
        for (place, output) in places.iter_mut().zip(call.outputs.iter().flatten()) {
            *place = windows.place(output);
        }
        let _in_progress = self.group.enter()?;
        let _lane = self.group.lanes[self.shape.lane].enter(self.shape.lane)?;
        // SAFETY: by the caller's word.
        self.told(unsafe { self.plan.dispatch(&call, &places, &how(options, deadline, stream)) })
    }

    /// # Safety
    /// As of `Plan::combine_on`.
    pub(super) unsafe fn combine(
        &self,
        inputs: &CombineInputs,
        outputs: &CombineOutputs,
        options: &Options,
        stream: DeviceStream,
    ) -> Result<()> {
        self.group.check_usable()?;
        let deadline = self.deadline(options);
        let tokens = Some(self.known_tokens()?);
        let windows = WindowTable::of(&self.group);
        let call = check::combine(&self.shape, inputs, outputs, options, tokens, &windows, deadline)?;
        let places = call.places(&windows);
        let _in_progress = self.group.enter()?;
        let _lane = self.group.lanes[self.shape.lane].enter(self.shape.lane)?;
        // SAFETY: by the caller's word.
        self.told(unsafe { self.plan.combine(&call, &places, &how(options, deadline, stream)) })
    }

    /// Waits for the counts of the last update, without making the device wait. Of what breaks the group
    /// meanwhile it returns the cause.
    pub(super) fn counts(&self, timeout: Option<Duration>) -> Result<Counts> {
        self.group.check_open()?;
        self.known_tokens()?;
        let started = Instant::now();
        let deadline = started + timeout.unwrap_or(self.group.default_timeout());
        let mut watch = Watch { next: started + LOOK_ABOUT, gone: None };
        loop {
            self.group.poll_device();
            if let Some(error) = self.group.broken() {
                return Err(error);
            }
            if let Some(counts) = self.plan.counts()? {
                return Ok(counts);
            }
            let now = Instant::now();
            if now >= deadline {
                return Err(Error::new(
                    Status::NotReady,
                    "the plan's update has not run on its stream yet; call again, or wait longer",
                ));
            }
            watch.look(self, now)?;
            match now - started < SPIN {
                true => std::hint::spin_loop(),
                false => std::thread::sleep(NAP),
            }
        }
    }

    /// A device that is lost takes the group with it, so that the peers need not wait.
    fn told<T>(&self, result: Result<T>) -> Result<T> {
        let Err(error) = result else { return result };
        if error.status != Status::DeviceLost {
            return Err(error);
        }
        let text = format!("rank {} lost its device: {}", self.group.rank, error.message);
        Err(self.group.fail(&self.group.error_info(error.status, None, Some(self.shape.lane), 0, text)))
    }

    fn deadline(&self, options: &Options) -> Instant {
        deadline_after(options.timeout_ms, self.group.default_timeout())
    }

    fn known_tokens(&self) -> Result<usize> {
        // Relaxed: the caller orders the calls of a lane.
        match self.num_tokens.load(Ordering::Relaxed) {
            NEVER => Err(never_updated()),
            tokens => Ok(tokens as usize),
        }
    }
}

/// What `deadline` leaves is the device's time: its clock starts when the call does.
fn how(options: &Options, deadline: Instant, stream: DeviceStream) -> How {
    How { options: *options, timeout: deadline.saturating_duration_since(Instant::now()), stream }
}

/// Notices the death of a peer or of the device before the device's deadline does.
struct Watch {
    next: Instant,
    /// Who was gone at an earlier look, and since when: its part of the update may be on its way still.
    gone: Option<(usize, Instant)>,
}

impl Watch {
    fn look(&mut self, plan: &DeviceCore, now: Instant) -> Result<()> {
        if now < self.next {
            return Ok(());
        }
        self.next = now + LOOK_ABOUT;
        let group = &plan.group;
        if let Some(device) = &group.device {
            plan.told(device.is_idle())?;
        }
        let gone = (0..group.num_ranks).find(|&rank| group.has_left(rank));
        self.gone = gone.map(|rank| self.gone.filter(|before| before.0 == rank).unwrap_or((rank, now)));
        match self.gone {
            Some((peer, since)) if now - since >= PEER_GRACE => {
                let (rank, lane) = (group.rank, plan.shape.lane);
                let text = format!(
                    "rank {peer} left or died while rank {rank} waited in ep_plan_counts (lane {lane}) for the \
                     counts of it"
                );
                Err(group.fail(&group.error_info(Status::PeerLost, Some(peer), Some(lane), 0, text)))
            }
            _ => Ok(()),
        }
    }
}
