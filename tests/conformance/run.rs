//! One case on one rank: makes the calls and checks what they did.

use std::ffi::c_void;
use std::ptr::null_mut;
use std::time::Duration;

use ep::capi::*;
use ep_core::config::Counts;
use ep_core::tensor::Dtype;

use crate::abi::{expect_ok, size_of};
use crate::case::{Case, Op};
use crate::memory::{Matrix, Region};
use crate::rank::{Member, Trouble};
use crate::rng::Rng;

/// A call that was made and not yet checked.
struct Pending<'d> {
    name: String,
    regions: Vec<Region<'d>>,
    counts: Option<Counts>,
}

/// One case on one rank, on its way.
pub struct Run<'a> {
    pub case: &'a Case,
    pub member: &'a Member<'a>,
    /// The rank's memberships in other groups, whose windows are ordinary memory to this one.
    pub others: Vec<&'a Member<'a>>,
    index: usize,
    pub plan: *mut EpPlan,
    plan_memory: Option<Region<'a>>,
    pub stream: *mut c_void,
    next: usize,
    pending: Vec<Pending<'a>>,
}

impl<'a> Run<'a> {
    /// Creates the plan.
    pub fn new(
        case: &'a Case,
        members: &'a [Option<Member<'a>>],
        index: usize,
        stream: *mut c_void,
    ) -> Result<Run<'a>, String> {
        let member = members[case.group].as_ref().ok_or("not a member of the case's group")?;
        let others = members
            .iter()
            .enumerate()
            .filter(|(group, _)| *group != case.group)
            .filter_map(|(_, m)| m.as_ref());
        let routing = case.first_routing();
        let experts: Vec<u32> = routing.experts_per_rank.iter().map(|&count| count as u32).collect();
        let config = EpPlanConfig {
            struct_size: size_of::<EpPlanConfig>(),
            reserved_flags: 0,
            lane: case.lane,
            topk: routing.topk as u32,
            num_experts: routing.num_experts() as u32,
            num_experts_per_rank: if case.names_experts { experts.len() as u32 } else { 0 },
            experts_per_rank: if case.names_experts { experts.as_ptr() } else { std::ptr::null() },
            max_tokens: case.max_tokens[member.rank],
            layout: routing.layout as i32,
            expert_alignment: if routing.expert_alignment == 1 && case.salt.is_multiple_of(2) {
                0
            } else {
                routing.expert_alignment as u32
            },
        };
        let mut bytes = 0;
        // SAFETY: group and config are alive; the pointer is a place for one number.
        expect_ok(unsafe { ep_plan_bytes(member.group, &config, &mut bytes) }, "ep_plan_bytes")?;
        // Where memory comes from is each rank's own choice.
        let own_memory = Rng::part(case.salt, member.rank as u64).once_in(2);
        let matrix = Matrix::contiguous(Dtype::Ue8m0, bytes, 1);
        let plan_memory = own_memory.then(|| Region::new(member.device, "plan", matrix, None));
        let memory = plan_memory.as_ref().map_or(null_mut(), |region| region.data());
        let memory_bytes = if own_memory { bytes } else { 0 };
        let mut plan = null_mut();
        // SAFETY: the memory stays until the plan is destroyed; the rest outlives the call.
        let status = unsafe { ep_plan_create(member.group, &config, memory.cast(), memory_bytes, &mut plan) };
        expect_ok(status, "ep_plan_create")?;
        let others = others.collect();
        Ok(Run { case, member, others, index, plan, plan_memory, stream, next: 0, pending: Vec::new() })
    }

    /// The rank in the case's group.
    pub fn rank(&self) -> usize {
        self.member.rank
    }

    /// Whether there are calls to make.
    pub fn has_more(&self) -> bool {
        self.next < self.case.ops.len()
    }

    /// True if the last call made asks for counts. They are of the last update, and asking waits: no
    /// call may be issued before `finish`, and no other lane's calls may depend on it.
    pub fn counts_wait(&self) -> bool {
        self.pending.last().is_some_and(|pending| pending.counts.is_some())
    }

    /// Makes all calls.
    pub fn all(&mut self, troubles: &mut Vec<Trouble>) -> Result<(), String> {
        // On a stream, let calls queue up now and then.
        let mut rng = Rng::part(self.case.salt, 200 + self.member.rank as u64);
        while self.has_more() {
            self.issue()?;
            if self.stream.is_null() || self.counts_wait() || rng.once_in(2) || !self.has_more() {
                self.finish(troubles)?;
            }
        }
        Ok(())
    }

    /// Makes the next call. Waits only if there is no stream.
    pub fn issue(&mut self) -> Result<(), String> {
        let case = self.case;
        let op = &case.ops[self.next];
        let salt = case.salt ^ ((self.next as u64 + 1) << 32);
        let mut rng = Rng::part(salt, self.member.rank as u64);
        // Ranks come late now and then, each to other calls.
        if rng.once_in(12) {
            std::thread::sleep(Duration::from_micros(rng.below(600) as u64));
        }
        let mut regions = Vec::new();
        let mut counts = None;
        let what = match op {
            Op::Update(update) => {
                self.issue_update(update, &mut rng, &mut regions)?;
                "update"
            }
            Op::Dispatch(dispatch) => {
                self.issue_dispatch(dispatch, &mut rng, &mut regions)?;
                "dispatch"
            }
            Op::Combine(combine) => {
                self.issue_combine(combine, &mut rng, &mut regions)?;
                "combine"
            }
            Op::Counts(all) => {
                counts = Some(all[self.member.rank].clone());
                "counts"
            }
        };
        let name = format!("case {}, call {} ({what})", self.index, self.next);
        self.pending.push(Pending { name, regions, counts });
        self.next += 1;
        Ok(())
    }

    /// Waits for the calls made and checks what they did.
    pub fn finish(&mut self, troubles: &mut Vec<Trouble>) -> Result<(), String> {
        // Before the stream is awaited, for counts wait by themselves.
        if let Some(Pending { counts: Some(expected), name, .. }) = self.pending.last() {
            let found = self.counts(expected).map_err(|text| format!("{name}: {text}"))?;
            if found != *expected {
                troubles.push(Trouble::Wrong(format!("{name}: found {found:?}, expected {expected:?}")));
            }
        }
        let done = self.member.device.stream_synchronize(self.stream);
        done.map_err(|text| {
            let names: Vec<&str> = self.pending.iter().map(|pending| pending.name.as_str()).collect();
            format!("{}: {text}", names.join(", "))
        })?;
        for pending in self.pending.drain(..) {
            let wrong = pending.regions.iter().filter_map(|region| region.check().err());
            troubles.extend(wrong.map(|text| Trouble::Wrong(format!("{}: {text}", pending.name))));
        }
        Ok(())
    }

    /// Destroys the plan and looks at what lies around its memory.
    pub fn end(self) -> Result<(), String> {
        // SAFETY: no call is in progress and the plan is not used afterwards.
        expect_ok(unsafe { ep_plan_destroy(self.plan) }, "ep_plan_destroy")?;
        self.plan_memory.map_or(Ok(()), |mut memory| memory.check_guards())
    }

    /// Poisoned memory of the rank's device.
    pub fn region(&self, name: &str, matrix: Matrix, place: Option<*mut u8>) -> Region<'a> {
        Region::new(self.member.device, name, matrix, place)
    }

    /// The routing of the last update that was issued.
    pub fn routing(&self) -> &'a ep_core::reference::Routing {
        let earlier = self.case.ops[..self.next].iter().rev();
        let mut updates = earlier.filter_map(|op| match op {
            Op::Update(update) => Some(&*update.routing),
            _ => None,
        });
        updates.next().expect("a case begins with an update")
    }
}
