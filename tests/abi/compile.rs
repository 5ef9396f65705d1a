//! Compilers, scratch directories, and where cargo put the library.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What every translation unit of the tests must pass.
pub(crate) const STRICT: [&str; 4] = ["-Wall", "-Wextra", "-Wpedantic", "-Werror"];

/// The repository.
pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The text of `include/ep.h`.
pub(crate) fn header() -> String {
    fs::read_to_string(root().join("include/ep.h")).expect("include/ep.h is readable")
}

/// The header without comments.
pub(crate) fn header_code() -> String {
    let mut code = String::new();
    let text = header();
    let mut rest = text.as_str();
    while let Some((before, after)) = rest.split_once("/*") {
        code.push_str(before);
        rest = after.split_once("*/").expect("comments end").1;
    }
    code + rest
}

/// An empty directory of a test's own.
pub(crate) fn scratch(test: &str) -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("abi").join(test);
    let _ = fs::remove_dir_all(&dir);
    fs::create_dir_all(&dir).expect("the target directory is writable");
    dir
}

/// A C and a C++ compiler of one make.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Compiler {
    pub(crate) c: &'static str,
    pub(crate) cxx: &'static str,
}

pub(crate) const GCC: Compiler = Compiler { c: "gcc", cxx: "g++" };
const CLANG: Compiler = Compiler { c: "clang", cxx: "clang++" };

/// gcc, which must be there, and clang where it is.
pub(crate) fn compilers() -> Vec<Compiler> {
    let mut found = vec![GCC];
    match is_installed(CLANG.c) && is_installed(CLANG.cxx) {
        true => found.push(CLANG),
        false => eprintln!("clang is not installed: compiled by gcc only"),
    }
    found
}

pub(crate) fn is_installed(program: &str) -> bool {
    Command::new(program).arg("--version").output().is_ok_and(|output| output.status.success())
}

/// Runs a compiler on `sources` with the include path and [`STRICT`].
pub(crate) fn compile(program: &str, args: &[&str], sources: &[&Path]) -> Result<(), String> {
    let include = root().join("include");
    let mut command = Command::new(program);
    command.arg("-I").arg(include).args(STRICT).args(sources).args(args);
    let output = command.output().unwrap_or_else(|error| panic!("{program} could not be run: {error}"));
    match output.status.success() {
        true => Ok(()),
        false => Err(format!("{command:?}\n{}", String::from_utf8_lossy(&output.stderr))),
    }
}

/// The shared object of this build. Cargo puts the fresh one beside the test, not above.
pub(crate) fn shared_object() -> PathBuf {
    let test = std::env::current_exe().expect("a test knows its path");
    let path = test.with_file_name("libep.so");
    assert!(path.exists(), "{} is not there; cargo builds it with the tests", path.display());
    path
}

/// A directory with the shared object under every name that a linker or loader asks for.
pub(crate) fn library_dir(test: &str) -> PathBuf {
    let dir = scratch(&format!("{test}-lib"));
    let object = shared_object();
    symlink(&object, dir.join("libep.so")).expect("the target directory takes links");
    if let Some(name) = soname(&object) {
        symlink(&object, dir.join(name)).expect("the target directory takes links");
    }
    dir
}

fn soname(object: &Path) -> Option<String> {
    let dynamic = output(Command::new("readelf").arg("-d").arg(object));
    let line = dynamic.lines().find(|line| line.contains("(SONAME)"))?;
    Some(line.split_once('[')?.1.split_once(']')?.0.to_string()).filter(|name| name != "libep.so")
}

/// Standard output of a command that must succeed.
pub(crate) fn output(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?} could not be run: {error}"));
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {}\n{stdout}{stderr}", output.status);
    stdout
}

/// The functions that the header declares, by name.
pub(crate) fn header_functions() -> Vec<String> {
    let code = header_code();
    let mut names: Vec<String> = code
        .split("EP_API ")
        .skip(1)
        .filter_map(|declaration| declaration.split_once('(')?.0.rsplit([' ', '*']).next())
        .filter(|name| name.starts_with("ep_"))
        .map(str::to_string)
        .collect();
    names.sort();
    assert!(names.len() > 20, "found {} functions in ep.h", names.len());
    names
}

/// The structs that the header defines, by name of their `_t`.
pub(crate) fn header_structs() -> Vec<String> {
    let code = header_code();
    let mut names: Vec<String> = code
        .split("typedef struct ")
        .skip(1)
        .filter_map(|rest| rest.split_once(" {").map(|(name, _)| name).filter(|name| !name.contains(';')))
        .map(|name| format!("{name}_t"))
        .collect();
    names.sort();
    assert!(names.len() > 10, "found {} structs in ep.h", names.len());
    names
}
