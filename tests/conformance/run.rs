//! One case on one rank: makes the calls and checks what they did.

use std::ffi::c_void;
use std::ptr::null_mut;
use std::time::Duration;

use ep::capi::*;
use ep_core::config::{Counts, Layout, ReduceOrder};
use ep_core::tensor::{Dtype, RawTensor};

use crate::abi::{expect_ok, size_of};
use crate::case::{Case, CombineOp, DispatchOp, Op, UpdateOp};
use crate::memory::{Matrix, Region};
use crate::rank::{Member, TIMEOUT_MS, Trouble};
use crate::rng::Rng;
use crate::strides::{any_strides, payload_strides, records, row_strides};

/// A call that was made and not yet checked.
struct Pending<'d> {
    name: String,
    regions: Vec<Region<'d>>,
    counts: Option<Counts>,
}

/// One case on one rank, on its way.
pub struct Run<'a> {
    pub case: &'a Case,
    member: &'a Member<'a>,
    /// The rank's memberships in other groups, whose windows are ordinary memory to this one.
    others: Vec<&'a Member<'a>>,
    index: usize,
    plan: *mut EpPlan,
    plan_memory: Option<Region<'a>>,
    stream: *mut c_void,
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
        if !self.stream.is_null() {
            let names: Vec<&str> = self.pending.iter().map(|pending| pending.name.as_str()).collect();
            let done = self.member.device.stream_synchronize(self.stream);
            done.map_err(|text| format!("{}: {text}", names.join(", ")))?;
        }
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

    fn region(&self, name: &str, matrix: Matrix, place: Option<*mut u8>) -> Region<'a> {
        Region::new(self.member.device, name, matrix, place)
    }

    /// A place in a window, of this group or now and then of another, if there is room and luck.
    fn window_place(&self, rng: &mut Rng, bytes: usize) -> Option<*mut u8> {
        let foreign = !self.others.is_empty() && rng.once_in(6);
        let member = if foreign { rng.pick(&self.others) } else { self.member };
        member.window_place(rng, bytes)
    }

    fn issue_update(
        &self,
        op: &UpdateOp,
        rng: &mut Rng,
        regions: &mut Vec<Region<'a>>,
    ) -> Result<(), String> {
        let routing = &op.routing;
        let ids = &routing.topk_idx[self.member.rank];
        let dtype = rng.pick(&[Dtype::I32, Dtype::I64]);
        let matrix = any_strides(rng, dtype, routing.num_tokens(self.member.rank), routing.topk);
        let region = self.region("topk_idx", matrix, None).fill(&integer_bytes(dtype, ids));
        let tensor = region.tensor();
        regions.push(region);
        let options = options(rng, 0, 0);
        let options = options.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        // SAFETY: the ids are in `regions`, which live until the call is done.
        expect_ok(unsafe { ep_plan_update(self.plan, &tensor, options, self.stream) }, "ep_plan_update")
    }

    fn counts(&self, expected: &Counts) -> Result<Counts, String> {
        let mut rows_per_expert = vec![-7; expected.rows_per_expert.len()];
        let mut rows_per_source = vec![-7; expected.rows_per_source.len()];
        let mut counts = EpCounts {
            struct_size: size_of::<EpCounts>(),
            num_local_experts: rows_per_expert.len() as u32,
            num_ranks: rows_per_source.len() as u32,
            reserved: 0,
            rows_per_expert: if rows_per_expert.is_empty() {
                null_mut()
            } else {
                rows_per_expert.as_mut_ptr()
            },
            rows_per_source: rows_per_source.as_mut_ptr(),
            num_rows: -7,
            num_tokens: -7,
        };
        // SAFETY: the arrays have the lengths that the struct says.
        expect_ok(unsafe { ep_plan_counts(self.plan, 0, &mut counts) }, "ep_plan_counts")?;
        let EpCounts { num_rows, num_tokens, .. } = counts;
        Ok(Counts { rows_per_expert, rows_per_source, num_rows, num_tokens })
    }

    fn issue_dispatch(
        &self,
        op: &DispatchOp,
        rng: &mut Rng,
        regions: &mut Vec<Region<'a>>,
    ) -> Result<(), String> {
        let rank = self.member.rank;
        let routing = self.routing();
        let tokens = routing.num_tokens(rank);
        let expected = &op.expected[rank];
        let mut inputs = EpDispatchInputs {
            struct_size: size_of::<EpDispatchInputs>(),
            num_payloads: op.specs.len() as u32,
            payloads: [RawTensor::NONE; 4],
            topk_weights: RawTensor::NONE,
        };
        let mut outputs = EpDispatchOutputs {
            struct_size: size_of::<EpDispatchOutputs>(),
            num_payloads: op.specs.len() as u32,
            payloads: [RawTensor::NONE; 4],
            topk_idx: RawTensor::NONE,
            topk_weights: RawTensor::NONE,
            src_rank: null_mut(),
            src_token: null_mut(),
            src_slot: null_mut(),
            num_rows: null_mut(),
            num_required: null_mut(),
            num_dropped: null_mut(),
            rows_per_expert: null_mut(),
            expert_offsets: null_mut(),
        };
        let data: Vec<&[u8]> = op.payloads.iter().map(|payload| payload.data[rank].as_slice()).collect();
        let filled = self.payloads(op, tokens, rng, false);
        for (mut region, parts) in filled {
            for (part, payload) in parts.into_iter().enumerate() {
                region.fill_part(part, data[payload]);
                inputs.payloads[payload] = region.tensor_of_part(part);
            }
            regions.push(region);
        }
        for (mut region, parts) in self.payloads(op, expected.capacity, rng, true) {
            for (part, payload) in parts.into_iter().enumerate() {
                region.expect_part(part, &expected.payloads[payload]);
                outputs.payloads[payload] = region.tensor_of_part(part);
            }
            regions.push(region);
        }
        if let Some(weights) = &op.topk_weights {
            let matrix = any_strides(rng, Dtype::F32, tokens, routing.topk);
            let region = self.region("input topk_weights", matrix, None).fill(&float_bytes(&weights[rank]));
            inputs.topk_weights = region.tensor();
            regions.push(region);
        }

        let flat = routing.layout == Layout::Flat;
        let capacity = expected.capacity;
        // Every output is optional.
        let all = rng.once_in(2);
        let mut wanted = || all || !rng.once_in(4);
        if flat && wanted() {
            let dtype = if self.case.salt & 4 == 0 { Dtype::I32 } else { Dtype::I64 };
            let matrix = Matrix::contiguous(dtype, capacity, routing.topk);
            let bytes = integer_bytes(dtype, &expected.topk_idx);
            let region = self.region("topk_idx", matrix, None).expect(&bytes);
            outputs.topk_idx = region.tensor();
            regions.push(region);
        }
        if let Some(weights) = &expected.topk_weights
            && wanted()
        {
            let width = if flat { routing.topk } else { 1 };
            let matrix = Matrix::contiguous(Dtype::F32, capacity, width);
            let region = self.region("topk_weights", matrix, None).expect(&float_bytes(weights));
            outputs.topk_weights = region.tensor();
            regions.push(region);
        }
        let mut array = |name: &str, dtype: Dtype, values: &[i64]| {
            if !wanted() {
                return null_mut();
            }
            let matrix = Matrix::contiguous(dtype, values.len(), 1);
            let region = self.region(name, matrix, None).expect(&integer_bytes(dtype, values));
            let data = region.data();
            regions.push(region);
            data
        };
        let wide = |values: &[i32]| -> Vec<i64> { values.iter().map(|&value| i64::from(value)).collect() };
        outputs.src_rank = array("src_rank", Dtype::I32, &wide(&expected.src_rank)).cast();
        outputs.src_token = array("src_token", Dtype::I32, &wide(&expected.src_token)).cast();
        outputs.num_rows = array("num_rows", Dtype::I64, &[expected.num_rows as i64]).cast();
        outputs.num_required = array("num_required", Dtype::I64, &[expected.num_required as i64]).cast();
        outputs.num_dropped = array("num_dropped", Dtype::I64, &[expected.num_dropped as i64]).cast();
        outputs.rows_per_expert = array("rows_per_expert", Dtype::I64, &expected.rows_per_expert).cast();
        if !flat {
            outputs.src_slot = array("src_slot", Dtype::I32, &wide(&expected.src_slot)).cast();
            outputs.expert_offsets = array("expert_offsets", Dtype::I64, &expected.expert_offsets).cast();
        }
        let options = options(rng, 0, 0);
        let options = options.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        // SAFETY: all memory is in `regions`, which live until the call is done.
        let status = unsafe { ep_dispatch(self.plan, &inputs, &outputs, options, self.stream) };
        expect_ok(status, "ep_dispatch")
    }

    /// Memory for the payloads of one side, and which payloads each region has.
    fn payloads(
        &self,
        op: &DispatchOp,
        rows: usize,
        rng: &mut Rng,
        output: bool,
    ) -> Vec<(Region<'a>, Vec<usize>)> {
        // All outputs in windows, none, or each as it comes.
        let windows = if output { rng.below(3) } else { 2 };
        let side = if output { "payload" } else { "input payload" };
        let in_memory = |rng: &mut Rng, matrices: Vec<(usize, Matrix)>| {
            let bytes = matrices.iter().map(|(_, matrix)| matrix.region_bytes()).max().unwrap_or(0);
            let in_window = windows == 0 || windows == 1 && rng.once_in(2);
            let place = if in_window { self.window_place(rng, bytes) } else { None };
            let suffix = if place.is_some() { " (in a window)" } else { "" };
            let numbers = matrices.iter().map(|(payload, _)| *payload).collect();
            let name = |(payload, matrix)| (format!("{side} {payload}{suffix}"), matrix);
            let parts = matrices.into_iter().map(name).collect();
            (Region::of_parts(self.member.device, parts, place), numbers)
        };
        if self.case.records
            && rng.once_in(2)
            && let Some(matrices) = records(rng, &op.specs, rows)
        {
            return vec![in_memory(rng, matrices.into_iter().enumerate().collect())];
        }
        let mut all = Vec::new();
        for (payload, spec) in op.specs.iter().enumerate() {
            let matrix = payload_strides(rng, spec, rows);
            all.push(in_memory(rng, vec![(payload, matrix)]));
        }
        all
    }

    fn issue_combine(
        &self,
        op: &CombineOp,
        rng: &mut Rng,
        regions: &mut Vec<Region<'a>>,
    ) -> Result<(), String> {
        let rank = self.member.rank;
        let routing = self.routing();
        let tokens = routing.num_tokens(rank);
        let row_bytes = op.cols * op.dtype.bytes();
        let num_rows = op.rows[rank].len() / row_bytes;
        let mut inputs = EpCombineInputs {
            struct_size: size_of::<EpCombineInputs>(),
            reserved_flags: 0,
            rows: RawTensor::NONE,
            row_weights: RawTensor::NONE,
            topk_weights: RawTensor::NONE,
            bias: [RawTensor::NONE; 2],
        };
        let mut outputs = EpCombineOutputs {
            struct_size: size_of::<EpCombineOutputs>(),
            reserved_flags: 0,
            combined: RawTensor::NONE,
            combined_weights: RawTensor::NONE,
        };
        let matrix = row_strides(rng, op.dtype, num_rows, op.cols);
        let place = rng.once_in(2).then(|| self.window_place(rng, matrix.region_bytes())).flatten();
        let name = if place.is_some() { "rows (in a window)" } else { "rows" };
        let region = self.region(name, matrix, place).fill(&op.rows[rank]);
        inputs.rows = region.tensor();
        regions.push(region);
        let width = if routing.layout == Layout::Flat { routing.topk } else { 1 };
        if let Some(weights) = &op.row_weights {
            let matrix = Matrix::contiguous(Dtype::F32, num_rows, width);
            let place = rng.once_in(3).then(|| self.window_place(rng, matrix.region_bytes())).flatten();
            let region = self.region("row_weights", matrix, place).fill(&float_bytes(&weights[rank]));
            inputs.row_weights = region.tensor();
            regions.push(region);
            let matrix = Matrix::contiguous(Dtype::F32, tokens, routing.topk);
            let expected = op.expected[rank].combined_weights.as_ref().expect("the case has row weights");
            let region = self.region("combined_weights", matrix, None).expect(&float_bytes(expected));
            outputs.combined_weights = region.tensor();
            regions.push(region);
        }
        if let Some(weights) = &op.topk_weights[rank] {
            let matrix = any_strides(rng, Dtype::F32, tokens, routing.topk);
            let region = self.region("topk_weights", matrix, None).fill(&float_bytes(weights));
            inputs.topk_weights = region.tensor();
            regions.push(region);
        }
        for (at, bias) in op.bias[rank].iter().enumerate() {
            let matrix = row_strides(rng, op.dtype, tokens, op.cols);
            let region = self.region(&format!("bias {at}"), matrix, None).fill(bias);
            inputs.bias[at] = region.tensor();
            regions.push(region);
        }
        let matrix = row_strides(rng, op.dtype, tokens, op.cols);
        let region = self.region("combined", matrix, None).expect(&op.expected[rank].combined);
        outputs.combined = region.tensor();
        regions.push(region);
        let order = if op.default_order { EP_REDUCE_DEFAULT } else { op.order as i32 };
        let wire = match (op.order, op.wire_bf16) {
            (ReduceOrder::NodeRank, true) => Dtype::Bf16 as i32,
            (ReduceOrder::NodeRank, false) if self.case.salt & 8 == 0 => Dtype::F32 as i32,
            _ => 0,
        };
        let options = options(rng, order, wire);
        let options = options.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        // SAFETY: all memory is in `regions`, which live until the call is done.
        let status = unsafe { ep_combine(self.plan, &inputs, &outputs, options, self.stream) };
        expect_ok(status, "ep_combine")
    }

    /// The routing of the last update that was issued.
    fn routing(&self) -> &'a ep_core::reference::Routing {
        let earlier = self.case.ops[..self.next].iter().rev();
        let mut updates = earlier.filter_map(|op| match op {
            Op::Update(update) => Some(&*update.routing),
            _ => None,
        });
        updates.next().expect("a case begins with an update")
    }
}

/// Absent where nothing is asked for, now and then.
fn options(rng: &mut Rng, reduce_order: i32, wire_dtype: i32) -> Option<EpOptions> {
    let options = EpOptions {
        struct_size: size_of::<EpOptions>(),
        reserved_flags: 0,
        timeout_ms: rng.pick(&[0, TIMEOUT_MS + 1]),
        num_sms: 0,
        reduce_order,
        wire_dtype,
    };
    (reduce_order != 0 || wire_dtype != 0 || rng.once_in(2)).then_some(options)
}

fn float_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_ne_bytes()).collect()
}

fn integer_bytes(dtype: Dtype, values: &[i64]) -> Vec<u8> {
    match dtype {
        Dtype::I32 => values.iter().flat_map(|&value| (value as i32).to_ne_bytes()).collect(),
        Dtype::I64 => values.iter().flat_map(|&value| value.to_ne_bytes()).collect(),
        other => panic!("{} is not an integer", other.name()),
    }
}
