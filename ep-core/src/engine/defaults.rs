//! A caller's config with its zeros filled in, and what can be refused before the ranks meet.

use super::device::Backend;
use crate::config::{DEFAULT_TIMEOUT, GroupConfig, MAX_LANES, Route, Transport};
use crate::error::{Error, Result, Status};
use crate::layout;

/// `EP_BACKEND_AUTO`.
pub(super) const BACKEND_AUTO: i32 = 0;
/// `EP_BACKEND_HOST`.
pub(super) const BACKEND_HOST: i32 = 1;
/// `EP_BACKEND_CUDA`.
const BACKEND_CUDA: i32 = 2;

/// The `EP_BACKEND_` of a backend.
pub(super) fn chosen(backend: &Backend) -> i32 {
    if backend.device.is_some() { BACKEND_CUDA } else { BACKEND_HOST }
}

/// Fills in the defaults that do not depend on the other ranks.
///
/// # Errors
/// [`Status::InvalidArgument`] or [`Status::Unsupported`], naming the field.
pub(super) fn with_defaults(
    config: &GroupConfig,
    backend: &Backend,
    num_ranks: usize,
) -> Result<GroupConfig> {
    let mut config = *config;
    let or = |value: u32, default: u32| if value == 0 { default } else { value };
    config.num_lanes = or(config.num_lanes, 2);
    config.timeout_ms = or(config.timeout_ms, DEFAULT_TIMEOUT.as_millis() as u32);
    config.max_local_experts = or(config.max_local_experts, 256);
    if config.num_lanes as usize > MAX_LANES {
        return Err(Error::invalid(format!(
            "num_lanes is {}, expected at most {MAX_LANES}; 0 means 2",
            config.num_lanes
        )));
    }
    if config.max_local_experts > 1 << 20 {
        return Err(Error::invalid(format!(
            "max_local_experts is {}, expected at most {}",
            config.max_local_experts,
            1 << 20
        )));
    }
    if config.ring_bytes as usize > layout::RING_MAX {
        return Err(Error::invalid(format!(
            "ring_bytes is {}, expected at most {}; 0 chooses",
            config.ring_bytes,
            layout::RING_MAX
        )));
    }
    match (config.backend, &backend.device) {
        (BACKEND_AUTO, _) | (BACKEND_HOST, None) | (BACKEND_CUDA, Some(_)) => {}
        (BACKEND_HOST, Some(device)) => {
            return Err(Error::invalid(format!("backend is EP_BACKEND_HOST, not {}", device.describe())));
        }
        (BACKEND_CUDA, None) => {
            return Err(Error::new(
                Status::Unsupported,
                format!(
                    "EP_BACKEND_CUDA: {}; use EP_BACKEND_HOST or EP_BACKEND_AUTO",
                    if backend.reason.is_empty() {
                        "the group is made without a device"
                    } else {
                        &backend.reason
                    }
                ),
            ));
        }
        (other, _) => {
            return Err(Error::invalid(format!("backend is {other}, expected an EP_BACKEND_ value, 0 to 2")));
        }
    }
    if let Some(device) = &backend.device {
        if num_ranks > device.max_ranks() {
            return Err(Error::new(
                Status::Unsupported,
                format!(
                    "{num_ranks} ranks, expected at most {} on {}",
                    device.max_ranks(),
                    device.describe()
                ),
            ));
        }
        if config.ring_bytes == 0 {
            config.ring_bytes = device.ring_bytes(num_ranks) as u32;
        }
    }
    if config.ring_bytes != 0 {
        config.ring_bytes = layout::ring_bytes(config.ring_bytes, num_ranks) as u32;
    }
    check_network(&config)?;
    Ok(config)
}

/// Bytes of a message between nodes: the smallest has room for a few rows, the largest is what commands can say.
pub(super) const CHUNK_MIN: usize = 2 << 10;
pub(super) const CHUNK_MAX: usize = 64 << 20;
/// Messages of a kind on their way between two ranks: what a relay keeps in one word of bits.
pub(crate) const WINDOW_MAX: u32 = 64;

fn check_network(config: &GroupConfig) -> Result<()> {
    Transport::from_code(config.transport)?;
    Route::from_code(config.route)?;
    let chunk = config.chunk_bytes as usize;
    if chunk != 0 && !(CHUNK_MIN..=CHUNK_MAX).contains(&chunk) {
        return Err(Error::invalid(format!(
            "chunk_bytes is {chunk}, expected {CHUNK_MIN} to {CHUNK_MAX}; 0 chooses"
        )));
    }
    if config.chunk_window > WINDOW_MAX {
        return Err(Error::invalid(format!(
            "chunk_window is {}, expected at most {WINDOW_MAX}; 0 chooses",
            config.chunk_window
        )));
    }
    Ok(())
}
