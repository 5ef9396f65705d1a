//! Libraries and providers, and the processes that run a scene on them.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};
use std::{env, thread};

/// The longest that one scene may take.
const DEADLINE: Duration = Duration::from_secs(150);

pub(crate) const SCENE: &str = "EP_TEST_SCENE";
pub(crate) const RANK: &str = "EP_TEST_RANK";

/// A library and one of its providers.
#[derive(Clone, Debug)]
pub(crate) struct Cell {
    pub(crate) library: String,
    pub(crate) provider: &'static str,
}

/// The cells that this machine has. In CI a missing library is a failure.
pub(crate) fn cells() -> Vec<Cell> {
    let newer = Path::new(env!("CARGO_MANIFEST_DIR")).join("../build/fabric/libfabric.so.1");
    let libraries = [
        (String::from("libfabric.so.1"), &["net", "tcp;ofi_rxm"][..], "install libfabric1"),
        (newer.to_string_lossy().into_owned(), &["tcp", "tcp;ofi_rxm"], "run scripts/fabric.sh"),
    ];
    let mut cells = Vec::new();
    for (library, providers, remedy) in libraries {
        let output = alone(&Cell { library: library.clone(), provider: "" }, "version", &[]);
        match output.status.success() {
            true => {
                cells.extend(providers.iter().map(|&provider| Cell { library: library.clone(), provider }))
            }
            false => {
                let text = text_of(&output);
                assert!(env::var_os("CI").is_none(), "promised in CI, but could not run: {library}\n{text}");
                println!("skipped: {library} does not open; {remedy}");
            }
        }
    }
    cells
}

/// Runs a scene between two processes, for every cell.
pub(crate) fn both(scene: &str) {
    both_with(scene, &[]);
}

/// The same with settings.
pub(crate) fn both_with(scene: &str, settings: &[(&str, &str)]) {
    for cell in cells() {
        let (a, b) = UnixStream::pair().expect("a pair of sockets");
        let children = [spawn(&cell, scene, 0, settings, a), spawn(&cell, scene, 1, settings, b)];
        let outputs = children.map(wait);
        // A scene in which rank 1 is killed names it so.
        let killed = scene.ends_with("_is_killed");
        let good = outputs[0].status.success() && outputs[1].status.success() != killed;
        let [zero, one] = outputs.each_ref().map(|output| format!("{}\n{}", output.status, text_of(output)));
        assert!(good, "{cell:?}, {scene}\n-- rank 0: {zero}\n-- rank 1: {one}");
    }
}

/// Runs a scene in one process.
pub(crate) fn alone(cell: &Cell, scene: &str, settings: &[(&str, &str)]) -> Output {
    let (_parent, child) = UnixStream::pair().expect("a pair of sockets");
    wait(spawn(cell, scene, 0, settings, child))
}

/// This program again, as one rank; the socket to the other rank is its standard input.
fn spawn(cell: &Cell, scene: &str, rank: usize, settings: &[(&str, &str)], socket: UnixStream) -> Child {
    let mut command = Command::new(env::current_exe().expect("this program has a path"));
    command.args(["--exact", "scenes::rank", "--ignored", "--nocapture", "--test-threads=1"]);
    command.env("EP_LIBFABRIC", &cell.library).env("EP_FABRIC_PROVIDER", cell.provider);
    command.env("EP_FABRIC_NICS", "127.0.0.1,127.0.0.2").env(SCENE, scene).env(RANK, rank.to_string());
    command.env("RUST_BACKTRACE", "0").envs(settings.iter().copied());
    command.stdin(Stdio::from(OwnedFd::from(socket))).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().expect("this program starts again")
}

/// What a process said.
pub(crate) fn text_of(output: &Output) -> String {
    [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned()).concat()
}

fn wait(mut child: Child) -> Output {
    let deadline = Instant::now() + DEADLINE;
    while child.try_wait().expect("the child is ours").is_none() {
        if Instant::now() > deadline {
            let _ = child.kill();
            println!("killed after {DEADLINE:?}");
            break;
        }
        thread::sleep(Duration::from_millis(5));
    }
    child.wait_with_output().expect("the child is ours")
}
