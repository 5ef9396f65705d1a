//! Roots end, and take their threads and descriptors with them.

use std::fs;
use std::process::Command;
use std::thread;
use std::time::Duration;

use super::root::RootOptions;
use super::tcp_tests::{connect_all, create, far, gather_all, soon};
use super::*;

/// Set in the child, in which nothing else runs that could be counted.
const CHILD: &str = "EP_TEST_BOOTSTRAP_LEAK_CHILD";

fn count(directory: &str) -> usize {
    fs::read_dir(directory).unwrap().count()
}

fn threads_and_descriptors() -> (usize, usize) {
    (count("/proc/self/task"), count("/proc/self/fd"))
}

/// A root ends a moment after its last rank has left.
fn assert_settles_at(expected: (usize, usize)) {
    for _ in 0..1000 {
        if threads_and_descriptors() == expected {
            return;
        }
        thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(threads_and_descriptors(), expected, "(threads, descriptors)");
}

/// Runs this test again in a process of its own; true in that process.
fn is_child(test: &str) -> bool {
    if std::env::var_os(CHILD).is_some() {
        return true;
    }
    let name = format!("{}::{test}", module_path!().split_once("::").unwrap().1);
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &name, "--test-threads=1", "--nocapture"])
        .env(CHILD, "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
    false
}

fn cycle() {
    let members = connect_all(&create().0, &[(0, 2), (1, 2)], far());
    let mut members: Vec<_> = members.into_iter().map(|member| member.unwrap()).collect();
    gather_all(&mut members, 1);
}

#[test]
fn two_hundred_groups_leave_nothing_behind() {
    if is_child("two_hundred_groups_leave_nothing_behind") {
        cycle();
        thread::sleep(Duration::from_millis(100));
        let before = threads_and_descriptors();
        for _ in 0..200 {
            cycle();
        }
        assert_settles_at(before);
    }
}

#[test]
fn groups_that_fail_leave_nothing_behind() {
    if is_child("groups_that_fail_leave_nothing_behind") {
        let before = threads_and_descriptors();
        // An absent rank, a duplicate whose last rank never comes, and an id that is never used.
        connect_all(&create().0, &[(0, 2)], soon(50));
        connect_all(&create().0, &[(0, 3), (0, 3)], soon(300));
        let idle = RootOptions { idle: Duration::from_millis(50), ..RootOptions::default() };
        UniqueId::create_at(([127, 0, 0, 1], 0).into(), idle).unwrap();
        let nobody = UniqueId::from_address("127.0.0.1:1", "x").unwrap();
        connect_all(&nobody, &[(1, 2)], soon(50));
        // A hosted root that fails, and a rank that leaves before the others have come.
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        drop(listener);
        connect_all(&UniqueId::from_address(&address, "x").unwrap(), &[(0, 2)], soon(50));
        assert_settles_at(before);
    }
}
