//! Programs in C that are compiled when a benchmark compares itself with them.

use std::path::{Path, PathBuf};
use std::process::Output;

use anyhow::{Context, Result, bail};

/// Makes the program `name`: `build` writes it to the path that it is given. Returns where it is.
///
/// # Errors
/// What `build` fails with, or if there is no place for it.
pub(crate) fn whole(name: &str, build: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
    let dir = target_dir()?.join("ep-bench");
    std::fs::create_dir_all(&dir)?;
    // A name of its own until it is whole: two runs may build at a time.
    let (program, unfinished) = (dir.join(name), dir.join(format!("{name}.{}", std::process::id())));
    build(&unfinished)?;
    std::fs::rename(&unfinished, &program)?;
    Ok(program)
}

/// Whether a compiler did its work.
///
/// # Errors
/// If it does not start, or with what it says.
pub(crate) fn check(what: &str, output: std::io::Result<Output>) -> Result<()> {
    let output = output.with_context(|| format!("{what} does not start"))?;
    if output.status.success() {
        return Ok(());
    }
    bail!("{what} failed ({}): {}", output.status, String::from_utf8_lossy(&output.stderr).trim())
}

/// The target directory that this program was built in, or the one of its source tree.
///
/// # Errors
/// If this program has no path.
pub(crate) fn target_dir() -> Result<PathBuf> {
    let exe = std::env::current_exe()?;
    let of_exe = exe.parent().and_then(Path::parent);
    let target = of_exe.filter(|dir| dir.join("CACHEDIR.TAG").exists()).map(Path::to_path_buf);
    Ok(target.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target")))
}
