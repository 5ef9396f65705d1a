//! Combine.

use std::ffi::c_void;

use ep_core::config::{CombineInputs, CombineOutputs};

use super::copy_in::{copy_options, copy_struct};
use super::guard::{contain, guard};
use super::plan::pin_plan;
use super::stream::{Queue, StreamObject};
use super::types::{EpCombineInputs, EpCombineOutputs, EpOptions, EpPlan, EpStatus};

/// `ep_combine`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ep_combine(
    plan: *mut EpPlan,
    inputs: *const EpCombineInputs,
    outputs: *const EpCombineOutputs,
    options: *const EpOptions,
    stream: *mut c_void,
) -> EpStatus {
    guard("ep_combine", || {
        let plan = pin_plan(plan)?;
        // SAFETY: by the header, the address of inputs of `struct_size` bytes.
        let inputs = combine_inputs(&unsafe { copy_struct(inputs, "inputs") }?);
        // SAFETY: by the header, the address of outputs of `struct_size` bytes.
        let outputs = combine_outputs(&unsafe { copy_struct(outputs, "outputs") }?);
        // SAFETY: by the header, NULL or the address of options of `struct_size` bytes.
        let options = unsafe { copy_options(options) }?;
        let queue = Queue::of(&plan.plan, stream)?;
        contain(&plan.group.group, || {
            // SAFETY: by the header, inputs and outputs belong to the call until it is done, and the stream
            // is one.
            unsafe {
                match &queue {
                    Queue::Host(pin) => plan.plan.combine(&inputs, &outputs, &options, StreamObject::of(pin)),
                    Queue::Device(stream) => plan.plan.combine_on(&inputs, &outputs, &options, *stream),
                }
            }
        })
    })
}

fn combine_inputs(from: &EpCombineInputs) -> CombineInputs {
    let EpCombineInputs { struct_size: _, reserved_flags: _, rows, row_weights, topk_weights, bias } = *from;
    CombineInputs { rows, row_weights, topk_weights, bias }
}

fn combine_outputs(from: &EpCombineOutputs) -> CombineOutputs {
    let EpCombineOutputs { struct_size: _, reserved_flags: _, combined, combined_weights } = *from;
    CombineOutputs { combined, combined_weights }
}
