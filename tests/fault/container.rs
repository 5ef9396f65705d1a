//! Ranks in containers that share the network but not the processes, so that no rank has a number for the
//! process of another.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use ep_core::Status;
use ep_core::config::Layout;
use ep_core::perturb::Perturb;

use crate::process::{self, Rank, Scratch, role, say};
use crate::threads::{LONG, config};
use crate::work::{Member, Place, Shape};

const NUM_RANKS: usize = 3;

/// Becomes the parent of a rank in a container, which talks for it from then on.
fn play_outer(role: &[String]) {
    // SAFETY: plain system call.
    if unsafe { libc::unshare(libc::CLONE_NEWPID) } != 0 {
        return say("pid none");
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(std::env::args().skip(1)).env(process::ROLE, format!("inner {} {}", role[1], role[2]));
    let mut child = command.spawn().unwrap();
    say(format!("pid {}", child.id()));
    std::process::exit(child.wait().unwrap().code().unwrap_or(9));
}

fn play_inner(role: &[String]) {
    assert_eq!(std::process::id(), 1, "the first process of its container");
    let rank = role[1].parse().unwrap();
    let group = process::meet(Path::new(&role[2]), rank, NUM_RANKS, &config(LONG), Perturb::none());
    let shape = Shape::small(NUM_RANKS, Layout::Flat, Place::Window);
    let mut member = Member::new(&group, shape).expect("windows are made");
    member.round(1).expect("the round works");
    say("made");
    if rank == 1 {
        process::hear();
    }
    let error = (2..).find_map(|seed| member.calls(seed).err()).expect("rank 1 dies");
    assert!(matches!(error.status, Status::PeerLost | Status::Aborted), "{error}");
    assert!(error.message.contains("rank 1 left or died"), "{error}");
    say("told");
}

#[test]
fn ranks_of_several_containers_meet_and_see_each_other_die() {
    match role() {
        Some(role) if role[0] == "outer" => return play_outer(&role),
        Some(role) => return play_inner(&role),
        None => {}
    }
    let test = "container::ranks_of_several_containers_meet_and_see_each_other_die";
    let scratch = Scratch::new();
    let role = |rank| format!("outer {rank} {}", scratch.file("meet").display());
    let mut ranks: Vec<Rank> = (0..NUM_RANKS).map(|rank| Rank::spawn(test, &role(rank), &scratch)).collect();
    let pids: Vec<String> = ranks.iter().map(|rank| rank.await_line("pid").1).collect();
    if pids.iter().any(|pid| pid == "none") {
        eprintln!("skipped: this user may not make containers");
        return;
    }
    ranks.iter().for_each(|rank| drop(rank.await_line("made")));
    let pid: libc::pid_t = pids[1].parse().expect("a number");
    // SAFETY: the parent of this process waits for it, so the number is still its own.
    assert_eq!(unsafe { libc::kill(pid, libc::SIGKILL) }, 0);
    let died = Instant::now();
    assert_eq!(ranks.remove(1).wait().code(), Some(9));
    for rank in ranks {
        let when = rank.await_line("told").0;
        assert!(when.saturating_duration_since(died) < Duration::from_secs(1));
        rank.finish();
    }
}
