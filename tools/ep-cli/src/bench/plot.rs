//! The chart of a sweep: time over tokens.

use std::fs::OpenOptions;
use std::path::Path;

use anyhow::{Context, Result};

use super::measure::Measured;
use super::shape::{Op, RowOrder};
use super::stats::{Samples, micros};
use crate::svg::{Chart, Series};

/// Finds out, before anything is measured, whether the chart can be written. What is there stays as it is.
///
/// # Errors
/// If the file cannot be written.
pub(crate) fn check(path: &Path) -> Result<()> {
    let is_new = !path.exists();
    OpenOptions::new().append(true).create(true).open(path).with_context(|| refused(path))?;
    if is_new {
        std::fs::remove_file(path).with_context(|| refused(path))?;
    }
    Ok(())
}

fn refused(path: &Path) -> String {
    format!("--plot cannot write {}", path.display())
}

/// Writes the chart of `measured` to `path`.
///
/// # Errors
/// If the file cannot be written.
pub(crate) fn write(path: &Path, measured: &[Measured]) -> Result<()> {
    std::fs::write(path, chart(measured).render()).with_context(|| refused(path))
}

fn chart(measured: &[Measured]) -> Chart {
    let mut series: Vec<Series> = Vec::new();
    for one in measured {
        let shape = &one.shape;
        let mut name = shape.op.to_string();
        if shape.op != Op::Plan {
            name.push_str(&format!(" {} {}", shape.dtype, shape.output));
        }
        if shape.with_plan {
            name.push_str(" with plan");
        }
        if shape.layout == RowOrder::ExpertMajor {
            name.push_str(" expert-major");
        }
        let limit = one.copies.first().map(|(_, samples)| samples);
        let lines: [(String, Option<&Samples>, bool); 3] = [
            (name.clone(), Some(&one.ours), false),
            (format!("{name}: MPI"), one.peer.as_ref(), true),
            (format!("{name}: plain copy"), limit, true),
        ];
        for (name, samples, dashed) in lines {
            let Some(samples) = samples else { continue };
            let point = (shape.tokens as f64, micros(samples.percentile(50.0)));
            match series.iter_mut().find(|series| series.name == name) {
                Some(series) => series.points.push(point),
                None => series.push(Series { name, points: vec![point], dashed }),
            }
        }
    }
    for series in &mut series {
        series.points.sort_by(|a, b| a.0.total_cmp(&b.0));
    }
    let first = measured.first().map(|one| &one.shape);
    let title = first.map_or(String::new(), |shape| {
        format!(
            "{} ranks, {} columns, top-{} of {} experts",
            shape.ranks, shape.hidden, shape.topk, shape.experts
        )
    });
    let (x, y) = ("tokens of each rank".to_string(), "median time of a call, µs".to_string());
    Chart { title, x, y, series }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::measure::tests::measured;

    #[test]
    fn each_op_and_what_it_is_compared_with_is_a_line() {
        let chart = chart(&[measured(200), measured(100)]);
        let names: Vec<&str> = chart.series.iter().map(|series| series.name.as_str()).collect();
        assert_eq!(
            names,
            ["dispatch bf16 window", "dispatch bf16 window: MPI", "dispatch bf16 window: plain copy"]
        );
        assert_eq!(chart.series[0].points, [(100.0, 5.0), (200.0, 5.0)]);
    }
}
