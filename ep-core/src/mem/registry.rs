//! Memory of this process that other ranks in it may use without mapping it again.
//!
//! A process with 256 ranks as threads would otherwise need 256 x 256 mappings, more than Linux allows.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, Weak};

use super::Mapping;
use crate::error::{Error, Result};

/// Names one piece of shared memory: random, so it is also the proof that its reader was told of it.
pub type SegmentId = [u8; 16];

static REGISTRY: OnceLock<Mutex<HashMap<SegmentId, Weak<Mapping>>>> = OnceLock::new();

fn registry() -> std::sync::MutexGuard<'static, HashMap<SegmentId, Weak<Mapping>>> {
    let lock = REGISTRY.get_or_init(Default::default);
    lock.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Makes `mapping` findable under a new random id for as long as it lives.
///
/// # Errors
/// [`crate::Status::System`] if the system has no random numbers.
pub fn publish(mapping: &Arc<Mapping>) -> Result<SegmentId> {
    let mut id = SegmentId::default();
    getrandom::fill(&mut id).map_err(|e| Error::system("getrandom", e))?;
    let mut registry = registry();
    registry.retain(|_, weak| weak.strong_count() > 0);
    registry.insert(id, Arc::downgrade(mapping));
    Ok(id)
}

/// The mapping with this id, if it is of this process and alive.
pub fn find(id: &SegmentId) -> Option<Arc<Mapping>> {
    registry().get(id).and_then(Weak::upgrade)
}
