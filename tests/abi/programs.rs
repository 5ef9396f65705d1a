//! Whole programs in C and C++, as a user writes them: plain, under valgrind, and with the address
//! sanitizer. The C program starts its ranks as processes, the C++ program as threads.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::compile::{GCC, compile, is_installed, library_dir, output, root, scratch};

struct Program {
    built: PathBuf,
    library: PathBuf,
}

impl Program {
    fn command(&self) -> Command {
        self.under(&[])
    }

    /// The program as the last arguments of `tool`.
    fn under(&self, tool: &[&str]) -> Command {
        let mut command = match tool {
            [] => Command::new(&self.built),
            [name, args @ ..] => {
                let mut command = Command::new(name);
                command.args(args).arg(&self.built);
                command
            }
        };
        command.env("LD_LIBRARY_PATH", &self.library);
        command
    }
}

fn build(test: &str, compiler: &str, source: &str, args: &[&str]) -> Program {
    let (built, library) = (scratch(test).join("program"), library_dir(test));
    let link = format!("-L{}", library.display());
    let mut all = vec!["-g", "-o", path_text(&built), &link];
    all.extend(args);
    all.extend(["-lep", "-lm", "-lpthread"]);
    compile(compiler, &all, &[&root().join(source)]).unwrap_or_else(|error| panic!("{error}"));
    Program { built, library }
}

fn path_text(path: &Path) -> &str {
    path.to_str().expect("the target directory is UTF-8")
}

fn c_program(test: &str, args: &[&str]) -> Program {
    build(test, GCC.c, "examples/c/moe_layer.c", &[&["-std=c99"], args].concat())
}

fn cxx_program(test: &str, args: &[&str]) -> Program {
    build(test, GCC.cxx, "tests/c/consumer.cpp", &[&["-std=c++17"], args].concat())
}

/// Valgrind's arguments, or `None` where it may be and is missing.
fn valgrind() -> Option<[&'static str; 7]> {
    if is_installed("valgrind") {
        return Some([
            "valgrind",
            "--quiet",
            "--error-exitcode=99",
            "--leak-check=full",
            "--errors-for-leak-kinds=definite,indirect,possible",
            concat!("--suppressions=", env!("CARGO_MANIFEST_DIR"), "/tests/c/valgrind.supp"),
            "--fair-sched=yes",
        ]);
    }
    assert!(std::env::var_os("CI").is_none(), "valgrind is not installed, and CI promises it");
    eprintln!("valgrind is not installed: this test checked nothing");
    None
}

#[test]
fn the_c_example_runs_with_any_number_of_processes() {
    let program = c_program("c-plain", &["-O2"]);
    for num_ranks in ["1", "2", "3", "8"] {
        let text = output(program.command().arg(num_ranks));
        assert!(text.contains(&format!("ok: {num_ranks} ranks, 0 failed")), "{text}");
        assert!(text.contains(" tokens, 0 wrong"), "{text}");
    }
}

#[test]
fn the_c_example_is_a_rank_when_told_so() {
    let program = c_program("c-ranks", &["-O2"]);
    let file = program.built.with_file_name("id");
    let rank = |rank: &str| {
        let mut command = program.command();
        command.env("RANK", rank).env("WORLD_SIZE", "2").env("EP_UNIQUE_ID_FILE", &file);
        command
    };
    let first = rank("0").stdout(Stdio::null()).spawn().expect("the program starts");
    output(&mut rank("1"));
    assert!(first.wait_with_output().expect("the program ends").status.success());
}

#[test]
fn the_c_example_is_clean_under_valgrind() {
    let Some(valgrind) = valgrind() else { return };
    let program = c_program("c-valgrind", &["-O1"]);
    output(program.under(&valgrind).arg("2"));
}

#[test]
fn the_c_example_is_clean_under_asan() {
    let program = c_program("c-asan", &["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]);
    assert_sanitized(&program);
    output(program.command().arg("2"));
}

#[test]
fn the_cxx_consumer_runs() {
    let text = output(&mut cxx_program("cxx-plain", &["-O2"]).command());
    assert_eq!(text, "ok\n");
}

#[test]
fn the_cxx_consumer_is_clean_under_valgrind() {
    let Some(valgrind) = valgrind() else { return };
    output(&mut cxx_program("cxx-valgrind", &["-O1"]).under(&valgrind));
}

#[test]
fn the_cxx_consumer_is_clean_under_asan() {
    let program =
        cxx_program("cxx-asan", &["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]);
    assert_sanitized(&program);
    output(&mut program.command());
}

/// A sanitizer that was not linked finds nothing.
fn assert_sanitized(program: &Program) {
    let needed = output(Command::new("readelf").arg("-d").arg(&program.built));
    assert!(needed.contains("libasan"), "{needed}");
}
