//! Ranks in processes of their own.

use std::env;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use super::tcp_tests::far;
use super::*;

/// Set in a child: its rank, the file to meet through, and how it ends.
const CHILD: &str = "EP_TEST_BOOTSTRAP_RANK";
const FILE: &str = "EP_TEST_BOOTSTRAP_FILE";

const NUM_RANKS: usize = 4;
const BLOB_BYTES: usize = 1 << 20;

fn path(name: &str) -> PathBuf {
    env::temp_dir().join(format!("ep-bootstrap-{}-{name}", std::process::id()))
}

/// The rank of this process if it is a child.
fn child() -> Option<(usize, PathBuf)> {
    let rank = env::var(CHILD).ok()?.parse().ok()?;
    Some((rank, PathBuf::from(env::var_os(FILE)?)))
}

/// Runs `test` again as one rank.
fn spawn(test: &str, rank: usize, path: &PathBuf) -> Child {
    let name = format!("{}::{test}", module_path!().split_once("::").unwrap().1);
    Command::new(env::current_exe().unwrap())
        .args(["--exact", &name, "--test-threads=1", "--nocapture"])
        .env(CHILD, rank.to_string())
        .env(FILE, path)
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

#[test]
fn process_of_the_root_may_exit_right_after_the_last_round() {
    const TEST: &str = "process_of_the_root_may_exit_right_after_the_last_round";
    if let Some((rank, path)) = child() {
        let mut member = FileBootstrap::connect(&path, rank, NUM_RANKS, far()).unwrap();
        let all = member.all_gather(&vec![rank as u8; BLOB_BYTES], far()).unwrap();
        let is_right = |(rank, blob): (usize, &Vec<u8>)| *blob == vec![rank as u8; BLOB_BYTES];
        assert!(all.len() == NUM_RANKS && all.iter().enumerate().all(is_right));
        // No destructor runs, and the root's thread ends wherever it is.
        std::process::exit(0);
    }
    let path = path("exit");
    let children: Vec<Child> = (0..NUM_RANKS).map(|rank| spawn(TEST, rank, &path)).collect();
    for (rank, mut child) in children.into_iter().enumerate() {
        assert!(child.wait().unwrap().success(), "rank {rank}");
    }
    assert!(!path.exists());
}

#[test]
fn killed_process_is_named() {
    const TEST: &str = "killed_process_is_named";
    if let Some((rank, path)) = child() {
        let mut member = FileBootstrap::connect(&path, rank, 2, far()).unwrap();
        member.all_gather(b"alive", far()).unwrap();
        thread::sleep(Duration::from_secs(60));
        return;
    }
    let path = path("kill");
    let mut killed = spawn(TEST, 1, &path);
    let mut member = FileBootstrap::connect(&path, 0, 2, far()).unwrap();
    assert_eq!(member.all_gather(b"", far()).unwrap(), [b"".to_vec(), b"alive".to_vec()]);
    killed.kill().unwrap();
    killed.wait().unwrap();
    let error = member.all_gather(b"", far()).unwrap_err();
    assert!(error.message.starts_with("rank 1 of 2 left or died before all-gather round 2"), "{error}");
}
