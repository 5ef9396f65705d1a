//! What calls do not do once they have run before: allocate, enter the kernel but for waiting, or lock.

use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use ep_core::config::Layout;
use ep_core::engine::Stream;

use crate::alloc;
use crate::process::{Rank, Scratch, role, say};
use crate::seccomp;
use crate::threads::{LONG, Watchdog, run_calm};
use crate::work::{Member, Place, Shape};

const ROUNDS: usize = 100;

/// Every layout and place, with rings that are too small for the rows.
fn shapes(num_ranks: usize) -> Vec<Shape> {
    let layouts = [Layout::Flat, Layout::ExpertMajor];
    let all = layouts.map(|layout| [Place::Window, Place::Ring].map(|place| (layout, place)));
    let shape = |(layout, place)| Shape { cols: 600, ..Shape::large(num_ranks, layout, place) };
    all.into_iter().flatten().map(shape).collect()
}

fn calls(member: &mut Member, stream: Option<&Stream>) {
    member.update(stream).expect("the update works");
    member.dispatch(stream).expect("the dispatch works");
    member.combine(stream).expect("the combine works");
}

#[test]
fn calls_do_not_allocate() {
    let _watchdog = Watchdog::new("calls that do not allocate", LONG);
    for num_ranks in [1, 3] {
        for shape in shapes(num_ranks) {
            let counts = run_calm(num_ranks, LONG, |group| {
                let mut member = Member::new(group, shape).expect("windows are made");
                let mut sum = 0;
                for round in 0..ROUNDS as u64 {
                    member.prepare(round % 7);
                    member.origins = round % 2 == 0;
                    let count = alloc::count(|| calls(&mut member, None)).1;
                    // The first time, tables of the process and the thread are made.
                    sum += if round < 2 { 0 } else { count };
                }
                sum
            });
            assert_eq!(counts, vec![0; num_ranks], "{shape:?}");
        }
    }
}

/// In a process of its own, since every thread counts.
#[test]
fn calls_on_streams_do_not_allocate_on_any_thread() {
    if role().is_some() {
        let barrier = Barrier::new(2);
        let counts = run_calm(2, LONG, |group| {
            let members = shapes(2).into_iter().map(|shape| Member::new(group, shape));
            let mut members: Vec<Member> = members.map(|member| member.expect("windows are made")).collect();
            let stream = Stream::new().expect("the system has a thread");
            members.iter_mut().for_each(|member| member.prepare(1));
            for round in 0..10 {
                // A thread's first wait on a queue makes what its later ones use.
                thread::sleep(Duration::from_millis(if round < 2 { 50 } else { 0 }));
                if round == 2 && barrier.wait().is_leader() {
                    alloc::start_counting_all();
                }
                members.iter_mut().for_each(|member| calls(member, Some(&stream)));
                stream.synchronize(LONG).expect("all calls work");
            }
            let count = barrier.wait().is_leader().then(alloc::stop_counting_all);
            // Nothing is freed before the count has ended.
            barrier.wait();
            count
        });
        return say(format!("count {}", counts.into_iter().flatten().sum::<usize>()));
    }
    let scratch = Scratch::new();
    let rank = Rank::spawn("quiet::calls_on_streams_do_not_allocate_on_any_thread", "count", &scratch);
    assert_eq!(rank.await_line("count").1, "0");
    rank.finish();
}

/// System calls that a waiting rank makes: it yields, sleeps, and looks whether its peers live.
const WAITING: [libc::c_long; 3] = [libc::SYS_futex, libc::SYS_sched_yield, libc::SYS_ppoll];
/// Where the clock cannot be read without a system call.
const CLOCK: libc::c_long = libc::SYS_clock_gettime;

/// Runs rounds under a filter on each rank's thread, and says "quiet" or which call was refused.
fn play_filtered(num_ranks: usize) {
    let (barrier, num_done) = (&*Box::leak(Box::new(Barrier::new(num_ranks))), &AtomicUsize::new(0));
    thread::scope(|scope| {
        scope.spawn(move || {
            run_calm(num_ranks, LONG, |group| {
                let members = shapes(num_ranks).into_iter().map(|shape| Member::new(group, shape));
                let mut members: Vec<Member> =
                    members.map(|member| member.expect("windows are made")).collect();
                for member in &mut members {
                    member.prepare(1);
                    calls(member, None);
                    calls(member, None);
                }
                barrier.wait();
                if num_ranks == 1 {
                    seccomp::allow_only(&[CLOCK]);
                } else {
                    seccomp::allow_only(&[&WAITING[..], &[CLOCK, libc::SYS_clock_nanosleep]].concat());
                }
                for _ in 0..ROUNDS / 4 {
                    members.iter_mut().for_each(|member| calls(member, None));
                }
                num_done.fetch_add(1, Ordering::SeqCst);
                // A thread cannot end under the filter; the process ends it.
                loop {
                    if num_ranks == 1 {
                        std::hint::spin_loop();
                    } else {
                        thread::sleep(Duration::from_millis(10));
                    }
                }
            });
        });
        let deadline = Instant::now() + LONG;
        while num_done.load(Ordering::SeqCst) < num_ranks {
            if let Some(number) = seccomp::refused() {
                say(format!("quiet no, system call {number}"));
                std::process::exit(1);
            }
            assert!(Instant::now() < deadline, "the ranks are not done");
            thread::sleep(Duration::from_millis(1));
        }
        say("quiet yes");
        std::process::exit(0);
    });
}

fn check_filtered(test: &str, num_ranks: usize) {
    if !seccomp::supported() {
        eprintln!("skipped: this kernel has no seccomp filters");
        return;
    }
    let scratch = Scratch::new();
    let rank = Rank::spawn(test, &format!("{num_ranks}"), &scratch);
    assert_eq!(rank.await_line("quiet").1, "yes", "{num_ranks} ranks");
    rank.finish();
}

#[test]
fn only_waiting_enters_the_kernel() {
    if let Some(role) = role() {
        return play_filtered(role[0].parse().unwrap());
    }
    check_filtered("quiet::only_waiting_enters_the_kernel", 3);
}

/// Nobody to wait for: not even a futex, which also means that no lock was ever contended.
#[test]
fn rank_that_waits_for_nobody_does_not_enter_the_kernel() {
    if let Some(role) = role() {
        return play_filtered(role[0].parse().unwrap());
    }
    check_filtered("quiet::rank_that_waits_for_nobody_does_not_enter_the_kernel", 1);
}

#[test]
fn the_filter_refuses() {
    if role().is_some() {
        thread::spawn(|| {
            seccomp::allow_only(&WAITING);
            std::thread::yield_now();
            let _ = std::fs::metadata("/");
        });
        while seccomp::refused().is_none() {
            thread::sleep(Duration::from_millis(1));
        }
        let number = seccomp::refused();
        say(format!("refused {}", number == Some(libc::SYS_statx) || number == Some(libc::SYS_newfstatat)));
        std::process::exit(0);
    }
    if !seccomp::supported() {
        eprintln!("skipped: this kernel has no seccomp filters");
        return;
    }
    let scratch = Scratch::new();
    let rank = Rank::spawn("quiet::the_filter_refuses", "refuse", &scratch);
    assert_eq!(rank.await_line("refused").1, "true");
    rank.finish();
}

/// Time that this thread has had a core.
fn cpu_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the address of a struct of the right type.
    assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) }, 0);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

#[test]
fn waiting_rank_leaves_its_core_to_others() {
    let _watchdog = Watchdog::new("a waiting rank", LONG);
    let used = run_calm(2, LONG, |group| {
        let mut member = Member::new(group, shapes(2)[0]).expect("windows are made");
        member.prepare(1);
        if group.rank() == 1 {
            thread::sleep(Duration::from_secs(1));
        }
        let before = cpu_time();
        member.update(None).expect("the update works");
        cpu_time() - before
    });
    assert!(used[0] < Duration::from_millis(100), "{:?} of a second", used[0]);
}

/// The host device has nothing to lock with.
#[test]
fn the_stages_have_no_lock() {
    let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/ep-core/src/host");
    let mut num_files = 0;
    for entry in std::fs::read_dir(directory).expect("the sources are there") {
        let path = entry.expect("it is listed").path();
        let text = std::fs::read_to_string(&path).expect("sources are text");
        for word in ["Mutex", "RwLock", "Condvar", "mpsc", "Once<", "LazyLock", "thread_local"] {
            assert!(!text.contains(word), "{} has a {word}", path.display());
        }
        num_files += 1;
    }
    assert!(num_files > 10, "{num_files} files in {directory}");
}
