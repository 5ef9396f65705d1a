//! Ranks as processes: this test binary, started again with its part in the environment.

use std::ffi::CString;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::ptr::{null, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use ep::capi::{EpBootstrap, EpUniqueId, ep_unique_id_create};

use super::{Cell, Outcome, live};
use crate::abi::{expect_ok, size_of};
use crate::cuda::Cuda;
use crate::job::JobId;
use crate::memory::{Device, Host};
use crate::rank::Trouble;
use crate::world::World;

/// How the processes of a group meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Meeting {
    /// Through a file that rank 0 writes.
    File,
    /// Through an id that this process makes and serves.
    UniqueId,
}

/// Processes, each a rank.
pub struct Processes {
    pub meeting: Meeting,
    pub on: On,
    /// The libfabric to use between nodes, empty for the loader's; None where there are none.
    pub libfabric: Option<String>,
}

/// The backend of the processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum On {
    Host,
    /// Rank r on device r % devices. Several ranks on one device need MPS.
    Cuda,
}

/// The test that is a worker when this is set to its rank.
const RANK: &str = "EP_CONFORMANCE_RANK";
const JOBS: &str = "EP_CONFORMANCE_JOBS";
const MEETING: &str = "EP_CONFORMANCE_MEETING";
const ON_CUDA: &str = "EP_CONFORMANCE_ON_CUDA";
/// Opens each line with which a worker reports.
const REPORT: &str = "EP_CONFORMANCE_REPORT";
/// How long a world may take.
const PATIENCE: Duration = Duration::from_secs(180);

impl Cell for Processes {
    fn name(&self) -> String {
        let backend = if self.on == On::Cuda { "cuda" } else { "host" };
        let network = self.libfabric.as_ref().map_or(String::new(), |path| format!(", libfabric {path:?}"));
        format!("{backend}-processes ({:?}{network})", self.meeting)
    }

    fn run(&self, world: &World, jobs: &[JobId]) -> Outcome {
        static WORLDS: AtomicU32 = AtomicU32::new(0);
        // Relaxed: only the number matters.
        let number = WORLDS.fetch_add(1, Ordering::Relaxed);
        let folder = std::env::temp_dir().join(format!("ep-conformance-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder for the reports");
        let meeting: Vec<String> =
            world.groups.iter().enumerate().map(|(group, _)| self.meeting(&folder, group)).collect();
        let jobs: Vec<String> = jobs.iter().map(JobId::to_string).collect();
        let children: Vec<Child> =
            (0..world.num_ranks).map(|rank| self.start(rank, &jobs, &meeting, &folder)).collect();
        let deadline = Instant::now() + PATIENCE;
        let mut outcome = Outcome::default();
        for (rank, mut child) in children.into_iter().enumerate() {
            let end = wait(&mut child, deadline);
            let output = std::fs::read_to_string(output_path(&folder, rank)).unwrap_or_default();
            let mut found: Vec<(usize, Trouble)> = output.lines().filter_map(parse_report).collect();
            if end != "exit status: 0" {
                let tail: Vec<&str> = output.lines().rev().take(30).collect();
                let tail: Vec<&str> = tail.into_iter().rev().collect();
                found.push((0, Trouble::Broken(format!("{end}, output: {}", tail.join("\n")))));
            }
            outcome.add(rank, found);
        }
        let _ = std::fs::remove_dir_all(&folder);
        outcome.settle()
    }
}

impl Processes {
    /// What a worker needs to know to meet the others of a group.
    fn meeting(&self, folder: &Path, group: usize) -> String {
        match self.meeting {
            Meeting::File => format!("file:{}", folder.join(format!("group-{group}")).display()),
            Meeting::UniqueId => {
                let mut id = EpUniqueId { bytes: [0; 128] };
                // SAFETY: the pointer is a place for one id.
                expect_ok(unsafe { ep_unique_id_create(&mut id) }, "ep_unique_id_create").expect("an id");
                let hex: String = id.bytes.iter().map(|byte| format!("{byte:02x}")).collect();
                format!("id:{hex}")
            }
        }
    }

    fn start(&self, rank: usize, jobs: &[String], meeting: &[String], folder: &Path) -> Child {
        let output = std::fs::File::create(output_path(folder, rank)).expect("a file for the output");
        let errors = output.try_clone().expect("a second descriptor");
        let mut command = Command::new(std::env::current_exe().expect("the path of this binary"));
        command
            .args(["worker_of_the_process_cell", "--exact", "--nocapture", "--test-threads=1"])
            .env(RANK, rank.to_string())
            .env(JOBS, jobs.join(","))
            .env(MEETING, meeting.join(","))
            .env(ON_CUDA, if self.on == On::Cuda { "1" } else { "0" });
        if let Some(path) = &self.libfabric {
            // Two NICs, so that large messages are cut; and room for worlds of many lanes and wide windows.
            command
                .env("EP_LIBFABRIC", path)
                .env("EP_FABRIC_PROVIDER", "tcp")
                .env("EP_FABRIC_NICS", "127.0.0.1,127.0.0.2")
                .env("EP_FABRIC_CQ_DEPTH", "262144");
        }
        command.stdin(Stdio::null()).stdout(output).stderr(errors).spawn().expect("this binary starts")
    }
}

fn output_path(folder: &Path, rank: usize) -> PathBuf {
    folder.join(format!("output-{rank}"))
}

/// How the child ended; kills it at the deadline.
fn wait(child: &mut Child, deadline: Instant) -> String {
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return status.to_string(),
            Ok(None) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(5)),
            Ok(None) => {
                let _ = child.kill();
                let _ = child.wait();
                return format!("killed after {PATIENCE:?}");
            }
            Err(e) => return format!("waiting failed: {e}"),
        }
    }
}

fn parse_report(line: &str) -> Option<(usize, Trouble)> {
    // libtest may have written the test's name in front.
    let line = &line[line.find(REPORT)? + REPORT.len()..];
    let mut parts = line.trim_start().splitn(3, ' ');
    let (job, kind, text) = (parts.next()?.parse().ok()?, parts.next()?, parts.next()?.to_string());
    Some((job, if kind == "broken" { Trouble::Broken(text) } else { Trouble::Wrong(text) }))
}

/// The whole of a worker process; does nothing in any other.
pub fn worker() {
    let Ok(rank) = std::env::var(RANK) else { return };
    let rank: usize = rank.parse().expect("a rank");
    let variable = |name: &str| std::env::var(name).expect("set together with the rank");
    let jobs: Vec<JobId> = variable(JOBS).split(',').map(|job| job.parse().expect("a job id")).collect();
    let world = jobs[0].world();
    let meeting = variable(MEETING);
    let seats: Vec<Seat> = meeting.split(',').map(Seat::parse).collect();
    let bootstrap = |group: usize, place: usize| EpBootstrap {
        struct_size: size_of::<EpBootstrap>(),
        reserved_flags: 0,
        rank: place as i32,
        num_ranks: world.groups[group].members.len() as i32,
        all_gather: None,
        all_gather_ctx: null_mut(),
        unique_id: seats[group].id.as_ref().map_or(null(), std::ptr::from_ref),
        file: seats[group].file.as_ref().map_or(null(), |file| file.as_ptr()),
        timeout_ms: 0,
        reserved: 0,
    };
    let device: Box<dyn Device> = match variable(ON_CUDA).as_str() {
        "1" => Box::new(Cuda::of_rank(rank)),
        _ => Box::new(Host),
    };
    let jobs = jobs.iter().map(|job| Arc::new(job.build()));
    for (job, trouble) in live(&*device, &world, rank, bootstrap, jobs) {
        let kind = if matches!(trouble, Trouble::Broken(_)) { "broken" } else { "wrong" };
        println!("\n{REPORT} {job} {kind} {}", trouble.text().replace('\n', " "));
    }
}

/// What a worker knows about meeting the others of one group.
struct Seat {
    id: Option<EpUniqueId>,
    file: Option<CString>,
}

impl Seat {
    fn parse(text: &str) -> Seat {
        if let Some(file) = text.strip_prefix("file:") {
            return Seat { id: None, file: Some(CString::new(file).expect("a path without NUL")) };
        }
        let hex = text.strip_prefix("id:").expect("file: or id:");
        let mut id = EpUniqueId { bytes: [0; 128] };
        for (at, byte) in id.bytes.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).expect("hexadecimal digits");
        }
        Seat { id: Some(id), file: None }
    }
}
