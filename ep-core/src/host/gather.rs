//! The relay's side of a combine between nodes: reads the rows of its node for owners of other nodes, adds them as far
//! as the order of the sum allows, and answers. Questions are worked off in the order in which they were found. What
//! one of them waits for is a rank of this node that serves rows whatever else it waits for, so none waits for another
//! node.

use std::collections::VecDeque;

use super::ask::record_bytes;
use super::combine::Combine;
use super::copy::copy_bytes;
use super::exchange::{Exchange, Missing};
use super::pieces::{Pieces, direct_weights, missing_pieces, slot_of_weight};
use super::reduce::{Close, Reduction, Term, Values, reduce_partial};
use super::response::{Form, Mask, set};
use super::scratch::{Fetching, Piecing};
use super::scratch_between::SourceState;
use super::serve::request_token;
use super::wanted::{NONE_WANTED, Slots, WantedRows, sort};
use crate::config::{MAX_TOPK, ReduceOrder};
use crate::engine::{Net, RingPositions, Topology};
use crate::error::Result;
use crate::net::Kind;
use crate::wire::{CHUNK_BYTES, Chunk, REQUESTS};

/// What a lane keeps for gathering, so that calls do not allocate.
pub(super) struct Gathering {
    /// Questions that were found, oldest first.
    queue: VecDeque<Asked>,
    /// Per place, how far the token in progress is.
    piecing: Vec<Piecing>,
}

/// A question.
#[derive(Clone, Copy)]
struct Asked {
    /// The source, by its number.
    source: usize,
    seq: u64,
    head: Chunk,
    message: *const u8,
}

// SAFETY: the address is of the port's landing area, which lives as long as the group; one call uses it.
unsafe impl Send for Asked {}

impl Gathering {
    pub(super) fn new(topology: &Topology) -> Gathering {
        // A window of each source is the most that can be found at a time.
        let queue = VecDeque::with_capacity(topology.sources().len() * crate::engine::WINDOW_MAX as usize);
        Gathering { queue, piecing: vec![Piecing::default(); topology.locals().len()] }
    }
}

/// Answers questions.
pub(super) struct Gatherer<'a> {
    combine: &'a Combine<'a>,
    queue: &'a mut VecDeque<Asked>,
    piecing: &'a mut [Piecing],
    /// The question and the token of which rows are asked for next.
    next_request: (usize, usize),
    /// Of the oldest question: the token in progress, and its next column.
    record: usize,
    col: usize,
    /// Where the answer for that token begins; null before the first.
    out: *mut u8,
    wanted: WantedRows,
    num_wanted: usize,
    opened: bool,
}

/// Tokens that are answered before the other sides of the call get their turn.
const TOKENS_PER_TURN: usize = 16;

impl<'a> Gatherer<'a> {
    pub(super) fn new(combine: &'a Combine<'a>, gathering: &'a mut Gathering) -> Gatherer<'a> {
        let Gathering { queue, piecing } = gathering;
        queue.clear();
        Gatherer {
            combine,
            queue,
            piecing,
            next_request: (0, 0),
            record: 0,
            col: 0,
            out: std::ptr::null_mut(),
            wanted: NONE_WANTED,
            num_wanted: 0,
            opened: false,
        }
    }

    /// Takes up questions and answers what can be answered, once all ranks of the node have said where their rows are.
    /// True if anything moved.
    pub(super) fn gather(
        &mut self,
        exchange: &mut Exchange<'_>,
        sources: &mut [SourceState],
        holders: &[Fetching],
        rings: &mut [RingPositions],
    ) -> Result<bool> {
        let group = self.combine.group;
        let Some(net) = group.net.as_ref().filter(|_| !sources.is_empty()) else { return Ok(false) };
        let ready = |place: usize| holders[place].known && !holders[place].differs;
        if exchange.mismatched() || !group.topology.served_places().all(ready) {
            return Ok(false);
        }
        let mut progress = self.take_up(net, exchange, sources)?;
        progress |= self.request_rows(exchange, holders, rings)?;
        for _ in 0..TOKENS_PER_TURN {
            let Some(asked) = self.queue.front().copied() else { break };
            exchange.step()?;
            let before = (self.record, self.col);
            let done = self.answer(net, exchange, &asked, holders, rings)?;
            progress |= done || (self.record, self.col) != before;
            if done {
                self.finish(net, exchange, &asked, &mut sources[asked.source])?;
            } else if self.record == before.0 {
                break;
            }
            progress |= self.request_rows(exchange, holders, rings)?;
        }
        pieces_of(holders, self.piecing, (0, 0)).publish_tails(exchange, rings);
        Ok(progress)
    }

    /// The ranks of this node whose rows, for the token in progress, are not in their rings.
    pub(super) fn missing_pieces(&self, exchange: &Exchange<'_>, holders: &[Fetching]) -> Missing {
        missing_pieces(exchange, self.opened, holders, self.piecing)
    }

    /// Finds new questions. Those of calls that failed are answered with nothing.
    fn take_up(&mut self, net: &Net, exchange: &Exchange<'_>, sources: &mut [SourceState]) -> Result<bool> {
        let mut progress = false;
        let (requests, responses) = (exchange.stream(Kind::Request), exchange.stream(Kind::Response));
        for (index, state) in sources.iter_mut().enumerate().filter(|(_, state)| state.known && state.matches)
        {
            let source = self.combine.group.topology.sources()[index];
            while state.answered < state.requests_first
                && net.port.landed(source.link, requests, state.answered).is_some()
                && net.port.can_stage(source.link, responses, state.answered)
            {
                let slot = net.port.slot_staging(source.link, responses, state.answered);
                // SAFETY: the slot may be staged, and has room for a header.
                unsafe { slot.cast::<Chunk>().write(Chunk { epoch: exchange.epoch, ..Chunk::default() }) };
                let sent = net.port.send(source.link, responses, state.answered, CHUNK_BYTES);
                sent.map_err(|error| exchange.defect(source.rank, error))?;
                state.answered += 1;
                progress = true;
            }
            if state.answered < state.requests_first {
                // An old question has not landed yet; to answer a new one first would pass it over for ever.
                continue;
            }
            while let Some(message) = net.port.landed(source.link, requests, state.accepted) {
                // SAFETY: a landed slot begins with a header, and stays until its question is answered.
                let head = unsafe { message.cast::<Chunk>().read() };
                // A source that has all its answers may have begun the next call.
                if head.epoch > exchange.epoch {
                    break;
                }
                if !self.is_sound(net, exchange, &head, state) {
                    return Err(exchange.torn(source.rank, "question"));
                }
                self.queue.push_back(Asked { source: index, seq: state.accepted, head, message });
                state.accepted += 1;
                progress = true;
            }
        }
        Ok(progress)
    }

    fn is_sound(&self, net: &Net, exchange: &Exchange<'_>, head: &Chunk, state: &SourceState) -> bool {
        let room = net.chunk_bytes(Kind::Request) - CHUNK_BYTES;
        head.epoch == exchange.epoch
            && head.records != 0
            && head.records as usize <= room / record_bytes(self.combine)
            && head.first as usize + head.records as usize <= state.num_tokens
            && head.cols != 0
            && head.col as usize + head.cols as usize <= self.combine.call.rows.cols
            && self.queue.len() < self.queue.capacity()
    }

    /// Asks the holders outside windows for the rows of as many tokens as there is room for, in the order in which
    /// they are answered.
    fn request_rows(
        &mut self,
        exchange: &mut Exchange<'_>,
        holders: &[Fetching],
        rings: &mut [RingPositions],
    ) -> Result<bool> {
        let num_locals = holders.len();
        if holders.iter().all(|holder| holder.rows.is_some()) {
            return Ok(false);
        }
        let mut wanted = NONE_WANTED;
        let before = self.next_request;
        'tokens: while let Some(asked) = self.queue.get(self.next_request.0).copied() {
            let count = look_up(self.combine, exchange, (&asked, self.next_request.1), holders, &mut wanted)?;
            let wanted = &wanted[..count];
            let asks = |place: &usize| holders[*place].rows.is_none();
            for place in (0..num_locals).filter(asks) {
                let rows = wanted.iter().filter(|want| want.place == place).count() as u64;
                let channel = num_locals + place;
                if rows != 0 && !exchange.requests_out(channel).has_room(rings[channel].requested, rows + 2) {
                    break 'tokens;
                }
            }
            let cols = (asked.head.col as usize, (asked.head.col + asked.head.cols) as usize);
            for place in (0..num_locals).filter(asks) {
                let channel = num_locals + place;
                let requests = exchange.requests_out(channel);
                let start = rings[channel].requested;
                request_token(&requests, wanted, place, Some(cols), &mut rings[channel].requested);
                if rings[channel].requested != start {
                    requests.publish(rings[channel].requested);
                    exchange.moved(place, start, rings[channel].requested, REQUESTS as u64 / 2);
                }
            }
            self.next_request.1 += 1;
            if self.next_request.1 == asked.head.records as usize {
                self.next_request = (self.next_request.0 + 1, 0);
            }
        }
        Ok(self.next_request != before)
    }

    /// Answers one token of the oldest question, or goes on with it. True: the question is answered.
    fn answer(
        &mut self,
        net: &Net,
        exchange: &Exchange<'_>,
        asked: &Asked,
        holders: &[Fetching],
        rings: &mut [RingPositions],
    ) -> Result<bool> {
        let responses = exchange.stream(Kind::Response);
        let link = self.combine.group.topology.sources()[asked.source].link;
        if self.out.is_null() {
            if !net.port.can_stage(link, responses, asked.seq) {
                return Ok(false);
            }
            let slot = net.port.slot_staging(link, responses, asked.seq);
            // SAFETY: the slot may be staged, and has room for a header.
            unsafe { slot.cast::<Chunk>().write(asked.head) };
            self.out = slot.wrapping_add(CHUNK_BYTES);
        }
        let (begin, end) = (asked.head.col as usize, (asked.head.col + asked.head.cols) as usize);
        if !self.opened {
            let token = (asked, self.record);
            self.num_wanted = look_up(self.combine, exchange, token, holders, &mut self.wanted)?;
            self.begin_token(asked, holders);
            (self.col, self.opened) = (begin, true);
        }
        let combine = self.combine;
        let (slots, _) = record(combine, asked, self.record);
        let weights = self.weights(begin);
        let put = move |slot: Option<usize>, bits: u32| {
            if let Some(slot) = slot.filter(|_| !weights.is_null()) {
                // SAFETY: the answer has a weight per slot, and the slot is below topk.
                unsafe { weights.add(slot).write(bits) };
            }
        };
        while self.col < end {
            let (wanted, col) = (&self.wanted[..self.num_wanted], self.col);
            let mut pieces = pieces_of(holders, self.piecing, (begin, end));
            let mut piece_end = end;
            if pieces.through_rings(wanted) {
                let put =
                    |place, i, bits| put(slot_of_weight(combine, slots.experts, wanted, place, i), bits);
                if !pieces.take(combine, exchange, rings, col, put) {
                    return Ok(false);
                }
                piece_end = pieces.piece_end(combine, col);
            }
            self.add_columns(asked, holders, piece_end);
            pieces_of(holders, self.piecing, (begin, end)).release(combine, exchange, rings, piece_end);
            self.col = piece_end;
        }
        let wanted = &self.wanted[..self.num_wanted];
        if begin == 0 {
            direct_weights(combine, holders, wanted, |place, i, bits| {
                put(slot_of_weight(combine, slots.experts, wanted, place, i), bits);
            });
        }
        let mask = self.mask();
        let rows = combine.response.num_rows(combine, slots.experts, &mask);
        let bytes = combine.response.head_bytes(begin) + rows * combine.response.row_bytes(end - begin);
        self.out = self.out.wrapping_add(bytes);
        (self.record, self.opened) = (self.record + 1, false);
        Ok(self.record == asked.head.records as usize)
    }

    /// The slots whose rows are here.
    fn mask(&self) -> Mask {
        let mut mask = Mask::default();
        self.wanted[..self.num_wanted].iter().for_each(|want| set(&mut mask, want.slot));
        mask
    }

    /// Where the weights of the token's answer are, null if none come with column `col`.
    fn weights(&self, col: usize) -> *mut u32 {
        let response = &self.combine.response;
        match response.weight_words(col) {
            0 => std::ptr::null_mut(),
            _ => self.out.cast::<u32>().wrapping_add(response.mask_words),
        }
    }

    /// Writes what comes before the rows, and puts the rows into the order of the sum.
    fn begin_token(&mut self, asked: &Asked, holders: &[Fetching]) {
        let (combine, response) = (self.combine, &self.combine.response);
        let mask = self.mask();
        let words = response.mask_words + response.weight_words(asked.head.col as usize);
        for word in 0..words {
            // SAFETY: the owner asked for no more than has room, were nothing dropped.
            unsafe { self.out.cast::<u32>().add(word).write(mask.get(word).copied().unwrap_or(0)) };
        }
        let wanted = &mut self.wanted[..self.num_wanted];
        if combine.call.order != ReduceOrder::TopkSlot {
            sort(wanted, |want| (0, want.rank));
        }
        pieces_of(holders, self.piecing, (0, 0)).begin(wanted);
    }

    /// Copies or adds the columns from `self.col` to `end`.
    fn add_columns(&mut self, asked: &Asked, holders: &[Fetching], end: usize) {
        let (combine, response, col) = (self.combine, &self.combine.response, self.col);
        let (begin, asked_end) = (asked.head.col as usize, (asked.head.col + asked.head.cols) as usize);
        let (_, weights) = record(combine, asked, self.record);
        let row_bytes = response.row_bytes(asked_end - begin);
        let rows_out = self.out.wrapping_add(response.head_bytes(begin) + (col - begin) * response.element);
        let wanted = &self.wanted[..self.num_wanted];
        let pieces = pieces_of(holders, self.piecing, (begin, asked_end));
        let mut terms = [Term::NONE; MAX_TOPK];
        for (i, want) in wanted.iter().enumerate() {
            let weight = weights.map_or(1.0, |weights| weights[want.slot]);
            let last = wanted.get(i + 1).is_none_or(|next| next.rank != want.rank);
            let close = if i + 1 == wanted.len() {
                Close::Node
            } else if last {
                Close::Rank
            } else {
                Close::Nothing
            };
            terms[i] = Term { row: pieces.row(combine, want, col), weight, close, values: Values::Own };
        }
        let terms = &terms[..wanted.len()];
        let (dtype, cols) = (combine.call.rows.dtype, end - col);
        // SAFETY: the owner asked for no more rows than the answer has room for; terms hold these columns, as in the
        // owner's sum.
        unsafe {
            match response.form {
                Form::Rows => {
                    for (i, term) in terms.iter().enumerate() {
                        copy_bytes(rows_out.add(i * row_bytes), term.row, cols * response.element, false);
                    }
                }
                Form::Node if terms.is_empty() => {}
                Form::Node => {
                    let nodes = Reduction::Nodes { bf16: false };
                    reduce_partial(dtype, response.values == Values::Bf16, rows_out, cols, terms, nodes);
                }
                Form::Ranks => {
                    let groups = terms.chunk_by(|earlier, _| earlier.close == Close::Nothing);
                    for (i, of_rank) in groups.enumerate() {
                        let out = rows_out.add(i * row_bytes);
                        reduce_partial(dtype, false, out, cols, of_rank, Reduction::Chain);
                    }
                }
            }
        }
    }

    /// Sends the answer to the oldest question.
    fn finish(
        &mut self,
        net: &Net,
        exchange: &Exchange<'_>,
        asked: &Asked,
        state: &mut SourceState,
    ) -> Result<()> {
        let source = self.combine.group.topology.sources()[asked.source];
        let responses = exchange.stream(Kind::Response);
        let slot = net.port.slot_staging(source.link, responses, asked.seq);
        let sent = net.port.send(source.link, responses, asked.seq, self.out.addr() - slot.addr());
        sent.map_err(|error| exchange.defect(source.rank, error))?;
        state.answered = asked.seq + 1;
        if (asked.head.col + asked.head.cols) as usize == self.combine.call.rows.cols {
            state.tokens_done += asked.head.records as usize;
        }
        self.queue.pop_front();
        self.next_request = match self.next_request {
            (0, _) => (0, 0),
            (question, token) => (question - 1, token),
        };
        (self.record, self.out) = (0, std::ptr::null_mut());
        Ok(())
    }
}

fn pieces_of<'a>(holders: &'a [Fetching], pieces: &'a mut [Piecing], cols: (usize, usize)) -> Pieces<'a> {
    Pieces { holders, pieces, first_channel: holders.len(), col: cols.0, end: cols.1 }
}

/// A token of a question: where it goes, and its weights, if the question has any.
fn record<'a>(combine: &Combine<'_>, asked: &'a Asked, record: usize) -> (Slots<'a>, Option<&'a [f32]>) {
    let topk = combine.shape.topk;
    let start = asked.message.wrapping_add(CHUNK_BYTES + record * record_bytes(combine));
    let weights = combine.asks_with_weights();
    // SAFETY: the message was checked to hold the record, which begins with these words, aligned; it stays until
    // it is answered, after this was used.
    let words =
        unsafe { std::slice::from_raw_parts(start.cast::<u32>(), 1 + topk * (2 + usize::from(weights))) };
    let slots = Slots {
        experts: bytemuck::cast_slice(&words[1..1 + topk]),
        positions: &words[1 + topk..1 + 2 * topk],
    };
    (slots, weights.then(|| bytemuck::cast_slice(&words[1 + 2 * topk..])))
}

/// The rows that a token of a question has in this node, in slot order.
fn look_up(
    combine: &Combine<'_>,
    exchange: &Exchange<'_>,
    (asked, number): (&Asked, usize),
    holders: &[Fetching],
    wanted: &mut WantedRows,
) -> Result<usize> {
    let topology = &combine.group.topology;
    let (slots, _) = record(combine, asked, number);
    let source = topology.sources()[asked.source].rank;
    let most = combine.shape.experts.num_experts() as i32;
    if !slots.experts.iter().all(|&expert| (-1..most).contains(&expert)) {
        return Err(exchange.torn(source, "question"));
    }
    let tail = |place: usize| match place == topology.own_place() {
        true => combine.state.base[source * combine.shape.column_words()..].as_ptr(),
        false => exchange.relay_tail(asked.source, place),
    };
    Ok(combine.wanted(holders, slots, tail, wanted))
}
