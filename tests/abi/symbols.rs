//! What the shared object exports.

use std::fs;
use std::process::Command;

use crate::compile::{header_functions, output, root, shared_object};

/// The golden list: `name@@NODE` a line, as the installed library has them.
fn golden() -> Vec<String> {
    let path = root().join("packaging/libep.symbols");
    let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    text.lines().map(|line| line.split_once("@@").map_or(line, |(name, _)| name).to_string()).collect()
}

#[test]
fn the_library_exports_the_golden_list() {
    let listed = output(Command::new("nm").args(["-D", "--defined-only"]).arg(shared_object()));
    let mut exported: Vec<String> =
        listed.lines().filter_map(|line| line.split_whitespace().nth(2).map(str::to_string)).collect();
    exported.sort();
    assert_eq!(exported, golden(), "the exported symbols differ from packaging/libep.symbols");
}

#[test]
fn the_golden_list_is_the_header_s() {
    assert_eq!(golden(), header_functions(), "ep.h and packaging/libep.symbols name different functions");
}
