//! What one rank does for a job, and how it checks what it finds.

use std::cell::Cell;
use std::ffi::c_void;
use std::ptr::null_mut;

use ep::capi::*;

use crate::abi::{expect_ok, size_of};
use crate::case::Case;
use crate::job::{Job, Schedule};
use crate::memory::Device;
use crate::rng::Rng;
use crate::run::Run;
use crate::stats;
use crate::world::GroupSpec;

/// Bytes of each of a group's windows on each rank.
const WINDOW_BYTES: usize = 3 << 20;
/// Deadline of every collective call.
pub const TIMEOUT_MS: u32 = 20_000;

/// What went wrong on a rank.
#[derive(Clone, Debug)]
pub enum Trouble {
    /// An output differs from the reference; the group goes on.
    Wrong(String),
    /// A call failed; the group is of no use any more.
    Broken(String),
}

impl Trouble {
    /// The sentence.
    pub fn text(&self) -> &str {
        match self {
            Trouble::Wrong(text) | Trouble::Broken(text) => text,
        }
    }
}

/// A part of a window that is given out from front to back.
struct WindowSpace {
    window: *mut EpWindow,
    data: *mut u8,
    bytes: usize,
    used: Cell<usize>,
}

/// One group as one rank has it.
pub struct Member<'d> {
    pub device: &'d dyn Device,
    pub group: *mut EpGroup,
    pub rank: usize,
    pub num_ranks: usize,
    windows: Vec<WindowSpace>,
}

impl<'d> Member<'d> {
    /// Joins a group. Collective.
    pub fn join(
        device: &'d dyn Device,
        spec: &GroupSpec,
        rank: usize,
        bootstrap: &EpBootstrap,
    ) -> Result<Member<'d>, String> {
        let config = EpGroupConfig {
            struct_size: size_of::<EpGroupConfig>(),
            reserved_flags: 0,
            backend: device.backend(),
            num_lanes: spec.num_lanes,
            timeout_ms: TIMEOUT_MS,
            node_id: spec.node_ids[rank],
            max_local_experts: spec.max_local_experts,
            ring_bytes: spec.ring_bytes,
        };
        let mut group = null_mut();
        // SAFETY: config, bootstrap and the place for the handle outlive the call.
        let status = unsafe { ep_group_create_versioned(ep_version(), &config, bootstrap, &mut group) };
        expect_ok(status, "ep_group_create")?;
        let mut member = Member { device, group, rank, num_ranks: spec.members.len(), windows: Vec::new() };
        member.check_node(spec)?;
        // One window more than is needed, of another size on each rank, and one of no bytes.
        for bytes in [WINDOW_BYTES, WINDOW_BYTES + rank * 4096, 0] {
            let mut window = null_mut();
            // SAFETY: the group is alive; the pointer is a place for one handle.
            expect_ok(unsafe { ep_window_allocate(group, bytes, &mut window) }, "ep_window_allocate")?;
            let (mut data, mut found) = (null_mut(), 0);
            // SAFETY: the window is alive; the pointers are places for one value each.
            expect_ok(unsafe { ep_window_data(window, &mut data, &mut found) }, "ep_window_data")?;
            if found != bytes {
                return Err(format!("the window has {found} bytes, expected {bytes}"));
            }
            member.windows.push(WindowSpace { window, data: data.cast(), bytes, used: Cell::new(0) });
        }
        Ok(member)
    }

    /// Compares the library's nodes with those that the reference will use.
    fn check_node(&self, spec: &GroupSpec) -> Result<(), String> {
        // SAFETY: all fields are numbers or texts, for which zero is a value.
        let mut info: EpGroupInfo = unsafe { std::mem::zeroed() };
        info.struct_size = size_of::<EpGroupInfo>();
        // SAFETY: the group is alive and the struct is of the size it says.
        expect_ok(unsafe { ep_group_query(self.group, &mut info) }, "ep_group_query")?;
        let nodes = spec.nodes();
        let num_nodes = nodes.iter().max().map_or(0, |last| last + 1);
        let expected = (self.rank, nodes.len(), num_nodes, nodes[self.rank]);
        let found =
            (info.rank as usize, info.num_ranks as usize, info.num_nodes as usize, info.node as usize);
        if found != expected {
            return Err(format!("(rank, ranks, nodes, node) are {found:?}, expected {expected:?}"));
        }
        Ok(())
    }

    /// Breaks the group, so that the peers need not wait for this rank.
    pub fn abort(&self) {
        // SAFETY: the group is alive.
        let _ = unsafe { ep_group_abort(self.group) };
    }

    /// Leaves the group.
    pub fn leave(self) -> Result<(), String> {
        for space in &self.windows {
            // SAFETY: no call is in progress, and the regions in the window are gone.
            expect_ok(unsafe { ep_window_release(space.window) }, "ep_window_release")?;
        }
        // SAFETY: the group is not used afterwards.
        expect_ok(unsafe { ep_group_destroy(self.group, 0) }, "ep_group_destroy")
    }

    /// A place for `bytes` in a window, if there is room and luck.
    pub fn window_place(&self, rng: &mut Rng, bytes: usize) -> Option<*mut u8> {
        let space = &self.windows[rng.below(3)];
        let used = space.used.get();
        if used + bytes > space.bytes {
            return None;
        }
        space.used.set(used + bytes);
        Some(space.data.wrapping_add(used))
    }

    /// Forgets what was given out of the windows.
    fn reset_windows(&self) {
        for space in &self.windows {
            space.used.set(0);
        }
    }
}

/// Runs a job on the rank that has these memberships, by index of group. Returns all that is wrong.
pub fn run_job(job: &Job, members: &[Option<Member>]) -> Vec<Trouble> {
    for member in members.iter().flatten() {
        member.reset_windows();
    }
    let read_stats = || -> Vec<_> {
        let counted = |member: &Member| stats::read(member, member.num_ranks);
        members.iter().map(|member| member.as_ref().map(counted).transpose()).collect()
    };
    let before = read_stats();
    let mut streams = Streams { of_lane: Vec::new() };
    let mut troubles = Vec::new();
    let mut runs = Vec::new();
    for (index, case) in job.cases.iter().enumerate() {
        let Some(member) = &members[case.group] else { continue };
        match Run::new(case, members, index, streams.of(member, case)) {
            Ok(run) => runs.push(run),
            Err(text) => return vec![Trouble::Broken(text)],
        }
    }
    let done = match job.schedule {
        Schedule::InTurn => runs.iter_mut().try_for_each(|run| run.all(&mut troubles)),
        Schedule::Interleaved => interleave(&mut runs, &mut troubles),
        Schedule::Overlapped => overlap(&mut runs, job.id.seed, &mut troubles),
    };
    if let Err(text) = done {
        troubles.push(Trouble::Broken(text));
        members.iter().flatten().for_each(Member::abort);
    }
    // The streams end first: what they run uses the plans and the memory of the runs.
    drop(streams);
    for run in runs {
        if let Err(text) = run.end() {
            troubles.push(Trouble::Wrong(text));
        }
    }
    let counted = members.iter().flatten().all(|member| !member.device.lacks().stats);
    if troubles.is_empty() && counted {
        for (group, (before, after)) in before.into_iter().zip(read_stats()).enumerate() {
            let Some(member) = &members[group] else { continue };
            let counted =
                before.and_then(|before| Ok((before.unwrap_or_default(), after?.unwrap_or_default())));
            let checked =
                counted.and_then(|(before, after)| stats::check(job, group, member.rank, &before, &after));
            troubles.extend(checked.err().map(|text| Trouble::Wrong(format!("group {group}: {text}"))));
        }
    }
    troubles
}

/// The streams of a job: one for each lane of a group, as the calls of a lane need an order.
struct Streams<'d> {
    of_lane: Vec<(usize, u32, &'d dyn Device, *mut c_void)>,
}

impl<'d> Streams<'d> {
    /// The stream of a case; NULL if it has none.
    fn of(&mut self, member: &Member<'d>, case: &Case) -> *mut c_void {
        if !case.streamed {
            return null_mut();
        }
        let known = self.of_lane.iter().find(|(group, lane, ..)| (*group, *lane) == (case.group, case.lane));
        if let Some((.., stream)) = known {
            return *stream;
        }
        let stream = member.device.stream_create();
        self.of_lane.push((case.group, case.lane, member.device, stream));
        stream
    }
}

impl Drop for Streams<'_> {
    fn drop(&mut self) {
        for (_, _, device, stream) in &self.of_lane {
            device.stream_destroy(*stream);
        }
    }
}

fn interleave(runs: &mut [Run], troubles: &mut Vec<Trouble>) -> Result<(), String> {
    while runs.iter().any(Run::has_more) {
        for run in runs.iter_mut().filter(|run| run.has_more()) {
            run.issue()?;
            run.finish(troubles)?;
        }
    }
    Ok(())
}

fn overlap(runs: &mut [Run], seed: u64, troubles: &mut Vec<Trouble>) -> Result<(), String> {
    let rank = runs.first().map_or(0, |run| run.rank());
    let mut own = Rng::part(seed, 100 + rank as u64);
    let mut common = Rng::part(seed, 99);
    let mut lanes: Vec<u32> = runs.iter().map(|run| run.case.lane).collect();
    lanes.sort_unstable();
    lanes.dedup();
    while runs.iter().any(Run::has_more) {
        // Between lanes any order will do; within one the order of the runs is everybody's.
        own.shuffle(&mut lanes);
        let depth = common.within(1..=3);
        for lane in &lanes {
            for run in runs.iter_mut().filter(|run| run.case.lane == *lane) {
                for _ in 0..depth {
                    if run.has_more() && !run.counts_wait() {
                        run.issue()?;
                    }
                }
            }
        }
        own.shuffle(&mut lanes);
        for lane in &lanes {
            for run in runs.iter_mut().filter(|run| run.case.lane == *lane) {
                run.finish(troubles)?;
            }
        }
    }
    Ok(())
}
