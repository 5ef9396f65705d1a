//! Builds the MPI program when it is asked for: it needs the source tree, cargo and mpicc.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, ensure};

use crate::bench::compile::{check, target_dir, whole};

/// What to install where MPI is missing.
const INSTALL: &str = "install Open MPI: apt-get install openmpi-bin libopenmpi-dev";

/// Builds the program and returns its path.
///
/// # Errors
/// If the sources, cargo, mpicc or mpirun are missing, or something does not compile.
pub(crate) fn build() -> Result<PathBuf> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let source = here.join("mpi/peer.c");
    ensure!(
        source.exists(),
        "--peer mpi compiles {}, which is not there: run `ep bench` from a source tree",
        source.display()
    );
    for tool in ["mpicc", "mpirun"] {
        let found = Command::new(tool).arg("--version").output();
        ensure!(found.is_ok(), "--peer mpi needs {tool}, which is not there; {INSTALL}");
    }
    let target = target_dir()?;
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut shared = Command::new(cargo);
    shared.args(["build", "--release", "--locked", "--quiet", "-p", "ep-peer", "--target-dir"]).arg(&target);
    check("cargo", shared.current_dir(here).output())?;

    whole("peer", |unfinished| {
        let mut compiler = Command::new("mpicc");
        compiler.args(["-std=c11", "-O3", "-Wall", "-Wextra", "-o"]).arg(unfinished).arg(&source);
        compiler.arg(target.join("release/libep_peer.a")).args(["-lpthread", "-ldl", "-lm"]);
        check("mpicc", compiler.output())
    })
}
