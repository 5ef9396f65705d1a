//! Memory and streams of a CUDA device.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex};

use ep::capi::EP_BACKEND_CUDA;
use ep_cuda::pool::Buffer;
use ep_cuda::stream::{Stream, synchronize};
use ep_cuda::{CudaDevice, driver};

use crate::job::JobId;
use crate::memory::{Device, Lacks};

/// The kernels' limit.
const MAX_TOPK: usize = 64;

/// A device as one rank uses it.
pub struct Cuda {
    device: Arc<CudaDevice>,
    buffers: Mutex<HashMap<usize, Buffer>>,
    streams: Mutex<HashMap<usize, Stream>>,
}

impl Cuda {
    /// Why there is none on this machine.
    pub fn missing() -> Option<String> {
        driver::open().err().map(|error| error.message)
    }

    /// The device of a rank's process, current on this thread as an application's would be.
    pub fn of_rank(rank: usize) -> Cuda {
        let devices = driver::open().expect("a driver").num_devices;
        let device = CudaDevice::open((rank % devices.max(1)) as i32).expect("a device");
        // The library finds the device through the current context.
        std::mem::forget(device.context().enter().expect("a context"));
        // The guard is gone, and the borrow with it: the device stays open for the whole process.
        std::mem::forget(device.clone());
        Cuda { device, buffers: Mutex::default(), streams: Mutex::default() }
    }

    /// The jobs that the backend has kernels for.
    pub fn able(jobs: Vec<JobId>) -> Vec<JobId> {
        let fits = |job: &JobId| job.build().cases.iter().all(|case| case.first_routing().topk <= MAX_TOPK);
        jobs.into_iter().filter(fits).collect()
    }
}

impl Device for Cuda {
    fn allocate(&self, bytes: usize) -> *mut u8 {
        let buffer = self.device.pool().allocate(bytes).expect("device memory");
        let base = buffer.base() as usize;
        self.buffers.lock().expect("nobody panics with it").insert(base, buffer);
        base as *mut u8
    }

    fn free(&self, data: *mut u8, _bytes: usize) {
        self.buffers
            .lock()
            .expect("nobody panics with it")
            .remove(&data.addr())
            .expect("given by `allocate`");
    }

    fn upload(&self, to: *mut u8, from: &[u8]) {
        // SAFETY: regions write inside their own allocation, while no call is in progress on it.
        unsafe { self.device.pool().upload(to.addr() as u64, from) }.expect("a copy to the device");
    }

    fn download(&self, from: *const u8, to: &mut [u8]) {
        // SAFETY: as in `upload`.
        unsafe { self.device.pool().download(from.addr() as u64, to) }.expect("a copy from the device");
    }

    fn stream_create(&self) -> *mut c_void {
        let stream = Stream::new(self.device.context()).expect("a stream");
        let raw = stream.raw();
        self.streams.lock().expect("nobody panics with it").insert(raw.addr(), stream);
        raw.cast()
    }

    fn stream_synchronize(&self, stream: *mut c_void) -> Result<(), String> {
        // SAFETY: NULL, or from `stream_create` and not destroyed yet.
        unsafe { synchronize(self.device.context(), stream.cast()) }.map_err(|error| error.to_string())
    }

    fn stream_destroy(&self, stream: *mut c_void) {
        self.streams.lock().expect("nobody panics with it").remove(&stream.addr()).expect("a live stream");
    }

    fn backend(&self) -> i32 {
        EP_BACKEND_CUDA
    }

    fn lacks(&self) -> Lacks {
        Lacks { stats: true }
    }
}
