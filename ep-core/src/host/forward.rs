//! The middle of a dispatch between nodes: a relay takes the messages of its sources, in whatever order they land, and
//! passes each token on to the ranks of its node, as it sends its own.

use super::between::BetweenState;
use super::copy::RowEnd;
use super::dispatch::Dispatch;
use super::exchange::{Exchange, Missing};
use super::item::{Item, Sent, Tally, send_item};
use super::pack::padded;
use super::scratch::Sending;
use super::scratch_between::SourceState;
use super::store::Filling;
use crate::config::{Layout, PeerStats};
use crate::engine::{Net, RingPositions, Source};
use crate::error::Result;
use crate::net::Kind;
use crate::plan::NO_ROW;
use crate::wire::{CHUNK_BYTES, Chunk, WHOLE};

/// Messages that are passed on before the other halves of the call get their turn.
const MESSAGES_PER_TURN: usize = 4;

/// Passes tokens on. One message at a time: what it waits for is room in the ring of a rank of this node, which takes
/// from its rings whatever else it waits for.
pub(super) struct Forwarder<'a> {
    dispatch: &'a Dispatch<'a>,
    current: Option<Current>,
    /// The source to look at next.
    next_source: usize,
    tally: Tally,
}

/// The message in progress.
#[derive(Clone, Copy)]
struct Current {
    source: usize,
    seq: u64,
    chunk: Chunk,
    message: *const u8,
    /// The place that is next, by its number among those served; the token for it; and how much of that is done.
    place: usize,
    record: usize,
    pieces: usize,
}

impl Current {
    /// What is done of a token before this message: its head, and the pieces before the one that is here.
    fn first_piece(&self) -> usize {
        match self.chunk.piece {
            WHOLE | 0 => 0,
            piece => piece as usize + 1,
        }
    }
}

impl<'a> Forwarder<'a> {
    pub(super) fn new(dispatch: &'a Dispatch<'a>) -> Forwarder<'a> {
        Forwarder { dispatch, current: None, next_source: 0, tally: Tally::default() }
    }

    /// Passes on what has come and has room, once all ranks of the node have said where. True if anything moved.
    pub(super) fn forward(
        &mut self,
        exchange: &Exchange<'_>,
        sources: &mut [SourceState],
        peers: &[Sending],
        rings: &mut [RingPositions],
    ) -> Result<bool> {
        let Some(net) = self.dispatch.group.net.as_ref().filter(|_| !sources.is_empty()) else {
            return Ok(false);
        };
        let ready = |place: usize| peers[place].credited && !peers[place].differs;
        if exchange.mismatched() || !self.dispatch.group.topology.served_places().all(ready) {
            return Ok(false);
        }
        let mut progress = false;
        for _ in 0..MESSAGES_PER_TURN {
            let found = match self.current.take() {
                None => self.find(net, exchange, sources)?,
                current => current,
            };
            let Some(mut current) = found else { break };
            exchange.step()?;
            let before = (current.record, current.place, current.pieces);
            let done = self.pass_on(exchange, &mut current, sources, peers, rings)?;
            progress |= done || (current.record, current.place, current.pieces) != before;
            if !done {
                self.current = Some(current);
                break;
            }
            self.finish(net, exchange, &current, &mut sources[current.source])?;
        }
        Ok(progress)
    }

    /// A message that has landed and was not taken yet. Sources take turns.
    fn find(
        &mut self,
        net: &Net,
        exchange: &Exchange<'_>,
        sources: &mut [SourceState],
    ) -> Result<Option<Current>> {
        let (rows, num_sources) = (exchange.stream(Kind::Rows), sources.len());
        let window = net.port.layout().window(rows);
        for index in (0..num_sources).map(|i| (self.next_source + i) % num_sources) {
            let (source, state) = (&self.dispatch.group.topology.sources()[index], &mut sources[index]);
            if !state.known || !state.matches || state.is_done() {
                continue;
            }
            skip_old(net, exchange, source, state)?;
            let whole = self.dispatch.packing.per_message != 0;
            // Pieces of a token follow each other in rings.
            let ahead = if whole { window } else { 1 };
            let fresh =
                |seq: &u64| *seq >= state.rows_first && state.rows_taken >> (seq - state.rows) & 1 == 0;
            let landed = |seq: u64| {
                let message = net.port.landed(source.link, rows, seq)?;
                // SAFETY: a landed slot begins with a header, and stays until it is freed.
                let chunk = unsafe { message.cast::<Chunk>().read() };
                // A source that has ended this call may have begun the next.
                (chunk.epoch == exchange.epoch).then_some((seq, message, chunk))
            };
            let found = (state.rows..state.rows + ahead).filter(fresh).find_map(landed);
            if let Some((seq, message, chunk)) = found {
                // The pieces of a token go out without another token between them, whoever that is of.
                self.next_source = if whole { (index + 1) % num_sources } else { index };
                let mut current =
                    Current { source: index, seq, chunk, message, record: 0, place: 0, pieces: 0 };
                current.pieces = current.first_piece();
                return Ok(Some(current));
            }
            if !whole && self.in_token(state) {
                self.next_source = index;
                break;
            }
        }
        Ok(None)
    }

    /// True between the first and the last piece of a token of the source.
    fn in_token(&self, state: &SourceState) -> bool {
        let sent = state.rows.saturating_sub(state.rows_first) as usize;
        !sent.is_multiple_of(self.dispatch.pieces_of_token().max(1))
    }

    /// Sends the tokens of a message. False: a ring is full.
    fn pass_on(
        &mut self,
        exchange: &Exchange<'_>,
        current: &mut Current,
        sources: &[SourceState],
        peers: &[Sending],
        rings: &mut [RingPositions],
    ) -> Result<bool> {
        let (dispatch, topology) = (self.dispatch, &self.dispatch.group.topology);
        let packing = &dispatch.packing;
        let source = topology.sources()[current.source].rank;
        let state = &sources[current.source];
        let end = current.chunk.first as usize + current.chunk.records as usize;
        let most = packing.per_message.max(1);
        let whole = current.chunk.piece == WHOLE;
        let piece_is_known = whole || (current.chunk.piece as usize) < dispatch.pieces_of_token();
        if end > state.num_tokens
            || current.chunk.records as usize > most
            || whole != (packing.per_message != 0)
            || !piece_is_known
        {
            return Err(exchange.torn(source, "rows"));
        }
        // Place by place: a ring is told of all its pieces at once.
        while let Some(place) = topology.served_places().nth(current.place) {
            let channel = topology.locals().len() + place;
            let mut filling = Filling::begin(exchange, channel, &rings[channel]);
            let sent = self.send_all(exchange, current, source, place, &peers[place], &mut filling);
            if filling.publish(&mut rings[channel]).is_some() {
                exchange.ring(place);
            }
            if !sent? {
                return Ok(false);
            }
            (current.place, current.record) = (current.place + 1, 0);
            current.pieces = current.first_piece();
        }
        Ok(true)
    }

    /// Sends the tokens of a message to one rank. False: its ring is full.
    fn send_all(
        &mut self,
        exchange: &Exchange<'_>,
        current: &mut Current,
        source: usize,
        place: usize,
        peer: &Sending,
        filling: &mut Filling<'_>,
    ) -> Result<bool> {
        let (dispatch, topology) = (self.dispatch, &self.dispatch.group.topology);
        let rank = topology.locals()[place];
        let tail = if place == topology.own_place() {
            dispatch.state.base[source * dispatch.shape.column_words()..].as_ptr()
        } else {
            exchange.relay_tail(current.source, place)
        };
        // SAFETY: the tail has a word at least, and outlives the call.
        let first_row = u64::from(unsafe { *tail });
        while current.record < current.chunk.records as usize {
            let record = Record::at(dispatch, current);
            if !record.is_sound(dispatch) {
                return Err(exchange.torn(source, "rows"));
            }
            if let Some(position) = record.position(dispatch, rank) {
                if dispatch.shape.layout == Layout::Flat && first_row + u64::from(position) >= peer.capacity {
                    self.tally.dropped += u64::from(current.first_piece() == 0);
                } else {
                    let item = Relayed { dispatch, record, source, position, tail };
                    let (pieces, tally) = (&mut current.pieces, &mut self.tally);
                    if send_item(dispatch, peer, rank, &item, filling, pieces, tally) == Sent::Full {
                        return Ok(false);
                    }
                }
            }
            current.record += 1;
            current.pieces = current.first_piece();
        }
        Ok(true)
    }

    /// Frees a message that was passed on.
    fn finish(
        &mut self,
        net: &Net,
        exchange: &Exchange<'_>,
        current: &Current,
        state: &mut SourceState,
    ) -> Result<()> {
        let last_piece = current.chunk.piece as usize + 1 == self.dispatch.pieces_of_token();
        if current.chunk.piece == WHOLE || last_piece {
            state.tokens_done += current.chunk.records as usize;
            if current.chunk.piece != WHOLE {
                self.next_source += 1;
            }
        }
        state.rows_taken |= 1 << (current.seq - state.rows);
        let taken = state.rows_taken.trailing_ones();
        state.rows_taken = state.rows_taken.checked_shr(taken).unwrap_or(0);
        state.rows += u64::from(taken);
        let source = &self.dispatch.group.topology.sources()[current.source];
        net.port
            .send_credit(source.link, exchange.stream(Kind::Rows), state.rows)
            .map_err(|error| exchange.defect(source.rank, error))
    }

    /// Rows of other nodes that did not fit are counted where they were passed on.
    pub(super) fn count_stats(&self) {
        if self.tally.dropped != 0 {
            let dropped = PeerStats { rows_dropped: self.tally.dropped, ..PeerStats::default() };
            self.dispatch.group.lanes[self.dispatch.shape.lane].counters[self.dispatch.group.rank]
                .add(&dropped);
        }
    }
}

/// Frees messages of calls that failed, once they have landed.
fn skip_old(net: &Net, exchange: &Exchange<'_>, source: &Source, state: &mut SourceState) -> Result<()> {
    let (rows, before) = (exchange.stream(Kind::Rows), state.rows);
    while state.rows < state.rows_first
        && (state.rows_taken & 1 != 0 || net.port.landed(source.link, rows, state.rows).is_some())
    {
        (state.rows, state.rows_taken) = (state.rows + 1, state.rows_taken >> 1);
    }
    if state.rows == before {
        return Ok(());
    }
    net.port.send_credit(source.link, rows, state.rows).map_err(|error| exchange.defect(source.rank, error))
}

/// The sources whose rows are not all here.
pub(super) fn missing_rows_of_sources(exchange: &Exchange<'_>, between: &BetweenState) -> Missing {
    let sources = exchange.group.topology.sources().iter().zip(&between.sources);
    let missing = sources.filter(|(_, state)| !state.is_done());
    Missing::of(missing.map(|(source, _)| source.rank), "the rows")
}

/// One token in a message.
struct Record<'a> {
    token: u32,
    experts: &'a [i32],
    positions: &'a [u32],
    weights: Option<RowEnd>,
    payloads: *const u8,
    piece: u32,
}

impl<'a> Record<'a> {
    fn at(dispatch: &Dispatch<'_>, current: &Current) -> Record<'a> {
        let (packing, topk) = (&dispatch.packing, dispatch.shape.topk);
        let start = current.message.wrapping_add(CHUNK_BYTES + current.record * packing.record_bytes);
        let with_weights = dispatch.call.topk_weights.is_some();
        // SAFETY: the message was checked to hold the record, which begins with these words, aligned; it stays until
        // it is freed, after this record was used.
        let words = unsafe {
            std::slice::from_raw_parts(start.cast::<u32>(), 1 + topk * (2 + usize::from(with_weights)))
        };
        let weights = words[1 + 2 * topk..].as_ptr().cast_mut().cast();
        Record {
            token: words[0],
            experts: bytemuck::cast_slice(&words[1..1 + topk]),
            positions: &words[1 + topk..1 + 2 * topk],
            weights: with_weights.then_some(RowEnd { address: weights, col_pitch: 4 }),
            payloads: start.wrapping_add(packing.head_bytes),
            piece: current.chunk.piece,
        }
    }

    fn is_sound(&self, dispatch: &Dispatch<'_>) -> bool {
        let most = dispatch.shape.experts.num_experts() as i32;
        self.experts.iter().all(|&expert| (-1..most).contains(&expert))
    }

    /// The token's position among those of its rank that go to `rank`; None if it does not go there.
    fn position(&self, dispatch: &Dispatch<'_>, rank: usize) -> Option<u32> {
        let there = |expert: i32| expert >= 0 && dispatch.shape.experts.owner(expert) == rank;
        let mut slots = self.experts.iter().zip(self.positions).filter(|(expert, _)| there(**expert));
        match dispatch.shape.layout {
            Layout::Flat => slots.find(|(_, position)| **position != NO_ROW).map(|(_, position)| *position),
            Layout::ExpertMajor => slots.next().map(|_| 0),
        }
    }

    /// Where the payload `i` begins among those of the token.
    fn payload(&self, dispatch: &Dispatch<'_>, i: usize) -> *mut u8 {
        let before = dispatch.call.inputs[..i].iter().flatten();
        self.payloads.cast_mut().wrapping_add(before.map(|input| padded(input.row_bytes())).sum())
    }
}

/// A token of another node, on its way to one rank.
struct Relayed<'a> {
    dispatch: &'a Dispatch<'a>,
    record: Record<'a>,
    source: usize,
    position: u32,
    tail: *const u32,
}

impl Item for Relayed<'_> {
    fn source(&self) -> Option<usize> {
        Some(self.source)
    }

    fn token(&self) -> u32 {
        self.record.token
    }

    fn position(&self) -> u32 {
        self.position
    }

    fn experts(&self) -> &[i32] {
        self.record.experts
    }

    fn slot_pos(&self) -> &[u32] {
        self.record.positions
    }

    fn weights(&self) -> Option<RowEnd> {
        self.record.weights
    }

    fn tail(&self) -> *const u32 {
        self.tail
    }

    fn is_whole(&self) -> bool {
        self.record.piece == WHOLE
    }

    fn row(&self, i: usize, start: usize, piece: usize) -> Option<RowEnd> {
        let col_pitch = self.dispatch.call.inputs[i].as_ref()?.dtype.bytes();
        if self.is_whole() {
            let address = self.record.payload(self.dispatch, i).wrapping_add(start);
            return Some(RowEnd { address, col_pitch });
        }
        let here = self.record.piece as usize == piece;
        here.then_some(RowEnd { address: self.record.payloads.cast_mut(), col_pitch })
    }
}
