//! What a lane keeps of each cell and each source: the numbers of the next messages, which live as long as the group,
//! and how far its call is.

use super::ask::Answer;
use crate::wire::RelayDesc;

/// One cell, as the destination of this rank's messages.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CellState {
    /// Messages of rows sent: the number of the next.
    pub(super) rows: u64,
    /// Requests sent.
    pub(super) requests: u64,
    /// Responses read.
    pub(super) responses: u64,
    /// The call's descriptor was sent.
    pub(super) desc_sent: bool,
    /// The next token to send or to ask for, an index into the plan's list for the cell.
    pub(super) next: usize,
    /// The piece of that token that is next, where tokens are sent in pieces.
    pub(super) piece: usize,
    /// The column from which that token is asked for.
    pub(super) next_col: usize,
    /// Messages of rows, and requests, that were sent before this call.
    pub(super) rows_first: u64,
    pub(super) requests_first: u64,
    /// The next token of which the answer is read, an index as `next`, and its column.
    pub(super) read: usize,
    pub(super) read_col: usize,
    /// The token that this rank looked for here last, and its answer.
    pub(super) asked: usize,
    pub(super) answer: Option<Answer>,
}

impl CellState {
    /// Keeps the numbers of messages.
    pub(super) fn begin_call(&mut self) {
        let CellState { rows, requests, responses, .. } = *self;
        let (rows_first, requests_first) = (rows, requests);
        *self = CellState { rows, requests, responses, rows_first, requests_first, ..CellState::default() };
    }
}

/// One source, whose messages this rank takes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SourceState {
    /// Messages of rows that were taken, and all before them.
    pub(super) rows: u64,
    /// Bit i: message `rows + i` was taken.
    pub(super) rows_taken: u64,
    /// Requests that were answered.
    pub(super) answered: u64,
    /// Requests that were taken up, or answered.
    pub(super) accepted: u64,
    /// The call's descriptor came.
    pub(super) known: bool,
    /// Its signature equals this rank's.
    pub(super) matches: bool,
    /// Messages of rows, and requests, that the source had sent before this call.
    pub(super) rows_first: u64,
    pub(super) requests_first: u64,
    /// Tokens that the source sends in this call, or asks for; and how many of them are done.
    pub(super) num_tokens: usize,
    pub(super) tokens_done: usize,
}

impl SourceState {
    pub(super) fn begin_call(&mut self) {
        (self.known, self.matches, self.tokens_done) = (false, false, 0);
    }

    /// The call's descriptor came.
    pub(super) fn open(&mut self, desc: &RelayDesc, matches: bool) {
        (self.known, self.matches) = (true, matches);
        (self.rows_first, self.requests_first) = (desc.rows_first, desc.requests_first);
        self.accepted = desc.requests_first;
        self.num_tokens = desc.num_tokens as usize;
    }

    /// Every token of the call is done; unknown before a matching descriptor came.
    pub(super) fn is_done(&self) -> bool {
        self.known && self.matches && self.tokens_done == self.num_tokens
    }
}
