//! The calls of a case: puts their memory together and says what it must become.

use std::ptr::null_mut;

use ep::capi::*;
use ep_core::config::{Counts, Layout, ReduceOrder};
use ep_core::reference::Delivered;
use ep_core::tensor::{Dtype, RawTensor};

use crate::abi::{expect_ok, size_of};
use crate::case::{CombineOp, DispatchOp, UpdateOp};
use crate::memory::{Matrix, Region};
use crate::rank::TIMEOUT_MS;
use crate::rng::Rng;
use crate::run::Run;
use crate::strides::{any_strides, payload_strides, records, row_strides};

impl<'a> Run<'a> {
    /// A place in a window, of this group or now and then of another, if there is room and luck.
    fn window_place(&self, rng: &mut Rng, bytes: usize) -> Option<*mut u8> {
        let foreign = !self.others.is_empty() && rng.once_in(6);
        let member = if foreign { rng.pick(&self.others) } else { self.member };
        member.window_place(rng, bytes)
    }

    /// A place for what a combine reads: one time in `n` in a window.
    fn row_place(&self, rng: &mut Rng, n: usize, bytes: usize) -> Option<*mut u8> {
        if rng.once_in(n) { self.window_place(rng, bytes) } else { None }
    }

    pub fn issue_update(
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

    pub fn counts(&self, expected: &Counts) -> Result<Counts, String> {
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

    pub fn issue_dispatch(
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

        self.want_outputs(expected, rng, &mut outputs, regions);
        let options = options(rng, 0, 0);
        let options = options.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        // SAFETY: all memory is in `regions`, which live until the call is done.
        let status = unsafe { ep_dispatch(self.plan, &inputs, &outputs, options, self.stream) };
        expect_ok(status, "ep_dispatch")
    }

    /// Memory for what a dispatch tells beside the payloads, as far as this rank wants it.
    fn want_outputs(
        &self,
        expected: &Delivered,
        rng: &mut Rng,
        outputs: &mut EpDispatchOutputs,
        regions: &mut Vec<Region<'a>>,
    ) {
        let routing = self.routing();
        let flat = routing.layout == Layout::Flat;
        let capacity = expected.capacity;
        // Every output is optional. A library does less for what nobody wants, so want all, many, few or
        // none.
        let quarters = rng.pick(&[4, 4, 3, 1, 0]);
        let mut wanted = || rng.below(4) < quarters;
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

    pub fn issue_combine(
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
        let place = self.row_place(rng, 2, matrix.region_bytes());
        let name = if place.is_some() { "rows (in a window)" } else { "rows" };
        let region = self.region(name, matrix, place).fill(&op.rows[rank]);
        inputs.rows = region.tensor();
        regions.push(region);
        let width = if routing.layout == Layout::Flat { routing.topk } else { 1 };
        if let Some(weights) = &op.row_weights {
            let matrix = Matrix::contiguous(Dtype::F32, num_rows, width);
            let place = self.row_place(rng, 3, matrix.region_bytes());
            let region = self.region("row_weights", matrix, place).fill(&float_bytes(&weights[rank]));
            inputs.row_weights = region.tensor();
            regions.push(region);
            // What comes back need not be wanted.
            if !rng.once_in(8) {
                let matrix = Matrix::contiguous(Dtype::F32, tokens, routing.topk);
                let expected = op.expected[rank].combined_weights.as_ref().expect("the case has row weights");
                let region = self.region("combined_weights", matrix, None).expect(&float_bytes(expected));
                outputs.combined_weights = region.tensor();
                regions.push(region);
            }
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
