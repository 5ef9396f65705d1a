//! How much memory this process may still get. Who touches more is not refused but killed.

use std::fs;
use std::path::Path;

use crate::error::{Error, Result, Status};

/// What stays free for everybody else.
const RESERVE: u64 = 64 << 20;

/// Refuses `bytes` that the machine, or the control group of this process, does not have.
///
/// # Errors
/// [`Status::OutOfMemory`] with both numbers.
pub(crate) fn require(bytes: usize) -> Result<()> {
    let machine = fs::read_to_string("/proc/meminfo").ok().and_then(|text| of_machine(&text));
    let found = [(machine, "this machine"), (of_cgroup(), "this process's control group")];
    for (available, whose) in found {
        if let Some(available) = available.filter(|available| *available < bytes as u64 + RESERVE) {
            return Err(Error::new(
                Status::OutOfMemory,
                format!(
                    "{whose} has {available} bytes of memory left, {bytes} more are needed and {RESERVE} kept free"
                ),
            ));
        }
    }
    Ok(())
}

/// Memory and swap that `/proc/meminfo` says are available.
fn of_machine(meminfo: &str) -> Option<u64> {
    let kib = |name| meminfo.lines().find_map(|line| number_of(line, name));
    Some(kib("MemAvailable:")?.saturating_add(kib("SwapFree:").unwrap_or(0)).saturating_mul(1024))
}

/// The least that is left in the control groups (version 2) around this process.
fn of_cgroup() -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let own = groups.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let read = |group: &Path, file: &str| {
        fs::read_to_string(Path::new("/sys/fs/cgroup").join(group).join(file)).ok()
    };
    let left = |group: &Path| {
        let stat = read(group, "memory.stat")?;
        left_in(&read(group, "memory.max")?, &read(group, "memory.current")?, &stat)
    };
    Path::new(own).ancestors().filter_map(left).min()
}

/// What a control group may still get: cached files make room.
fn left_in(max: &str, current: &str, stat: &str) -> Option<u64> {
    let number = |text: &str| text.trim().parse::<u64>().ok();
    let cached = |name| stat.lines().find_map(|line| number_of(line, name)).unwrap_or(0);
    let files = cached("active_file ").saturating_add(cached("inactive_file "));
    Some(number(max)?.saturating_sub(number(current)?.saturating_sub(files)))
}

/// The number behind `name` in a line such as `MemAvailable:   1024 kB`.
fn number_of(line: &str, name: &str) -> Option<u64> {
    line.strip_prefix(name)?.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_and_swap_of_the_machine_are_added() {
        let text = "MemTotal: 9 kB\nMemFree: 1 kB\nMemAvailable:   5 kB\nSwapTotal: 8 kB\nSwapFree:  2 kB\n";
        assert_eq!(of_machine(text), Some(7 * 1024));
        assert_eq!(of_machine("MemTotal: 9 kB\n"), None);
        let here = fs::read_to_string("/proc/meminfo").unwrap();
        assert!(of_machine(&here).is_some_and(|bytes| bytes > 1 << 20));
    }

    #[test]
    fn a_control_group_without_a_limit_has_none() {
        let stat = "anon 5\nactive_file 30\ninactive_file 10\nshmem 7\n";
        assert_eq!(left_in("max\n", "100\n", stat), None);
        assert_eq!(left_in("1000\n", "100\n", stat), Some(940));
        assert_eq!(left_in("50\n", "100\n", stat), Some(0));
    }

    #[test]
    fn more_than_there_is_is_refused_with_the_numbers() {
        assert_eq!(require(4096), Ok(()));
        let error = require(1 << 60).unwrap_err();
        assert_eq!(error.status, Status::OutOfMemory);
        assert!(error.message.contains("1152921504606846976 more are needed"), "{error}");
    }
}
