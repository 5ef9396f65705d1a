//! `kernels/include/ep/command.h` and `ep_core::net::command` pack the same commands into the same bits.

use std::fmt::Write as _;
use std::path::Path;
use std::process::Command as Process;

use ep_core::net::command::{COMMAND_BYTES, Command, MAX_BYTES, OP_CREDIT, OP_SEND, UNIT};
use ep_core::net::{Kind, Stream};

/// Commands with every field at its ends and in between.
fn commands() -> Vec<Command> {
    let mut random = 0x5EED_u64;
    let mut draw = |bound: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        match random >> 60 {
            0 => 0,
            1 => bound - 1,
            _ => (random >> 20) % bound,
        }
    };
    (0..500)
        .map(|_| Command {
            op: draw(8) as u8,
            link: draw(8192) as u16,
            stream: draw(128) as u8,
            seq: draw(65536) as u16,
            bytes: draw(MAX_BYTES / UNIT + 1) * UNIT,
            source: draw(1 << 31) * UNIT,
            target: draw(1 << 32) * UNIT,
        })
        .collect()
}

/// A C program that prints both words of each command, and fails to compile where a constant differs.
fn program() -> String {
    let mut unit = String::from("#include <inttypes.h>\n#include <stdio.h>\n#include \"ep/command.h\"\n");
    let kind = |kind| Stream::new(0, kind).id() as u64;
    let constants = [
        ("EP_COMMAND_BYTES", COMMAND_BYTES as u64),
        ("EP_COMMAND_UNIT", UNIT),
        ("EP_COMMAND_SEND", OP_SEND.into()),
        ("EP_COMMAND_CREDIT", OP_CREDIT.into()),
        ("EP_STREAM_RADIX", Stream::new(1, Kind::Desc).id() as u64),
        ("EP_STREAM_DESC", kind(Kind::Desc)),
        ("EP_STREAM_ROWS", kind(Kind::Rows)),
        ("EP_STREAM_REQUEST", kind(Kind::Request)),
        ("EP_STREAM_RESPONSE", kind(Kind::Response)),
        ("EP_STREAM_ERROR", kind(Kind::Error)),
        ("EP_STREAM_CREDIT", kind(Kind::Credit)),
    ];
    for (c, rust) in constants {
        writeln!(unit, "EP_COMMAND_ASSERT({c} == {rust});").unwrap();
    }
    unit += "int main(void) {\n  ep_command_t c;\n";
    for (position, command) in commands().into_iter().enumerate() {
        let Command { op, link, stream, seq, bytes, source, target } = command;
        writeln!(
            unit,
            "  c = ep_command_pack(EP_COMMAND_PHASE({position}, 4), {op}, {link}, {stream}, {seq}, {bytes}u, \
             {source}u, {target}u);\n  printf(\"%016\" PRIx64 \" %016\" PRIx64 \"\\n\", c.words[0], c.words[1]);"
        )
        .unwrap();
    }
    unit + "  return 0;\n}\n"
}

/// What the program prints.
fn run(compiler: &str, standard: &str, unit: &str) -> Result<String, String> {
    let dir = tempfile::tempdir().map_err(|e| e.to_string())?;
    let (source, binary) = (dir.path().join("command.c"), dir.path().join("command"));
    std::fs::write(&source, unit).map_err(|e| e.to_string())?;
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels/include");
    let language = if compiler == "g++" { "c++" } else { "c" };
    let output = Process::new(compiler)
        .args([
            "-x",
            language,
            &format!("-std={standard}"),
            "-Wall",
            "-Wextra",
            "-Wpedantic",
            "-Werror",
            "-I",
        ])
        .arg(include)
        .arg(source)
        .arg("-o")
        .arg(&binary)
        .output()
        .map_err(|e| format!("{compiler}: {e}"))?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned());
    }
    let output = Process::new(binary).output().map_err(|e| e.to_string())?;
    String::from_utf8(output.stdout).map_err(|e| e.to_string())
}

#[test]
fn c_and_rust_pack_the_same_bits() {
    let expected: String = commands()
        .iter()
        .enumerate()
        .map(|(position, command)| {
            let [first, second] = command.encode(((position as u64 / 4) & 1) ^ 1);
            format!("{first:016x} {second:016x}\n")
        })
        .collect();
    for (compiler, standard) in [("gcc", "c11"), ("g++", "c++17")] {
        assert_eq!(run(compiler, standard, &program()).unwrap(), expected, "{compiler}");
    }
}

#[test]
fn a_difference_is_found() {
    let unit = program().replace("EP_STREAM_RADIX == 8", "EP_STREAM_RADIX == 9");
    assert!(run("gcc", "c11", &unit).unwrap_err().contains("EP_STREAM_RADIX"));
}
