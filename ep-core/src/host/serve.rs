//! Combine through rings: the owner asks for rows in the order in which it adds them, the holder copies
//! them into the owner's ring in that order. A request is the rows of one token, the last one marked; a relay, which
//! asks for owners of other nodes in channels of its own, says first which columns it wants.

use super::combine::{Combine, padded};
use super::copy::copy_bytes;
use super::exchange::Exchange;
use super::item::row_end;
use super::request::RequestRing;
use super::scratch::{Fetching, Serving};
use super::store::Filling;
use super::wanted::{NONE_WANTED, Wanted};
use crate::config::MAX_TOPK;
use crate::engine::RingPositions;
use crate::error::Result;
use crate::wire::{DescBody, REQUESTS};

/// Marks the last row of a request; row numbers have 31 bits.
const LAST: u32 = 1 << 31;

/// Asks every holder whose rows come through the ring for as many tokens as its request ring has room for.
pub(super) fn request_rows(
    combine: &Combine<'_>,
    exchange: &mut Exchange<'_>,
    holders: &mut [Fetching],
    rings: &mut [RingPositions],
) -> Result<bool> {
    let mut progress = false;
    for place in 0..holders.len() {
        if holders[place].rows.is_some() || holders[place].arrived {
            continue;
        }
        let requests = exchange.requests_out(place);
        let start = rings[place].requested;
        let tokens = combine.state.tokens_to(exchange.group.topology.locals()[place]);
        let mut wanted = NONE_WANTED;
        while let Some(&token) = tokens.get(holders[place].next_request) {
            let slots = combine.slots_of(token as usize);
            let count = combine.wanted(holders, slots, |place| holders[place].tail, &mut wanted);
            if !request_token(&requests, &wanted[..count], place, None, &mut rings[place].requested) {
                break;
            }
            holders[place].next_request += 1;
        }
        if rings[place].requested != start {
            exchange.step()?;
            requests.publish(rings[place].requested);
            exchange.moved(place, start, rings[place].requested, REQUESTS as u64 / 2);
            progress = true;
        }
    }
    Ok(progress)
}

/// Asks for the rows of a token that the rank at `place` holds; of the columns `cols`, if a relay asks. False: there
/// is no room. The entries are not published yet.
pub(super) fn request_token(
    requests: &RequestRing<'_>,
    wanted: &[Wanted],
    place: usize,
    cols: Option<(usize, usize)>,
    position: &mut u64,
) -> bool {
    let rows = wanted.iter().filter(|want| want.place == place);
    let num_rows = rows.clone().count();
    if num_rows == 0 {
        return true;
    }
    if !requests.has_room(*position, num_rows as u64 + if cols.is_some() { 2 } else { 0 }) {
        return false;
    }
    let mut put = |entry: u32| {
        requests.put(*position, entry);
        *position += 1;
    };
    if let Some((col, end)) = cols {
        put(col as u32);
        put(end as u32);
    }
    for (i, want) in rows.enumerate() {
        put(want.row | if i + 1 == num_rows { LAST } else { 0 });
    }
    true
}

/// The holder's side of rings.
pub(super) struct Server<'a> {
    combine: &'a Combine<'a>,
    /// This rank's rows are outside windows.
    active: bool,
    /// By channel.
    owners: &'a mut [Serving],
}

impl<'a> Server<'a> {
    pub(super) fn new(combine: &'a Combine<'a>, body: &DescBody, owners: &'a mut [Serving]) -> Server<'a> {
        for owner in owners.iter_mut() {
            (owner.num_rows, owner.pieces) = (0, 0);
        }
        Server { combine, active: body.places[0].window == 0, owners }
    }

    /// Copies requested rows into the rings of their owners while there is room.
    pub(super) fn serve(
        &mut self,
        exchange: &mut Exchange<'_>,
        holders: &[Fetching],
        rings: &mut [RingPositions],
    ) -> Result<bool> {
        if !self.active || exchange.mismatched() {
            return Ok(false);
        }
        let mut progress = false;
        let topology = &exchange.group.topology;
        let (own, num_locals, num_channels) = (topology.own_place(), holders.len(), self.owners.len());
        let first = exchange.group.perturb.first_peer(own, num_channels);
        for channel in (0..num_channels).map(|i| (first + i) % num_channels) {
            let place = channel % num_locals;
            if place != own && holders[place].known && !holders[place].differs {
                progress |= self.serve_owner(exchange, channel, &mut rings[channel])?;
            }
        }
        Ok(progress)
    }

    fn serve_owner(
        &mut self,
        exchange: &mut Exchange<'_>,
        channel: usize,
        ring: &mut RingPositions,
    ) -> Result<bool> {
        let num_locals = exchange.group.topology.locals().len();
        let requests = exchange.requests_in(channel);
        let owner = &mut self.owners[channel];
        let before = (ring.served, owner.pieces, ring.sent);
        let mut filling = Filling::begin(exchange, channel, ring);
        loop {
            if owner.num_rows == 0 {
                let cols = self.combine.call.rows.cols;
                next_request(&requests, channel >= num_locals, cols, &mut ring.served, owner);
            }
            if owner.num_rows == 0 || !write_request(self.combine, owner, &mut filling) {
                break;
            }
            owner.num_rows = 0;
        }
        if let Some(moved) = filling.publish(ring) {
            exchange.step()?;
            exchange.moved(channel % num_locals, moved.start, moved.end, exchange.turn_bytes());
        }
        Ok((ring.served, owner.pieces, ring.sent) != before)
    }
}

/// Takes the next request; none leaves `owner` without rows. A request is published whole.
fn next_request(
    requests: &RequestRing<'_>,
    names_cols: bool,
    cols: usize,
    served: &mut u64,
    owner: &mut Serving,
) {
    let head = requests.head();
    (owner.num_rows, owner.pieces, owner.col, owner.end) = (0, 0, 0, cols);
    if *served == head {
        return;
    }
    if names_cols {
        owner.col = requests.get(*served) as usize;
        owner.end = (requests.get(*served + 1) as usize).min(cols);
        *served += 2;
    }
    while *served < head && owner.num_rows < MAX_TOPK {
        let entry = requests.get(*served);
        *served += 1;
        owner.rows[owner.num_rows] = entry & !LAST;
        owner.num_rows += 1;
        if entry & LAST != 0 {
            break;
        }
    }
    requests.release(*served);
}

/// Writes the pieces of a request: the rows' weights, if it begins with the first column, then columns, piece by
/// piece. False: the ring is full.
fn write_request(combine: &Combine<'_>, owner: &mut Serving, filling: &mut Filling<'_>) -> bool {
    let rows = &owner.rows[..owner.num_rows];
    let per_row = combine.weights_per_row();
    let mut index = 0;
    if let Some(weights) = combine.call.row_weights.as_ref().filter(|_| owner.col == 0) {
        if owner.pieces == 0 {
            let Some(piece) = filling.reserve(4 * per_row * rows.len()) else { return false };
            for (i, &row) in rows.iter().enumerate() {
                let from = row_end(weights, row as usize, 0).address;
                // SAFETY: the piece has room for all rows' weights; the row exists, since owners ask only
                // for rows below this rank's capacity, and is readable by the caller's word.
                unsafe { copy_bytes(piece.add(4 * per_row * i), from, 4 * per_row, false) };
            }
            owner.pieces = 1;
        }
        index = 1;
    }
    let tensor = &combine.call.rows;
    let mut col = owner.col;
    while col < owner.end {
        let bytes = combine.piece_bytes(col, owner.end);
        if index == owner.pieces {
            let Some(piece) = filling.reserve(rows.len() * padded(bytes)) else { return false };
            for (i, &row) in rows.iter().enumerate() {
                let from = row_end(tensor, row as usize, col).address;
                // SAFETY: as above.
                unsafe { copy_bytes(piece.add(i * padded(bytes)), from, bytes, filling.streaming()) };
            }
            owner.pieces += 1;
        }
        index += 1;
        col += combine.piece_cols;
    }
    true
}
