//! Compiles the raw peer when it is asked for: it needs the source tree, a C compiler and libfabric's headers.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::bench::compile::{check, whole};

/// Compiles the program and returns its path.
///
/// # Errors
/// If the source, the compiler or libfabric are missing, or it does not compile.
pub(super) fn build() -> Result<PathBuf> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("fabric/peer.c");
    ensure!(
        source.exists(),
        "--peer raw compiles {}, which is not there: run `ep bench` from a source tree",
        source.display()
    );
    whole("fabric-peer", |unfinished| {
        let mut compiler = Command::new("cc");
        compiler
            .args(["-std=gnu11", "-O3", "-Wall", "-Wextra", "-o"])
            .arg(unfinished)
            .arg(&source)
            .arg("-lfabric");
        check("cc", compiler.output())
            .context("--peer raw needs cc and libfabric's headers: apt-get install libfabric-dev")
    })
}
