//! Plans.

use std::ffi::c_void;
use std::sync::Arc;
use std::time::Duration;

use ep_core::config::{Layout, PlanConfig};
use ep_core::engine::Plan;
use ep_core::{Error, Result};

use super::copy_in::{check_pointer, copy_options, copy_struct, copy_value};
use super::copy_out::{StructOut, ValueOut};
use super::group::{SharedGroup, check_length, check_optional_array, pin_group};
use super::guard::{contain, guard};
use super::handle::{InUse, Kind, Object, Pin, Table};
use super::stream::{Queue, StreamObject};
use super::types::{EpCounts, EpGroup, EpOptions, EpPlan, EpPlanConfig, EpStatus, EpTensor};

static PLANS: Table<PlanObject> = Table::new();

/// What an `ep_plan_t` names.
pub(crate) struct PlanObject {
    pub(crate) plan: Plan,
    pub(crate) group: Arc<SharedGroup>,
}

impl Object for PlanObject {
    type Opaque = EpPlan;
    const KIND: Kind = Kind::Plan;
}

/// A plan whose group is there.
pub(crate) fn pin_plan(plan: *mut EpPlan) -> Result<Pin<PlanObject>> {
    let plan = PLANS.pin(plan, "plan")?;
    plan.group.check_alive("plan")?;
    Ok(plan)
}

/// `ep_plan_bytes`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ep_plan_bytes(
    group: *mut EpGroup,
    config: *const EpPlanConfig,
    bytes_out: *mut usize,
) -> EpStatus {
    guard("ep_plan_bytes", || {
        let group = &pin_group(group)?.shared.group;
        // SAFETY: by the header, the address of a size.
        let bytes_out = unsafe { ValueOut::new(bytes_out, "bytes_out") }?;
        // SAFETY: by the header, the address of a config of `struct_size` bytes.
        let config = unsafe { plan_config(config, group.num_ranks()) }?;
        bytes_out.write(contain(group, || Plan::bytes(group, &config))?);
        Ok(())
    })
}

/// `ep_plan_create`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ep_plan_create(
    group: *mut EpGroup,
    config: *const EpPlanConfig,
    memory: *mut c_void,
    memory_bytes: usize,
    plan_out: *mut *mut EpPlan,
) -> EpStatus {
    guard("ep_plan_create", || {
        let group = Arc::clone(&pin_group(group)?.shared);
        // SAFETY: by the header, the address of a pointer.
        let plan_out = unsafe { ValueOut::new(plan_out, "plan_out") }?;
        // SAFETY: by the header, the address of a config of `struct_size` bytes.
        let config = unsafe { plan_config(config, group.group.num_ranks()) }?;
        if memory.is_null() && memory_bytes != 0 {
            return Err(Error::invalid(format!(
                "memory is NULL and memory_bytes is {memory_bytes}; give 0 to let the library allocate"
            )));
        }
        let memory = (!memory.is_null()).then_some((memory.cast(), memory_bytes));
        let plan = contain(&group.group, || {
            // SAFETY: by the header, the memory is the plan's until it is destroyed.
            unsafe { Plan::create(&group.group, &config, memory) }
        })?;
        plan_out.write(PLANS.insert(PlanObject { plan, group })?);
        Ok(())
    })
}

/// `ep_plan_destroy`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ep_plan_destroy(plan: *mut EpPlan) -> EpStatus {
    guard("ep_plan_destroy", || {
        if !plan.is_null() {
            drop(PLANS.retire(plan, "plan", InUse::Refused)?);
        }
        Ok(())
    })
}

/// `ep_plan_update`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ep_plan_update(
    plan: *mut EpPlan,
    topk_idx: *const EpTensor,
    options: *const EpOptions,
    stream: *mut c_void,
) -> EpStatus {
    guard("ep_plan_update", || {
        let plan = pin_plan(plan)?;
        // SAFETY: by the header, the address of a tensor.
        let topk_idx = unsafe { copy_value(topk_idx, "topk_idx") }?;
        // SAFETY: by the header, NULL or the address of options of `struct_size` bytes.
        let options = unsafe { copy_options(options) }?;
        let queue = Queue::of(&plan.plan, stream)?;
        contain(&plan.group.group, || {
            // SAFETY: by the header, the tensor's memory belongs to the call until it is done, and the stream
            // is one.
            unsafe {
                match &queue {
                    Queue::Host(pin) => plan.plan.update(&topk_idx, &options, StreamObject::of(pin)),
                    Queue::Device(stream) => plan.plan.update_on(&topk_idx, &options, *stream),
                }
            }
        })
    })
}

/// `ep_plan_counts`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ep_plan_counts(
    plan: *mut EpPlan,
    timeout_ms: u32,
    counts_out: *mut EpCounts,
) -> EpStatus {
    guard("ep_plan_counts", || {
        let plan = pin_plan(plan)?;
        // SAFETY: by the header, the address of a struct of `struct_size` bytes.
        let mut counts = unsafe { copy_struct(counts_out, "counts_out") }?;
        // SAFETY: as above.
        let counts_out = unsafe { StructOut::new(counts_out, "counts_out") }?;
        let num_ranks = plan.group.group.num_ranks();
        let num_local_experts = plan.plan.num_local_experts();
        check_counts(&counts, num_local_experts, num_ranks)?;
        let timeout = (timeout_ms != 0).then(|| Duration::from_millis(timeout_ms.into()));
        let found = contain(&plan.group.group, || plan.plan.counts(timeout))?;
        for (array, values, length) in [
            (counts.rows_per_expert, &found.rows_per_expert, num_local_experts),
            (counts.rows_per_source, &found.rows_per_source, num_ranks),
        ] {
            if !array.is_null() {
                for (at, value) in values.iter().take(length).enumerate() {
                    // SAFETY: `check_counts` has compared the length that the caller gave with `length`.
                    unsafe { array.add(at).write(*value) };
                }
            }
        }
        counts.num_rows = found.num_rows;
        counts.num_tokens = found.num_tokens;
        counts_out.write(&counts);
        Ok(())
    })
}

fn check_counts(counts: &EpCounts, num_local_experts: usize, num_ranks: usize) -> Result<()> {
    let (experts, ranks) = (counts.num_local_experts, counts.num_ranks);
    check_optional_array(counts.rows_per_expert, experts, "counts_out: rows_per_expert")?;
    check_optional_array(counts.rows_per_source, ranks, "counts_out: rows_per_source")?;
    if !counts.rows_per_expert.is_null() {
        let what = "the plan's experts on this rank";
        check_length("counts_out: num_local_experts", experts, num_local_experts, what)?;
    }
    if !counts.rows_per_source.is_null() {
        check_length("counts_out: num_ranks", ranks, num_ranks, "the ranks of the group")?;
    }
    Ok(())
}

/// # Safety
/// `from` is null, misaligned, or the address of a config of `struct_size` bytes whose `experts_per_rank`
/// is null, misaligned, or the address of `num_experts_per_rank` readable numbers.
unsafe fn plan_config(from: *const EpPlanConfig, num_ranks: usize) -> Result<PlanConfig> {
    // SAFETY: passed on to the caller.
    let from = unsafe { copy_struct(from, "config") }?;
    let length = from.num_experts_per_rank;
    let experts_per_rank = if from.experts_per_rank.is_null() {
        check_optional_array(from.experts_per_rank, length, "config: experts_per_rank")?;
        None
    } else {
        check_pointer(from.experts_per_rank, "config: experts_per_rank")?;
        check_length("config: num_experts_per_rank", length, num_ranks, "the number of ranks")?;
        // SAFETY: not null, aligned, and by contract `length` numbers long.
        Some(unsafe { std::slice::from_raw_parts(from.experts_per_rank, num_ranks) }.to_vec())
    };
    Ok(PlanConfig {
        lane: from.lane,
        topk: from.topk,
        num_experts: from.num_experts,
        experts_per_rank,
        max_tokens: from.max_tokens,
        layout: Layout::from_code(from.layout)
            .map_err(|error| Error::new(error.status, format!("config: {}", error.message)))?,
        expert_alignment: from.expert_alignment,
    })
}
