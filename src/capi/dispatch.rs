//! Dispatch.

use std::ffi::c_void;

use ep_core::config::{DispatchInputs, DispatchOutputs};

use super::copy_in::{copy_options, copy_struct};
use super::guard::{contain, guard};
use super::plan::pin_plan;
use super::stream::{Queue, StreamObject};
use super::types::{EpDispatchInputs, EpDispatchOutputs, EpOptions, EpPlan, EpStatus};

/// `ep_dispatch`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ep_dispatch(
    plan: *mut EpPlan,
    inputs: *const EpDispatchInputs,
    outputs: *const EpDispatchOutputs,
    options: *const EpOptions,
    stream: *mut c_void,
) -> EpStatus {
    guard("ep_dispatch", || {
        let plan = pin_plan(plan)?;
        // SAFETY: by the header, the address of inputs of `struct_size` bytes.
        let inputs = dispatch_inputs(&unsafe { copy_struct(inputs, "inputs") }?);
        // SAFETY: by the header, the address of outputs of `struct_size` bytes.
        let outputs = dispatch_outputs(&unsafe { copy_struct(outputs, "outputs") }?);
        // SAFETY: by the header, NULL or the address of options of `struct_size` bytes.
        let options = unsafe { copy_options(options) }?;
        let queue = Queue::of(&plan.plan, stream)?;
        contain(&plan.group.group, || {
            // SAFETY: by the header, inputs and outputs belong to the call until it is done, and the stream
            // is one.
            unsafe {
                match &queue {
                    Queue::Host(pin) => {
                        plan.plan.dispatch(&inputs, &outputs, &options, StreamObject::of(pin))
                    }
                    Queue::Device(stream) => plan.plan.dispatch_on(&inputs, &outputs, &options, *stream),
                }
            }
        })
    })
}

fn dispatch_inputs(from: &EpDispatchInputs) -> DispatchInputs {
    let EpDispatchInputs { struct_size: _, num_payloads, payloads, topk_weights } = *from;
    DispatchInputs { num_payloads, payloads, topk_weights }
}

fn dispatch_outputs(from: &EpDispatchOutputs) -> DispatchOutputs {
    let EpDispatchOutputs {
        struct_size: _,
        num_payloads,
        payloads,
        topk_idx,
        topk_weights,
        src_rank,
        src_token,
        src_slot,
        num_rows,
        num_required,
        num_dropped,
        rows_per_expert,
        expert_offsets,
    } = *from;
    DispatchOutputs {
        num_payloads,
        payloads,
        topk_idx,
        topk_weights,
        src_rank,
        src_token,
        src_slot,
        num_rows,
        num_required,
        num_dropped,
        rows_per_expert,
        expert_offsets,
    }
}
