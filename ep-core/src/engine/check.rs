//! Checks of a dispatch's and a combine's arguments: everything that can be known without a peer.

use std::time::Instant;

use super::window::WindowTable;
use crate::config::{
    CombineInputs, CombineOutputs, DispatchInputs, DispatchOutputs, Layout, MAX_PAYLOADS, Options,
    ReduceOrder,
};
use crate::error::{Error, Result, Status};
use crate::host::{CombineCall, DispatchCall};
use crate::plan::PlanShape;
use crate::tensor::{Dtype, RawTensor, Tensor};

/// Checks an optional tensor.
fn optional(raw: &RawTensor, name: &str) -> Result<Option<Tensor>> {
    if raw.is_none() { Ok(None) } else { raw.check(name).map(Some) }
}

/// Checks dtype, columns and, if known, rows.
fn expect(tensor: &Tensor, name: &str, dtype: Dtype, cols: usize, rows: Option<(usize, &str)>) -> Result<()> {
    if tensor.dtype != dtype {
        return Err(Error::invalid(format!("{name} is {}, expected {}", tensor.dtype.name(), dtype.name())));
    }
    if tensor.cols != cols {
        return Err(Error::invalid(format!("{name} has {} columns, expected {cols}", tensor.cols)));
    }
    expect_rows(tensor, name, rows)
}

fn expect_rows(tensor: &Tensor, name: &str, rows: Option<(usize, &str)>) -> Result<()> {
    match rows {
        Some((rows, why)) if tensor.rows != rows => {
            Err(Error::invalid(format!("{name} has {} rows, expected {rows}, {why}", tensor.rows)))
        }
        _ => Ok(()),
    }
}

fn expect_contiguous(tensor: &Tensor, name: &str) -> Result<()> {
    if tensor.contiguous() {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "{name} must be contiguous, its strides are {} and {}",
        tensor.row_stride, tensor.col_stride
    )))
}

const PLAN_TOKENS: &str = "the tokens of the plan's last update";
const CAPACITY: &str = "the rows of the payload outputs";

/// Payloads in error texts; written out, since a dispatch allocates nothing.
const PAYLOAD_NAMES: [(&str, &str); MAX_PAYLOADS] = [
    ("inputs.payloads[0]", "outputs.payloads[0]"),
    ("inputs.payloads[1]", "outputs.payloads[1]"),
    ("inputs.payloads[2]", "outputs.payloads[2]"),
    ("inputs.payloads[3]", "outputs.payloads[3]"),
];

/// Checks the ids of an update.
///
/// # Errors
/// [`Status::InvalidArgument`] naming the argument; nothing was done.
pub(super) fn topk_idx(raw: &RawTensor, windows: &WindowTable) -> Result<Tensor> {
    let idx = raw.check("topk_idx")?;
    let start = idx.data.addr();
    windows.check("topk_idx", &(start..start + idx.span_bytes()))?;
    Ok(idx)
}

/// Checks a dispatch. `tokens` is None while the plan's update is queued; the call checks them when it runs.
///
/// # Errors
/// [`Status::InvalidArgument`] naming the argument; nothing was done.
pub(super) fn dispatch(
    shape: &PlanShape,
    inputs: &DispatchInputs,
    outputs: &DispatchOutputs,
    tokens: Option<usize>,
    windows: &WindowTable,
    deadline: Instant,
) -> Result<DispatchCall> {
    let count = inputs.num_payloads as usize;
    if count == 0 || count > MAX_PAYLOADS || outputs.num_payloads as usize != count {
        return Err(Error::invalid(format!(
            "num_payloads is {count} in the inputs and {} in the outputs, expected the same number, 1 to \
             {MAX_PAYLOADS}",
            outputs.num_payloads
        )));
    }
    let rows = tokens.map(|tokens| (tokens, PLAN_TOKENS));
    let (mut from, mut to) = ([None; MAX_PAYLOADS], [None; MAX_PAYLOADS]);
    let mut capacity = 0;
    for i in 0..count {
        let (name_in, name_out) = PAYLOAD_NAMES[i];
        let input = inputs.payloads[i].check(name_in)?;
        let output = outputs.payloads[i].check(name_out)?;
        expect_rows(&input, name_in, rows)?;
        if i == 0 {
            capacity = output.rows;
        }
        let same_rows = Some((capacity, "those of outputs.payloads[0]"));
        expect(&output, name_out, input.dtype, input.cols, same_rows)?;
        (from[i], to[i]) = (Some(input), Some(output));
    }
    let topk_weights = optional(&inputs.topk_weights, "inputs.topk_weights")?;
    if let Some(weights) = &topk_weights {
        expect(weights, "inputs.topk_weights", Dtype::F32, shape.topk, rows)?;
    }
    let call = DispatchCall {
        num_payloads: count,
        inputs: from,
        outputs: to,
        topk_weights,
        capacity,
        out_idx: optional(&outputs.topk_idx, "outputs.topk_idx")?,
        out_weights: optional(&outputs.topk_weights, "outputs.topk_weights")?,
        src_rank: outputs.src_rank,
        src_token: outputs.src_token,
        src_slot: outputs.src_slot,
        num_rows: outputs.num_rows,
        num_required: outputs.num_required,
        num_dropped: outputs.num_dropped,
        rows_per_expert: outputs.rows_per_expert,
        expert_offsets: outputs.expert_offsets,
        deadline,
    };
    dispatch_origins(shape, &call)?;
    dispatch_memory(shape, &call, windows)?;
    Ok(call)
}

/// Checks the outputs that say where a row came from.
fn dispatch_origins(shape: &PlanShape, call: &DispatchCall) -> Result<()> {
    let capacity = Some((call.capacity, CAPACITY));
    let flat = shape.layout == Layout::Flat;
    if let Some(idx) = &call.out_idx {
        if !flat {
            return Err(Error::invalid(
                "outputs.topk_idx exists in EP_LAYOUT_FLAT only; expert-major rows have one expert each, see \
                 outputs.expert_offsets",
            ));
        }
        let dtype = if idx.dtype == Dtype::I64 { Dtype::I64 } else { Dtype::I32 };
        expect(idx, "outputs.topk_idx", dtype, shape.topk, capacity)?;
        expect_contiguous(idx, "outputs.topk_idx")?;
    }
    if let Some(weights) = &call.out_weights {
        if call.topk_weights.is_none() {
            return Err(Error::invalid(
                "outputs.topk_weights is wanted but inputs.topk_weights is absent; a rank without tokens gives a \
                 tensor of 0 rows",
            ));
        }
        expect(weights, "outputs.topk_weights", Dtype::F32, if flat { shape.topk } else { 1 }, capacity)?;
        expect_contiguous(weights, "outputs.topk_weights")?;
    }
    let wide = [
        ("num_rows", call.num_rows),
        ("num_required", call.num_required),
        ("num_dropped", call.num_dropped),
        ("rows_per_expert", call.rows_per_expert),
        ("expert_offsets", call.expert_offsets),
    ];
    let narrow = [("src_rank", call.src_rank), ("src_token", call.src_token), ("src_slot", call.src_slot)];
    let misaligned = wide.iter().find(|(_, array)| !array.addr().is_multiple_of(8)).map(|(name, _)| *name);
    let misaligned = misaligned
        .or(narrow.iter().find(|(_, array)| !array.addr().is_multiple_of(4)).map(|(name, _)| *name));
    if let Some(name) = misaligned {
        return Err(Error::invalid(format!("outputs.{name} is not aligned to its element")));
    }
    if flat && (!call.src_slot.is_null() || !call.expert_offsets.is_null()) {
        return Err(Error::invalid(
            "outputs.src_slot and outputs.expert_offsets exist in EP_LAYOUT_EXPERT_MAJOR only; leave them NULL",
        ));
    }
    Ok(())
}

/// One output or input as a range of addresses: rows of `width` bytes, `pitch` bytes apart; pitch 0 if its
/// elements are spread over the whole range.
struct Extent {
    name: &'static str,
    start: usize,
    end: usize,
    pitch: usize,
    width: usize,
}

impl Extent {
    /// True if no byte belongs to both. Tensors side by side in records of one size may interleave.
    fn is_apart_from(&self, other: &Extent) -> bool {
        if self.start >= other.end || other.start >= self.end {
            return true;
        }
        if self.pitch == 0 || self.pitch != other.pitch {
            return false;
        }
        let (first, second) = if self.start <= other.start { (self, other) } else { (other, self) };
        let offset = (second.start - first.start) % self.pitch;
        offset >= first.width && offset + second.width <= self.pitch
    }
}

fn extent(name: &'static str, address: usize, bytes: usize) -> Option<Extent> {
    (address != 0 && bytes != 0).then_some(Extent {
        name,
        start: address,
        end: address + bytes,
        pitch: 0,
        width: 0,
    })
}

fn of_tensor(name: &'static str, tensor: &Option<Tensor>) -> Option<Extent> {
    let tensor = tensor.as_ref()?;
    let mut extent = extent(name, tensor.data.addr(), tensor.span_bytes())?;
    if tensor.rows_contiguous() {
        (extent.pitch, extent.width) = (tensor.row_pitch(), tensor.row_bytes());
    }
    Some(extent)
}

/// Refuses outputs that overlap each other or an input.
fn apart(outputs: &[Option<Extent>], inputs: &[Option<Extent>]) -> Result<()> {
    for (i, output) in outputs.iter().enumerate() {
        let Some(output) = output else { continue };
        let others = outputs[i + 1..].iter().chain(inputs).flatten();
        for other in others {
            if !output.is_apart_from(other) {
                return Err(Error::invalid(format!(
                    "{} and {} overlap in memory; give each its own",
                    output.name, other.name
                )));
            }
        }
    }
    Ok(())
}

/// Refuses what lies partly in a window.
fn whole(extents: &[Option<Extent>], windows: &WindowTable) -> Result<()> {
    extents.iter().flatten().try_for_each(|extent| windows.check(extent.name, &(extent.start..extent.end)))
}

fn dispatch_memory(shape: &PlanShape, call: &DispatchCall, windows: &WindowTable) -> Result<()> {
    let [out0, out1, out2, out3] = &call.outputs;
    let [in0, in1, in2, in3] = &call.inputs;
    let local = shape.num_local();
    let outputs = [
        of_tensor("outputs.payloads[0]", out0),
        of_tensor("outputs.payloads[1]", out1),
        of_tensor("outputs.payloads[2]", out2),
        of_tensor("outputs.payloads[3]", out3),
        of_tensor("outputs.topk_idx", &call.out_idx),
        of_tensor("outputs.topk_weights", &call.out_weights),
        extent("outputs.src_rank", call.src_rank.addr(), 4 * call.capacity),
        extent("outputs.src_token", call.src_token.addr(), 4 * call.capacity),
        extent("outputs.src_slot", call.src_slot.addr(), 4 * call.capacity),
        extent("outputs.num_rows", call.num_rows.addr(), 8),
        extent("outputs.num_required", call.num_required.addr(), 8),
        extent("outputs.num_dropped", call.num_dropped.addr(), 8),
        extent("outputs.rows_per_expert", call.rows_per_expert.addr(), 8 * local),
        extent("outputs.expert_offsets", call.expert_offsets.addr(), 8 * (local + 1)),
    ];
    let inputs = [
        of_tensor("inputs.payloads[0]", in0),
        of_tensor("inputs.payloads[1]", in1),
        of_tensor("inputs.payloads[2]", in2),
        of_tensor("inputs.payloads[3]", in3),
        of_tensor("inputs.topk_weights", &call.topk_weights),
    ];
    whole(&outputs, windows)?;
    whole(&inputs, windows)?;
    apart(&outputs, &inputs)
}

/// Checks what only the plan's last update says.
///
/// # Errors
/// [`Status::InvalidArgument`].
pub(super) fn dispatch_tokens(call: &DispatchCall, tokens: usize) -> Result<()> {
    for input in call.inputs.iter().flatten().chain(&call.topk_weights) {
        expect_rows(input, "a dispatch input", Some((tokens, PLAN_TOKENS)))?;
    }
    Ok(())
}

/// Checks a combine.
///
/// # Errors
/// [`Status::InvalidArgument`] or [`Status::Unsupported`] naming the argument; nothing was done.
pub(super) fn combine(
    shape: &PlanShape,
    inputs: &CombineInputs,
    outputs: &CombineOutputs,
    options: &Options,
    tokens: Option<usize>,
    windows: &WindowTable,
    deadline: Instant,
) -> Result<CombineCall> {
    let flat = shape.layout == Layout::Flat;
    let of_tokens = tokens.map(|tokens| (tokens, PLAN_TOKENS));
    let rows = inputs.rows.check("inputs.rows")?;
    if !matches!(rows.dtype, Dtype::Bf16 | Dtype::F16 | Dtype::F32) {
        return Err(Error::new(
            Status::Unsupported,
            format!(
                "inputs.rows is {}; a combine adds EP_DTYPE_BF16, EP_DTYPE_F16 or EP_DTYPE_F32",
                rows.dtype.name()
            ),
        ));
    }
    let combined = outputs.combined.check("outputs.combined")?;
    expect(&combined, "outputs.combined", rows.dtype, rows.cols, of_tokens)?;
    let mut bias = [None; 2];
    for (i, (bias, name)) in bias.iter_mut().zip(["inputs.bias[0]", "inputs.bias[1]"]).enumerate() {
        *bias = optional(&inputs.bias[i], name)?;
        if let Some(bias) = bias {
            expect(bias, name, rows.dtype, rows.cols, Some((combined.rows, "those of outputs.combined")))?;
        }
    }
    if bias[0].is_none() {
        bias.swap(0, 1);
    }
    for tensor in [Some(&rows), Some(&combined), bias[0].as_ref(), bias[1].as_ref()].into_iter().flatten() {
        if !tensor.rows_contiguous() {
            return Err(Error::invalid(format!(
                "rows, bias and combined need col_stride 1, one has {}",
                tensor.col_stride
            )));
        }
    }
    let topk_weights = optional(&inputs.topk_weights, "inputs.topk_weights")?;
    if let Some(weights) = &topk_weights {
        if flat {
            return Err(Error::invalid(
                "inputs.topk_weights needs EP_LAYOUT_EXPERT_MAJOR: a flat row is a sum over a rank's experts, \
                 apply the weights where that sum is made",
            ));
        }
        let rows = Some((combined.rows, "those of outputs.combined"));
        expect(weights, "inputs.topk_weights", Dtype::F32, shape.topk, rows)?;
    }
    let row_weights = optional(&inputs.row_weights, "inputs.row_weights")?;
    let combined_weights = optional(&outputs.combined_weights, "outputs.combined_weights")?;
    returned_weights(shape, &rows, &combined, &row_weights, &combined_weights)?;
    let call = CombineCall {
        rows,
        row_weights,
        topk_weights,
        bias,
        combined,
        combined_weights,
        order: ReduceOrder::from_code(options.reduce_order, shape.layout)?,
        wire_bf16: options.wire_is_bf16()?,
        deadline,
    };
    if call.wire_bf16 && call.order != ReduceOrder::NodeRank {
        return Err(Error::invalid("wire_dtype EP_DTYPE_BF16 needs reduce_order EP_REDUCE_NODE_RANK"));
    }
    combine_memory(&call, windows)?;
    Ok(call)
}

fn returned_weights(
    shape: &PlanShape,
    rows: &Tensor,
    combined: &Tensor,
    row_weights: &Option<Tensor>,
    combined_weights: &Option<Tensor>,
) -> Result<()> {
    if let Some(weights) = row_weights {
        let per_row = if shape.layout == Layout::Flat { shape.topk } else { 1 };
        let same = Some((rows.rows, "those of inputs.rows"));
        expect(weights, "inputs.row_weights", Dtype::F32, per_row, same)?;
        expect_contiguous(weights, "inputs.row_weights")?;
    }
    if let Some(weights) = combined_weights {
        if row_weights.is_none() {
            return Err(Error::invalid(
                "outputs.combined_weights is wanted but inputs.row_weights is absent; a rank without rows gives a \
                 tensor of 0 rows",
            ));
        }
        let same = Some((combined.rows, "those of outputs.combined"));
        expect(weights, "outputs.combined_weights", Dtype::F32, shape.topk, same)?;
        expect_contiguous(weights, "outputs.combined_weights")?;
    }
    Ok(())
}

fn combine_memory(call: &CombineCall, windows: &WindowTable) -> Result<()> {
    let outputs = [
        of_tensor("outputs.combined", &Some(call.combined)),
        of_tensor("outputs.combined_weights", &call.combined_weights),
    ];
    let inputs = [
        of_tensor("inputs.rows", &Some(call.rows)),
        of_tensor("inputs.row_weights", &call.row_weights),
        of_tensor("inputs.topk_weights", &call.topk_weights),
        of_tensor("inputs.bias[0]", &call.bias[0]),
        of_tensor("inputs.bias[1]", &call.bias[1]),
    ];
    whole(&outputs, windows)?;
    whole(&inputs, windows)?;
    apart(&outputs, &inputs)
}

/// Checks what only the plan's last update says.
///
/// # Errors
/// [`Status::InvalidArgument`].
pub(super) fn combine_tokens(call: &CombineCall, tokens: usize, delivered: u64) -> Result<()> {
    if (call.rows.rows as u64) < delivered {
        return Err(Error::invalid(format!(
            "inputs.rows has {} rows, the plan's last dispatch delivered {delivered} here; rows that are left out \
             would be missing from their sums",
            call.rows.rows
        )));
    }
    expect_rows(&call.combined, "outputs.combined", Some((tokens, PLAN_TOKENS)))
}
