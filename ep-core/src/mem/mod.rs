//! Memory that ranks share: anonymous, unnamed, gone with its last mapping.

mod available;
mod mapping;
mod memory;
mod registry;
mod words;

pub(crate) use available::require;
pub use mapping::Mapping;
pub use memory::{DeviceMemory, Memory};
pub use registry::{SegmentId, find, publish};
pub use words::Words;
