//! Windows and groups that cannot be made on one rank: no rank gets one, and the next attempt works.

use std::path::Path;
use std::time::{Duration, Instant};

use ep_core::Status;
use ep_core::bootstrap::{FileBootstrap, TcpBootstrap, UniqueId};
use ep_core::config::{GroupConfig, Layout, MAX_WINDOWS};
use ep_core::engine::{Group, Window};
use ep_core::perturb::Perturb;

use crate::process::{self, Rank, Scratch, become_nobody, role, say};
use crate::threads::{LONG, Watchdog, config, run_calm};
use crate::work::{Member, Place, Shape};

/// More than any machine has, and less than the address space.
const TOO_MUCH: usize = 1 << 60;

#[test]
fn window_that_one_rank_cannot_have_is_refused_to_all_and_the_next_works() {
    let _watchdog = Watchdog::new("windows that one rank cannot have", LONG);
    run_calm(3, LONG, |group| {
        for round in 0..6 {
            let odd = round % 3;
            let bytes = if group.rank() == odd { TOO_MUCH } else { 4096 };
            let start = Instant::now();
            let error = Window::allocate(group, bytes).err().expect("one rank asks for too much");
            assert_eq!(error.status, Status::OutOfMemory, "{error}");
            if group.rank() != odd {
                assert!(error.message.contains(&format!("rank {odd}")), "{error}");
            }
            assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
            assert_eq!(group.info().window_bytes, 0);
            let shape = Shape::small(3, Layout::Flat, Place::Window);
            Member::new(group, shape).expect("the next window is made").round(round as u64).unwrap();
        }
    });
}

#[test]
fn one_window_too_many_on_some_ranks_is_refused_to_all_and_the_next_works() {
    let _watchdog = Watchdog::new("too many windows", LONG);
    run_calm(3, LONG, |group| {
        let allocate = || Window::allocate(group, 100);
        let mut windows: Vec<Window> = (0..MAX_WINDOWS).map(|_| allocate().unwrap()).collect();
        // Rank 1 would have room.
        if group.rank() == 1 {
            windows.pop();
        }
        let error = allocate().err().expect("two ranks have no room");
        assert!(matches!(error.status, Status::Capacity | Status::OutOfMemory), "{error}");
        windows.truncate(1);
        let shape = Shape::small(3, Layout::Flat, Place::Window);
        Member::new(group, shape).expect("the next window is made").round(8).unwrap();
    });
}

/// Lets this process open `more` descriptors, or as many as it may.
fn limit_descriptors(more: Option<usize>) {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the address of a struct of the right type.
    assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) }, 0);
    limit.rlim_cur = match more {
        // The limit is on numbers: below that of one more, as many are free.
        Some(more) => {
            // SAFETY: duplicates the standard output; all are closed below.
            let free: Vec<libc::c_int> = (0..=more).map(|_| unsafe { libc::dup(1) }).collect();
            // SAFETY: made just now.
            free.iter().for_each(|&fd| assert_eq!(unsafe { libc::close(fd) }, 0));
            free[more] as libc::rlim_t
        }
        None => limit.rlim_max,
    };
    // SAFETY: as above.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) }, 0);
}

fn num_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("Linux has it").count()
}

/// Rank 1 runs out of descriptors while it maps its peers' parts.
fn play_window(rank: usize, path: &Path) {
    let group = process::meet(path, rank, 4, &config(LONG), Perturb::none());
    let before = num_descriptors();
    for more in 0..4 {
        if rank == 1 {
            limit_descriptors(Some(more));
        }
        let start = Instant::now();
        let result = Window::allocate(&group, 4096);
        limit_descriptors(None);
        // With two at a time, its own and a peer's, all is well again.
        assert_eq!(result.is_err(), more < 2, "with {more} descriptors: {:?}", result.err());
        if let Err(error) = result {
            assert!(rank == 1 || error.message.contains("rank 1"), "{error}");
            assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
        }
        let shape = Shape::small(4, Layout::ExpertMajor, Place::Window);
        Member::new(&group, shape).expect("the next window is made").round(more as u64).unwrap();
        // Not equal: rank 0 also serves the meeting of those who may have ended by now.
        assert!(num_descriptors() <= before, "after {more}: {} of {before}", num_descriptors());
    }
}

#[test]
fn rank_without_descriptors_fails_a_window_on_all_and_the_next_works() {
    if let Some(role) = role() {
        return play_window(role[0].parse().unwrap(), Path::new(&role[1]));
    }
    let test = "windows::rank_without_descriptors_fails_a_window_on_all_and_the_next_works";
    let scratch = Scratch::new();
    let role = |rank| format!("{rank} {}", scratch.file("meet").display());
    let ranks: Vec<Rank> = (0..4).map(|rank| Rank::spawn(test, &role(rank), &scratch)).collect();
    ranks.into_iter().for_each(Rank::finish);
}

/// Rank 1 runs out of descriptors at each point of making a group.
fn play_group(rank: usize, directory: &Path) {
    let before = num_descriptors();
    for more in 0..40 {
        let path = directory.join(format!("meet-{more}"));
        let deadline = Instant::now() + LONG;
        let bootstrap = FileBootstrap::connect(&path, rank, 3, deadline).expect("the ranks meet");
        if rank == 1 {
            limit_descriptors(Some(more));
        }
        let start = Instant::now();
        let result = Group::create(&GroupConfig::default(), Box::new(bootstrap), deadline);
        limit_descriptors(None);
        let (failed, text) = (result.is_err(), result.as_ref().err().map(ToString::to_string));
        assert!(start.elapsed() < Duration::from_secs(5), "{:?}: {text:?}", start.elapsed());
        if let Ok(group) = result {
            Member::new(&group, Shape::small(3, Layout::Flat, Place::Window)).unwrap().round(1).unwrap();
            group.close(LONG).unwrap();
            assert!(more > 2, "a group needs descriptors");
            return;
        }
        assert!(rank == 1 || text.as_ref().is_some_and(|text| text.contains("rank 1")), "{text:?}");
        // The server of the rendezvous ends a moment later.
        let settled = Instant::now() + LONG;
        while num_descriptors() != before && Instant::now() < settled {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(num_descriptors(), before, "after {more}: {failed} {text:?}");
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        assert!(!maps.contains("memfd:ep"), "after {more}: {maps}");
    }
    panic!("the group was never made");
}

#[test]
fn rank_without_descriptors_fails_a_group_on_all_and_nothing_is_left() {
    if let Some(role) = role() {
        return play_group(role[0].parse().unwrap(), Path::new(&role[1]));
    }
    let test = "windows::rank_without_descriptors_fails_a_group_on_all_and_nothing_is_left";
    let scratch = Scratch::new();
    let role = |rank| format!("{rank} {}", scratch.path().display());
    let ranks: Vec<Rank> = (0..3).map(|rank| Rank::spawn(test, &role(rank), &scratch)).collect();
    ranks.into_iter().for_each(Rank::finish);
}

/// Descriptors that a user has under way count against a limit, which only root may exceed.
#[test]
fn ranks_of_a_user_with_few_descriptors_hand_over_their_memory() {
    const NUM_RANKS: usize = 16;
    if let Some(role) = role() {
        let rank = role[0].parse().unwrap();
        let id: Vec<u8> = role[1].as_bytes().chunks(2).map(hex).collect();
        let id: UniqueId = bytemuck::pod_read_unaligned(&id);
        become_nobody();
        // Each rank has two sockets and a process for each other one.
        limit_descriptors(Some(3 * NUM_RANKS + 20));
        let deadline = Instant::now() + LONG;
        let bootstrap = TcpBootstrap::connect(&id, rank, NUM_RANKS, deadline).expect("the ranks meet");
        let group = Group::create(&config(LONG), Box::new(bootstrap), deadline).expect("the group is made");
        let shape = Shape::small(NUM_RANKS, Layout::Flat, Place::Window);
        Member::new(&group, shape).expect("windows are made").round(1).expect("the round works");
        return;
    }
    // SAFETY: plain system call.
    if unsafe { libc::geteuid() } != 0 {
        eprintln!("skipped: only root can become another user");
        return;
    }
    let test = "windows::ranks_of_a_user_with_few_descriptors_hand_over_their_memory";
    let id = UniqueId::create().expect("an id is made");
    let id: String = bytemuck::bytes_of(&id).iter().map(|byte| format!("{byte:02x}")).collect();
    let scratch = Scratch::new();
    let spawn = |rank| Rank::spawn(test, &format!("{rank} {id}"), &scratch);
    let ranks: Vec<Rank> = (0..NUM_RANKS).map(spawn).collect();
    ranks.into_iter().for_each(Rank::finish);
}

fn hex(digits: &[u8]) -> u8 {
    let digits = std::str::from_utf8(digits).expect("the parent writes hex");
    u8::from_str_radix(digits, 16).expect("the parent writes hex")
}

/// A rank dies while the others allocate a window.
#[test]
fn rank_killed_while_a_window_is_allocated_is_named_at_once() {
    if let Some(role) = role() {
        let rank = role[0].parse().unwrap();
        let group = process::meet(Path::new(&role[1]), rank, 3, &config(LONG), Perturb::none());
        say("made");
        if rank == 1 {
            process::hear();
        }
        let error = Window::allocate(&group, 1 << 20).err().expect("rank 1 is dead");
        assert_eq!(error.status, Status::Bootstrap, "{error}");
        assert!(error.message.contains("rank 1"), "{error}");
        say("told");
        // Calls learn it in their own way.
        let mut member =
            Member::new(&group, Shape::small(3, Layout::Flat, Place::Ring)).expect("the plan is made");
        let error = member.calls(1).expect_err("rank 1 is dead");
        assert!(error.message.contains("rank 1 left or died"), "{error}");
        return;
    }
    let test = "windows::rank_killed_while_a_window_is_allocated_is_named_at_once";
    let scratch = Scratch::new();
    let role = |rank| format!("{rank} {}", scratch.file("meet").display());
    let mut ranks: Vec<Rank> = (0..3).map(|rank| Rank::spawn(test, &role(rank), &scratch)).collect();
    ranks.iter().for_each(|rank| drop(rank.await_line("made")));
    std::thread::sleep(Duration::from_millis(50));
    let victim = ranks.remove(1);
    victim.signal(libc::SIGKILL);
    let died = Instant::now();
    victim.finish_killed();
    for rank in ranks {
        let when = rank.await_line("told").0;
        assert!(when.saturating_duration_since(died) < Duration::from_secs(1));
        rank.finish();
    }
}

/// A window that one rank has released cannot be written by it any more: the calls of its peers that still
/// put rows there end, on all ranks, and say so.
#[test]
fn window_that_is_used_after_one_rank_released_it_is_an_error_on_all() {
    let _watchdog = Watchdog::new("a window that is used after its release", LONG);
    run_calm(3, LONG, |group| {
        let mut member = Member::new(group, Shape::large(3, Layout::Flat, Place::Window)).unwrap();
        member.round(1).unwrap();
        if group.rank() == 1 {
            member.release_window();
        }
        let start = Instant::now();
        let error = member.calls(2).unwrap_err();
        assert!(matches!(error.status, Status::PeerLost | Status::Aborted), "{error}");
        assert!(error.message.contains("a window that rank 1 does not have"), "{error}");
        assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    });
}

/// The system answers a file above the limit with a signal that ends the process.
#[test]
fn window_above_the_limit_of_files_is_an_error_and_no_signal() {
    if role().is_none() {
        let test = "windows::window_above_the_limit_of_files_is_an_error_and_no_signal";
        return Rank::spawn(test, "x", &Scratch::new()).finish();
    }
    run_calm(1, LONG, |group| {
        let limit = libc::rlimit { rlim_cur: 1 << 20, rlim_max: 1 << 20 };
        // SAFETY: the address of a struct of the right type.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &limit) }, 0);
        let error = Window::allocate(group, (1 << 20) + 1).err().expect("the window is above the limit");
        assert_eq!(error.status, Status::OutOfMemory, "{error}");
        assert!(error.message.contains("1048576 bytes") && error.message.contains("ulimit -f"), "{error}");
        Window::allocate(group, 1 << 20).expect("the window is as large as the limit");
    });
}
