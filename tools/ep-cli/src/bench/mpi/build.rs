//! Builds the MPI program when it is asked for: it needs the source tree, cargo and mpicc.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use anyhow::{Context, Result, bail, ensure};

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
    let target = target_dir(here)?;
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut shared = Command::new(cargo);
    shared.args(["build", "--release", "--locked", "--quiet", "-p", "ep-peer", "--target-dir"]).arg(&target);
    check("cargo", shared.current_dir(here).output())?;

    let dir = target.join("ep-bench");
    std::fs::create_dir_all(&dir)?;
    // A name of its own until it is whole: two runs may build at a time.
    let (program, unfinished) = (dir.join("peer"), dir.join(format!("peer.{}", std::process::id())));
    let mut compiler = Command::new("mpicc");
    compiler.args(["-std=c11", "-O3", "-Wall", "-Wextra", "-o"]).arg(&unfinished).arg(&source);
    compiler.arg(target.join("release/libep_peer.a")).args(["-lpthread", "-ldl", "-lm"]);
    check("mpicc", compiler.output())?;
    std::fs::rename(&unfinished, &program)?;
    Ok(program)
}

fn check(what: &str, output: std::io::Result<Output>) -> Result<()> {
    let output = output.with_context(|| format!("{what} does not start"))?;
    if output.status.success() {
        return Ok(());
    }
    bail!("{what} failed ({}): {}", output.status, String::from_utf8_lossy(&output.stderr).trim())
}

/// The target directory that this program was built in, or the one of its source tree.
fn target_dir(here: &Path) -> Result<PathBuf> {
    let exe = std::env::current_exe()?;
    let of_exe = exe.parent().and_then(Path::parent);
    let target = of_exe.filter(|dir| dir.join("CACHEDIR.TAG").exists()).map(Path::to_path_buf);
    Ok(target.unwrap_or_else(|| here.join("../../target")))
}
