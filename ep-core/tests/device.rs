//! The seam to devices, over a device that is not one: what the engine asks of it, and what it makes of the
//! answers. Ranks are threads.

use std::ffi::c_void;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::time::{Duration, Instant};

use ep_core::bootstrap::LocalBootstrap;
use ep_core::config::{Counts, ErrorInfo, GroupConfig, MAX_PAYLOADS, Options, PlanConfig};
use ep_core::engine::{
    Backend, Device, DeviceGroup, DevicePlan, Group, How, Membership, Plan, Stream, Window,
};
use ep_core::host::{CombineCall, DispatchCall, UpdateCall};
use ep_core::mem::{DeviceMemory, Mapping, Memory};
use ep_core::plan::PlanShape;
use ep_core::tensor::{Dtype, RawTensor};
use ep_core::wire::Place;
use ep_core::{Error, Result, Status};

/// What the device of one rank does next, and what was done to it.
#[derive(Default)]
struct Script {
    /// What `counts` answers.
    counts: Mutex<Option<Result<Option<Counts>>>>,
    error: Mutex<Option<ErrorInfo>>,
    call_error: Mutex<Option<ErrorInfo>>,
    lost: Mutex<Option<Error>>,
    windows: Mutex<Vec<(u32, Option<Vec<u64>>)>>,
    aborted: Mutex<Vec<ErrorInfo>>,
    streams: Mutex<Vec<usize>>,
    admitted: AtomicUsize,
}

struct Fake(Arc<Script>);

#[derive(Debug)]
struct FakeMemory(Mapping);

impl DeviceMemory for FakeMemory {
    fn base(&self) -> u64 {
        self.0.base().addr() as u64
    }

    fn bytes(&self) -> usize {
        self.0.bytes()
    }

    fn export(&self) -> Result<Option<OwnedFd>> {
        Ok(None)
    }
}

impl Device for Fake {
    fn describe(&self) -> String {
        String::from("a fake device")
    }

    fn max_ranks(&self) -> usize {
        3
    }

    fn ring_bytes(&self, _num_ranks: usize) -> usize {
        128 << 10
    }

    fn allocate(&self, bytes: usize) -> Result<Arc<dyn DeviceMemory>> {
        Ok(Arc::new(FakeMemory(Mapping::create(bytes)?.0)))
    }

    fn import(&self, _fd: OwnedFd, _bytes: usize) -> Result<Arc<dyn DeviceMemory>> {
        Err(Error::new(Status::Internal, "ranks of one process need no descriptors"))
    }

    fn admit(&self, _memory: &dyn DeviceMemory) -> Result<()> {
        self.0.admitted.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn join(&self, membership: Membership) -> Result<Box<dyn DeviceGroup>> {
        assert_eq!(membership.segments.len(), membership.num_ranks);
        Ok(Box::new(FakeGroup(self.0.clone(), membership)))
    }
}

/// Keeps the membership, as a device's group does: its segment lives as long.
struct FakeGroup(Arc<Script>, Membership);

impl DeviceGroup for FakeGroup {
    fn set_window(&self, id: u32, parts: Option<&[Option<Memory>]>) -> Result<()> {
        let base = |part: &Option<Memory>| part.as_ref().map_or(0, |part| part.base().addr() as u64);
        let bases = parts.map(|parts| parts.iter().map(base).collect());
        self.0.windows.lock().unwrap().push((id, bases));
        Ok(())
    }

    fn plan_bytes(&self, shape: &PlanShape) -> Result<usize> {
        Ok(64 * shape.topk)
    }

    fn create_plan(&self, _shape: &PlanShape, _memory: Option<(u64, usize)>) -> Result<Box<dyn DevicePlan>> {
        Ok(Box::new(FakePlan(self.0.clone())))
    }

    fn error(&self) -> Option<ErrorInfo> {
        self.0.error.lock().unwrap().clone()
    }

    fn take_call_error(&self) -> Option<ErrorInfo> {
        self.0.call_error.lock().unwrap().take()
    }

    fn abort(&self, info: &ErrorInfo) {
        self.0.aborted.lock().unwrap().push(info.clone());
    }

    fn is_idle(&self) -> Result<bool> {
        assert_eq!(self.1.segments.len(), self.1.num_ranks);
        self.0.lost.lock().unwrap().clone().map_or(Ok(true), Err)
    }
}

struct FakePlan(Arc<Script>);

impl DevicePlan for FakePlan {
    unsafe fn update(&self, _call: &UpdateCall, how: &How) -> Result<()> {
        self.0.streams.lock().unwrap().push(how.stream.addr());
        Ok(())
    }

    unsafe fn dispatch(&self, _: &DispatchCall, _: &[Place; MAX_PAYLOADS], _: &How) -> Result<()> {
        Ok(())
    }

    unsafe fn combine(&self, _: &CombineCall, _: &[Place; 2], _: &How) -> Result<()> {
        Ok(())
    }

    fn counts(&self) -> Result<Option<Counts>> {
        self.0.counts.lock().unwrap().clone().unwrap_or(Ok(None))
    }
}

/// Runs `body` on `num_ranks` threads, each with a group on a fake device.
fn with_ranks(num_ranks: usize, body: impl Fn(&Arc<Group>, &Script) + Sync) {
    std::thread::scope(|scope| {
        for bootstrap in LocalBootstrap::group(num_ranks) {
            scope.spawn(|| {
                let script = Arc::new(Script::default());
                let backend = Backend::on(Arc::new(Fake(script.clone())), "a test");
                let deadline = Instant::now() + Duration::from_secs(20);
                let config = GroupConfig { backend: 2, timeout_ms: 5000, ..GroupConfig::default() };
                let group = Group::create_on(backend, &config, Box::new(bootstrap), deadline).unwrap();
                body(&group, &script);
            });
        }
    });
}

fn plan(group: &Arc<Group>) -> Plan {
    let config = PlanConfig { topk: 2, num_experts: 6, max_tokens: 4, ..PlanConfig::default() };
    // SAFETY: the plan has memory of its own.
    unsafe { Plan::create(group, &config, None) }.unwrap()
}

fn update(plan: &Plan, ids: &[i64; 4]) -> Result<()> {
    let idx = RawTensor::contiguous(ids.as_ptr().cast_mut().cast(), Dtype::I64, 2, 2);
    // SAFETY: the ids outlive the call, and the device does not follow the stream.
    unsafe { plan.update_on(&idx, &Options::default(), 0x770 as *mut c_void) }
}

#[test]
fn a_group_says_which_device_it_is_on() {
    with_ranks(3, |group, script| {
        let info = group.info();
        assert_eq!(info.backend, 2);
        assert!(info.backend_reason.starts_with("a fake device: a test"), "{}", info.backend_reason);
        assert_eq!(info.ring_bytes, 128 << 10);
        // Both peers' segments.
        assert_eq!(script.admitted.load(Ordering::Relaxed), 2);
    });
}

#[test]
fn windows_have_small_numbers_that_are_used_again_when_all_have_released_them() {
    with_ranks(2, |group, script| {
        let first = Window::allocate(group, 4096).unwrap();
        let second = Window::allocate(group, if group.rank() == 0 { 0 } else { 8192 }).unwrap();
        if group.rank() == 0 {
            drop(first);
            let third = Window::allocate(group, 4096).unwrap();
            let fourth = Window::allocate(group, 4096).unwrap();
            drop((second, third, fourth));
        } else {
            // Rank 1 releases the first only after the third is there.
            let third = Window::allocate(group, 4096).unwrap();
            drop(first);
            let fourth = Window::allocate(group, 4096).unwrap();
            drop((second, third, fourth));
        }
        let windows = script.windows.lock().unwrap();
        let made: Vec<u32> = windows.iter().filter(|(_, parts)| parts.is_some()).map(|(id, _)| *id).collect();
        let gone = windows.iter().filter(|(_, parts)| parts.is_none()).count();
        assert_eq!((made, gone), (vec![1, 2, 3, 1], 4));
        let second = windows.iter().find(|(id, _)| *id == 2).and_then(|(_, parts)| parts.clone()).unwrap();
        assert!(second[0] == 0 && second[1] != 0, "{second:?}");
    });
}

#[test]
fn counts_wait_for_the_device_and_no_longer_than_asked() {
    with_ranks(1, |group, script| {
        let plan = plan(group);
        let never = plan.counts(None).unwrap_err();
        assert_eq!(never.status, Status::InvalidState, "{never}");
        update(&plan, &[0, 1, 2, 3]).unwrap();
        assert_eq!(*script.streams.lock().unwrap(), [0x770]);
        let late = plan.counts(Some(Duration::from_millis(30))).unwrap_err();
        assert_eq!(late.status, Status::NotReady, "{late}");
        let counts = Counts { num_rows: 7, ..Counts::default() };
        *script.counts.lock().unwrap() = Some(Ok(Some(counts.clone())));
        assert_eq!(plan.counts(None).unwrap(), counts);
        // An error of the update alone leaves the group as it is.
        let wrong = Error::new(Status::OutOfRange, "topk_idx of token 3");
        *script.counts.lock().unwrap() = Some(Err(wrong.clone()));
        assert_eq!(plan.counts(None).unwrap_err(), wrong);
        assert_eq!(group.health(&mut []), None);
    });
}

#[test]
fn an_error_on_the_device_breaks_the_group_on_all_ranks() {
    let updated = Barrier::new(3);
    with_ranks(3, |group, script| {
        let plan = plan(group);
        update(&plan, &[0, 1, 2, 3]).unwrap();
        updated.wait();
        if group.rank() == 1 {
            *script.error.lock().unwrap() = Some(ErrorInfo {
                status: Status::Timeout,
                rank: 1,
                peer: Some(2),
                lane: Some(0),
                epoch: 1,
                text: String::from("rank 1 waited for rank 2"),
            });
        }
        let error = plan.counts(None).unwrap_err();
        assert_eq!(error.status, Status::Timeout, "{error}");
        assert!(error.message.contains("rank 1 waited for rank 2"), "{error}");
        let later = update(&plan, &[0, 1, 2, 3]).unwrap_err();
        assert_eq!(later.status, Status::Aborted, "{later}");
        // The rank that found it tells the devices, its own and the peers'.
        let told = script.aborted.lock().unwrap().len();
        assert_eq!(told > 0, group.rank() == 1);
    });
}

#[test]
fn a_lost_device_is_told_to_the_peers() {
    let updated = Barrier::new(2);
    with_ranks(2, |group, script| {
        let plan = plan(group);
        update(&plan, &[0, 1, 2, 3]).unwrap();
        updated.wait();
        if group.rank() == 0 {
            *script.lost.lock().unwrap() = Some(Error::new(Status::DeviceLost, "an illegal address"));
        }
        let error = plan.counts(None).unwrap_err();
        assert_eq!(error.status, Status::DeviceLost, "{error}");
        assert!(error.message.contains("rank 0 lost its device: an illegal address"), "{error}");
    });
}

#[test]
fn a_peer_that_leaves_is_named_before_the_deadline() {
    with_ranks(2, |group, _| {
        let plan = plan(group);
        update(&plan, &[0, 1, 2, 3]).unwrap();
        if group.rank() == 1 {
            group.close(Duration::from_secs(1)).unwrap();
            return;
        }
        let started = Instant::now();
        let error = plan.counts(None).unwrap_err();
        assert_eq!(error.status, Status::PeerLost, "{error}");
        assert!(error.message.contains("rank 1 left or died"), "{error}");
        assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());
    });
}

#[test]
fn streams_of_the_other_backend_are_refused() {
    with_ranks(1, |group, _| {
        let on_device = plan(group);
        let ids = [0i64, 1, 2, 3];
        let idx = RawTensor::contiguous(ids.as_ptr().cast_mut().cast(), Dtype::I64, 2, 2);
        let stream = Stream::new().unwrap();
        // SAFETY: the ids outlive the call.
        let error = unsafe { on_device.update(&idx, &Options::default(), Some(&stream)) }.unwrap_err();
        assert_eq!(error.status, Status::InvalidArgument, "{error}");
        let bootstrap = LocalBootstrap::group(1).remove(0);
        let deadline = Instant::now() + Duration::from_secs(20);
        let host = Group::create(&GroupConfig::default(), Box::new(bootstrap), deadline).unwrap();
        let error = update(&plan(&host), &ids).unwrap_err();
        assert_eq!(error.status, Status::InvalidArgument, "{error}");
    });
}

#[test]
fn ranks_that_choose_different_backends_do_not_meet() {
    std::thread::scope(|scope| {
        for (rank, bootstrap) in LocalBootstrap::group(2).into_iter().enumerate() {
            scope.spawn(move || {
                let backend = match rank {
                    0 => Backend::host("no current context"),
                    _ => Backend::on(Arc::new(Fake(Arc::default())), "a current context"),
                };
                let deadline = Instant::now() + Duration::from_secs(20);
                let made = Group::create_on(backend, &GroupConfig::default(), Box::new(bootstrap), deadline);
                let error = made.err().expect("they differ");
                assert_eq!(error.status, Status::Mismatch, "{error}");
                assert!(error.message.contains("CUDA on rank 1"), "{error}");
            });
        }
    });
}

#[test]
fn more_ranks_than_the_device_takes_are_refused() {
    let backend = Backend::on(Arc::new(Fake(Arc::default())), "a test");
    let bootstrap = LocalBootstrap::group(4).remove(0);
    let deadline = Instant::now() + Duration::from_secs(5);
    let made = Group::create_on(backend, &GroupConfig::default(), Box::new(bootstrap), deadline);
    let error = made.err().expect("too many");
    assert_eq!(error.status, Status::Unsupported, "{error}");
    assert!(error.message.contains("at most 3 on a fake device"), "{error}");
}
