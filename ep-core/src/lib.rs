//! The part of libep that needs neither CUDA nor libfabric.

pub mod bootstrap;
pub mod error;

pub use error::{Error, Result, Status};
