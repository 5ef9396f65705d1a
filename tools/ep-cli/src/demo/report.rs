//! What the demonstration shows: a table, heat maps, the sentence about what was verified; or JSON.

use ep_core::config::Layout;
use serde::Serialize;

use super::job::{DemoJob, Done, LAYOUTS, Step};
use crate::clock::whole;
use crate::heat::{Heat, render};
use crate::table::{Align, Table};
use crate::trace::Trace;

/// One layer of a trace in one layout, over all ranks.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Layer {
    trace: String,
    layer: usize,
    layout: &'static str,
    ranks: usize,
    tokens: usize,
    hidden: usize,
    dtype: &'static str,
    topk: usize,
    experts: usize,
    /// Rows that were sent, without padding.
    rows: u64,
    bytes: u64,
    plan_us: f64,
    dispatch_us: f64,
    combine_us: f64,
    dispatch_gbs: f64,
    combine_gbs: f64,
    /// Rows of the busiest rank over the mean.
    imbalance: f64,
    /// By source, then by destination.
    rows_by_rank: Vec<Vec<i64>>,
    verified_bytes: u64,
}

/// The last line of `--json`.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Verdict {
    verified: bool,
    what: String,
    bytes: u64,
    seconds: f64,
}

impl Layer {
    /// Sums up what the ranks did.
    pub(crate) fn new(
        job: &DemoJob,
        trace: &Trace,
        step: Step,
        layout: usize,
        done: &[&Done],
        verified: u64,
    ) -> Layer {
        let rows_of = |done: &&Done| done.rows_per_source.iter().sum::<i64>() as u64;
        let rows: u64 = done.iter().map(rows_of).sum();
        let busiest = done.iter().map(rows_of).max().unwrap_or(0);
        let bytes = rows * job.row_bytes() as u64;
        let micros = |ns: u64| ns as f64 / 1e3;
        let (dispatch, combine) =
            (whole(done.iter().map(|done| done.dispatch)), whole(done.iter().map(|done| done.combine)));
        let by_source =
            |source: usize| done.iter().map(|done| done.rows_per_source[source]).collect::<Vec<i64>>();
        Layer {
            trace: trace.name.to_string(),
            layer: step.layer,
            layout: match LAYOUTS[layout] {
                Layout::Flat => "flat",
                Layout::ExpertMajor => "expert-major",
            },
            ranks: job.ranks,
            tokens: job.tokens * job.ranks,
            hidden: job.hidden,
            dtype: "bf16",
            topk: trace.topk,
            experts: trace.num_experts,
            rows,
            bytes,
            plan_us: micros(whole(done.iter().map(|done| done.plan))),
            dispatch_us: micros(dispatch),
            combine_us: micros(combine),
            dispatch_gbs: bytes as f64 / dispatch.max(1) as f64,
            combine_gbs: bytes as f64 / combine.max(1) as f64,
            imbalance: (busiest * job.ranks as u64) as f64 / rows.max(1) as f64,
            rows_by_rank: (0..job.ranks).map(by_source).collect(),
            verified_bytes: verified,
        }
    }
}

/// A row per trace and layout, summed over layers.
pub(crate) fn table(layers: &[Layer]) -> String {
    let mut table = Table::new(&[
        ("trace", Align::Left),
        ("layout", Align::Left),
        ("tokens", Align::Right),
        ("rows", Align::Right),
        ("MB", Align::Right),
        ("plan ms", Align::Right),
        ("dispatch ms", Align::Right),
        ("GB/s", Align::Right),
        ("combine ms", Align::Right),
        ("GB/s", Align::Right),
        ("imbalance", Align::Right),
    ]);
    for group in groups(layers) {
        let sum = |value: &dyn Fn(&Layer) -> f64| group.iter().map(|layer| value(layer)).sum::<f64>();
        let (dispatch, combine) = (sum(&|layer| layer.dispatch_us), sum(&|layer| layer.combine_us));
        let bytes = sum(&|layer| layer.bytes as f64);
        table.row(vec![
            group[0].trace.clone(),
            group[0].layout.to_string(),
            format!("{:.0}", sum(&|layer| layer.tokens as f64)),
            format!("{:.0}", sum(&|layer| layer.rows as f64)),
            format!("{:.0}", bytes / 1e6),
            format!("{:.1}", sum(&|layer| layer.plan_us) / 1e3),
            format!("{:.1}", dispatch / 1e3),
            format!("{:.2}", bytes / dispatch / 1e3),
            format!("{:.1}", combine / 1e3),
            format!("{:.2}", bytes / combine / 1e3),
            format!("{:.2}", group.iter().map(|layer| layer.imbalance).fold(0.0, f64::max)),
        ]);
    }
    table.to_string()
}

/// What the columns mean.
pub(crate) const EXPLANATION: &str = "\
Sums over the layers. A time is from when the first rank begins until the last one is done.
imbalance: rows of the busiest rank over the mean, in the worst layer.";

/// The layers of each trace and layout.
fn groups(layers: &[Layer]) -> Vec<Vec<&Layer>> {
    let mut groups: Vec<Vec<&Layer>> = Vec::new();
    for layer in layers {
        let same =
            |group: &&mut Vec<&Layer>| (&group[0].trace, group[0].layout) == (&layer.trace, layer.layout);
        match groups.iter_mut().find(same) {
            Some(group) => group.push(layer),
            None => groups.push(vec![layer]),
        }
    }
    groups
}

/// Rows from rank to rank in expert-major layout, a map per trace.
pub(crate) fn heat(layers: &[Layer], colour: bool) -> String {
    let expert_major = groups(layers).into_iter().filter(|group| group[0].layout == "expert-major");
    let maps: Vec<Heat> = expert_major
        .map(|group| {
            let ranks = group[0].ranks;
            let rows =
                |from: usize, to: usize| group.iter().map(|layer| layer.rows_by_rank[from][to]).sum::<i64>();
            let of_source = |from: usize| (0..ranks).map(|to| rows(from, to) as f64).collect();
            Heat { title: group[0].trace.clone(), values: (0..ranks).map(of_source).collect() }
        })
        .collect();
    render(&maps, colour)
}

fn bytes_for_a_person(bytes: u64) -> String {
    let bytes = bytes as f64;
    match bytes {
        1e9.. => format!("{:.2} GB", bytes / 1e9),
        1e6.. => format!("{:.1} MB", bytes / 1e6),
        _ => format!("{:.1} kB", bytes / 1e3),
    }
}

impl Verdict {
    /// Says what was verified.
    pub(crate) fn new(job: &DemoJob, layers: &[Layer], seconds: f64) -> Verdict {
        let bytes = layers.iter().map(|layer| layer.verified_bytes).sum();
        let plural =
            |count: usize, word: &str| format!("{count} {word}{}", if count == 1 { "" } else { "s" });
        let what = format!(
            "{} x {} x {} on {}, {} of rows and sums bit for bit",
            plural(job.traces.len(), "trace"),
            plural(job.layers, "layer"),
            plural(LAYOUTS.len(), "layout"),
            plural(job.ranks, "rank"),
            bytes_for_a_person(bytes)
        );
        Verdict { verified: true, what, bytes, seconds }
    }

    /// The last line for a person.
    pub(crate) fn line(&self) -> String {
        format!("verified: {} ({:.1} s)", self.what, self.seconds)
    }
}
