//! What a measurement says, as a line of JSON or a row of a table.

use serde::Serialize;

use super::limit::CopyKind;
use super::measure::Measured;
use super::report_wire::WireLine;
use super::shape::RowOrder;
use super::stats::{Samples, micros};
use crate::table::{Align, Table};

/// One line of `--json`.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Line {
    op: String,
    device: &'static str,
    transport: String,
    ranks: usize,
    nodes: usize,
    tokens: usize,
    hidden: usize,
    topk: usize,
    experts: usize,
    dtype: String,
    output: String,
    layout: String,
    routing: String,
    with_plan: bool,
    calls: usize,
    min_us: f64,
    p50_us: f64,
    p99_us: f64,
    /// Summed over the ranks.
    bytes: f64,
    gbs: f64,
    limit: Option<String>,
    limit_us: Option<f64>,
    limit_gbs: Option<f64>,
    of_limit: Option<f64>,
    /// The same where every source byte is read once only, as by a copy of an array.
    distinct_limit_gbs: Option<f64>,
    of_distinct_limit: Option<f64>,
    peer: Option<&'static str>,
    peer_us: Option<f64>,
    peer_p99_us: Option<f64>,
    /// The peer's time over ours.
    ratio: Option<f64>,
    verified: bool,
    verified_rows: usize,
    /// More than `verified_rows` where sums were sampled.
    rows_in_all: usize,
    verified_bytes: usize,
    /// None: one node.
    #[serde(skip_serializing_if = "Option::is_none")]
    wire: Option<WireLine>,
}

pub(super) fn rounded(x: f64, digits: i32) -> f64 {
    let scale = 10f64.powi(digits);
    (x * scale).round() / scale
}

impl Line {
    /// The line of a measurement.
    pub(crate) fn new(measured: &Measured) -> Line {
        let shape = &measured.shape;
        let p50 = micros(measured.ours.percentile(50.0));
        let peer = measured.peer.as_ref();
        let limit = measured.copies.first();
        let time = |(_, samples): &(CopyKind, Samples)| micros(samples.percentile(50.0));
        let wire = measured.between.as_ref().map(WireLine::new);
        // Between nodes, what crosses is also copied at its source and at its end.
        let wire_us = wire.as_ref().and_then(|wire| wire.raw_us).unwrap_or(0.0);
        let limit_us = limit.map(|limit| time(limit) + wire_us);
        let distinct_us =
            measured.copies.iter().find(|(kind, _)| !kind.reuse).map(|copy| time(copy) + wire_us);
        let gbs = |us: f64| rounded(measured.bytes / us / 1e3, 3);
        Line {
            op: shape.op.to_string(),
            device: "host",
            transport: wire.as_ref().map_or(String::from("shm"), |wire| format!("fabric:{}", wire.provider)),
            ranks: shape.ranks,
            nodes: measured.num_nodes,
            tokens: shape.tokens,
            hidden: shape.hidden,
            topk: shape.topk,
            experts: shape.experts,
            dtype: shape.dtype.to_string(),
            output: shape.output.to_string(),
            layout: shape.layout.to_string(),
            routing: shape.routing.to_string(),
            with_plan: shape.with_plan,
            calls: measured.ours.len(),
            min_us: rounded(micros(measured.ours.percentile(0.0)), 1),
            p50_us: rounded(p50, 1),
            p99_us: rounded(micros(measured.ours.percentile(99.0)), 1),
            bytes: measured.bytes.round(),
            gbs: gbs(p50),
            limit: limit.map(|(kind, _)| match &wire {
                None => format!("{kind}, {} processes", shape.ranks),
                Some(wire) if wire.raw_us.is_none() => format!("{kind}, {} processes", shape.ranks),
                Some(_) => {
                    format!("{kind}, {0} processes, and the wire's bytes by {0} raw pairs", shape.ranks)
                }
            }),
            limit_us: limit_us.map(|us| rounded(us, 1)),
            limit_gbs: limit_us.map(gbs),
            of_limit: limit_us.map(|us| rounded(us / p50, 3)),
            distinct_limit_gbs: distinct_us.map(gbs),
            of_distinct_limit: distinct_us.map(|us| rounded(us / p50, 3)),
            peer: peer.map(|_| "mpi"),
            peer_us: peer.map(|samples| rounded(micros(samples.percentile(50.0)), 1)),
            peer_p99_us: peer.map(|samples| rounded(micros(samples.percentile(99.0)), 1)),
            ratio: peer.map(|samples| rounded(micros(samples.percentile(50.0)) / p50, 3)),
            verified: true,
            verified_rows: measured.verified.compared,
            rows_in_all: measured.verified.total,
            verified_bytes: measured.verified.bytes,
            wire,
        }
    }
}

/// The table of `lines`.
pub(crate) fn table(lines: &[Line]) -> String {
    let mut table = Table::new(&[
        ("op", Align::Left),
        ("tokens", Align::Right),
        ("hidden", Align::Right),
        ("dtype", Align::Left),
        ("output", Align::Left),
        ("p50 us", Align::Right),
        ("p99 us", Align::Right),
        ("MB", Align::Right),
        ("GB/s", Align::Right),
        ("limit", Align::Right),
        ("of limit", Align::Right),
        ("mpi us", Align::Right),
        ("ratio", Align::Right),
        ("verified", Align::Right),
    ]);
    let or_none = |x: Option<f64>, digits: usize| x.map_or("-".to_string(), |x| format!("{x:.digits$}"));
    for line in lines {
        let mut op = line.op.clone();
        if line.with_plan {
            op.push_str("+plan");
        }
        if line.layout == RowOrder::ExpertMajor.to_string() {
            op.push_str(" (em)");
        }
        table.row(vec![
            op,
            line.tokens.to_string(),
            line.hidden.to_string(),
            line.dtype.clone(),
            line.output.clone(),
            format!("{:.0}", line.p50_us),
            format!("{:.0}", line.p99_us),
            format!("{:.1}", line.bytes / 1e6),
            format!("{:.2}", line.gbs),
            or_none(line.limit_gbs, 2),
            line.of_limit.map_or("-".to_string(), |part| format!("{:.0} %", 100.0 * part)),
            or_none(line.peer_us, 0),
            or_none(line.ratio, 2),
            match line.rows_in_all == line.verified_rows {
                true => line.verified_rows.to_string(),
                false => format!("{} of {}", line.verified_rows, line.rows_in_all),
            },
        ]);
    }
    table.to_string()
}

/// What was verified.
pub(crate) fn verdict(lines: &[Line]) -> String {
    let rows: usize = lines.iter().map(|line| line.verified_rows).sum();
    let bytes: usize = lines.iter().map(|line| line.verified_bytes).sum();
    format!(
        "\nverified: a call of each of {} shapes, {rows} rows, sums and counts, {:.1} MB bit for bit",
        lines.len(),
        bytes as f64 / 1e6
    )
}

/// What the columns mean.
pub(crate) const EXPLANATION: &str = "\
p50, p99  time of a call, from when its first rank begins until its last rank is done
MB        row bytes of a call: what each rank sends to all ranks, itself included, summed over the ranks
limit     GB/s of the best plain copy of as many bytes by as many processes, measured in the same run
verified  rows (combine: sums, plan: counts) of one call that agree with the reference bit for bit";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::measure::tests::measured;

    #[test]
    fn a_line_has_every_field_that_programs_rely_on() -> anyhow::Result<()> {
        let json = serde_json::to_value(Line::new(&measured(64)))?;
        for field in [
            "op",
            "device",
            "transport",
            "ranks",
            "nodes",
            "tokens",
            "hidden",
            "topk",
            "experts",
            "dtype",
            "output",
            "p50_us",
            "p99_us",
            "bytes",
            "gbs",
            "limit",
            "limit_gbs",
            "of_limit",
            "ratio",
            "verified",
        ] {
            assert!(!json[field].is_null(), "{field} in {json}");
        }
        assert_eq!(
            (&json["gbs"], &json["of_limit"], &json["ratio"]),
            (&200.0.into(), &0.8.into(), &2.0.into())
        );
        Ok(())
    }

    #[test]
    fn the_table_fits_a_wide_terminal() {
        let text = table(&[Line::new(&measured(4096))]);
        assert!(text.lines().all(|line| line.chars().count() <= 120), "{text}");
        assert!(text.contains("80 %") && text.contains("2.00"), "{text}");
    }
}
