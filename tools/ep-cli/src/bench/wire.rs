//! What a call sends between nodes: counted, by the formula of `docs/FABRIC.md`, and what must cross in any case.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use ep_core::engine::Group;
use serde::{Deserialize, Serialize};

use super::rank::owners;
use super::routing::rank_routing;
use super::shape::{Op, RowOrder, Shape};
use crate::place::node_of;

/// Messages and their bytes, without those that are credit alone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Traffic {
    /// Messages.
    pub(crate) messages: u64,
    /// Their bytes.
    pub(crate) bytes: u64,
}

/// What a call sends between nodes, summed over the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Wire {
    /// As the proxies counted it.
    pub(crate) counted: Traffic,
    /// By the formula; None where it says nothing, since a row does not fit a message.
    pub(crate) formula: Option<Traffic>,
    /// Row bytes if each row crosses once to each node that it has an expert on, or comes back as one sum.
    pub(crate) least: u64,
    /// Row bytes that must cross so that rows can be added in the order that the call has.
    pub(crate) must: u64,
}

/// Counters that did not move for so long have counted all.
const STILL: Duration = Duration::from_millis(100);
/// Bytes before each message's records, before a descriptor's tails, and what everything is padded to.
const HEAD: u64 = 64;
const DESC: u64 = 288;
const PAD: u64 = 16;

impl Traffic {
    /// What `group` has sent since it was made, once the proxy has counted all of it.
    ///
    /// # Errors
    /// If it goes on sending until `patience` is over.
    pub(crate) fn of(group: &Group, patience: Duration) -> Result<Traffic> {
        let deadline = Instant::now() + patience;
        let (mut last, mut since) = (Traffic::now(group), Instant::now());
        while since.elapsed() < STILL {
            ensure!(Instant::now() < deadline, "the network is still at work after {patience:?}");
            std::thread::sleep(Duration::from_millis(5));
            let now = Traffic::now(group);
            if now != last {
                (last, since) = (now, Instant::now());
            }
        }
        Ok(last)
    }

    fn now(group: &Group) -> Traffic {
        let mut sum = Traffic::default();
        for (_, stats) in group.link_stats() {
            sum.add(stats.messages, stats.bytes);
        }
        sum
    }

    /// What came since `before`.
    pub(crate) fn since(self, before: Traffic) -> Traffic {
        Traffic { messages: self.messages - before.messages, bytes: self.bytes - before.bytes }
    }

    fn add(&mut self, messages: u64, bytes: u64) {
        self.messages += messages;
        self.bytes += bytes;
    }
}

impl std::iter::Sum for Traffic {
    fn sum<I: Iterator<Item = Traffic>>(parts: I) -> Traffic {
        parts.fold(Traffic::default(), |mut sum, part| {
            sum.add(part.messages, part.bytes);
            sum
        })
    }
}

/// Compares what was counted in a call with this routing with the formula. `chunk_bytes` is the size of a message.
///
/// # Errors
/// If the routing cannot be had.
pub(crate) fn compare(shape: &Shape, routing: usize, chunk_bytes: usize, counted: Traffic) -> Result<Wire> {
    let mut wire = Wire { counted, formula: Some(Traffic::default()), least: 0, must: 0 };
    let owners = owners(shape);
    for rank in 0..shape.ranks {
        let ids = rank_routing(shape, routing, rank)?.ids;
        for node in (0..shape.nodes).filter(|&node| node != shape.node_of(rank)) {
            wire.add_cell(shape, &Cell::new(shape, &owners, &ids, node), chunk_bytes as u64);
        }
    }
    Ok(wire)
}

/// What one rank has to do with one node.
struct Cell {
    ranks: Vec<usize>,
    /// Of each token that has an expert there, in order: distinct ranks, and slots.
    tokens: Vec<(u64, u64)>,
}

impl Cell {
    fn new(shape: &Shape, owners: &[usize], ids: &[i32], node: usize) -> Cell {
        let count = |token: &[i32]| {
            let there = token.iter().map(|&id| owners[id as usize]);
            let mut ranks: Vec<usize> = there.filter(|&owner| shape.node_of(owner) == node).collect();
            let slots = ranks.len() as u64;
            ranks.sort_unstable();
            ranks.dedup();
            (ranks.len() as u64, slots)
        };
        Cell {
            ranks: (0..shape.ranks).filter(|&rank| shape.node_of(rank) == node).collect(),
            tokens: ids.chunks(shape.topk).map(count).filter(|(_, slots)| *slots != 0).collect(),
        }
    }
}

impl Wire {
    fn add_cell(&mut self, shape: &Shape, cell: &Cell, chunk_bytes: u64) {
        let tokens = cell.tokens.len() as u64;
        let row = shape.row_bytes() as u64;
        let rows = |&(ranks, slots): &(u64, u64)| if shape.layout == RowOrder::Flat { ranks } else { slots };
        if shape.op != Op::Plan {
            self.least += tokens * row;
            let crossing: u64 = cell.tokens.iter().map(rows).sum();
            self.must += row * if shape.op == Op::Combine { crossing } else { tokens };
        }
        let Some(formula) = &mut self.formula else { return };
        let desc = |tails: u64| (DESC + 4 * tails).next_multiple_of(PAD);
        if shape.op == Op::Plan || shape.with_plan {
            let experts = shape.experts_per_rank();
            formula.add(1, desc(cell.ranks.iter().map(|&rank| 2 + experts[rank] as u64).sum()));
        }
        if shape.op == Op::Plan {
            return;
        }
        formula.add(1, desc(cell.ranks.len() as u64));
        let room = chunk_bytes - HEAD;
        if shape.op == Op::Dispatch {
            let ids = (4 * (1 + 3 * shape.topk as u64)).next_multiple_of(PAD);
            let payloads = shape.dtype.payloads(shape.hidden).into_iter();
            let payloads =
                payloads.map(|(dtype, cols)| ((dtype.bytes() * cols) as u64).next_multiple_of(PAD));
            let record = ids + payloads.sum::<u64>();
            if record > room {
                self.formula = None;
                return;
            }
            let messages = tokens.div_ceil(room / record);
            formula.add(messages, messages * HEAD + tokens * record);
            return;
        }
        let ids = (4 * (1 + 2 * shape.topk as u64)).next_multiple_of(PAD);
        let mask = (4 * (shape.topk as u64).div_ceil(32)).next_multiple_of(PAD);
        let answer = |token: &(u64, u64)| mask + rows(token) * row.next_multiple_of(PAD);
        match questions(
            cell.tokens.iter().map(answer),
            room,
            ((chunk_bytes / 8).max(3200).min(chunk_bytes).next_multiple_of(64) - HEAD) / ids,
        ) {
            Some(questions) => {
                let answers: u64 = cell.tokens.iter().map(answer).sum();
                formula.add(2 * questions, 2 * questions * HEAD + tokens * ids + answers);
            }
            None => self.formula = None,
        }
    }
}

/// Questions for tokens whose answers have these bytes, `most` tokens in one. None: an answer does not fit.
fn questions(answers: impl Iterator<Item = u64>, room: u64, most: u64) -> Option<u64> {
    let (mut questions, mut used, mut tokens) = (0, 0, most);
    for bytes in answers {
        if bytes > room {
            return None;
        }
        if tokens == most || used + bytes > room {
            (questions, used, tokens) = (questions + 1, 0, 0);
        }
        (used, tokens) = (used + bytes, tokens + 1);
    }
    Some(questions)
}

impl Shape {
    /// The node of a rank.
    pub(crate) fn node_of(&self, rank: usize) -> usize {
        node_of(rank, self.ranks, self.nodes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::measure::tests::measured;

    #[test]
    fn questions_end_where_the_answer_or_the_question_is_full() {
        assert_eq!(questions([10; 7].into_iter(), 30, 100), Some(3));
        assert_eq!(questions([10; 7].into_iter(), 30, 2), Some(4));
        assert_eq!(questions([10, 25, 5, 1].into_iter(), 30, 100), Some(3));
        assert_eq!(questions([31].into_iter(), 30, 100), None);
        assert_eq!(questions([].into_iter(), 30, 100), Some(0));
    }

    #[test]
    fn a_row_crosses_once_to_a_node_and_comes_back_as_often_as_the_order_says() -> Result<()> {
        // Four ranks on two nodes, an expert each; every token goes to all.
        let shape = Shape { nodes: 2, topk: 4, experts: 4, hidden: 64, ..measured(10).shape };
        let wire = compare(&shape, 0, 4096, Traffic::default())?;
        let row = 128;
        assert_eq!((wire.least, wire.must), (4 * 10 * row, 4 * 10 * row));
        // 64 bytes of ids and weights beside each row: 21 fit a message.
        let each = Traffic { messages: 2, bytes: 304 + 64 + 10 * (64 + row) };
        assert_eq!(wire.formula, Some(Traffic { messages: 4 * each.messages, bytes: 4 * each.bytes }));
        let wire = compare(&Shape { op: Op::Combine, ..shape.clone() }, 0, 4096, Traffic::default())?;
        assert_eq!((wire.least, wire.must), (4 * 10 * row, 4 * 2 * 10 * row));
        let each = Traffic { messages: 3, bytes: 304 + 2 * 64 + 10 * (48 + 16 + 2 * row) };
        assert_eq!(wire.formula, Some(Traffic { messages: 4 * each.messages, bytes: 4 * each.bytes }));
        let wide = Shape { hidden: 1 << 20, ..shape };
        assert_eq!(compare(&wide, 0, 4096, Traffic::default())?.formula, None);
        Ok(())
    }
}
