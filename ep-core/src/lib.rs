//! The part of libep that needs neither CUDA nor libfabric.

pub mod bootstrap;
pub mod config;
pub mod engine;
pub mod error;
pub mod tensor;

pub use error::{Error, Result, Status};
