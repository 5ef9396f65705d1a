//! Which network the ranks of this process have between nodes.

use std::sync::{Arc, PoisonError, RwLock};

use ep_core::engine::Backend;
use ep_core::net::Network;
use ep_fabric::FabricNetwork;

use crate::capi::EP_TRANSPORT_SHARED_MEMORY;

/// A network and why it is this one.
type Chosen = Option<(Arc<dyn Network>, String)>;

static GIVEN: RwLock<Chosen> = RwLock::new(None);

/// Gives groups that are made from now on this network instead of the library's own choice; for tests.
pub fn replace(network: Arc<dyn Network>, reason: &str) {
    *GIVEN.write().unwrap_or_else(PoisonError::into_inner) = Some((network, reason.to_string()));
}

/// The backend with the network of this process, or with the reason why it has none. A group that shall use shared
/// memory alone does not look for one.
pub(crate) fn add(backend: Backend, transport: i32) -> Backend {
    if let Some((network, reason)) = &*GIVEN.read().unwrap_or_else(PoisonError::into_inner) {
        return backend.with_network(network.clone(), reason.clone());
    }
    if transport == EP_TRANSPORT_SHARED_MEMORY {
        return backend.without_network("EP_TRANSPORT_SHARED_MEMORY was asked for");
    }
    match FabricNetwork::of_process() {
        Ok(network) => backend.with_network(network, "libfabric is there"),
        Err(error) => backend.without_network(error.message),
    }
}
