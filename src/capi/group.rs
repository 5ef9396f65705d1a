//! Groups.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ep_core::config::{ErrorInfo, GroupConfig, GroupInfo, MAX_RANKS};
use ep_core::engine::Group;
use ep_core::{Error, Result, Status};

use super::bootstrap::Meeting;
use super::copy_in::{check_alignment, check_pointer, copy_struct};
use super::copy_out::{StructOut, ValueOut, text};
use super::guard::{contain, guard};
use super::handle::{InUse, Kind, Object, Pin, Table};
use super::types::*;
use super::version;
use crate::{backend, network};

/// How long `ep_group_destroy` waits when nobody chose.
const DEFAULT_DESTROY_TIMEOUT: Duration = Duration::from_secs(5);

pub(crate) static GROUPS: Table<GroupObject> = Table::new();

/// What an `ep_group_t` names. Its plans and windows share it, so it may be destroyed before them.
pub(crate) struct GroupObject {
    pub(crate) shared: Arc<SharedGroup>,
}

impl Object for GroupObject {
    type Opaque = EpGroup;
    const KIND: Kind = Kind::Group;
}

pub(crate) struct SharedGroup {
    pub(crate) group: Arc<Group>,
    destroyed: AtomicBool,
}

impl SharedGroup {
    /// Refuses the plans and windows of a group that was destroyed.
    pub(crate) fn check_alive(&self, arg: &str) -> Result<()> {
        // Relaxed: nothing else is read because of it; the engine orders its own closing.
        if self.destroyed.load(Ordering::Relaxed) {
            let text = format!("{arg} belongs to a group that was destroyed; only destroy it");
            return Err(Error::new(Status::BadHandle, text));
        }
        Ok(())
    }
}

pub(crate) fn pin_group(group: *mut EpGroup) -> Result<Pin<GroupObject>> {
    GROUPS.pin(group, "group")
}

/// `ep_group_create_versioned`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ep_group_create_versioned(
    header_version: u32,
    config: *const EpGroupConfig,
    bootstrap: *const EpBootstrap,
    group_out: *mut *mut EpGroup,
) -> EpStatus {
    guard("ep_group_create", || {
        version::check_header(header_version)?;
        // SAFETY: by the header, the address of a pointer.
        let group_out = unsafe { ValueOut::new(group_out, "group_out") }?;
        // SAFETY: by the header, the address of a config of `struct_size` bytes.
        let config = group_config(&unsafe { copy_struct(config, "config") }?);
        // SAFETY: by the header, the address of a bootstrap of `struct_size` bytes.
        let meeting = unsafe { Meeting::copy(bootstrap) }?;
        let backend = network::add(backend::choose(config.backend)?, config.transport);
        let deadline = meeting.deadline();
        let group = Group::create_on(backend, &config, meeting.connect()?, deadline)?;
        let shared = Arc::new(SharedGroup { group, destroyed: AtomicBool::new(false) });
        group_out.write(GROUPS.insert(GroupObject { shared })?);
        Ok(())
    })
}

/// `ep_group_destroy`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ep_group_destroy(group: *mut EpGroup, timeout_ms: u32) -> EpStatus {
    guard("ep_group_destroy", || {
        if group.is_null() {
            return Ok(());
        }
        let group = GROUPS.retire(group, "group", InUse::Waits)?;
        // Relaxed: as in `check_alive`.
        group.shared.destroyed.store(true, Ordering::Relaxed);
        let timeout = match timeout_ms {
            0 => DEFAULT_DESTROY_TIMEOUT,
            ms => Duration::from_millis(ms.into()),
        };
        group.shared.group.close(timeout)
    })
}

/// `ep_group_abort`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ep_group_abort(group: *mut EpGroup) -> EpStatus {
    guard("ep_group_abort", || {
        let group = &pin_group(group)?.shared.group;
        contain(group, || {
            group.abort();
            Ok(())
        })
    })
}

/// `ep_group_health`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ep_group_health(
    group: *mut EpGroup,
    error_out: *mut EpErrorInfo,
    states_out: *mut i32,
    num_states: u32,
) -> EpStatus {
    guard("ep_group_health", || {
        let group = &pin_group(group)?.shared.group;
        let error_out = match error_out.is_null() {
            true => None,
            // SAFETY: by the header, the address of a struct of `struct_size` bytes.
            false => Some(unsafe { StructOut::new(error_out, "error_out") }?),
        };
        let num_ranks = group.num_ranks();
        if num_states != 0 || !states_out.is_null() {
            check_pointer(states_out, "states_out")?;
            check_length("num_states", num_states, num_ranks, "the number of ranks")?;
        }
        // On the stack: polling allocates nothing here, whatever the size of the group.
        let mut alive = [true; MAX_RANKS];
        let alive = &mut alive[..num_ranks];
        let error = contain(group, || Ok(group.health(alive)))?;
        if let Some(out) = error_out {
            out.write(&error_info(error.as_ref()));
        }
        if num_states != 0 {
            for (rank, alive) in alive.iter().enumerate() {
                let state = if *alive { EP_RANK_ALIVE } else { EP_RANK_LOST };
                // SAFETY: `states_out` has `num_states` entries by contract, which is `num_ranks`.
                unsafe { states_out.add(rank).write(state) };
            }
        }
        Ok(())
    })
}

/// `ep_group_query`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ep_group_query(group: *mut EpGroup, info_out: *mut EpGroupInfo) -> EpStatus {
    guard("ep_group_query", || {
        let group = &pin_group(group)?.shared.group;
        // SAFETY: by the header, the address of a struct of `struct_size` bytes.
        let info_out = unsafe { StructOut::new(info_out, "info_out") }?;
        info_out.write(&group_info(&contain(group, || Ok(group.info()))?));
        Ok(())
    })
}

/// `ep_group_stats`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ep_group_stats(
    group: *mut EpGroup,
    stats_out: *mut EpPeerStats,
    num_peers: u32,
) -> EpStatus {
    guard("ep_group_stats", || {
        let group = &pin_group(group)?.shared.group;
        check_pointer(stats_out, "stats_out")?;
        check_length("num_peers", num_peers, group.num_ranks(), "the number of ranks")?;
        let stats = contain(group, || Ok(group.stats()))?;
        for (peer, stats) in stats.into_iter().take(num_peers as usize).enumerate() {
            // SAFETY: `stats_out` has `num_peers` entries by contract.
            unsafe { stats_out.add(peer).write(stats) };
        }
        Ok(())
    })
}

/// Checks the length of an array of the caller.
pub(crate) fn check_length(arg: &str, length: u32, expected: usize, what: &str) -> Result<()> {
    if length as usize == expected {
        return Ok(());
    }
    Err(Error::invalid(format!("{arg} is {length}, expected {expected}, {what}")))
}

/// Checks an array that is absent when its length is 0.
pub(crate) fn check_optional_array<T>(array: *const T, length: u32, arg: &str) -> Result<()> {
    if array.is_null() && length != 0 {
        return Err(Error::invalid(format!("{arg} is NULL, and its length is {length}; expected 0")));
    }
    check_alignment(array, arg)
}

fn group_config(from: &EpGroupConfig) -> GroupConfig {
    let EpGroupConfig {
        struct_size: _,
        reserved_flags: _,
        backend,
        num_lanes,
        timeout_ms,
        node_id,
        max_local_experts,
        ring_bytes,
        transport,
        route,
        chunk_bytes,
        chunk_window,
    } = *from;
    GroupConfig {
        backend,
        num_lanes,
        timeout_ms,
        node_id,
        max_local_experts,
        ring_bytes,
        transport,
        route,
        chunk_bytes,
        chunk_window,
    }
}

fn error_info(error: Option<&ErrorInfo>) -> EpErrorInfo {
    let index = |value: Option<usize>| value.map_or(-1, |value| value as i32);
    EpErrorInfo {
        struct_size: size_of::<EpErrorInfo>() as u32,
        status: error.map_or(Status::Ok, |error| error.status).code(),
        rank: error.map_or(-1, |error| error.rank as i32),
        peer: index(error.and_then(|error| error.peer)),
        lane: index(error.and_then(|error| error.lane)),
        reserved: 0,
        epoch: error.map_or(0, |error| error.epoch),
        text: text(error.map_or("", |error| &error.text)),
    }
}

fn group_info(info: &GroupInfo) -> EpGroupInfo {
    EpGroupInfo {
        struct_size: size_of::<EpGroupInfo>() as u32,
        rank: info.rank as i32,
        num_ranks: info.num_ranks as i32,
        num_nodes: info.num_nodes as i32,
        node: info.node as i32,
        backend: info.backend,
        num_lanes: info.num_lanes as u32,
        timeout_ms: info.timeout_ms,
        max_local_experts: info.max_local_experts as u32,
        ring_bytes: info.ring_bytes as u32,
        memory_bytes: info.memory_bytes,
        window_bytes: info.window_bytes,
        backend_reason: text(&info.backend_reason),
        transport: info.transport,
        route: info.route,
        chunk_bytes: info.chunk_bytes as u32,
        chunk_window: info.chunk_window as u32,
        network_bytes: info.network_bytes,
        transport_reason: text(&info.transport_reason),
    }
}
