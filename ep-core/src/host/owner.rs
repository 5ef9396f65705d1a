//! The owner's side of a combine: adds the rows of this rank's tokens, in token order.

use super::ask::{Answer, answer, finish_answer};
use super::combine::Combine;
use super::exchange::{Exchange, Missing};
use super::item::row_end;
use super::pieces::{Pieces, direct_weights, missing_pieces, own_place, slot_of_weight};
use super::reduce::{Close, Reduction, Term, Values, reduce};
use super::response::{Form, has};
use super::scratch::{DirectPlace, Fetching, Piecing};
use super::scratch_between::CellState;
use super::serve::request_rows;
use super::wanted::{NONE_WANTED, WantedRows, sort};
use crate::config::{Layout, MAX_TOPK, ReduceOrder};
use crate::engine::{RingPositions, WindowTable};
use crate::error::Result;

/// A term of the token in progress.
#[derive(Clone, Copy, Debug, Default)]
struct OwnTerm {
    rank: usize,
    slot: usize,
    from: From,
}

/// Where a term comes from.
#[derive(Clone, Copy, Debug)]
enum From {
    /// A row at a rank of this node, by its number among the token's rows here.
    Here(usize),
    /// A row of a cell's answer.
    There { cell: usize, index: usize },
}

impl Default for From {
    fn default() -> Self {
        From::Here(0)
    }
}

/// Adds tokens.
pub(super) struct Owner<'a> {
    combine: &'a Combine<'a>,
    windows: &'a WindowTable,
    /// By place.
    holders: &'a mut [Fetching],
    pieces: &'a mut [Piecing],
    /// Rows that each rank had so far.
    rows_read: &'a mut [u64],
    token: usize,
    col: usize,
    wanted: WantedRows,
    num_wanted: usize,
    terms: [OwnTerm; MAX_TOPK],
    num_terms: usize,
    /// The token in progress was looked up.
    opened: bool,
}

/// Tokens that are added before the server's side gets its turn.
const TOKENS_PER_TURN: usize = 16;

impl<'a> Owner<'a> {
    pub(super) fn new(
        combine: &'a Combine<'a>,
        windows: &'a WindowTable,
        holders: &'a mut [Fetching],
        pieces: &'a mut [Piecing],
        rows_read: &'a mut [u64],
    ) -> Owner<'a> {
        holders.fill(Fetching::default());
        rows_read.fill(0);
        Owner {
            combine,
            windows,
            holders,
            pieces,
            rows_read,
            token: 0,
            col: 0,
            wanted: NONE_WANTED,
            num_wanted: 0,
            terms: [OwnTerm::default(); MAX_TOPK],
            num_terms: 0,
            opened: false,
        }
    }

    /// What is known of the ranks of this node, by place.
    pub(super) fn holders(&self) -> &[Fetching] {
        self.holders
    }

    /// The token in progress.
    pub(super) fn token(&self) -> usize {
        self.token
    }

    pub(super) fn read_descriptors(&mut self, exchange: &mut Exchange<'_>) -> Result<bool> {
        let mut progress = false;
        for (place, &rank) in self.combine.group.topology.locals().iter().enumerate() {
            if self.holders[place].known {
                continue;
            }
            let words = 1 + self.combine.shape.experts.num_local(rank);
            let Some(desc) = exchange.peek(rank, words) else { continue };
            progress = true;
            let peer = &mut self.holders[place];
            peer.known = true;
            peer.tail = desc.tail.as_ptr();
            peer.capacity = desc.body.capacity;
            if !exchange.matches(&desc) {
                peer.differs = true;
                peer.arrived = true;
                continue;
            }
            let call = self.combine.call;
            if rank == self.combine.group.rank {
                peer.rows = Some(own_place(&call.rows));
                peer.row_weights = call.row_weights.as_ref().map(own_place);
            } else if desc.body.places[0].window != 0 {
                let spans = [call.rows.row_bytes(), 4 * self.combine.weights_per_row()];
                let mut found = [None; 2];
                for (i, span) in spans.into_iter().enumerate().filter(|(_, span)| *span != 0) {
                    let at = &desc.body.places[i];
                    let base = self.windows.resolve(rank, at, desc.body.capacity, span as u64);
                    let base = base.ok_or_else(|| super::dispatch::bad_place(exchange, rank))?;
                    let row_pitch = at.row_pitch as usize;
                    found[i] = Some(DirectPlace { base, row_pitch, col_pitch: at.col_pitch as usize });
                }
                let peer = &mut self.holders[place];
                [peer.rows, peer.row_weights] = found;
            }
        }
        Ok(progress)
    }

    /// Adds tokens until rows are missing, or it is the server's turn. `gathered`: this rank reads nobody's rows for
    /// other nodes any more.
    pub(super) fn fetch(
        &mut self,
        exchange: &mut Exchange<'_>,
        rings: &mut [RingPositions],
        cells: &mut [CellState],
        gathered: bool,
    ) -> Result<bool> {
        if exchange.mismatched() {
            return self.say_done(exchange);
        }
        if self.holders.iter().any(|peer| !peer.known) {
            return Ok(false);
        }
        let before = (self.token, self.col);
        let mut progress = false;
        for _ in 0..TOKENS_PER_TURN {
            progress |= request_rows(self.combine, exchange, self.holders, rings)?;
            if self.token == self.combine.num_tokens {
                break;
            }
            exchange.step()?;
            if !self.add_token(exchange, rings, cells)? {
                break;
            }
        }
        pieces_of(self.holders, self.pieces, self.combine.call.rows.cols).publish_tails(exchange, rings);
        if self.token == self.combine.num_tokens && gathered {
            progress |= self.say_done(exchange)?;
        }
        Ok(progress || (self.token, self.col) != before)
    }

    /// Tells the ranks of this node that this rank reads their rows no more.
    fn say_done(&mut self, exchange: &Exchange<'_>) -> Result<bool> {
        let mut progress = false;
        for (place, peer) in self.holders.iter_mut().enumerate() {
            if peer.known && !peer.arrived {
                exchange.arrive(place)?;
                peer.arrived = true;
                progress = true;
            }
        }
        Ok(progress)
    }

    /// Adds one token, or goes on with it. False: a piece is missing.
    fn add_token(
        &mut self,
        exchange: &Exchange<'_>,
        rings: &mut [RingPositions],
        cells: &mut [CellState],
    ) -> Result<bool> {
        let (combine, token) = (self.combine, self.token);
        let cols = combine.call.rows.cols;
        if !self.answers_are_here(exchange, cells)? {
            return Ok(false);
        }
        if !self.opened {
            self.open(cells);
        }
        while self.col < cols {
            if !self.answers_are_here(exchange, cells)? {
                return Ok(false);
            }
            let wanted = &self.wanted[..self.num_wanted];
            let mut pieces = pieces_of(self.holders, self.pieces, cols);
            let mut end = cols;
            if pieces.through_rings(wanted) {
                let experts = combine.slots_of(token).experts;
                let put = |place, i, bits| {
                    put_weight(combine, token, slot_of_weight(combine, experts, wanted, place, i), bits);
                };
                if !pieces.take(combine, exchange, rings, self.col, put) {
                    return Ok(false);
                }
                end = pieces.piece_end(combine, self.col);
            }
            let answers =
                cells.iter().filter_map(|state| state.answer.as_ref().filter(|_| state.asked == token));
            let end = answers.fold(end, |end, answer| end.min(answer.col + answer.cols));
            self.add_columns(cells, end - self.col);
            pieces_of(self.holders, self.pieces, cols).release(combine, exchange, rings, end);
            self.finish_answers(cells, end);
            self.col = end;
        }
        let wanted = &self.wanted[..self.num_wanted];
        let experts = combine.slots_of(token).experts;
        direct_weights(combine, self.holders, wanted, |place, i, bits| {
            put_weight(combine, token, slot_of_weight(combine, experts, wanted, place, i), bits);
        });
        (self.token, self.col, self.opened) = (token + 1, 0, false);
        Ok(true)
    }

    /// True if the answer of every cell that the token in progress went to is here, for the next columns.
    fn answers_are_here(&self, exchange: &Exchange<'_>, cells: &mut [CellState]) -> Result<bool> {
        for (index, state) in cells.iter_mut().enumerate() {
            let next = self.combine.state.tokens_to_cell(index).get(state.read);
            if next != Some(&(self.token as u32)) {
                continue;
            }
            state.asked = self.token;
            if !answer(self.combine, exchange, index, state, self.token)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Goes on behind the answers that end at column `end`.
    fn finish_answers(&self, cells: &mut [CellState], end: usize) {
        for (index, state) in cells.iter_mut().enumerate() {
            let ends = state.answer.as_ref().is_some_and(|answer| answer.col + answer.cols == end);
            if ends && state.asked == self.token {
                let tokens = self.combine.state.tokens_to_cell(index);
                finish_answer(self.combine, state, tokens.get(state.read + 1).map(|&token| token as usize));
            }
        }
    }

    /// Looks the token in progress up: its rows here, and those of the answers, in the order of the sum.
    fn open(&mut self, cells: &[CellState]) {
        let (combine, call) = (self.combine, self.combine.call);
        let holders = &*self.holders;
        let slots = combine.slots_of(self.token);
        self.num_wanted = combine.wanted(holders, slots, |place| holders[place].tail, &mut self.wanted);
        pieces_of(self.holders, self.pieces, call.rows.cols).begin(&self.wanted[..self.num_wanted]);
        self.num_terms = 0;
        for (i, want) in self.wanted[..self.num_wanted].iter().enumerate() {
            self.rows_read[want.rank] += 1;
            self.terms[i] = OwnTerm { rank: want.rank, slot: want.slot, from: From::Here(i) };
        }
        self.num_terms = self.num_wanted;
        self.clear_weights();
        let token = self.token;
        for (cell, state) in cells.iter().enumerate() {
            if let Some(answer) = state.answer.as_ref().filter(|_| state.asked == token) {
                self.add_terms_of(cell, answer, slots.experts);
            }
        }
        let terms = &mut self.terms[..self.num_terms];
        let node_of = combine.group.topology.node_of();
        match call.order {
            ReduceOrder::TopkSlot => sort(terms, |term| (0, term.slot)),
            ReduceOrder::Rank => sort(terms, |term| (0, term.rank)),
            ReduceOrder::NodeRank => sort(terms, |term| (node_of[term.rank], term.rank)),
        }
        self.opened = true;
    }

    /// The terms, and the weights, that a cell answered.
    fn add_terms_of(&mut self, cell: usize, answer: &Answer, experts: &[i32]) {
        let combine = self.combine;
        let owner = |slot: usize| combine.shape.experts.owner(experts[slot]);
        let there = |slot: &usize| has(&answer.mask, *slot);
        let first = self.num_terms;
        for slot in (0..experts.len()).filter(there) {
            let rank = owner(slot);
            self.rows_read[rank] += 1;
            let known = match combine.response.form {
                Form::Rows => false,
                Form::Ranks => self.terms[first..self.num_terms].iter().any(|term| term.rank == rank),
                Form::Node => self.num_terms > first,
            };
            if !known {
                self.terms[self.num_terms] = OwnTerm { rank, slot, from: From::There { cell, index: 0 } };
                self.num_terms += 1;
            }
        }
        // Rows lie in the order of slots in one order of sums, and of ranks in the others.
        let terms = &mut self.terms[first..self.num_terms];
        if combine.call.order != ReduceOrder::TopkSlot {
            sort(terms, |term| (0, term.rank));
        }
        for (number, term) in terms.iter_mut().enumerate() {
            term.from = From::There { cell, index: number };
        }
        for (slot, &expert) in experts.iter().enumerate() {
            let in_cell = expert >= 0 && combine.shape.cell_of[owner(slot)] as usize == cell;
            if let Some(bits) = answer.weight(combine, slot).filter(|_| in_cell) {
                put_weight(combine, self.token, Some(slot), bits);
            }
        }
    }

    /// Adds `width` columns of the token in progress from `self.col`.
    fn add_columns(&mut self, cells: &[CellState], width: usize) {
        let (combine, call) = (self.combine, self.combine.call);
        let pieces = pieces_of(self.holders, self.pieces, call.rows.cols);
        let mut terms = [Term::NONE; MAX_TOPK];
        for (i, own) in self.terms[..self.num_terms].iter().enumerate() {
            let close = close_after(combine, &self.terms[..self.num_terms], i);
            let weight = combine.topk_weight(self.token, own.slot);
            terms[i] = match own.from {
                From::Here(wanted) => {
                    let row = pieces.row(combine, &self.wanted[wanted], self.col);
                    Term { row, weight, close, values: Values::Own }
                }
                From::There { cell, index } => {
                    let (response, answer) = (&combine.response, cells[cell].answer.as_ref());
                    let row = answer.map_or(std::ptr::null(), |answer| answer.row(response, index, self.col));
                    Term { row, weight, close, values: response.values }
                }
            };
        }
        let bias = call.bias.map(|bias| {
            bias.map_or(std::ptr::null(), |bias| row_end(&bias, self.token, self.col).address.cast_const())
        });
        let reduction = match (call.order, combine.shape.layout) {
            (ReduceOrder::TopkSlot, _) | (ReduceOrder::Rank, Layout::Flat) => Reduction::Chain,
            (ReduceOrder::Rank, Layout::ExpertMajor) => Reduction::Ranks,
            (ReduceOrder::NodeRank, _) => Reduction::Nodes { bf16: call.wire_bf16 },
        };
        let out = row_end(&call.combined, self.token, self.col).address;
        // SAFETY: rows, biases and output hold these columns: places were checked against the capacity,
        // the caller vouches for his tensors, and a term's row was published before it was read.
        unsafe { reduce(call.rows.dtype, out, width, bias, &terms[..self.num_terms], reduction) };
    }

    /// Every slot of the token has weight 0 until its row brings one.
    fn clear_weights(&self) {
        if let Some(out) = &self.combine.call.combined_weights {
            let row = row_end(out, self.token, 0).address;
            // SAFETY: [tokens, topk] fp32, contiguous, writable by the caller's word.
            unsafe { row.write_bytes(0, out.row_bytes()) };
        }
    }

    pub(super) fn finished(&self) -> bool {
        self.holders.iter().all(|peer| peer.known && peer.arrived)
    }

    /// True once no rank of this node reads this rank's rows any more.
    pub(super) fn peers_are_done(&self, exchange: &Exchange<'_>) -> bool {
        let done = |(place, peer): (usize, &Fetching)| peer.differs || exchange.has_arrived(place);
        self.holders.iter().enumerate().all(done)
    }

    /// The ranks of this node that have not said where their rows are.
    pub(super) fn missing_places(&self, exchange: &Exchange<'_>) -> Missing {
        exchange.missing_locals("the rows' place", |place| !self.holders[place].known)
    }

    /// The ranks of this node whose rows, for the token in progress, are not in their rings.
    pub(super) fn missing_pieces(&self, exchange: &Exchange<'_>) -> Missing {
        missing_pieces(exchange, self.opened, self.holders, self.pieces)
    }

    /// The ranks of this node that still read this rank's rows.
    pub(super) fn missing_ends(&self, exchange: &Exchange<'_>) -> Missing {
        exchange.missing_locals("the end of its reading", |place| {
            !self.holders[place].differs && !exchange.has_arrived(place)
        })
    }
}

fn pieces_of<'a>(holders: &'a [Fetching], pieces: &'a mut [Piecing], cols: usize) -> Pieces<'a> {
    Pieces { holders, pieces, first_channel: 0, col: 0, end: cols }
}

/// What ends with the i-th term: its rank's sum, its node's sum.
fn close_after(combine: &Combine<'_>, terms: &[OwnTerm], i: usize) -> Close {
    let node_of = combine.group.topology.node_of();
    let rank = terms[i].rank;
    match terms.get(i + 1) {
        Some(next) if next.rank == rank => Close::Nothing,
        Some(next) if node_of[next.rank] == node_of[rank] => Close::Rank,
        _ => Close::Node,
    }
}

/// Stores the weight that came back for a token's slot, if it is wanted.
fn put_weight(combine: &Combine<'_>, token: usize, slot: Option<usize>, bits: u32) {
    if let (Some(out), Some(slot)) = (&combine.call.combined_weights, slot) {
        // SAFETY: [tokens, topk] fp32, writable by the caller's word.
        unsafe { row_end(out, token, slot).address.cast::<u32>().write(bits) };
    }
}
