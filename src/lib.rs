//! The C ABI of libep: thin entries over `ep_core`.
