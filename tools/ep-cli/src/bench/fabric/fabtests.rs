//! `fi_rma_bw` of fabtests, as far as it is on PATH.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use super::{Network, Shape};

const PROGRAM: &str = "fi_rma_bw";

/// What it measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Measured {
    pub(super) us: f64,
    pub(super) mbs: f64,
}

/// Looks for the program.
///
/// # Errors
/// If it is not on PATH.
pub(super) fn find() -> Result<()> {
    let found = Command::new(PROGRAM).arg("-h").stdout(Stdio::null()).stderr(Stdio::null()).status();
    ensure!(
        found.is_ok(),
        "--peer fabtests needs {PROGRAM} on PATH: build fabtests from the sources of libfabric"
    );
    Ok(())
}

/// Runs a server and a client for about `round_ms`.
///
/// # Errors
/// If one fails, is silent, or prints something else.
pub(super) fn run(network: &Network, shape: Shape, round_ms: usize) -> Result<Measured> {
    // Enough for slow providers, and no more than a fast one does in a round.
    let writes = (round_ms * 200_000 / (shape.bytes + 1000)).clamp(shape.window, 1 << 20);
    let address = &network.addresses[0];
    let command = |client: bool| {
        let mut command = Command::new(PROGRAM);
        command.args(["-o", "writedata", "-U", "-p", &network.provider, "-S", &shape.bytes.to_string()]);
        command.args(["-W", &shape.window.to_string(), "-I", &writes.to_string(), "-s", address]);
        if client {
            command.arg(address);
        }
        command.envs(network.preload.iter().map(|path| ("LD_PRELOAD", path)));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        command
    };
    let mut server = command(false).spawn().context("starting fi_rma_bw")?;
    // It says nothing when it listens.
    std::thread::sleep(Duration::from_millis(300));
    let client = command(true).spawn().context("starting fi_rma_bw");
    let outcome = client.and_then(|client| finish(client, network.timeout));
    let _ = server.kill();
    let _ = server.wait();
    parse(&outcome?)
}

fn finish(mut child: Child, timeout: Duration) -> Result<String> {
    let deadline = Instant::now() + timeout;
    while child.try_wait()?.is_none() {
        if Instant::now() > deadline {
            let _ = child.kill();
            let _ = child.wait();
            bail!("fi_rma_bw did not end within {timeout:?}");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let output = child.wait_with_output()?;
    ensure!(output.status.success(), "fi_rma_bw ended with {}", output.status);
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Reads the last row under its headings.
fn parse(text: &str) -> Result<Measured> {
    let rows: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
    let heading =
        rows.iter().position(|row| row.contains(&"MB/sec")).context("fi_rma_bw printed no heading")?;
    let values =
        rows[heading + 1..].iter().rfind(|row| !row.is_empty()).context("fi_rma_bw printed no row")?;
    let number = |name: &str| -> Result<f64> {
        let at = rows[heading]
            .iter()
            .position(|word| *word == name)
            .with_context(|| format!("no column {name}"))?;
        values.get(at).and_then(|word| word.parse().ok()).with_context(|| format!("no number under {name}"))
    };
    Ok(Measured { us: number("usec/xfer")?, mbs: number("MB/sec")? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_of_fabtests_is_read_by_its_headings() -> Result<()> {
        let text = "bytes   #sent   #ack     total       time     MB/sec    usec/xfer   Mxfers/sec\n\
                    64k     1k      =1k      62m         0.02s   2690.54      24.36       0.04\n\n";
        assert_eq!(parse(text)?, Measured { us: 24.36, mbs: 2690.54 });
        assert!(parse("fi_getinfo: -61").is_err());
        assert!(parse("MB/sec usec/xfer\n").is_err());
        Ok(())
    }
}
