//! The rules of style that a machine can check, over every tracked file.
//!
//! `the_tree_is_tidy` is the check. The other tests show, on small texts, that each rule can fail.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const MAX_LINE: usize = 120;
const MAX_FILE_LINES: usize = 600;
const MAX_FN_LINES: usize = 90;
const MAX_BLOB_BYTES: usize = 1 << 20;
/// How far above an ordering its comment may begin.
const COMMENT_REACH: usize = 4;

/// Marks a file that a program wrote, in one of its first lines.
const GENERATED: &str = "@generated";
const GENERATED_REACH: usize = 5;

/// Spelled in halves, so that this file does not break its own rule.
const UNFINISHED: [&str; 5] = [
    concat!("TO", "DO"),
    concat!("FIX", "ME"),
    concat!("XX", "X"),
    concat!("to", "do!"),
    concat!("unimpl", "emented!"),
];

#[derive(Debug, PartialEq)]
struct Finding {
    path: String,
    line: usize,
    rule: &'static str,
    what: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}: {}", self.path, self.line, self.rule, self.what)
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Language {
    Rust,
    C,
    Shell,
}

impl Language {
    fn of(path: &str) -> Option<Language> {
        if path == ".ci/run" {
            return Some(Language::Shell);
        }
        match path.rsplit_once('.')?.1 {
            "rs" => Some(Language::Rust),
            "c" | "h" | "cpp" | "cu" | "cuh" => Some(Language::C),
            "sh" => Some(Language::Shell),
            _ => None,
        }
    }
}

/// One source file, with its code and its comments told apart, line by line.
struct Source<'a> {
    path: &'a str,
    language: Language,
    lines: Vec<&'a str>,
    /// The lines without comments and without the inside of literals.
    code: Vec<String>,
    has_comment: Vec<bool>,
    /// Where test code begins: line 0 in a test file, else the first `#[cfg(test)]`.
    first_test_line: usize,
    findings: Vec<Finding>,
}

impl<'a> Source<'a> {
    fn new(path: &'a str, language: Language, text: &'a str) -> Source<'a> {
        let (code, has_comment) = match language {
            Language::Shell => (Vec::new(), Vec::new()),
            _ => split_comments(text, language),
        };
        let first_test_line = match is_test_file(path) {
            true => 0,
            false => code.iter().position(|line| line.contains("#[cfg(test)]")).unwrap_or(usize::MAX),
        };
        let lines = text.lines().collect();
        Source { path, language, lines, code, has_comment, first_test_line, findings: Vec::new() }
    }

    fn report(&mut self, line_idx: usize, rule: &'static str, what: impl Into<String>) {
        let (path, what) = (self.path.to_string(), what.into());
        self.findings.push(Finding { path, line: line_idx + 1, rule, what });
    }

    fn check(mut self) -> Vec<Finding> {
        self.check_lines();
        if self.language == Language::Rust {
            self.check_size();
            self.check_functions();
            self.check_library_code();
            self.check_orderings();
        }
        self.check_assembly();
        self.findings
    }

    fn check_lines(&mut self) {
        for (line_idx, line) in self.lines.clone().into_iter().enumerate() {
            let width = line.chars().count();
            if width > MAX_LINE {
                self.report(line_idx, "line length", format!("{width} characters, at most {MAX_LINE}"));
            }
            for mark in UNFINISHED.into_iter().filter(|mark| line.contains(mark)) {
                self.report(line_idx, "unfinished", format!("{mark} (finish it, or open an issue)"));
            }
            if self.language == Language::Rust && line.contains('\t') {
                self.report(line_idx, "tab", "Rust is indented with spaces");
            }
        }
    }

    fn check_size(&mut self) {
        let num_lines = self.lines.len();
        // What a program wrote nobody reads; a test checks it against its source.
        let generated = self.lines.iter().take(GENERATED_REACH).any(|line| line.contains(GENERATED));
        if num_lines > MAX_FILE_LINES && !generated {
            let what = format!("{num_lines} lines, at most {MAX_FILE_LINES}: split it by concern");
            self.report(MAX_FILE_LINES, "file length", what);
        }
    }

    fn check_functions(&mut self) {
        for function in functions(&self.code.join("\n")) {
            let num_lines = function.last_line - function.first_line + 1;
            if num_lines > MAX_FN_LINES {
                let what = format!("fn {} has {num_lines} lines, at most {MAX_FN_LINES}", function.name);
                self.report(function.first_line, "function length", what);
            }
        }
    }

    /// What code outside tests may not do: unwrap, or end the process.
    fn check_library_code(&mut self) {
        let may_exit = self.path == "tools/ep-cli/src/main.rs";
        for line_idx in 0..self.code.len().min(self.first_test_line) {
            let code = self.code[line_idx].clone();
            if code.contains(".unwrap()") {
                self.report(line_idx, "unwrap", "return the error, or expect(\"why it cannot fail\")");
            }
            for call in ["process::exit", "process::abort"] {
                if code.contains(call) && !may_exit {
                    self.report(line_idx, "exit", format!("{call} ends the caller's process"));
                }
            }
        }
    }

    fn check_orderings(&mut self) {
        const NAMES: [&str; 5] = ["Acquire", "Release", "AcqRel", "SeqCst", "Relaxed"];
        for line_idx in 0..self.code.len().min(self.first_test_line) {
            let code = self.code[line_idx].clone();
            for (at, _) in code.match_indices("Ordering::") {
                let after = &code[at + "Ordering::".len()..];
                let from = line_idx.saturating_sub(COMMENT_REACH);
                if after.starts_with('{') || after.starts_with('*') {
                    self.report(
                        line_idx,
                        "ordering",
                        "imports orderings; write Ordering::… where it is used",
                    );
                } else if NAMES.iter().any(|name| after.starts_with(name))
                    && !self.has_comment[from..=line_idx].contains(&true)
                {
                    let what = format!("no comment within {COMMENT_REACH} lines says what it pairs with");
                    self.report(line_idx, "ordering", what);
                }
            }
        }
    }

    fn check_assembly(&mut self) {
        if self.path.rsplit('/').next() == Some("ptx.cuh") {
            return;
        }
        for line_idx in 0..self.code.len() {
            let code = &self.code[line_idx];
            let found = match self.language {
                Language::Rust => code.contains("asm!"),
                _ => words(code).any(|word| matches!(word, "asm" | "__asm__" | "__asm")),
            };
            if found {
                self.report(line_idx, "assembly", "belongs in ptx.cuh, behind a named function");
            }
        }
    }
}

/// In a directory of tests, or a module of tests that has a file of its own.
fn is_test_file(path: &str) -> bool {
    let in_test_dir = path.split('/').any(|part| part == "tests" || part == "benches");
    in_test_dir || path.ends_with("/tests.rs") || path.ends_with("_tests.rs")
}

fn words(code: &str) -> impl Iterator<Item = &str> {
    code.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty())
}

/// Splits a text into lines of code, with comments and the inside of literals left out, and tells
/// which lines have a comment.
fn split_comments(text: &str, language: Language) -> (Vec<String>, Vec<bool>) {
    let chars: Vec<char> = text.chars().collect();
    let mut out = Splitter { code: vec![String::new()], has_comment: vec![false] };
    let mut at = 0;
    while at < chars.len() {
        let next = chars.get(at + 1).copied();
        let after_word = at > 0 && (chars[at - 1].is_alphanumeric() || chars[at - 1] == '_');
        match chars[at] {
            '/' if next == Some('/') => {
                let end = chars[at..].iter().position(|&c| c == '\n').map_or(chars.len(), |len| at + len);
                out.skip(&chars[at..end], true);
                at = end;
            }
            '/' if next == Some('*') => {
                let end = block_comment_end(&chars, at, language == Language::Rust);
                out.skip(&chars[at..end], true);
                at = end;
            }
            'r' if language == Language::Rust && !after_word && raw_string_end(&chars, at).is_some() => {
                let end = raw_string_end(&chars, at).expect("checked in the guard");
                out.skip(&chars[at..end], false);
                at = end;
            }
            '"' => {
                let end = quoted_end(&chars, at, '"');
                out.skip(&chars[at..end], false);
                at = end;
            }
            '\'' if is_char_literal(&chars, at, language, after_word) => {
                let end = quoted_end(&chars, at, '\'');
                out.skip(&chars[at..end], false);
                at = end;
            }
            c => {
                out.push(c);
                at += 1;
            }
        }
    }
    (out.code, out.has_comment)
}

struct Splitter {
    code: Vec<String>,
    has_comment: Vec<bool>,
}

impl Splitter {
    fn push(&mut self, c: char) {
        if c == '\n' {
            self.code.push(String::new());
            self.has_comment.push(false);
        } else {
            self.code.last_mut().expect("starts with one line").push(c);
        }
    }

    fn skip(&mut self, chars: &[char], comment: bool) {
        for &c in chars {
            if comment {
                *self.has_comment.last_mut().expect("starts with one line") = true;
            }
            self.push(if c == '\n' { '\n' } else { ' ' });
        }
    }
}

/// The index after a block comment; those of Rust nest.
fn block_comment_end(chars: &[char], start: usize, nests: bool) -> usize {
    let (mut depth, mut at) = (0, start);
    while at + 1 < chars.len() {
        match (chars[at], chars[at + 1]) {
            ('/', '*') if nests || depth == 0 => {
                depth += 1;
                at += 2;
            }
            ('*', '/') => {
                depth -= 1;
                at += 2;
                if depth == 0 {
                    return at;
                }
            }
            _ => at += 1,
        }
    }
    chars.len()
}

/// The index after `r"…"` or `r#"…"#` if one starts here.
fn raw_string_end(chars: &[char], start: usize) -> Option<usize> {
    let num_hashes = chars[start + 1..].iter().take_while(|&&c| c == '#').count();
    let mut at = start + 1 + num_hashes;
    if chars.get(at) != Some(&'"') {
        return None;
    }
    loop {
        at += 1;
        match chars.get(at) {
            None => return Some(chars.len()),
            Some('"') if chars[at + 1..].iter().take_while(|&&c| c == '#').count() >= num_hashes => {
                return Some(at + 1 + num_hashes);
            }
            Some(_) => {}
        }
    }
}

/// The index after the literal that starts here, or the end of the text.
fn quoted_end(chars: &[char], start: usize, quote: char) -> usize {
    let mut at = start + 1;
    while at < chars.len() {
        match chars[at] {
            '\\' => at += 2,
            c if c == quote => return at + 1,
            _ => at += 1,
        }
    }
    chars.len()
}

/// Tells a character from a lifetime in Rust, and from a digit separator in C++.
fn is_char_literal(chars: &[char], at: usize, language: Language, after_word: bool) -> bool {
    match language {
        Language::Rust => chars.get(at + 1) == Some(&'\\') || chars.get(at + 2) == Some(&'\''),
        _ => !after_word,
    }
}

#[derive(Debug, PartialEq)]
struct Function {
    name: String,
    first_line: usize,
    last_line: usize,
}

/// The functions with a body in Rust code that has no comments or literals left.
fn functions(code: &str) -> Vec<Function> {
    let bytes = code.as_bytes();
    let line_of = |at: usize| bytes[..at].iter().filter(|&&b| b == b'\n').count();
    let mut found = Vec::new();
    for (at, _) in code.match_indices("fn ") {
        if at > 0 && (bytes[at - 1].is_ascii_alphanumeric() || b"_'#".contains(&bytes[at - 1])) {
            continue;
        }
        let name: String =
            code[at + 3..].trim_start().chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
        if let Some(end) = body_end(&bytes[at..]).filter(|_| !name.is_empty()) {
            found.push(Function { name, first_line: line_of(at), last_line: line_of(at + end) });
        }
    }
    found
}

/// Where the body ends of a function that starts at 0; `None` for a declaration.
fn body_end(bytes: &[u8]) -> Option<usize> {
    let (mut nested, mut braces) = (0, 0);
    for (at, byte) in bytes.iter().enumerate() {
        match byte {
            b'(' | b'[' if braces == 0 => nested += 1,
            b')' | b']' if braces == 0 => nested -= 1,
            b';' if braces == 0 && nested == 0 => return None,
            b'{' if nested == 0 || braces > 0 => braces += 1,
            b'}' if braces > 0 => {
                braces -= 1;
                if braces == 0 {
                    return Some(at);
                }
            }
            _ => {}
        }
    }
    None
}

fn check_text(path: &str, text: &str) -> Vec<Finding> {
    Language::of(path).map_or(Vec::new(), |language| Source::new(path, language, text).check())
}

fn check_blob(path: &str, bytes: &[u8]) -> Option<Finding> {
    let num_bytes = bytes.len();
    let too_large = num_bytes > MAX_BLOB_BYTES && bytes.contains(&0);
    let what = format!("{num_bytes} bytes of binary, at most {MAX_BLOB_BYTES}");
    too_large.then(|| Finding { path: path.to_string(), line: 1, rule: "blob", what })
}

/// The tracked files, or every file outside build and hidden directories where git has no say.
fn tracked_files(root: &Path) -> Vec<PathBuf> {
    let listed = Command::new("git").args(["ls-files", "-z"]).current_dir(root).output();
    if let Ok(output) = listed
        && output.status.success()
        && root.join(".git").exists()
    {
        let names = String::from_utf8(output.stdout).expect("paths are UTF-8");
        return names.split_terminator('\0').map(PathBuf::from).collect();
    }
    let mut files = Vec::new();
    walk(root, Path::new(""), &mut files);
    files
}

fn walk(root: &Path, below: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(root.join(below)).expect("the source tree is readable") {
        let entry = entry.expect("the source tree is readable");
        let name = entry.file_name();
        let path = below.join(&name);
        let is_dir = entry.file_type().expect("the source tree is readable").is_dir();
        let hidden = name.to_string_lossy().starts_with('.') && name != ".ci";
        match is_dir {
            true if hidden || name == "target" || name == "build" => {}
            true => walk(root, &path, files),
            false => files.push(path),
        }
    }
}

#[test]
fn the_tree_is_tidy() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let files = tracked_files(root);
    assert!(files.iter().any(|path| path.ends_with("tidy.rs")), "lists {} files, not this one", files.len());
    let mut findings = Vec::new();
    for path in &files {
        // A file that is deleted but not yet committed, or a link to nowhere, has nothing to check.
        let Ok(bytes) = fs::read(root.join(path)) else { continue };
        let name = path.to_string_lossy();
        findings.extend(check_blob(&name, &bytes));
        if Language::of(&name).is_some() {
            findings.extend(check_text(&name, &String::from_utf8(bytes).expect("sources are UTF-8")));
        }
    }
    let report: Vec<String> = findings.iter().map(Finding::to_string).collect();
    assert!(findings.is_empty(), "{} findings:\n{}", findings.len(), report.join("\n"));
}

// Each rule, shown to fail.

#[track_caller]
fn assert_finds(rule: &str, line: usize, path: &str, text: &str) {
    let findings = check_text(path, text);
    assert!(findings.iter().any(|f| f.rule == rule && f.line == line), "{rule} not in {findings:?}");
}

#[track_caller]
fn assert_clean(path: &str, text: &str) {
    assert_eq!(check_text(path, text), []);
}

#[test]
fn long_lines_are_found_in_every_language() {
    let long = "x".repeat(MAX_LINE + 1);
    for path in ["a.rs", "a.c", "a.h", "a.cu", "a.cuh", "a.sh", ".ci/run"] {
        assert_finds("line length", 2, path, &format!("\n{long}"));
        assert_clean(path, &long[1..]);
    }
    assert_clean("a.md", &long);
    assert_clean("a.rs", &"é".repeat(MAX_LINE));
}

#[test]
fn unfinished_work_is_found_also_in_comments() {
    for mark in UNFINISHED {
        assert_finds("unfinished", 1, "a.rs", &format!("// {mark} later"));
        assert_finds("unfinished", 1, "a.cuh", &format!("/* {mark} */"));
    }
}

#[test]
fn tabs_are_found_in_rust_only() {
    assert_finds("tab", 1, "a.rs", "\tlet x = 1;");
    assert_clean("a.c", "\tint x;");
}

#[test]
fn unwrap_is_found_outside_tests_only() {
    let text = "fn f() { g().unwrap(); }\n#[cfg(test)]\nfn t() { g().unwrap(); }\n";
    assert_eq!(check_text("src/a.rs", text).len(), 1);
    assert_finds("unwrap", 1, "src/a.rs", text);
    assert_clean("tests/a.rs", text);
    assert_clean("ep-core/benches/a.rs", text);
    assert_clean("src/a/tests.rs", text);
    assert_clean("src/a_tests.rs", text);
    assert_finds("unwrap", 1, "src/contests.rs", text);
    assert_clean("src/a.rs", "/// g().unwrap();\nfn f() { h(\".unwrap()\", r#\"\".unwrap()\"#) }");
}

#[test]
fn ending_the_process_is_left_to_the_command() {
    for call in ["std::process::exit(1)", "process::abort()"] {
        let text = format!("fn f() {{ {call} }}");
        assert_finds("exit", 1, "src/a.rs", &text);
        assert_clean("tools/ep-cli/src/main.rs", &text);
        assert_clean("tests/a.rs", &text);
    }
}

#[test]
fn long_files_are_found() {
    assert_finds("file length", MAX_FILE_LINES + 1, "a.rs", &"\n".repeat(MAX_FILE_LINES + 1));
    assert_clean("a.rs", &"\n".repeat(MAX_FILE_LINES));
    let long = "\n".repeat(MAX_FILE_LINES);
    assert_clean("a.rs", &format!("\n// @generated by b\n{long}"));
    assert_finds("file length", MAX_FILE_LINES + 1, "a.rs", &format!("{long}// @generated by b\n"));
}

#[test]
fn long_functions_are_found_whatever_their_signature() {
    for head in
        ["fn f() {", "pub const fn f<'a>(x: &'a str) -> [u8; 4] where T: Fn() -> u8 {", "unsafe fn f(\n) {"]
    {
        let extra = head.matches('\n').count();
        let body = |num_lines: usize| format!("//\n{head}\n{}}}\n", "x;\n".repeat(num_lines - 2 - extra));
        assert_finds("function length", 2, "a.rs", &body(MAX_FN_LINES + 1));
        assert_clean("a.rs", &body(MAX_FN_LINES));
    }
}

#[test]
fn braces_in_literals_and_declarations_do_not_confuse_functions() {
    let code = "trait T { fn a(x: [u8; 2]); fn b() { '{'; \"}}\"; r\"{\"; /* { /* { */ */ } }\nfn c(f: fn (u8)) {\n}\n";
    let (lines, _) = split_comments(code, Language::Rust);
    let found = functions(&lines.join("\n"));
    let names: Vec<_> = found.iter().map(|f| (f.name.as_str(), f.first_line, f.last_line)).collect();
    assert_eq!(names, [("b", 0, 0), ("c", 1, 2)]);
}

#[test]
fn orderings_need_a_comment_near() {
    let far = format!("// why\n{}x.load(Ordering::Acquire);", "y();\n".repeat(COMMENT_REACH));
    assert_finds("ordering", COMMENT_REACH + 2, "src/a.rs", &far);
    for name in ["Release", "AcqRel", "SeqCst", "Relaxed"] {
        assert_finds("ordering", 1, "src/a.rs", &format!("x.store(1, atomic::Ordering::{name});"));
    }
    assert_finds("ordering", 1, "src/a.rs", "use std::sync::atomic::Ordering::{Acquire, Release};");
    let near = format!("// why\n{}x.load(Ordering::Acquire);", "y();\n".repeat(COMMENT_REACH - 1));
    assert_clean("src/a.rs", &near);
    assert_clean("src/a.rs", "x.load(Ordering::Relaxed); // a counter; nothing hangs on it");
    assert_clean("src/a.rs", "a.cmp(b) == std::cmp::Ordering::Less");
    assert_clean("tests/a.rs", "x.load(Ordering::Acquire);");
    assert_clean("src/a.rs", "#[cfg(test)]\nmod tests { x.load(Ordering::Acquire); }");
}

#[test]
fn a_string_with_slashes_is_no_comment() {
    assert_finds("ordering", 1, "src/a.rs", "x.swap(\"// why\", Ordering::AcqRel);");
}

#[test]
fn assembly_stays_in_one_file() {
    assert_finds("assembly", 1, "src/a.rs", "unsafe { core::arch::asm!(\"nop\") }");
    assert_finds("assembly", 1, "kernels/include/ep/a.cuh", "asm volatile(\"nop;\");");
    assert_finds("assembly", 1, "a.c", "__asm__(\"nop\");");
    assert_clean("kernels/include/ep/ptx.cuh", "asm volatile(\"nop;\");");
    assert_clean("a.cu", "// asm volatile is elsewhere\nint plasma = 1'000;");
}

#[test]
fn large_binaries_are_found() {
    assert!(check_blob("a.bin", &vec![0; MAX_BLOB_BYTES + 1]).is_some());
    assert_eq!(check_blob("a.bin", &vec![0; MAX_BLOB_BYTES]), None);
    assert_eq!(check_blob("a.txt", &vec![b'x'; MAX_BLOB_BYTES + 1]), None);
}
