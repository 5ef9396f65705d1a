//! What a measurement says, as a line of JSON or a row of a table.

use serde::Serialize;

use super::fabtests::Measured;
use super::pair::Mode;
use super::{Network, Rounds, Shape};
use crate::table::{Align, Table};

/// One line of `--json`.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Line {
    op: &'static str,
    provider: String,
    libfabric: String,
    nics: usize,
    bytes: usize,
    window: usize,
    rounds: usize,
    /// Of a round.
    writes: usize,
    mode: Mode,
    /// Of a write: the time of a round, the median of all, over its writes.
    us: f64,
    mbs: f64,
    /// Millions of writes a second.
    mcmds: f64,
    peer: Option<&'static str>,
    peer_mode: Option<Mode>,
    peer_us: Option<f64>,
    peer_mbs: Option<f64>,
    /// The peer's time over ours: the median of the rounds that were run one after the other.
    ratio: Option<f64>,
    fabtests_us: Option<f64>,
    fabtests_mbs: Option<f64>,
    verified: bool,
}

fn rounded(x: f64, digits: i32) -> f64 {
    let scale = 10f64.powi(digits);
    (x * scale).round() / scale
}

/// The middle one, or the mean of the two.
pub(super) fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let (low, high) = ((sorted.len() - 1) / 2, sorted.len() / 2);
    f64::midpoint(sorted[low], sorted[high])
}

impl Line {
    pub(super) fn new(network: &Network, shape: Shape, ours: &Rounds, raw: Option<&Rounds>) -> Line {
        let us = |rounds: &Rounds| median(&rounds.ns) / 1e3;
        let mbs = |us: f64| rounded(shape.bytes as f64 / us, 2);
        let ratio = |raw: &Rounds| {
            let pairs: Vec<f64> = raw.ns.iter().zip(&ours.ns).map(|(raw, ours)| raw / ours).collect();
            rounded(median(&pairs), 3)
        };
        Line {
            op: "fabric",
            provider: network.provider.clone(),
            libfabric: network.library.clone(),
            nics: shape.nics,
            bytes: shape.bytes,
            window: shape.window,
            rounds: ours.ns.len(),
            writes: ours.writes,
            mode: ours.mode,
            us: rounded(us(ours), 3),
            mbs: mbs(us(ours)),
            mcmds: rounded(1.0 / us(ours), 4),
            peer: raw.map(|_| "raw"),
            peer_mode: raw.map(|raw| raw.mode),
            peer_us: raw.map(|raw| rounded(us(raw), 3)),
            peer_mbs: raw.map(|raw| mbs(us(raw))),
            ratio: raw.map(ratio),
            fabtests_us: None,
            fabtests_mbs: None,
            verified: true,
        }
    }

    /// Adds what `fi_rma_bw` said.
    pub(super) fn fabtests(&mut self, measured: &Measured) {
        (self.fabtests_us, self.fabtests_mbs) = (Some(measured.us), Some(measured.mbs));
    }
}

/// The table of `lines`.
pub(super) fn table(lines: &[Line]) -> String {
    let headings = [
        "bytes",
        "window",
        "NICs",
        "us",
        "MB/s",
        "M/s",
        "mode",
        "raw us",
        "raw MB/s",
        "mode",
        "ratio",
        "fabtests us",
    ];
    let columns = headings.map(|name| (name, if name == "mode" { Align::Left } else { Align::Right }));
    let mut table = Table::new(&columns);
    let or_none = |x: Option<f64>, digits: usize| x.map_or(String::from("-"), |x| format!("{x:.digits$}"));
    let mode = |mode: Option<Mode>| match mode {
        Some(Mode::Spin) => String::from("spin"),
        Some(Mode::Sleep) => String::from("sleep"),
        None => String::from("-"),
    };
    for line in lines {
        table.row(vec![
            line.bytes.to_string(),
            line.window.to_string(),
            line.nics.to_string(),
            format!("{:.2}", line.us),
            format!("{:.1}", line.mbs),
            format!("{:.4}", line.mcmds),
            mode(Some(line.mode)),
            or_none(line.peer_us, 2),
            or_none(line.peer_mbs, 1),
            mode(line.peer_mode),
            or_none(line.ratio, 3),
            or_none(line.fabtests_us, 2),
        ]);
    }
    table.to_string()
}

/// What the columns mean.
pub(super) const EXPLANATION: &str = "
us     time of a write: that of a round over its writes, the median of the rounds; until the bytes lie there
MB/s   10^6 bytes a second, M/s: 10^6 writes a second
mode   how completions are waited for: whichever was faster
ratio  the raw peer's time over ours: the median of pairs of rounds, one after the other
verified: up to 4096 places of 16 MiB were written once more, and all of its bytes compared";

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn ratios_are_medians_of_pairs_not_ratios_of_medians() -> anyhow::Result<()> {
        let network = Network {
            provider: String::from("tcp"),
            library: String::from("2.5"),
            preload: None,
            addresses: Vec::new(),
            timeout: Duration::ZERO,
        };
        let ours = Rounds { mode: Mode::Sleep, writes: 160, ns: vec![1000.0, 8000.0, 2000.0] };
        let raw = Rounds { mode: Mode::Spin, writes: 80, ns: vec![900.0, 8800.0, 2000.0] };
        let shape = Shape { bytes: 8192, window: 16, nics: 2 };
        let line = Line::new(&network, shape, &ours, Some(&raw));
        let json = serde_json::to_value(&line)?;
        assert_eq!((&json["us"], &json["mbs"], &json["ratio"]), (&2.0.into(), &4096.0.into(), &1.0.into()));
        assert_eq!((&json["mode"], &json["peer_mode"]), (&"sleep".into(), &"spin".into()));
        for field in
            ["op", "provider", "libfabric", "nics", "bytes", "window", "mcmds", "peer_us", "verified"]
        {
            assert!(!json[field].is_null(), "{field} in {json}");
        }
        let text = table(&[line]);
        assert!(text.lines().all(|line| line.chars().count() <= 120), "{text}");
        Ok(())
    }
}
