//! A selection of these tests with all ranks, processes and threads alike, on a single core.

use std::os::unix::process::CommandExt;
use std::process::Command;

/// Set in the process that is confined, and its children.
const CONFINED: &str = "EP_TEST_FAULT_ONE_CORE";

const SELECTION: [&str; 12] = [
    "threads::the_workload_is_right_in_every_layout_and_place",
    "killed::rank_killed_before_a_call_is_named_by_all_at_once",
    "killed::rank_killed_at_a_step_of_the_protocol_is_named_by_all_at_once",
    "stopped::rank_stopped_before_a_call_is_named_at_the_deadline",
    "steps::rank_that_leaves_at_any_step_is_named_soon",
    "perturbed::delayed_and_reordered_steps_do_not_change_results",
    "mismatch::each_kind_of_mismatch_says_what_differs",
    "mismatch::lane_works_after_any_mismatch",
    "lanes::dispatch_of_one_lane_overlaps_a_combine_of_another",
    "abort::abort_in_the_middle_of_work_ends_every_rank",
    "ending::rank_may_leave_as_soon_as_its_last_call_returns",
    "quiet::only_waiting_enters_the_kernel",
];

#[test]
fn everything_works_on_one_core() {
    if std::env::var_os(CONFINED).is_some() {
        return;
    }
    let mut command = Command::new(std::env::current_exe().expect("this binary has a path"));
    command.arg("--exact").args(SELECTION).args(["--test-threads=2"]).env(CONFINED, "1");
    // SAFETY: only system calls, which are async-signal-safe. Children inherit the affinity.
    unsafe { command.pre_exec(confine) };
    let output = command.output().expect("this binary runs again");
    let text = String::from_utf8_lossy(&output.stdout);
    let passed = format!("{} passed", SELECTION.len());
    assert!(output.status.success() && text.contains(&passed), "{text}\n{:?}", output.stderr);
}

/// Leaves this process the first of its cores only.
fn confine() -> std::io::Result<()> {
    // SAFETY: an all-zero set is an empty one.
    let (mut has, mut one): (libc::cpu_set_t, libc::cpu_set_t) = unsafe { std::mem::zeroed() };
    let bytes = size_of::<libc::cpu_set_t>();
    // SAFETY: the sets are of the size said, and numbers are below CPU_SETSIZE.
    unsafe {
        if libc::sched_getaffinity(0, bytes, &mut has) != 0 {
            return Err(std::io::Error::last_os_error());
        }
        let first = (0..libc::CPU_SETSIZE as usize).find(|&core| libc::CPU_ISSET(core, &has)).unwrap_or(0);
        libc::CPU_SET(first, &mut one);
        if libc::sched_setaffinity(0, bytes, &one) != 0 {
            return Err(std::io::Error::last_os_error());
        }
    }
    Ok(())
}
