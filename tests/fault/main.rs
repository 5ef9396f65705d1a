//! Faults and resources: ranks that die, hang, come late or disagree, and what calls may cost and leave.
//!
//! | module | shows |
//! |---|---|
//! | `killed`, `stopped` | processes that die or hang at any point: every survivor names them in time |
//!
//! `work` is a workload with its expected results, derived from seeds alone. `threads` and `process` run
//! ranks as threads and as processes; a test that needs processes runs this binary again. `scene` is one
//! group of processes of which one comes to harm.

mod alloc;
mod process;
mod rng;
mod scene;
mod seccomp;
mod threads;
mod work;

mod abort;
mod container;
mod ending;
mod killed;
mod lanes;
mod many;
mod memory;
mod mismatch;
mod one_core;
mod perturbed;
mod quiet;
mod residue;
mod signals;
mod soak;
mod steps;
mod stopped;
mod windows;
