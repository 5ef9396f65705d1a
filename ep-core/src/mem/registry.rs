//! Memory of this process that other ranks in it may use without mapping it again.
//!
//! A process with 256 ranks as threads would otherwise need 256 x 256 mappings, more than Linux allows.

use std::collections::BTreeMap;
use std::sync::{Mutex, OnceLock};

use super::Memory;
use super::memory::WeakMemory;
use crate::error::{Error, Result};

/// Names one piece of shared memory: random, so it is also the proof that its reader was told of it.
pub type SegmentId = [u8; 16];

/// Ordered, because a hash table keeps no pointer to the beginning of its memory, which leak checkers take for lost.
static REGISTRY: OnceLock<Mutex<BTreeMap<SegmentId, WeakMemory>>> = OnceLock::new();

fn registry() -> std::sync::MutexGuard<'static, BTreeMap<SegmentId, WeakMemory>> {
    let lock = REGISTRY.get_or_init(Default::default);
    lock.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Makes `memory` findable under a new random id for as long as it lives.
///
/// # Errors
/// [`crate::Status::System`] if the system has no random numbers.
pub fn publish(memory: &Memory) -> Result<SegmentId> {
    let mut id = SegmentId::default();
    getrandom::fill(&mut id).map_err(|e| Error::system("getrandom", e))?;
    let mut registry = registry();
    registry.retain(|_, weak| weak.is_alive());
    registry.insert(id, memory.downgrade());
    Ok(id)
}

/// The memory with this id, if it is of this process and alive.
pub fn find(id: &SegmentId) -> Option<Memory> {
    registry().get(id).and_then(WeakMemory::upgrade)
}
