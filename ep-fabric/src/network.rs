//! The network of a process, as groups see it: one proxy that serves all NICs in use, for all groups. It is started
//! when the first group needs it and ends with the last one.

use std::process;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Instant;

use ep_core::net::{MAX_NICS, Network, Port, PortSpec, ProxyHandle, ProxyOptions, Transport};
use ep_core::{Error, Result, Status};

use crate::nic::Nic;
use crate::select::Selection;
use crate::settings::Settings;
use crate::sys::Library;

/// libfabric as a network.
pub struct FabricNetwork {
    library: Arc<Library>,
    /// The process that made it: threads and NICs are not there in its children.
    process: u32,
    /// None before the first group that has ranks on other nodes.
    running: Mutex<Option<Running>>,
}

#[derive(Clone)]
struct Running {
    proxy: ProxyHandle,
    reason: String,
}

impl FabricNetwork {
    /// The network of this process: the same one for all that hold it at a time. libfabric is opened, but not asked
    /// for anything, and no NIC is opened.
    ///
    /// # Errors
    /// As [`Library::open`].
    pub fn of_process() -> Result<Arc<FabricNetwork>> {
        static CURRENT: Mutex<Weak<FabricNetwork>> = Mutex::new(Weak::new());
        let library = Library::open()?;
        let mut current = CURRENT.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(network) = current.upgrade() {
            return Ok(network);
        }
        let network = Arc::new(FabricNetwork { library, process: process::id(), running: Mutex::new(None) });
        *current = Arc::downgrade(&network);
        Ok(network)
    }

    /// The proxy, started if it was not. Takes about 5 s per NIC at most.
    fn running(&self, deadline: Instant) -> Result<Running> {
        if process::id() != self.process {
            return Err(Error::new(
                Status::Unsupported,
                format!(
                    "this process was forked from process {}, which uses the network; start processes anew, as \
                     multiprocessing does with the method spawn",
                    self.process
                ),
            ));
        }
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(running) = &*running {
            return Ok(running.clone());
        }
        let started = start(&self.library, deadline)?;
        Ok(running.insert(started).clone())
    }
}

/// Opens the NICs that the settings and the machine say, and starts their proxy.
fn start(library: &Arc<Library>, deadline: Instant) -> Result<Running> {
    let settings = Settings::from_env()?;
    let selection = Selection::make(library, &settings, false)?;
    let (num_nics, mut reason) = (selection.nics().len(), String::from(selection.reason()));
    if num_nics > MAX_NICS {
        reason += &format!(", of which the first {MAX_NICS} of {num_nics} are used");
    }
    let mut nics: Vec<Box<dyn Transport>> = Vec::new();
    for nic_idx in 0..num_nics.min(MAX_NICS) {
        if Instant::now() >= deadline {
            let text = format!("{nic_idx} of {num_nics} NICs were open at the deadline; raise timeout_ms");
            return Err(Error::new(Status::Timeout, text));
        }
        nics.push(Box::new(Nic::open(&selection, nic_idx, &settings)?));
    }
    Ok(Running { proxy: ProxyHandle::start(nics, ProxyOptions::default())?, reason })
}

impl Network for FabricNetwork {
    fn describe(&self) -> String {
        match &*self.running.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(running) => format!("{}, because {}", running.proxy.nics().join(" and "), running.reason),
            None => self.library.to_string(),
        }
    }

    fn open(&self, spec: PortSpec, deadline: Instant) -> Result<Port> {
        self.running(deadline)?.proxy.open(spec, deadline)
    }
}
