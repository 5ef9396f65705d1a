//! The crate over a fake libfabric that behaves as EFA does, also where no test machine can.

mod efa;
#[expect(
    clippy::undocumented_unsafe_blocks,
    reason = "it stands in for C: its pointers are made by it or by the crate under test"
)]
mod fake;
