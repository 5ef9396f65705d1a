//! The recorded routings of `tests/data/routing`, which are part of this program.

use anyhow::{Context, Result, bail, ensure};
use ep_core::reference::float::f16_to_f32;

/// A recorded routing: ids and weights of `[layer][block][token][slot]`.
pub(crate) struct Trace {
    /// Its name.
    pub(crate) name: &'static str,
    /// How many layers were recorded.
    pub(crate) num_layers: usize,
    /// Tokens of a layer, over all blocks, in the order they were recorded.
    pub(crate) num_tokens: usize,
    /// Slots of a token.
    pub(crate) topk: usize,
    /// Experts of a layer.
    pub(crate) num_experts: usize,
    ids: Vec<u16>,
    weights: Vec<u16>,
}

/// Some tokens of one layer.
pub(crate) struct Part {
    /// `tokens * topk` expert ids.
    pub(crate) ids: Vec<i32>,
    /// `tokens * topk` weights.
    pub(crate) weights: Vec<f32>,
}

struct File {
    name: &'static str,
    num_experts: usize,
    ids: &'static [u8],
    weights: &'static [u8],
}

macro_rules! file {
    ($name:literal, $num_experts:literal) => {
        File {
            name: $name,
            num_experts: $num_experts,
            ids: include_bytes!(concat!("../../../tests/data/routing/", $name, ".topk_idx.npy")),
            weights: include_bytes!(concat!("../../../tests/data/routing/", $name, ".topk_weights.npy")),
        }
    };
}

const FILES: [File; 3] =
    [file!("moe64_top8_balanced", 64), file!("moe256_top8_balanced", 256), file!("moe256_top8_skewed", 256)];

/// The names of the traces that there are.
pub(crate) fn names() -> [&'static str; 3] {
    [FILES[0].name, FILES[1].name, FILES[2].name]
}

impl Trace {
    /// The trace of that name.
    ///
    /// # Errors
    /// If there is none, with the names that there are.
    pub(crate) fn load(name: &str) -> Result<Trace> {
        let Some(file) = FILES.iter().find(|file| file.name == name) else {
            bail!("there is no trace {name:?}; there are {}", names().join(", "));
        };
        let ids = Array::parse(file.ids, "<i2").with_context(|| format!("the ids of {name}"))?;
        let weights = Array::parse(file.weights, "<f2").with_context(|| format!("the weights of {name}"))?;
        ensure!(ids.shape == weights.shape, "ids and weights of {name} differ in shape");
        let [num_layers, blocks, tokens, topk] = ids.shape[..] else {
            bail!("{name} has shape {:?}, expected four dimensions", ids.shape);
        };
        Ok(Trace {
            name: file.name,
            num_layers,
            num_tokens: blocks * tokens,
            topk,
            num_experts: file.num_experts,
            ids: ids.elements,
            weights: weights.elements,
        })
    }

    /// The first `tokens` tokens of the share that `rank` of `ranks` has of a layer.
    ///
    /// # Errors
    /// If the share is smaller.
    pub(crate) fn part(&self, layer: usize, rank: usize, ranks: usize, tokens: usize) -> Result<Part> {
        let share = self.num_tokens / ranks;
        ensure!(
            tokens <= share,
            "a layer of {} has {} tokens, {share} for each of {ranks} ranks; {tokens} were asked for",
            self.name,
            self.num_tokens
        );
        let first = (layer * self.num_tokens + rank * share) * self.topk;
        let range = first..first + tokens * self.topk;
        Ok(Part {
            ids: self.ids[range.clone()].iter().map(|&id| i32::from(id as i16)).collect(),
            weights: self.weights[range].iter().map(|&bits| f16_to_f32(bits)).collect(),
        })
    }
}

/// An array of two-byte elements out of an `.npy` file.
struct Array {
    shape: Vec<usize>,
    elements: Vec<u16>,
}

impl Array {
    fn parse(file: &[u8], descr: &str) -> Result<Array> {
        let rest = file.strip_prefix(b"\x93NUMPY").context("not an npy file")?;
        let (header_bytes, rest) = match rest {
            [1, _, a, b, rest @ ..] => (u16::from_le_bytes([*a, *b]) as usize, rest),
            [2 | 3, _, a, b, c, d, rest @ ..] => (u32::from_le_bytes([*a, *b, *c, *d]) as usize, rest),
            _ => bail!("an npy file of an unknown version"),
        };
        let (header, data) = rest.split_at_checked(header_bytes).context("the header is cut off")?;
        let header = std::str::from_utf8(header).context("the header is not text")?;
        ensure!(header.contains(&format!("'descr': '{descr}'")), "expected elements of {descr}: {header}");
        ensure!(header.contains("'fortran_order': False"), "expected C order: {header}");
        let shape = header.split_once("'shape': (").and_then(|(_, rest)| rest.split_once(')'));
        let shape = shape.with_context(|| format!("no shape in {header}"))?.0;
        let dimensions = shape.split(',').map(str::trim).filter(|text| !text.is_empty());
        let shape = dimensions.map(str::parse).collect::<std::result::Result<Vec<usize>, _>>()?;
        let expected: usize = shape.iter().product();
        ensure!(data.len() == 2 * expected, "{} bytes of data, expected {}", data.len(), 2 * expected);
        let elements = data.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]])).collect();
        Ok(Array { shape, elements })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_trace_is_whole() -> Result<()> {
        for name in names() {
            let trace = Trace::load(name)?;
            assert_eq!((trace.num_layers, trace.num_tokens, trace.topk), (4, 8192, 8));
            for rank in 0..4 {
                let part = trace.part(3, rank, 4, 2048)?;
                let in_range = |&id: &i32| (0..trace.num_experts as i32).contains(&id);
                assert!(part.ids.iter().all(in_range), "{name}");
                for token in part.weights.chunks(8) {
                    assert!((token.iter().sum::<f32>() - 1.0).abs() < 0.01, "{name}: {token:?}");
                }
            }
            assert!(trace.part(0, 0, 4, 2049).is_err());
        }
        Ok(())
    }

    #[test]
    fn files_that_are_cut_or_of_another_kind_are_refused() {
        let whole = FILES[0].ids;
        assert!(Array::parse(whole, "<i2").is_ok());
        for (file, descr) in
            [(whole, "<f2"), (&whole[..whole.len() - 1], "<i2"), (&whole[..50], "<i2"), (b"", "<i2")]
        {
            assert!(Array::parse(file, descr).is_err());
        }
    }
}
