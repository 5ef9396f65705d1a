//! Signals that interrupt every system call, as a profiler's or a timer's do: nothing notices them.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use ep_core::config::Layout;
use ep_core::engine::Stream;
use ep_core::perturb::Perturb;

use crate::process::{self, Rank, Scratch, role, say};
use crate::threads::{LONG, config};
use crate::work::{Member, Place, Shape};

static SIGNALS: AtomicU64 = AtomicU64::new(0);

extern "C" fn count(_: i32) {
    SIGNALS.fetch_add(1, Ordering::Relaxed);
}

/// Interrupts whatever this process waits for, a thousand times a second, without restarting it.
fn interrupt_for_ever() {
    // SAFETY: all zero is an action without flags; the handler only adds to an atomic.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = count as *const () as usize;
        assert_eq!(libc::sigaction(libc::SIGUSR1, &action, std::ptr::null_mut()), 0);
    }
    // Directed at this thread, which makes the calls.
    // SAFETY: plain calls; the thread lives as long as its process.
    let thread = unsafe { libc::pthread_self() };
    std::thread::spawn(move || {
        loop {
            std::thread::sleep(std::time::Duration::from_micros(500));
            // SAFETY: as above.
            unsafe { libc::pthread_kill(thread, libc::SIGUSR1) };
        }
    });
}

fn play(role: &[String]) {
    let rank: usize = role[0].parse().unwrap();
    let directory = Path::new(&role[1]);
    interrupt_for_ever();
    for cycle in 0..6u64 {
        if rank == cycle as usize % 3 {
            // The others wait for this one, and are interrupted.
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
        let path = directory.join(format!("meet-{cycle}"));
        let group = process::meet(&path, rank, 3, &config(LONG), Perturb::none());
        for (layout, place) in [(Layout::Flat, Place::Window), (Layout::ExpertMajor, Place::Ring)] {
            let mut member = Member::new(&group, Shape::large(3, layout, place)).expect("windows are made");
            for seed in 0..3 {
                if rank == seed as usize {
                    std::thread::sleep(std::time::Duration::from_millis(20));
                }
                member.round(seed).expect("the round works");
            }
            let stream = Stream::new().expect("the system has a thread");
            member.update(Some(&stream)).expect("the update is queued");
            member.plan.counts(None).expect("the update works");
            stream.synchronize(LONG).expect("the update works");
        }
        group.close(LONG).expect("it has no calls");
    }
    say(format!("signals {}", SIGNALS.load(Ordering::Relaxed)));
    // The thread that sends signals must not outlive this one.
    std::process::exit(0);
}

#[test]
fn interrupted_system_calls_are_not_noticed() {
    if let Some(role) = role() {
        return play(&role);
    }
    let scratch = Scratch::new();
    let role = |rank| format!("{rank} {}", scratch.path().display());
    let test = "signals::interrupted_system_calls_are_not_noticed";
    let ranks: Vec<Rank> = (0..3).map(|rank| Rank::spawn(test, &role(rank), &scratch)).collect();
    for rank in ranks {
        let signals: u64 = rank.await_line("signals").1.parse().expect("a number");
        assert!(signals > 100, "{signals} signals");
        rank.finish();
    }
}
