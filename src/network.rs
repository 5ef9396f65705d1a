//! Which network the ranks of this process have between nodes.

use std::sync::{Arc, RwLock};

use ep_core::engine::Backend;
use ep_core::net::Network;

/// A network and why it is this one.
type Chosen = Option<(Arc<dyn Network>, String)>;

static GIVEN: RwLock<Chosen> = RwLock::new(None);

/// Gives groups that are made from now on this network instead of the library's own choice; for tests.
pub fn replace(network: Arc<dyn Network>, reason: &str) {
    *GIVEN.write().unwrap_or_else(|poisoned| poisoned.into_inner()) = Some((network, reason.to_string()));
}

/// The backend with the network of this process.
pub(crate) fn add(backend: Backend) -> Backend {
    let given = GIVEN.read().unwrap_or_else(|poisoned| poisoned.into_inner());
    match &*given {
        Some((network, reason)) => backend.with_network(network.clone(), reason.clone()),
        None => backend.without_network("this build of the library has none"),
    }
}
