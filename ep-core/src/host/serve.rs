//! Combine through rings: the owner asks for rows in the order in which it adds them, the holder copies
//! them into the owner's ring in that order. A request is the rows of one token, the last one marked.

use std::sync::atomic::Ordering;

use super::combine::{Combine, Wanted, padded};
use super::copy::copy_bytes;
use super::exchange::Exchange;
use super::ring::RingWriter;
use super::scratch::{Fetching, Serving};
use super::send::row_end;
use crate::config::MAX_TOPK;
use crate::engine::RingPositions;
use crate::error::Result;
use crate::wire::{DescBody, REQUESTS, line};

/// Marks the last row of a request; row numbers have 31 bits.
const LAST: u32 = 1 << 31;

/// Asks every holder whose rows come through the ring for as many tokens as its request ring has room for.
pub(super) fn request_rows(
    combine: &Combine<'_>,
    exchange: &mut Exchange<'_>,
    peers: &mut [Fetching],
    rings: &mut [RingPositions],
) -> Result<bool> {
    let mut progress = false;
    for rank in 0..peers.len() {
        if peers[rank].rows.is_some() || peers[rank].arrived {
            continue;
        }
        let group = exchange.group;
        let own_line = group.layout.line(exchange.lane, rank);
        // Acquire: pairs with the release in `next_request`; the entries up to there may be reused.
        let tail = group.segments[group.rank].u64(own_line + line::REQUEST_TAIL).load(Ordering::Acquire);
        let start = rings[rank].requested;
        let tokens = combine.state.tokens_to(rank);
        let mut wanted = [Wanted::default(); MAX_TOPK];
        while let Some(&token) = tokens.get(peers[rank].next_request) {
            let count = combine.wanted(peers, token as usize, &mut wanted);
            let rows = wanted[..count].iter().filter(|want| want.rank == rank);
            let num_rows = rows.clone().count() as u64;
            if rings[rank].requested + num_rows - tail > REQUESTS as u64 {
                break;
            }
            for (i, want) in rows.enumerate() {
                let mark = if i as u64 + 1 == num_rows { LAST } else { 0 };
                let entry = exchange.request_entry(rank, group.rank, rings[rank].requested);
                // Relaxed: published by the release store of the head below.
                entry.store(want.row | mark, Ordering::Relaxed);
                rings[rank].requested += 1;
            }
            peers[rank].next_request += 1;
        }
        if rings[rank].requested != start {
            exchange.step()?;
            let head = group.layout.line(exchange.lane, group.rank) + line::REQUEST_HEAD;
            // Release: pairs with the acquire in `next_request`; publishes the entries.
            group.segments[rank].u64(head).store(rings[rank].requested, Ordering::Release);
            exchange.moved(rank, start, rings[rank].requested, REQUESTS as u64 / 2);
            progress = true;
        }
    }
    Ok(progress)
}

/// Finds the pieces of the token in progress that begin at column `col`, in every holder's ring; weights
/// come before the first piece and go to `put_weight(rank, i, bits)`. False: one is not there yet.
pub(super) fn take_token_pieces(
    combine: &Combine<'_>,
    exchange: &Exchange<'_>,
    peers: &mut [Fetching],
    rings: &mut [RingPositions],
    col: usize,
    mut put_weight: impl FnMut(usize, usize, u32),
) -> bool {
    let mut complete = true;
    for (rank, peer) in peers.iter_mut().enumerate() {
        if peer.rows_of_token == 0 || peer.rows.is_some() || peer.piece.is_some() {
            continue;
        }
        let mut reader = exchange.ring_reader(rank, rings[rank].taken);
        let weights = peer.rows_of_token * combine.weights_per_row();
        if weights > 0 && !peer.weights_taken {
            let Some(piece) = reader.peek(4 * weights) else {
                complete = false;
                continue;
            };
            for i in 0..weights {
                // SAFETY: the piece has `weights` words, is 64-byte aligned, and stays until it is taken.
                put_weight(rank, i, unsafe { piece.cast::<u32>().add(i).read() });
            }
            reader.take(4 * weights);
            rings[rank].taken = reader.position();
            peer.weights_taken = true;
        }
        peer.piece = reader.peek(peer.rows_of_token * padded(combine.piece_bytes(col)));
        complete &= peer.piece.is_some();
    }
    complete
}

/// The holder's side of rings.
pub(super) struct Server<'a> {
    combine: &'a Combine<'a>,
    /// This rank's rows are outside windows.
    active: bool,
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
        peers: &[Fetching],
        rings: &mut [RingPositions],
    ) -> Result<bool> {
        if !self.active || exchange.mismatched() {
            return Ok(false);
        }
        let mut progress = false;
        let group = exchange.group;
        let first = group.perturb.first_peer(group.rank, group.num_ranks);
        for rank in (0..group.num_ranks).map(|i| (first + i) % group.num_ranks) {
            if rank != group.rank && peers[rank].known && !peers[rank].differs {
                progress |= self.serve_owner(exchange, rank, &mut rings[rank])?;
            }
        }
        Ok(progress)
    }

    fn serve_owner(
        &mut self,
        exchange: &mut Exchange<'_>,
        rank: usize,
        ring: &mut RingPositions,
    ) -> Result<bool> {
        let owner = &mut self.owners[rank];
        let mut writer = exchange.ring_writer(rank, ring.sent);
        let before = (ring.served, owner.pieces, writer.position());
        let batch = ring.stores.begin();
        loop {
            if owner.num_rows == 0 {
                owner.num_rows = next_request(exchange, rank, &mut ring.served, &mut owner.rows);
                owner.pieces = 0;
            }
            if owner.num_rows == 0 || !write_request(self.combine, owner, &mut writer, batch.streaming) {
                break;
            }
            owner.num_rows = 0;
        }
        if writer.publish() {
            ring.stores.end(batch, writer.position() - ring.sent);
            exchange.step()?;
            exchange.moved(rank, ring.sent, writer.position(), exchange.turn_bytes());
        }
        ring.sent = writer.position();
        Ok((ring.served, owner.pieces, ring.sent) != before)
    }
}

/// Takes the next request of `rank` into `rows`; 0 if there is none. A request is published whole.
fn next_request(exchange: &Exchange<'_>, rank: usize, served: &mut u64, rows: &mut [u32; MAX_TOPK]) -> usize {
    let group = exchange.group;
    let own = &group.segments[group.rank];
    // Acquire: pairs with the release in `request_rows`; makes the entries visible.
    let head = own.u64(group.layout.line(exchange.lane, rank) + line::REQUEST_HEAD).load(Ordering::Acquire);
    let mut count = 0;
    while *served < head && count < MAX_TOPK {
        // Relaxed: ordered by the acquire above.
        let entry = exchange.request_entry(group.rank, rank, *served).load(Ordering::Relaxed);
        *served += 1;
        rows[count] = entry & !LAST;
        count += 1;
        if entry & LAST != 0 {
            break;
        }
    }
    if count > 0 {
        let tail = group.layout.line(exchange.lane, group.rank) + line::REQUEST_TAIL;
        // Release: pairs with the acquire in `request_rows`; the entries were read.
        group.segments[rank].u64(tail).store(*served, Ordering::Release);
    }
    count
}

/// Writes the pieces of a request: the rows' weights, then their columns, piece by piece. False: the ring
/// is full.
fn write_request(
    combine: &Combine<'_>,
    owner: &mut Serving,
    writer: &mut RingWriter<'_>,
    streaming: bool,
) -> bool {
    let rows = &owner.rows[..owner.num_rows];
    let per_row = combine.weights_per_row();
    let mut index = 0;
    if let Some(weights) = &combine.call.row_weights {
        if owner.pieces == 0 {
            let Some(piece) = writer.reserve(4 * per_row * rows.len()) else { return false };
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
    let mut col = 0;
    while col < tensor.cols {
        let bytes = combine.piece_bytes(col);
        if index == owner.pieces {
            let Some(piece) = writer.reserve(rows.len() * padded(bytes)) else { return false };
            for (i, &row) in rows.iter().enumerate() {
                let from = row_end(tensor, row as usize, col).address;
                // SAFETY: as above.
                unsafe { copy_bytes(piece.add(i * padded(bytes)), from, bytes, streaming) };
            }
            owner.pieces += 1;
        }
        index += 1;
        col += combine.piece_cols;
    }
    true
}
