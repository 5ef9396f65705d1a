//! Endurance: many rounds, groups, windows and plans, and nothing grows.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::time::{Duration, Instant};

use ep_core::engine::Window;
use ep_core::perturb::Perturb;

use crate::alloc::live_bytes;
use crate::memory::mapped;
use crate::process::{self, Rank, Scratch, role};
use crate::rng::{Rng, hash};
use crate::threads::{LONG, config, run_calm};
use crate::work::{Member, Place, Shape};

/// What a process holds.
#[derive(Clone, Debug)]
struct Held {
    descriptors: usize,
    threads: usize,
    mappings: usize,
    live_bytes: isize,
    resident_bytes: usize,
}

fn count(directory: &str) -> usize {
    fs::read_dir(directory).expect("Linux has it").count()
}

impl Held {
    fn now() -> Held {
        let status = fs::read_to_string("/proc/self/status").expect("Linux has it");
        let resident = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).expect("Linux has it");
        let kib: usize = resident.trim().trim_end_matches(" kB").parse().expect("a number");
        Held {
            descriptors: count("/proc/self/fd"),
            threads: count("/proc/self/task"),
            mappings: mapped().len(),
            live_bytes: live_bytes(),
            resident_bytes: 1024 * kib,
        }
    }

    /// Waits for what ends a moment later by itself, such as the server of a meeting.
    fn settled(expected: &Held) -> Held {
        let deadline = Instant::now() + LONG;
        loop {
            let now = Held::now();
            let same = (now.descriptors, now.threads) == (expected.descriptors, expected.threads);
            if same || Instant::now() > deadline {
                return now;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn assert_not_more_than(&self, before: &Held, what: &str) {
        let same = |held: &Held| (held.descriptors, held.threads, held.mappings);
        assert_eq!(same(self), same(before), "{what}: {self:?} after {before:?}");
        let grown = self.live_bytes - before.live_bytes;
        assert!(grown < 64 << 10, "{what}: {grown} bytes more are allocated: {self:?} after {before:?}");
        // The system's allocator keeps what was freed in pieces.
        let grown = self.resident_bytes.saturating_sub(before.resident_bytes);
        assert!(grown < 16 << 20, "{what}: {grown} bytes more are resident: {self:?} after {before:?}");
    }
}

/// Rounds of shapes that change, in generations with windows and plans of their own.
fn play_rounds(rank: usize, num_ranks: usize, generations: u64, path: &Path) {
    let group = process::meet(path, rank, num_ranks, &config(LONG), Perturb::none());
    let mut rng = Rng::new(17);
    let mut early = None;
    for generation in 0..generations {
        let shapes: Vec<Shape> = (0..6).map(|_| Shape::random(num_ranks, &mut rng)).collect();
        let members = shapes.iter().map(|&shape| Member::new(&group, shape).expect("windows are made"));
        let mut members: Vec<Member> = members.collect();
        for round in 0..100u64 {
            let member = &mut members[rng.below(6)];
            member.origins = rng.below(2) == 0;
            member.round(hash(&[generation, round])).expect("the round works");
        }
        drop((members, shapes));
        if generation == 1 {
            early = Some(Held::now());
        }
    }
    Held::now().assert_not_more_than(&early.expect("more than one generation"), "rounds");
    // Everyone measures before anyone goes: the server of the meeting has a descriptor for each rank.
    Window::allocate(&group, 0).expect("the window is made");
    group.close(LONG).expect("it has no calls");
}

fn check_rounds(test: &str, num_ranks: usize) {
    let scratch = Scratch::new();
    let role = |rank| format!("{rank} {}", scratch.file("meet").display());
    let ranks: Vec<Rank> = (0..num_ranks).map(|rank| Rank::spawn(test, &role(rank), &scratch)).collect();
    ranks.into_iter().for_each(Rank::finish);
}

fn rank_and_path(role: &[String]) -> (usize, PathBuf) {
    (role[0].parse().expect("a rank"), PathBuf::from(&role[1]))
}

#[test]
fn a_thousand_rounds_of_sixteen_processes_leak_nothing() {
    if let Some(role) = role() {
        let (rank, path) = rank_and_path(&role);
        return play_rounds(rank, 16, 10, &path);
    }
    check_rounds("soak::a_thousand_rounds_of_sixteen_processes_leak_nothing", 16);
}

#[test]
#[ignore = "slow: run with EP_TEST_SLOW=1"]
fn slow_ten_thousand_rounds_of_sixteen_processes_leak_nothing() {
    if let Some(role) = role() {
        let (rank, path) = rank_and_path(&role);
        return play_rounds(rank, 16, 100, &path);
    }
    check_rounds("soak::slow_ten_thousand_rounds_of_sixteen_processes_leak_nothing", 16);
}

/// Makes and ends groups with everything in them, every third one by an abort.
#[test]
fn a_hundred_groups_with_windows_and_plans_leave_nothing() {
    let test = "soak::a_hundred_groups_with_windows_and_plans_leave_nothing";
    let Some(role) = role() else {
        let scratch = Scratch::new();
        let role = |rank| format!("{rank} {}", scratch.path().display());
        let ranks: Vec<Rank> = (0..3).map(|rank| Rank::spawn(test, &role(rank), &scratch)).collect();
        ranks.into_iter().for_each(Rank::finish);
        let files: Vec<_> = fs::read_dir(scratch.path()).expect("it is there").collect();
        return assert!(files.is_empty(), "{files:?}");
    };
    let (rank, directory) = rank_and_path(&role);
    let mut early: Option<Held> = None;
    for cycle in 0..100u64 {
        let path = directory.join(format!("meet-{cycle}"));
        let group = process::meet(&path, rank, 3, &config(LONG), Perturb::none());
        let mut rng = Rng::new(cycle);
        for _ in 0..3 {
            let mut member = Member::new(&group, Shape::random(3, &mut rng)).expect("windows are made");
            member.round(cycle).expect("the round works");
        }
        // Collective, so that nobody is in a call any more.
        Window::allocate(&group, 0).expect("the window is made");
        if cycle % 3 == 0 {
            group.abort();
        }
        group.close(LONG).expect("it has no calls");
        drop(group);
        if cycle == 10 {
            std::thread::sleep(Duration::from_millis(200));
            early = Some(Held::now());
        }
    }
    let early = early.expect("more than ten cycles");
    Held::settled(&early).assert_not_more_than(&early, "groups");
}

/// A hundred windows and plans in one group.
#[test]
fn a_hundred_windows_and_plans_leave_nothing() {
    if role().is_none() {
        // In a process of its own: other tests allocate as well.
        let scratch = Scratch::new();
        return Rank::spawn("soak::a_hundred_windows_and_plans_leave_nothing", "x", &scratch).finish();
    }
    let barrier = Barrier::new(2);
    let held = run_calm(2, LONG, |group| {
        let mut held = Vec::new();
        for cycle in 0..100u64 {
            let mut rng = Rng::new(cycle);
            let shapes = (0..3).map(|_| Shape { place: Place::Window, ..Shape::random(2, &mut rng) });
            for shape in shapes {
                Member::new(group, shape).expect("windows are made").round(cycle).expect("the round works");
            }
            assert_eq!(group.info().window_bytes, 0);
            // Neither rank is in a call while one looks.
            if barrier.wait().is_leader() && cycle % 50 == 49 {
                held.push(Held::now());
            }
            barrier.wait();
        }
        held
    });
    let held: Vec<Held> = held.into_iter().flatten().collect();
    let (early, late) = held.split_first().expect("two measurements");
    late[0].assert_not_more_than(early, "windows and plans");
    assert_eq!(mapped(), []);
}
