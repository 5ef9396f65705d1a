//! Unique ids, and from `ep_bootstrap_t` to a bootstrap of the core.

use std::ffi::{OsStr, c_char, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use bytemuck::cast;
use ep_core::bootstrap::{AllGatherFn, Bootstrap, CallbackBootstrap, FileBootstrap, TcpBootstrap, UniqueId};
use ep_core::config::MAX_RANKS;
use ep_core::{Error, Result, Status};

use super::copy_in::{copy_string, copy_struct, copy_text, copy_value};
use super::copy_out::ValueOut;
use super::guard::guard;
use super::types::{EpBootstrap, EpStatus, EpUniqueId};

/// How long absent ranks are waited for when nobody chose.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30);
/// The longest path, address and secret.
const MAX_PATH_BYTES: usize = 4096;
const MAX_ADDRESS_BYTES: usize = 512;
const MAX_SECRET_BYTES: usize = 4096;

/// `ep_unique_id_create`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ep_unique_id_create(id_out: *mut EpUniqueId) -> EpStatus {
    guard("ep_unique_id_create", || {
        // SAFETY: by the header, `id_out` is the address of an id.
        let id_out = unsafe { ValueOut::new(id_out, "id_out") }?;
        id_out.write(EpUniqueId { bytes: cast(UniqueId::create()?) });
        Ok(())
    })
}

/// `ep_unique_id_from_address`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ep_unique_id_from_address(
    address: *const c_char,
    secret: *const c_char,
    id_out: *mut EpUniqueId,
) -> EpStatus {
    guard("ep_unique_id_from_address", || {
        // SAFETY: by the header, a NUL-terminated string.
        let address = unsafe { copy_string(address, "address", MAX_ADDRESS_BYTES) }?;
        // SAFETY: by the header, a NUL-terminated string.
        let secret = unsafe { copy_string(secret, "secret", MAX_SECRET_BYTES) }?;
        // SAFETY: by the header, `id_out` is the address of an id.
        let id_out = unsafe { ValueOut::new(id_out, "id_out") }?;
        id_out.write(EpUniqueId { bytes: cast(UniqueId::from_address(&address, &secret)?) });
        Ok(())
    })
}

/// Everything of an `ep_bootstrap_t`, copied and checked.
pub(crate) struct Meeting {
    rank: usize,
    num_ranks: usize,
    deadline: Instant,
    means: Means,
}

/// Exactly one way to meet.
enum Means {
    Callback { call: AllGatherFn, ctx: *mut c_void },
    UniqueId(UniqueId),
    File(PathBuf),
}

impl Meeting {
    /// Copies and checks the caller's struct.
    ///
    /// # Safety
    /// As `ep_group_create` asks of `bootstrap`.
    pub(crate) unsafe fn copy(from: *const EpBootstrap) -> Result<Meeting> {
        // SAFETY: passed on to the caller.
        let from = unsafe { copy_struct(from, "bootstrap") }?;
        let (rank, num_ranks) = (from.rank, from.num_ranks);
        if num_ranks < 1 || num_ranks as usize > MAX_RANKS {
            let text = format!("bootstrap: num_ranks is {num_ranks}, expected 1 to {MAX_RANKS}");
            return Err(Error::invalid(text));
        }
        if !(0..num_ranks).contains(&rank) {
            let text = format!("bootstrap: rank is {rank}, expected 0 to {}", num_ranks - 1);
            return Err(Error::new(Status::OutOfRange, text));
        }
        // SAFETY: passed on to the caller.
        let means = unsafe { Means::copy(&from) }?;
        let timeout = match from.timeout_ms {
            0 => DEFAULT_TIMEOUT,
            ms => Duration::from_millis(ms.into()),
        };
        let deadline = Instant::now() + timeout;
        Ok(Meeting { rank: rank as usize, num_ranks: num_ranks as usize, deadline, means })
    }

    /// When the ranks must have met.
    pub(crate) fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Meets the other ranks.
    pub(crate) fn connect(self) -> Result<Box<dyn Bootstrap>> {
        let Meeting { rank, num_ranks, deadline, means } = self;
        Ok(match means {
            // SAFETY: the header asks of the callback what `new` does, and it is called by the threads
            // that create groups and allocate windows, which the header says.
            Means::Callback { call, ctx } => unsafe {
                Box::new(CallbackBootstrap::new(call, ctx, rank, num_ranks)?)
            },
            Means::UniqueId(id) => Box::new(TcpBootstrap::connect(&id, rank, num_ranks, deadline)?),
            Means::File(path) => Box::new(FileBootstrap::connect(&path, rank, num_ranks, deadline)?),
        })
    }
}

impl Means {
    /// # Safety
    /// As `ep_group_create` asks of the pointers in `bootstrap`.
    unsafe fn copy(from: &EpBootstrap) -> Result<Means> {
        let means = (from.all_gather, !from.unique_id.is_null(), !from.file.is_null());
        match means {
            (Some(call), false, false) => Ok(Means::Callback { call, ctx: from.all_gather_ctx }),
            (None, true, false) => {
                // SAFETY: passed on to the caller.
                let id = unsafe { copy_value(from.unique_id, "bootstrap: unique_id") }?;
                Ok(Means::UniqueId(cast(id.bytes)))
            }
            (None, false, true) => {
                // SAFETY: passed on to the caller.
                let path = unsafe { copy_text(from.file, "bootstrap: file", MAX_PATH_BYTES) }?;
                if path.is_empty() {
                    return Err(Error::invalid("bootstrap: file is empty, expected a path"));
                }
                Ok(Means::File(OsStr::from_bytes(&path).into()))
            }
            (call, id, file) => {
                let given: Vec<_> = [("all_gather", call.is_some()), ("unique_id", id), ("file", file)]
                    .into_iter()
                    .filter_map(|(name, is_given)| is_given.then_some(name))
                    .collect();
                let given = if given.is_empty() { "none".to_string() } else { given.join(" and ") };
                Err(Error::invalid(format!(
                    "bootstrap: {given} of all_gather, unique_id and file is set, expected exactly one"
                )))
            }
        }
    }
}
