//! Faults and resources: ranks that die, hang, come late or disagree, and what calls may cost and leave.
//!
//! | module | shows |
//! |---|---|
//! | `killed`, `stopped` | processes that die or hang at any point: every survivor names them in time |
//! | `steps` | ranks that vanish at each single step of a small scenario; deadlines of milliseconds |
//! | `residue`, `windows` | what a rank leaves, and what a stranger can get: nothing; attempts that fail |
//! | `container`, `signals` | ranks of several containers; signals that interrupt every system call |
//! | `perturbed`, `many` | delays, random peer order, 256 ranks: results are right all the same |
//! | `mismatch` | calls that do not match fail on every rank, and the next ones work |
//! | `nodes` | most of this between nodes, over a simulated network; bytes and messages as docs/FABRIC.md says |
//! | `lanes`, `abort`, `ending` | lanes and streams, abort, and groups that end early, twice, or in use |
//! | `quiet`, `memory`, `soak` | calls that neither allocate nor enter the kernel; memory; endurance |
//! | `one_core` | a selection of all this on a single core |
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
mod nodes;
mod one_core;
mod perturbed;
mod quiet;
mod residue;
mod signals;
mod soak;
mod steps;
mod stopped;
mod windows;
