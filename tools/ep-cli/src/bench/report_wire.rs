//! What went between nodes, as a part of a line of JSON or a row of a table of its own.

use serde::Serialize;

use super::measure::{Between, Measured};
use super::report::rounded;
use super::stats::micros;
use crate::table::{Align, Table};

/// The object `wire` of a line of `--json`: of one call, summed over the ranks.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct WireLine {
    pub(super) provider: String,
    network: String,
    messages: u64,
    bytes: u64,
    /// By the formula of `docs/FABRIC.md`; absent where a row does not fit a message.
    formula_messages: Option<u64>,
    formula_bytes: Option<u64>,
    /// Row bytes that must cross in the order in which rows are added.
    must_bytes: u64,
    /// Row bytes if each row crosses once to each node.
    least_bytes: u64,
    of_must: Option<f64>,
    raw_gbs: Option<f64>,
    /// The time in which the raw path moves the bytes.
    pub(super) raw_us: Option<f64>,
}

impl WireLine {
    /// Of a measurement.
    pub(super) fn new(between: &Between) -> WireLine {
        let wire = &between.wire;
        let bytes = wire.counted.bytes;
        WireLine {
            provider: between.provider.clone(),
            network: between.network.clone(),
            messages: wire.counted.messages,
            bytes,
            formula_messages: wire.formula.map(|formula| formula.messages),
            formula_bytes: wire.formula.map(|formula| formula.bytes),
            must_bytes: wire.must,
            least_bytes: wire.least,
            of_must: (wire.must != 0).then(|| rounded(bytes as f64 / wire.must as f64, 4)),
            raw_gbs: between.raw.map(|rate| rounded(rate / 1e9, 3)),
            raw_us: between.raw.map(|rate| rounded(bytes as f64 / rate * 1e6, 1)),
        }
    }
}

/// The table of what went between nodes.
pub(crate) fn table(results: &[Measured]) -> String {
    let mut table = Table::new(&[
        ("between nodes", Align::Left),
        ("tokens", Align::Right),
        ("messages", Align::Right),
        ("formula", Align::Right),
        ("wire MB", Align::Right),
        ("formula", Align::Right),
        ("must MB", Align::Right),
        ("least MB", Align::Right),
        ("of must", Align::Right),
        ("raw GB/s", Align::Right),
        ("raw us", Align::Right),
        ("us", Align::Right),
    ]);
    let or_none = |text: Option<String>| text.unwrap_or_else(|| String::from("-"));
    let megabytes = |bytes: u64| format!("{:.3}", bytes as f64 / 1e6);
    for measured in results {
        let Some(between) = &measured.between else { continue };
        let line = WireLine::new(between);
        table.row(vec![
            measured.shape.op.to_string(),
            measured.shape.tokens.to_string(),
            line.messages.to_string(),
            or_none(line.formula_messages.map(|messages| messages.to_string())),
            megabytes(line.bytes),
            or_none(line.formula_bytes.map(megabytes)),
            megabytes(line.must_bytes),
            megabytes(line.least_bytes),
            or_none(line.of_must.map(|part| format!("{part:.3}"))),
            or_none(line.raw_gbs.map(|rate| format!("{rate:.2}"))),
            or_none(line.raw_us.map(|us| format!("{us:.0}"))),
            format!("{:.0}", micros(measured.ours.percentile(50.0))),
        ]);
    }
    let network = results.iter().find_map(|measured| measured.between.as_ref());
    format!("\n{}\n{table}", network.map_or("", |between| &between.network))
}

/// What its columns mean.
pub(crate) const EXPLANATION: &str = "\
messages  of one call, over all links, beside the formula of docs/FABRIC.md; so for the bytes
must MB   row bytes that must cross so that rows are added in the call's order; least: once to each node
raw       writes of as many bytes by as many pairs of processes at once as there are ranks, in turns with ours
limit     raw us, and the time of the copy";
