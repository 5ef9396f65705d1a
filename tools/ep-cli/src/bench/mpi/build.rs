//! Builds the MPI program when it is asked for: it needs the source tree, cargo and mpicc.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, ensure};

use crate::bench::compile::{check, target_dir, whole};

/// Builds the program and returns its path.
///
/// # Errors
/// If the sources, cargo, mpicc or mpirun are missing, or something does not compile.
pub(crate) fn build() -> Result<PathBuf> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let source = here.join("mpi/peer.c");
    let needs = |missing: &str| {
        format!(
            "--peer mpi compiles an MPI program: it needs the source tree that this ep was built from ({}), cargo, and \
             Open MPI (apt-get install openmpi-bin libopenmpi-dev); {missing}",
            here.display()
        )
    };
    ensure!(source.exists(), needs("the source tree is not there"));
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    for tool in [cargo.as_os_str(), "mpicc".as_ref(), "mpirun".as_ref()] {
        let found = Command::new(tool).arg("--version").output();
        ensure!(found.is_ok(), needs(&format!("{} does not start", tool.display())));
    }
    let target = target_dir()?;
    let mut shared = Command::new(&cargo);
    shared.args(["build", "--release", "--locked", "--quiet", "-p", "ep-peer", "--target-dir"]).arg(&target);
    check("cargo", shared.current_dir(here).output())?;

    whole("peer", |unfinished| {
        let mut compiler = Command::new("mpicc");
        compiler.args(["-std=c11", "-O3", "-Wall", "-Wextra", "-o"]).arg(unfinished).arg(&source);
        compiler.arg(target.join("release/libep_peer.a")).args(["-lpthread", "-ldl", "-lm"]);
        check("mpicc", compiler.output())
    })
}
