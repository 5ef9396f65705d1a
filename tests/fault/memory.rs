//! Memory: what a group says it has is what it has mapped, and nothing grows with use.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use ep_core::config::{GroupConfig, Layout};
use ep_core::engine::{Group, Window};
use ep_core::perturb::Perturb;

use crate::process::{self, Rank, Scratch, role};
use crate::threads::{LONG, config};
use crate::work::{Member, Place, Shape};

/// Sizes of this process's mappings of shared memory of libep, ascending.
pub(crate) fn mapped() -> Vec<u64> {
    let maps = fs::read_to_string("/proc/self/maps").expect("Linux has it");
    let size = |line: &str| {
        let (from, to) = line.split_whitespace().next()?.split_once('-')?;
        let address = |hex| u64::from_str_radix(hex, 16).ok();
        Some(address(to)? - address(from)?)
    };
    let mut sizes: Vec<u64> =
        maps.lines().filter(|line| line.contains("/memfd:ep")).filter_map(size).collect();
    sizes.sort_unstable();
    sizes
}

fn group_of_one(config: &GroupConfig) -> Arc<Group> {
    let bootstrap = ep_core::bootstrap::LocalBootstrap::group(1).remove(0);
    Group::create(config, Box::new(bootstrap), std::time::Instant::now() + LONG).expect("the group is made")
}

#[test]
fn group_and_windows_are_as_large_as_they_say() {
    if role().is_none() {
        // In a process of its own: other tests map memory as well.
        let scratch = Scratch::new();
        return Rank::spawn("memory::group_and_windows_are_as_large_as_they_say", "x", &scratch).finish();
    }
    assert_eq!(mapped(), []);
    for (num_lanes, max_local_experts, ring_bytes) in [(0, 0, 0), (1, 1, 1), (16, 4096, 1 << 20)] {
        let config = GroupConfig { num_lanes, max_local_experts, ring_bytes, ..config(LONG) };
        let group = group_of_one(&config);
        assert_eq!(mapped(), [group.info().memory_bytes], "{config:?}");
        assert_eq!(group.info().window_bytes, 0);
        let mut windows = Vec::new();
        for bytes in [1, 4096, 1 << 20, 0, 12_345] {
            windows.push(Window::allocate(&group, bytes).expect("the window is made"));
            let info = group.info();
            assert_eq!(mapped().iter().sum::<u64>(), info.memory_bytes + info.window_bytes);
        }
        assert_eq!(group.info().window_bytes, 4096 + 4096 + (1 << 20) + 4 * 4096);
        while windows.pop().is_some() {
            let info = group.info();
            assert_eq!(mapped().iter().sum::<u64>(), info.memory_bytes + info.window_bytes);
        }
        assert_eq!(mapped(), [group.info().memory_bytes]);
        group.close(LONG).expect("it has no calls");
        drop(group);
        assert_eq!(mapped(), []);
    }
}

/// A rank of several maps every segment and every part of a window once, and they are as large as the
/// peers say.
#[test]
fn peers_memory_is_mapped_once() {
    let Some(role) = role() else {
        let scratch = Scratch::new();
        let role = |rank| format!("{rank} {}", scratch.file("meet").display());
        let spawn = |rank| Rank::spawn("memory::peers_memory_is_mapped_once", &role(rank), &scratch);
        let ranks: Vec<Rank> = (0..3).map(spawn).collect();
        return ranks.into_iter().for_each(Rank::finish);
    };
    let rank: usize = role[0].parse().unwrap();
    let group = process::meet(Path::new(&role[1]), rank, 3, &config(LONG), Perturb::none());
    let segment = group.info().memory_bytes;
    assert_eq!(mapped(), [segment; 3]);
    let window = Window::allocate(&group, (rank + 1) << 22).unwrap();
    assert_eq!(group.info().window_bytes, (rank as u64 + 1) << 22);
    let mut all = vec![segment; 3];
    all.extend([1 << 22, 2 << 22, 3 << 22]);
    all.sort_unstable();
    assert_eq!(mapped(), all);
    // Released here: peers keep theirs until they release it too.
    drop(window);
    assert_eq!(mapped(), [segment; 3]);
    Member::new(&group, Shape::small(3, Layout::Flat, Place::Window)).unwrap().round(1).unwrap();
    group.close(LONG).unwrap();
    drop(group);
    assert_eq!(mapped(), []);
}
