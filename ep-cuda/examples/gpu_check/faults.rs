//! What goes wrong in the middle of a call: every rank hears of it, nobody hangs, and the device goes on.

use std::time::{Duration, Instant};

use ep_core::config::{ErrorInfo, GroupConfig, Layout};
use ep_core::engine::{Backend, Group};
use ep_core::{Error, Result, Status};

use crate::arena::Arena;
use crate::case::Case;
use crate::meet::deadline;
use crate::options::Options;
use crate::rank::{Rank, differ};
use crate::run::{Call, Prepared, Side};

/// Deadline of calls in the group whose last rank does not come.
const SHORT: Duration = Duration::from_millis(700);
const LONG: Duration = Duration::from_secs(20);
/// How much later than the fault everyone must know.
const SLACK: Duration = Duration::from_millis(1000);
const WINDOW: usize = 64 << 20;

pub fn check_faults(rank: &mut Rank, options: &Options) -> std::result::Result<(), String> {
    if rank.num_ranks < 2 {
        return Err(String::from("faults need at least two ranks"));
    }
    let told = |what: &str, rank: usize, error: Error| format!("rank {rank}: {what}: {error}");
    late(rank, options).map_err(|e| told("a rank that does not come", rank.rank, e))?;
    mismatch(rank, options).map_err(|e| told("calls that do not match", rank.rank, e))?;
    abort(rank, options).map_err(|e| told("an abort in the middle", rank.rank, e))?;
    if rank.meetings.are_processes() {
        killed(rank, options).map_err(|e| told("a rank that is killed", rank.rank, e))?;
    }
    Ok(())
}

fn case(num_ranks: usize, seed: u64) -> Case {
    let mut case = Case::large(seed, num_ranks, 64, 256, 4, 4 * num_ranks);
    case.layout = Layout::Flat;
    case.static_rows = Some(64 * num_ranks);
    case
}

/// A group of its own for one fault, with a call ready.
fn fresh(rank: &mut Rank, options: &Options, timeout: Duration) -> Result<(Side, Prepared)> {
    let (own, num_ranks) = (rank.rank, rank.num_ranks);
    let config = GroupConfig { backend: 2, timeout_ms: timeout.as_millis() as u32, ..GroupConfig::default() };
    let meeting = rank.meetings.next(own, num_ranks)?;
    let group =
        Group::create_on(Backend::on(rank.device.clone(), "asked for"), &config, meeting, deadline())?;
    let mut side = Side { arena: Arena::new(&group, Some(rank.device.pool()), WINDOW)?, group };
    let case = case(num_ranks, options.seed);
    let prepared = side.prepare(&case, 0, options.sms)?;
    side.refill(&case, &prepared)?;
    rank.gather(&[])?;
    Ok((side, prepared))
}

fn expect(what: bool, text: impl FnOnce() -> String) -> Result<()> {
    if what { Ok(()) } else { Err(Error::new(Status::Internal, text())) }
}

/// Waits in `counts` for an update that cannot end well. Checks when and with which status it ends, that its
/// sentence has `part`, and that the device works afterwards.
fn ends(
    rank: &Rank,
    side: &Side,
    prepared: &Prepared,
    within: Duration,
    statuses: &[Status],
    part: &str,
) -> Result<Duration> {
    let started = Instant::now();
    let error = match prepared.plan().counts(Some(LONG)) {
        Ok(counts) => return Err(Error::new(Status::Internal, format!("the update ended well: {counts:?}"))),
        Err(error) => error,
    };
    let took = started.elapsed();
    expect(statuses.contains(&error.status), || format!("expected one of {statuses:?}, got {error}"))?;
    expect(error.message.contains(part), || format!("'{part}' is missing in: {error}"))?;
    expect(took < within, || format!("took {took:?}, expected less than {within:?}: {error}"))?;
    // Kernels have left, and the context works.
    side.arena.synchronize()?;
    expect(started.elapsed() < within + SLACK, || format!("kernels ran on for {:?}", started.elapsed()))?;
    let buffer = rank.device.pool().allocate(1 << 20)?;
    let mut byte = [1u8];
    buffer.read(12345, &mut byte)?;
    expect(byte == [0], || String::from("the device gives memory that is not zero"))?;
    // What comes afterwards is refused, with the reason.
    let later = side.queue(prepared, Call::Dispatch);
    expect(later.as_ref().is_err_and(|e| e.status == Status::Aborted), || {
        format!("a later call: {later:?}")
    })?;
    Ok(took)
}

fn is_last(rank: &Rank) -> bool {
    rank.rank == rank.num_ranks - 1
}

fn late(rank: &mut Rank, options: &Options) -> Result<()> {
    let (side, prepared) = fresh(rank, options, SHORT)?;
    let mut took = Duration::ZERO;
    if !is_last(rank) {
        side.queue(&prepared, Call::Update)?;
        let part = format!("of rank {}", rank.num_ranks - 1);
        took = ends(rank, &side, &prepared, SHORT + SLACK, &[Status::Timeout], &part)?;
    }
    rank.gather(&[])?;
    if is_last(rank) {
        let refused = side.queue(&prepared, Call::Update);
        let aborted = refused.as_ref().is_err_and(|e| e.status == Status::Aborted);
        expect(aborted, || format!("the late rank's call: {refused:?}"))?;
    }
    report(rank, "a rank that does not come: named by all", took)
}

/// What a dispatch that failed leaves: no rows, and no ids.
fn nothing_came(side: &Side, prepared: &Prepared) -> Result<()> {
    for (name, bytes) in &side.collect(prepared)?.blocks {
        let (byte, what) = match name.as_str() {
            "num_rows" | "num_required" | "num_dropped" | "rows_per_expert" => (0, "0"),
            "topk_idx" | "src_rank" | "src_token" => (0xff, "-1"),
            _ => continue,
        };
        expect(bytes.iter().all(|&found| found == byte), || {
            format!("{name} of a dispatch that failed is not {what}")
        })?;
    }
    Ok(())
}

/// The error of a single call, which the group outlives.
fn call_error(side: &Side, status: Status, part: &str) -> Result<()> {
    side.arena.synchronize()?;
    let found = side.group.health(&mut []);
    let right = |error: &ErrorInfo| error.status == status && error.text.contains(part);
    expect(found.as_ref().is_some_and(right), || format!("expected {status:?} with '{part}', got {found:?}"))
}

/// One rank combines while the others dispatch; then one names an expert that there is not; then all is well.
fn mismatch(rank: &mut Rank, options: &Options) -> Result<()> {
    let (side, prepared) = fresh(rank, options, LONG)?;
    let last = is_last(rank);
    let started = Instant::now();
    side.queue(&prepared, Call::Update)?;
    side.queue(&prepared, if last { Call::Combine } else { Call::Dispatch })?;
    call_error(&side, Status::Mismatch, "one is in ep_")?;
    if !last {
        nothing_came(&side, &prepared)?;
    }
    rank.gather(&[])?;

    side.refill(&case(rank.num_ranks, options.seed), &prepared)?;
    if last {
        side.spoil_ids(&prepared, 1 << 40)?;
    }
    side.queue(&prepared, Call::Update)?;
    side.queue(&prepared, Call::Dispatch)?;
    let error = prepared.plan().counts(Some(LONG)).err();
    let (status, part) = match last {
        true => (Status::OutOfRange, "token 0, slot 0 is 1099511627776"),
        false => (Status::Mismatch, "failed before it began"),
    };
    let right = |error: &Error| error.status == status && error.message.contains(part);
    expect(error.as_ref().is_some_and(right), || {
        format!("expected {status:?} with '{part}', got {error:?}")
    })?;
    nothing_came(&side, &prepared)?;
    // The dispatch has failed, too, and may have been told.
    while side.group.health(&mut []).is_some_and(|error| error.status == Status::Mismatch) {}
    rank.gather(&[])?;

    let mut host = fresh_host(rank)?;
    let case = case(rank.num_ranks, options.seed);
    side.refill(&case, &prepared)?;
    for call in [Call::Update, Call::Dispatch, Call::Combine] {
        side.queue(&prepared, call)?;
    }
    differ(&side.collect(&prepared)?, &host.run(&case, 0, options.sms)?)?;
    report(rank, "two calls that fail alone, and one that works: in step", started.elapsed())
}

fn fresh_host(rank: &mut Rank) -> Result<Side> {
    let config = GroupConfig { backend: 1, ..GroupConfig::default() };
    let group = Group::create(&config, rank.meetings.next(rank.rank, rank.num_ranks)?, deadline())?;
    Ok(Side { arena: Arena::new(&group, None, WINDOW)?, group })
}

fn abort(rank: &mut Rank, options: &Options) -> Result<()> {
    let (side, prepared) = fresh(rank, options, LONG)?;
    let pause = Duration::from_millis(300);
    let mut took = Duration::ZERO;
    if is_last(rank) {
        std::thread::sleep(pause);
        side.group.abort();
    } else {
        side.queue(&prepared, Call::Update)?;
        // Behind the update, so it never begins.
        side.queue(&prepared, Call::Dispatch)?;
        took = ends(rank, &side, &prepared, pause + SLACK, &[Status::Aborted], "ep_group_abort")?;
    }
    rank.gather(&[])?;
    report(rank, "an abort: heard by all", took)
}

fn killed(rank: &mut Rank, options: &Options) -> Result<()> {
    let (side, prepared) = fresh(rank, options, LONG)?;
    let victim = rank.num_ranks - 1;
    if is_last(rank) {
        std::thread::sleep(Duration::from_millis(300));
        let own = rustix::process::getpid();
        return rustix::process::kill_process(own, rustix::process::Signal::KILL)
            .map_err(|e| Error::system("kill", e));
    }
    side.queue(&prepared, Call::Update)?;
    let within = Duration::from_millis(300) + SLACK;
    let took = ends(rank, &side, &prepared, within, &[Status::PeerLost], &format!("rank {victim}"))?;
    let mut alive = vec![true; rank.num_ranks];
    side.group.health(&mut alive);
    expect(!alive[victim], || String::from("health does not say that the rank is lost"))?;
    survivors(rank, options)?;
    if rank.rank == 0 {
        println!("faults: a rank that is killed: named by all after {took:.0?}; the others go on without it");
    }
    Ok(())
}

/// The living make groups without the dead, and get the right results.
fn survivors(rank: &mut Rank, options: &Options) -> Result<()> {
    let (own, num_ranks) = (rank.rank, rank.num_ranks - 1);
    let config = GroupConfig { backend: 2, ..GroupConfig::default() };
    let meeting = rank.meetings.next(own, num_ranks)?;
    let group =
        Group::create_on(Backend::on(rank.device.clone(), "asked for"), &config, meeting, deadline())?;
    let host = GroupConfig { backend: 1, ..config };
    let host = Group::create(&host, rank.meetings.next(own, num_ranks)?, deadline())?;
    let mut cuda = Side { arena: Arena::new(&group, Some(rank.device.pool()), WINDOW)?, group };
    let mut host = Side { arena: Arena::new(&host, None, WINDOW)?, group: host };
    for seed in 0..3 {
        let case = case(num_ranks, 300 + seed);
        differ(&cuda.run(&case, 0, options.sms)?, &host.run(&case, 0, options.sms)?)?;
    }
    Ok(())
}

fn report(rank: &mut Rank, what: &str, took: Duration) -> Result<()> {
    let slowest = rank.gather(&[took.as_secs_f64()])?.iter().flatten().copied().fold(0.0, f64::max);
    if rank.rank == 0 {
        println!("faults: {what} after {slowest:.2} s");
    }
    Ok(())
}
