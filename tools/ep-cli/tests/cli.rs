//! The command as a user runs it.

use std::io::{BufRead, BufReader};
use std::process::{Command, Output, Stdio};

use serde_json::Value;

fn ep(arguments: &str) -> Output {
    let arguments = arguments.split_whitespace();
    Command::new(env!("CARGO_BIN_EXE_ep")).args(arguments).output().expect("the command starts")
}

fn succeeds(arguments: &str) -> String {
    let output = ep(arguments);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "ep {arguments}: {}\n{errors}", output.status);
    String::from_utf8(output.stdout).expect("the output is UTF-8")
}

fn fails(arguments: &str) -> String {
    let output = ep(arguments);
    assert!(!output.status.success(), "ep {arguments} succeeds");
    String::from_utf8(output.stderr).expect("the output is UTF-8")
}

fn json_lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{line}: {e}"))).collect()
}

#[test]
fn version_and_help_say_what_scripts_look_for() {
    assert_eq!(succeeds("--version"), format!("ep {}\n", env!("CARGO_PKG_VERSION")));
    let help = succeeds("help");
    for command in ["demo", "bench", "info"] {
        assert!(help.contains(command), "{help}");
    }
    assert!(!help.contains("rank-process"), "{help}");
    assert!(fails("").contains("Usage"));
}

#[test]
fn info_is_text_or_json() {
    let version = env!("CARGO_PKG_VERSION");
    assert!(succeeds("info").starts_with(&format!("ep {version}\n")));
    let info = &json_lines(&succeeds("info --json"))[0];
    assert_eq!(info["version"], version);
    assert_eq!(info["backends"]["host"]["available"], true);
}

#[test]
fn the_demo_verifies_every_trace_and_layout() {
    let text = succeeds("demo --ranks 3 --tokens 40 --hidden 48 --layers 2");
    let last = text.lines().last().expect("there is output");
    assert!(last.starts_with("verified: 3 traces x 2 layers x 2 layouts on 3 ranks"), "{text}");
    assert!(text.lines().all(|line| line.chars().count() <= 110), "{text}");
    assert!(text.contains("from 2") && text.contains("imbalance") && !text.contains('\x1b'), "{text}");

    let lines = json_lines(&succeeds("demo --tokens 16 --hidden 16 --traces moe256_top8_skewed --json"));
    assert_eq!(lines.len(), 4 * 2 + 1);
    assert_eq!(lines[8]["verified"], true);
    let compared =
        lines[..8].iter().map(|line| line["verified_bytes"].as_u64().expect("a number")).sum::<u64>();
    assert_eq!(lines[8]["bytes"], compared);
    let rows = lines[1]["rows"].as_u64();
    assert_eq!(rows, Some(4 * 16 * 8), "every slot has a row: {}", lines[1]);
}

#[test]
fn bench_measures_and_verifies_each_shape_of_a_sweep() {
    let plot = std::env::temp_dir().join(format!("ep-cli-test-{}.svg", std::process::id()));
    let sizes = "--ranks 2 --hidden 64 --experts 16 --topk 2 --tokens 8,32 --time 0.02 --iters 5";
    let text = succeeds(&format!("bench {sizes} --output window,copy --json --plot {}", plot.display()));
    let lines = json_lines(&text);
    assert_eq!(lines.len(), 2 + 4 + 4);
    for line in &lines {
        assert_eq!(line["verified"], true, "{line}");
        assert!(line["calls"].as_u64() >= Some(5) && line["p50_us"].as_f64() > Some(0.0), "{line}");
        assert!(line["p99_us"].as_f64() >= line["p50_us"].as_f64(), "{line}");
    }
    let svg = std::fs::read_to_string(&plot).expect("the plot was written");
    std::fs::remove_file(&plot).expect("the plot can be removed");
    assert!(svg.contains("dispatch bf16 window") && svg.contains("combine bf16 copy"), "{svg}");
}

#[test]
fn every_layout_dtype_and_number_of_ranks_is_verified() {
    let small = "--hidden 96 --topk 3 --tokens 33 --time 0.01 --iters 2 --output window,copy";
    for more in [
        "--ranks 1 --experts 10 --dtype bf16,f16,f32,fp8,e4m3,e5m2",
        "--ranks 3 --experts 10 --layout expert-major --dtype bf16,fp8",
        "--ranks 4 --routing trace:moe64_top8_balanced --with-plan",
        "--ranks 2 --experts 700",
    ] {
        let text = succeeds(&format!("bench {small} {more}"));
        assert!(text.lines().last().is_some_and(|line| line.starts_with("verified: ")), "{text}");
    }
}

#[test]
fn mistakes_are_told_with_what_was_expected() {
    for (arguments, expected) in [
        ("bench combine --dtype fp8", "bf16"),
        ("bench --routing trace:nothing", "moe256_top8_skewed"),
        ("bench --ranks 0", "1 to"),
        ("demo --tokens 5000", "2048"),
        ("demo --layers 9", "4"),
        ("bench plan --peer mpi", "plan"),
        // Before anything is measured: the run would take minutes.
        (
            "bench dispatch --tokens 8192 --time 600 --plot /nowhere/x.svg",
            "--plot cannot write /nowhere/x.svg",
        ),
        ("bench dispatch --layout expert-major --peer mpi", "flat"),
    ] {
        let text = fails(arguments);
        assert!(text.contains(expected), "{arguments}: {text}");
    }
}

#[test]
fn a_rank_without_a_parent_fails_and_does_not_wait() {
    let output = Command::new(env!("CARGO_BIN_EXE_ep")).arg("rank-process").stdin(Stdio::null()).output();
    let output = output.expect("the command starts");
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("no job"));
}

#[test]
fn a_reader_that_leaves_early_is_no_failure() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_ep"))
        .args("bench dispatch --ranks 2 --tokens 8,9,10 --hidden 64 --time 0.01 --iters 2 --json".split(' '))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the command starts");
    let mut output = BufReader::new(child.stdout.take().expect("the output is a pipe"));
    let mut line = String::new();
    output.read_line(&mut line).expect("there is a line");
    drop(output);
    assert!(line.contains("\"dispatch\""), "{line}");
    assert!(child.wait().expect("the command ends").success());
}

/// Ends the command and looks whether its ranks are gone.
#[test]
fn ranks_end_with_their_parent() {
    let mut parent = Command::new(env!("CARGO_BIN_EXE_ep"))
        .args("bench dispatch --ranks 2 --tokens 64 --hidden 64 --time 60".split(' '))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("the command starts");
    let children = || {
        let path = format!("/proc/{0}/task/{0}/children", parent.id());
        std::fs::read_to_string(path).unwrap_or_default()
    };
    let within_10_s = |done: &dyn Fn() -> bool| {
        (0..1000).any(|_| {
            std::thread::sleep(std::time::Duration::from_millis(10));
            done()
        })
    };
    assert!(within_10_s(&|| children().split_whitespace().count() == 2), "two ranks start");
    let ranks: Vec<String> = children().split_whitespace().map(str::to_string).collect();
    parent.kill().expect("the command runs");
    parent.wait().expect("the command ends");
    let gone = |pid: &String| match std::fs::read_to_string(format!("/proc/{pid}/stat")) {
        Ok(stat) => stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('Z')),
        Err(_) => true,
    };
    assert!(within_10_s(&|| ranks.iter().all(gone)), "the ranks {ranks:?} are still there");
}

#[test]
#[ignore = "compiles the MPI program and runs it: needs Open MPI"]
fn slow_the_mpi_peer_has_the_same_results_and_a_ratio() {
    let small = "--hidden 256 --tokens 50 --time 0.05 --iters 5 --json --peer mpi";
    for (more, num_lines) in [
        ("dispatch --ranks 3 --experts 20 --dtype bf16,fp8", 2),
        ("dispatch --with-plan --routing trace:moe256_top8_skewed", 1),
        ("combine --ranks 4 --dtype bf16,f16,f32", 3),
        ("dispatch --ranks 1", 1),
    ] {
        let lines = json_lines(&succeeds(&format!("bench {more} {small}")));
        assert_eq!(lines.len(), num_lines);
        for line in lines {
            assert_eq!((&line["peer"], &line["verified"]), (&"mpi".into(), &true.into()), "{line}");
            let (ours, theirs) = (line["p50_us"].as_f64(), line["peer_us"].as_f64());
            let ratio = line["ratio"].as_f64().expect("a ratio");
            assert!((ratio - theirs.unwrap() / ours.unwrap()).abs() < 0.01 * ratio + 0.01, "{line}");
        }
    }
}

#[test]
fn the_raw_path_is_measured_beside_libfabric_alone() {
    let needed = fails("bench fabric --provider nonsense");
    if needed.contains("no libfabric on this machine") {
        assert!(std::env::var_os("CI").is_none(), "promised in CI, but could not run: {needed}");
        return println!("skipped: {needed}");
    }
    assert!(needed.contains("EP_FABRIC_PROVIDER=nonsense is not there"), "{needed}");
    assert!(fails("bench fabric --addresses 192.0.2.77").contains("192.0.2.77"));
    assert!(fails("bench fabric --sizes 64M").contains("16M"));

    let lines = json_lines(&succeeds("bench fabric --quick --peer raw --nics 1,2 --json"));
    assert_eq!(lines.len(), 2 * 3);
    for line in &lines {
        assert_eq!((&line["op"], &line["verified"]), (&"fabric".into(), &true.into()), "{line}");
        for field in ["us", "mcmds", "peer_us", "ratio"] {
            assert!(line[field].as_f64() > Some(0.0), "{field} in {line}");
        }
    }
    assert_eq!((&lines[5]["nics"], &lines[5]["bytes"]), (&2.into(), &65536.into()));
    let text = succeeds("bench fabric --sizes 8,1K --rounds 2 --round-ms 5");
    assert!(
        text.contains("M/s") && text.lines().filter(|line| line.contains("16     1")).count() == 2,
        "{text}"
    );
}
