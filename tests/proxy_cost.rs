//! Nothing in the proxy's turn grows with the number of peers: counted in instructions, by valgrind.

#[path = "../benches/common/null_nic.rs"]
mod null_nic;

use std::process::Command;

const LINKS: &str = "EP_TEST_LINKS";
const ROUNDS: &str = "EP_TEST_ROUNDS";

/// The program that is counted: as many rounds of a message to each peer as it is told.
#[test]
#[ignore = "run by the other test, under valgrind"]
fn rounds() {
    let number = |name| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let (Some(num_links), Some(rounds)) = (number(LINKS), number(ROUNDS)) else { return };
    let (mut proxy, port) = null_nic::rank_0(num_links as usize, true);
    (0..rounds).for_each(|seq| null_nic::round(&mut proxy, &port, num_links as usize, seq));
}

/// Instructions that the program takes, or None without valgrind.
fn instructions(num_links: usize, rounds: usize) -> Option<u64> {
    let program = std::env::current_exe().expect("a test has a path");
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
        .arg(program)
        .args(["--exact", "rounds", "--ignored", "--test-threads=1"])
        .envs([(LINKS, num_links.to_string()), (ROUNDS, rounds.to_string())])
        .output()
        .ok()?;
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stdout));
    let count = text.lines().find_map(|line| line.split("Collected : ").nth(1)?.trim().parse().ok());
    Some(count.unwrap_or_else(|| panic!("valgrind counts instructions: {text}")))
}

#[test]
fn instructions_per_command_do_not_grow_with_the_number_of_peers() {
    const COMMANDS: usize = 8192;
    let per_command = |num_links: usize| {
        let rounds = COMMANDS / num_links;
        let (once, twice) = (instructions(num_links, rounds)?, instructions(num_links, 2 * rounds)?);
        Some((twice - once) as f64 / COMMANDS as f64)
    };
    let (Some(few), Some(many)) = (per_command(8), per_command(256)) else {
        assert!(std::env::var_os("CI").is_none(), "valgrind is not installed, and CI promises it");
        eprintln!("valgrind is not installed: this test checked nothing");
        return;
    };
    println!("{few:.0} instructions per command with 8 peers, {many:.0} with 256");
    assert!(many <= few * 1.02, "{few:.1} with 8 peers, {many:.1} with 256");
}
