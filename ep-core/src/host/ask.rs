//! The owner's side of a combine between nodes: asks the relay of each cell for the tokens that went there, in messages
//! of as many tokens as the answer has room for, and reads the answers in that order.

use super::combine::Combine;
use super::exchange::{Exchange, Missing};
use super::pack::padded;
use super::response::{Mask, Response, set};
use super::scratch_between::CellState;
use crate::engine::Net;
use crate::error::Result;
use crate::net::Kind;
use crate::plan::NO_ROW;
use crate::wire::{CHUNK_BYTES, Chunk, RECORD_ALIGN};

/// The answer of a cell for the token in progress.
#[derive(Clone, Copy, Debug)]
pub(super) struct Answer {
    /// Where the token's part begins.
    at: *const u8,
    /// Tokens in the message from here on.
    left: usize,
    pub(super) col: usize,
    pub(super) cols: usize,
    pub(super) mask: Mask,
    num_rows: usize,
}

// SAFETY: the address is of the port's landing area, which lives as long as the group; one call uses it.
unsafe impl Send for Answer {}

/// Bytes of a token in a question.
pub(super) fn record_bytes(combine: &Combine<'_>) -> usize {
    let with_weights = usize::from(combine.asks_with_weights());
    padded(4 * (1 + combine.shape.topk * (2 + with_weights)))
}

/// Asks every cell for what there is room for. True if anything was asked.
pub(super) fn ask(combine: &Combine<'_>, exchange: &Exchange<'_>, cells: &mut [CellState]) -> Result<bool> {
    let Some(net) = combine.group.net.as_ref().filter(|_| !exchange.mismatched()) else { return Ok(false) };
    let mut progress = false;
    let stream = exchange.stream(Kind::Request);
    let window = net.port.layout().window(stream);
    for (index, state) in cells.iter_mut().enumerate() {
        let cell = &combine.group.topology.cells()[index];
        // The answer before gives the slots back, here and there.
        while state.next < combine.state.tokens_to_cell(index).len()
            && state.requests - state.responses < window
            && net.port.can_stage(cell.link, stream, state.requests)
        {
            exchange.step()?;
            let bytes = write_request(combine, net, exchange, index, state);
            let sent = net.port.send(cell.link, stream, state.requests, bytes);
            sent.map_err(|error| exchange.defect(cell.relay, error))?;
            state.requests += 1;
            progress = true;
        }
    }
    Ok(progress)
}

/// Fills a request: tokens whose answers fit a message, or columns of one token that does not fit by itself.
fn write_request(
    combine: &Combine<'_>,
    net: &Net,
    exchange: &Exchange<'_>,
    index: usize,
    state: &mut CellState,
) -> usize {
    let (response, cols) = (&combine.response, combine.call.rows.cols);
    let cell = &combine.group.topology.cells()[index];
    let tokens = combine.state.tokens_to_cell(index);
    let room = net.chunk_bytes(Kind::Response) - CHUNK_BYTES;
    let most = (net.chunk_bytes(Kind::Request) - CHUNK_BYTES) / record_bytes(combine);
    let slot = net.port.slot_staging(cell.link, exchange.stream(Kind::Request), state.requests);
    let mut head = Chunk {
        epoch: exchange.epoch,
        first: state.next as u32,
        col: state.next_col as u32,
        cols: (cols - state.next_col) as u32,
        ..Chunk::default()
    };
    let (mut at, mut bytes, mut records) = (slot.wrapping_add(CHUNK_BYTES), 0, 0);
    while records < most && state.next < tokens.len() {
        let token = tokens[state.next] as usize;
        let rows = most_rows(combine, index, token);
        let left = cols - state.next_col;
        let needed = response.head_bytes(state.next_col) + rows * response.row_bytes(left);
        if bytes + needed > room {
            if records == 0 {
                // Not even one: as many columns as fit, the rest with the next request.
                let per_row = ((room - response.head_bytes(state.next_col)) / rows) & !(RECORD_ALIGN - 1);
                let fit = (per_row / response.element).min(left);
                head.cols = fit as u32;
                at = write_record(combine, index, token, at);
                records = 1;
                state.next_col += fit;
            }
            break;
        }
        at = write_record(combine, index, token, at);
        (bytes, records) = (bytes + needed, records + 1);
        (state.next, state.next_col) = (state.next + 1, 0);
        // A token's last columns are by themselves.
        if head.col != 0 {
            break;
        }
    }
    head.records = records as u32;
    // SAFETY: the slot has room for a header, and is this call's, since it may be staged.
    unsafe { slot.cast::<Chunk>().write(head) };
    at.addr() - slot.addr()
}

/// Rows of an answer for a token of which nothing was dropped.
fn most_rows(combine: &Combine<'_>, index: usize, token: usize) -> usize {
    let slots = combine.slots_of(token);
    let mut mask = Mask::default();
    for (slot, (&expert, &position)) in slots.experts.iter().zip(slots.positions).enumerate() {
        if expert >= 0
            && position != NO_ROW
            && combine.shape.cell_of[combine.shape.experts.owner(expert)] as usize == index
        {
            set(&mut mask, slot);
        }
    }
    combine.response.num_rows(combine, slots.experts, &mask).max(1)
}

/// Writes a token's ids, positions and weights; slots of other ranks are left empty.
fn write_record(combine: &Combine<'_>, index: usize, token: usize, at: *mut u8) -> *mut u8 {
    let (slots, topk) = (combine.slots_of(token), combine.shape.topk);
    let bytes = record_bytes(combine);
    // SAFETY: the slot has room for the record, by the number of records that fit, and is aligned.
    let words = unsafe { std::slice::from_raw_parts_mut(at.cast::<u32>(), bytes / 4) };
    words[0] = token as u32;
    for slot in 0..topk {
        let expert = slots.experts[slot];
        let there =
            expert >= 0 && combine.shape.cell_of[combine.shape.experts.owner(expert)] as usize == index;
        words[1 + slot] = if there { expert as u32 } else { u32::MAX };
        words[1 + topk + slot] = slots.positions[slot];
        if combine.asks_with_weights() {
            words[1 + 2 * topk + slot] = combine.topk_weight(token, slot).to_bits();
        }
    }
    at.wrapping_add(bytes)
}

/// Reads away the answers to requests of calls that failed; every request is answered once. True if there was one.
pub(super) fn discard_old_answers(
    combine: &Combine<'_>,
    exchange: &Exchange<'_>,
    cells: &mut [CellState],
) -> bool {
    let Some(net) = &combine.group.net else { return false };
    let mut progress = false;
    for (cell, state) in combine.group.topology.cells().iter().zip(cells) {
        while state.responses < state.requests_first
            && net.port.landed(cell.link, exchange.stream(Kind::Response), state.responses).is_some()
        {
            state.responses += 1;
            progress = true;
        }
    }
    progress
}

/// Finds the answer of a cell for `token` that has column `col`. None: it has not come. The token is the next that the
/// cell was asked for.
pub(super) fn answer(
    combine: &Combine<'_>,
    exchange: &Exchange<'_>,
    index: usize,
    state: &mut CellState,
    token: usize,
) -> Result<bool> {
    let Some(net) = &combine.group.net else { return Ok(true) };
    if state.answer.is_some() {
        return Ok(true);
    }
    if state.responses < state.requests_first {
        return Ok(false);
    }
    let cell = &combine.group.topology.cells()[index];
    let landed = net.port.landed(cell.link, exchange.stream(Kind::Response), state.responses);
    let Some(message) = landed else { return Ok(false) };
    // SAFETY: a landed slot begins with a header, and stays until the next request for it is sent.
    let head = unsafe { message.cast::<Chunk>().read() };
    let sound = head.epoch == exchange.epoch
        && head.first as usize == state.read
        && head.records != 0
        && head.col as usize == state.read_col
        && head.cols != 0
        && head.col as usize + head.cols as usize <= combine.call.rows.cols;
    if !sound {
        return Err(exchange.torn(cell.relay, "answer"));
    }
    let at = message.wrapping_add(CHUNK_BYTES);
    let (col, cols) = (head.col as usize, head.cols as usize);
    let answer = Answer { at, left: head.records as usize, col, cols, mask: Mask::default(), num_rows: 0 };
    state.answer = Some(answer.of_token(combine, token));
    Ok(true)
}

impl Answer {
    /// Reads the bits of the token that is next in the message.
    fn of_token(mut self, combine: &Combine<'_>, token: usize) -> Answer {
        let response = &combine.response;
        self.mask = Mask::default();
        for (word, bits) in self.mask.iter_mut().take(response.mask_words).enumerate() {
            // SAFETY: a token's part begins with the bits, aligned, inside the message.
            *bits = unsafe { self.at.cast::<u32>().add(word).read() };
        }
        self.num_rows = response.num_rows(combine, combine.slots_of(token).experts, &self.mask);
        self
    }

    /// The weight of a slot, if weights come with this answer.
    pub(super) fn weight(&self, combine: &Combine<'_>, slot: usize) -> Option<u32> {
        let response = &combine.response;
        let words = response.weight_words(self.col);
        // SAFETY: the weights follow the bits.
        (slot < words).then(|| unsafe { self.at.cast::<u32>().add(response.mask_words + slot).read() })
    }

    /// Column `col` of the row with number `index`.
    pub(super) fn row(&self, response: &Response, index: usize, col: usize) -> *const u8 {
        let rows = self.at.wrapping_add(response.head_bytes(self.col));
        rows.wrapping_add(index * response.row_bytes(self.cols) + (col - self.col) * response.element)
    }

    fn bytes(&self, response: &Response) -> usize {
        response.head_bytes(self.col) + self.num_rows * response.row_bytes(self.cols)
    }
}

/// Goes on behind the columns of a token's answer, all of which were read. `next`: the token that the cell was asked
/// for after this one.
pub(super) fn finish_answer(combine: &Combine<'_>, state: &mut CellState, next: Option<usize>) {
    let Some(answer) = state.answer.take() else { return };
    let end = answer.col + answer.cols;
    if end == combine.call.rows.cols {
        (state.read, state.read_col) = (state.read + 1, 0);
    } else {
        state.read_col = end;
    }
    match next.filter(|_| answer.left > 1) {
        Some(token) => {
            let at = answer.at.wrapping_add(answer.bytes(&combine.response));
            state.answer = Some(Answer { at, left: answer.left - 1, ..answer }.of_token(combine, token));
        }
        None => state.responses += 1,
    }
}

/// The relays whose answers for the token in progress are missing.
pub(super) fn missing_answers(
    exchange: &Exchange<'_>,
    combine: &Combine<'_>,
    cells: &[CellState],
    token: usize,
) -> Missing {
    let waiting = |(index, state): (usize, &CellState)| {
        let asked = combine.state.tokens_to_cell(index).get(state.read) == Some(&(token as u32));
        (asked && state.answer.is_none()).then(|| exchange.group.topology.cells()[index].relay)
    };
    Missing::of(cells.iter().enumerate().filter_map(waiting), "the sums of its node")
}
