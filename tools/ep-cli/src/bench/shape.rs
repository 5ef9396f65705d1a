//! What is measured: one operation with one set of sizes.

use std::fmt;

use clap::ValueEnum;
use ep_core::config::Layout;
use ep_core::tensor::Dtype;
use serde::{Deserialize, Serialize};

/// The operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Op {
    /// Rows go to their experts
    Dispatch,
    /// Rows come back and are added
    Combine,
    /// A routing becomes a plan, and its counts are read
    Plan,
}

/// What a row is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Element {
    /// bfloat16
    Bf16,
    /// IEEE binary16
    F16,
    /// IEEE binary32
    F32,
    /// fp8 E4M3, and an fp32 scale for every 128 columns as a second payload
    Fp8,
    /// fp8 E4M3 without scales
    E4m3,
    /// fp8 E5M2 without scales
    E5m2,
}

/// Where outputs of a dispatch, and rows of a combine, lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Output {
    /// In a window of the group: peers write and read there
    Window,
    /// In the caller's own memory: through staging rings
    Copy,
}

/// The order of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum RowOrder {
    /// One row per token and rank
    Flat,
    /// One row per token and slot, by expert
    ExpertMajor,
}

/// Where routings come from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum RoutingSource {
    /// Every set of distinct experts is equally likely.
    Random,
    /// A recorded one; its layers take turns.
    Trace(String),
}

/// Everything that says what is measured; the same on every rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Shape {
    /// The operation.
    pub(crate) op: Op,
    /// How many ranks.
    pub(crate) ranks: usize,
    /// How many nodes; ranks of different nodes share no memory.
    pub(crate) nodes: usize,
    /// Tokens of each rank.
    pub(crate) tokens: usize,
    /// Columns of a row.
    pub(crate) hidden: usize,
    /// Slots of a token.
    pub(crate) topk: usize,
    /// Experts over all ranks.
    pub(crate) experts: usize,
    /// What a row is made of.
    pub(crate) dtype: Element,
    /// Where rows lie.
    pub(crate) output: Output,
    /// The order of rows.
    pub(crate) layout: RowOrder,
    /// Where routings come from.
    pub(crate) routing: RoutingSource,
    /// Dispatch: the time has the plan's update and counts in it, and every call a routing of its own.
    pub(crate) with_plan: bool,
    /// How many routings take turns.
    pub(crate) routings: usize,
    /// Bytes of a staging ring; 0: the library chooses.
    pub(crate) ring_bytes: u32,
    /// Of routings and rows.
    pub(crate) seed: u64,
}

/// Columns per scale of [`Element::Fp8`].
const COLS_PER_SCALE: usize = 128;

impl Element {
    /// Dtype and columns of each payload.
    pub(crate) fn payloads(self, hidden: usize) -> Vec<(Dtype, usize)> {
        match self {
            Element::Bf16 => vec![(Dtype::Bf16, hidden)],
            Element::F16 => vec![(Dtype::F16, hidden)],
            Element::F32 => vec![(Dtype::F32, hidden)],
            Element::Fp8 => vec![(Dtype::F8E4M3, hidden), (Dtype::F32, hidden.div_ceil(COLS_PER_SCALE))],
            Element::E4m3 => vec![(Dtype::F8E4M3, hidden)],
            Element::E5m2 => vec![(Dtype::F8E5M2, hidden)],
        }
    }

    /// The dtype if a combine can add it.
    pub(crate) fn addable(self) -> Option<Dtype> {
        match self {
            Element::Bf16 => Some(Dtype::Bf16),
            Element::F16 => Some(Dtype::F16),
            Element::F32 => Some(Dtype::F32),
            Element::Fp8 | Element::E4m3 | Element::E5m2 => None,
        }
    }
}

impl RowOrder {
    /// As the library calls it.
    pub(crate) fn layout(self) -> Layout {
        match self {
            RowOrder::Flat => Layout::Flat,
            RowOrder::ExpertMajor => Layout::ExpertMajor,
        }
    }
}

impl Shape {
    /// Bytes of a row over all payloads.
    pub(crate) fn row_bytes(&self) -> usize {
        self.dtype.payloads(self.hidden).iter().map(|(dtype, cols)| dtype.bytes() * cols).sum()
    }

    /// Experts of each rank.
    pub(crate) fn experts_per_rank(&self) -> Vec<usize> {
        let more = self.experts % self.ranks;
        (0..self.ranks).map(|rank| self.experts / self.ranks + usize::from(rank < more)).collect()
    }
}

macro_rules! named {
    ($($name:ident)*) => {
        $(impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let value = self.to_possible_value();
                f.pad(value.as_ref().map_or("", |value| value.get_name()))
            }
        })*
    };
}

named!(Op Element Output RowOrder);

impl fmt::Display for RoutingSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RoutingSource::Random => f.pad("random"),
            RoutingSource::Trace(name) => f.pad(&format!("trace:{name}")),
        }
    }
}
