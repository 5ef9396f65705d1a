//! The sending half of a dispatch: each row is read once and stored to each of its destinations.

use super::copy::{RowEnd, copy_row};
use super::dispatch::{Dispatch, bad_place};
use super::exchange::{Exchange, PeerDesc};
use super::ring::RingWriter;
use super::scratch::{DirectPlace, Sending};
use crate::config::Layout;
use crate::engine::{RingPositions, WindowTable};
use crate::error::Result;
use crate::plan::NO_ROW;
use crate::tensor::Tensor;
use crate::wire::WANTS_META;

/// Tokens that go to all their destinations before the next ones are touched, in bytes of their rows: they
/// stay in the first-level cache from the first destination to the last.
const BLOCK_BYTES: usize = 64 << 10;

/// Sends this rank's tokens.
pub(super) struct Sender<'a> {
    dispatch: &'a Dispatch<'a>,
    windows: &'a WindowTable,
    peers: &'a mut [Sending],
    block_tokens: u32,
}

impl<'a> Sender<'a> {
    pub(super) fn new(
        dispatch: &'a Dispatch<'a>,
        windows: &'a WindowTable,
        peers: &'a mut [Sending],
    ) -> Sender<'a> {
        peers.fill(Sending::default());
        let row_bytes: usize = dispatch.call.inputs.iter().flatten().map(Tensor::row_bytes).sum();
        let block_tokens = (BLOCK_BYTES / row_bytes.max(1)).clamp(1, 1024) as u32;
        Sender { dispatch, windows, peers, block_tokens }
    }

    pub(super) fn peers(&self) -> &[Sending] {
        self.peers
    }

    /// True once every peer's descriptor was read and every peer has its rows.
    pub(super) fn finished(&self) -> bool {
        self.peers.iter().all(|peer| peer.done)
    }

    /// Reads the credits that have come. A peer whose signature differs is owed nothing.
    pub(super) fn read_credits(&mut self, exchange: &mut Exchange<'_>) -> Result<bool> {
        let mut progress = false;
        for rank in 0..self.peers.len() {
            if self.peers[rank].credited {
                continue;
            }
            let words = 1 + self.dispatch.shape.experts.num_local(rank);
            let Some(desc) = exchange.peek(rank, words) else { continue };
            progress = true;
            self.peers[rank].credited = true;
            if exchange.matches(&desc) {
                self.open(exchange, rank, &desc)?;
            } else {
                self.peers[rank].done = true;
                self.peers[rank].differs = true;
            }
        }
        Ok(progress)
    }

    /// Takes a credit: where rows go, and how many fit.
    fn open(&mut self, exchange: &Exchange<'_>, rank: usize, desc: &PeerDesc<'_>) -> Result<()> {
        let call = self.dispatch.call;
        let mut direct = [None; crate::wire::MAX_PAYLOADS];
        let mut all_direct = true;
        for (i, input) in call.inputs.iter().enumerate().take(call.num_payloads) {
            let (Some(input), Some(output)) = (input, &call.outputs[i]) else { continue };
            let place = &desc.body.places[i];
            // This rank's own output is direct wherever it lies.
            let base = if rank == self.dispatch.group.rank {
                output.data
            } else if place.window == 0 {
                all_direct = false;
                continue;
            } else {
                let span = place.col_pitch * (input.cols as u64 - 1) + input.dtype.bytes() as u64;
                match self.windows.resolve(rank, place, desc.body.capacity, span) {
                    Some(base) => base,
                    None => return Err(bad_place(exchange, rank)),
                }
            };
            direct[i] = Some(DirectPlace {
                base,
                row_pitch: place.row_pitch as usize,
                col_pitch: place.col_pitch as usize,
            });
        }
        let tokens = self.dispatch.state.tokens_to(rank).len();
        let fit = match self.dispatch.shape.layout {
            Layout::Flat => tokens.min(desc.body.capacity.saturating_sub(desc.tail[0].into()) as usize),
            Layout::ExpertMajor => tokens,
        };
        let peer = &mut self.peers[rank];
        peer.meta = desc.body.wants & WANTS_META != 0;
        peer.messages = peer.meta || !all_direct;
        peer.direct = direct;
        peer.tail = desc.tail.as_ptr();
        peer.capacity = desc.body.capacity;
        peer.end = fit;
        peer.dropped = (tokens - fit) as u64;
        Ok(())
    }

    /// Sends what can be sent now: one block of tokens to every destination that has room. Destinations
    /// that lag behind do not hold the others up.
    pub(super) fn send(&mut self, exchange: &mut Exchange<'_>, rings: &mut [RingPositions]) -> Result<bool> {
        let num_ranks = self.peers.len();
        let stop = exchange.mismatched();
        let limit = self.first_token().saturating_add(self.block_tokens);
        let first = self.dispatch.group.perturb.first_peer(self.dispatch.group.rank, num_ranks);
        let mut progress = false;
        for rank in (0..num_ranks).map(|i| (first + i) % num_ranks) {
            if !self.peers[rank].credited || self.peers[rank].done {
                continue;
            }
            if !stop {
                progress |= self.send_to(exchange, rank, limit, &mut rings[rank])?;
            }
            if stop || self.peers[rank].next == self.peers[rank].end {
                exchange.arrive(rank)?;
                self.peers[rank].done = true;
                progress = true;
            }
        }
        Ok(progress)
    }

    /// The first token that a destination with room still needs.
    fn first_token(&self) -> u32 {
        let next = |(rank, peer): (usize, &Sending)| {
            let open = peer.credited && !peer.done && !peer.blocked && peer.next < peer.end;
            open.then(|| self.dispatch.state.tokens_to(rank)[peer.next])
        };
        self.peers.iter().enumerate().filter_map(next).min().unwrap_or(0)
    }

    /// Sends the tokens of `rank` before `limit`; a destination that was blocked catches up by a block.
    fn send_to(
        &mut self,
        exchange: &mut Exchange<'_>,
        rank: usize,
        limit: u32,
        ring: &mut RingPositions,
    ) -> Result<bool> {
        exchange.step()?;
        let tokens = self.dispatch.state.tokens_to(rank);
        let peer = &mut self.peers[rank];
        let mut limit = limit;
        if peer.blocked && peer.next < peer.end {
            limit = limit.max(tokens[peer.next].saturating_add(self.block_tokens));
        }
        let mut writer = exchange.ring_writer(rank, ring.sent);
        let before = (peer.next, peer.pieces);
        let batch = ring.stores.begin();
        peer.blocked = false;
        while peer.next < peer.end && tokens[peer.next] < limit {
            if !send_token(
                self.dispatch,
                peer,
                rank,
                tokens[peer.next] as usize,
                &mut writer,
                batch.streaming,
            ) {
                peer.blocked = true;
                break;
            }
            peer.next += 1;
        }
        if writer.publish() {
            ring.stores.end(batch, writer.position() - ring.sent);
            exchange.ring(rank);
        }
        ring.sent = writer.position();
        Ok((peer.next, peer.pieces) != before)
    }
}

/// Sends one token to one destination, or goes on with it. False: the ring is full.
fn send_token(
    dispatch: &Dispatch<'_>,
    peer: &mut Sending,
    rank: usize,
    token: usize,
    writer: &mut RingWriter<'_>,
    streaming: bool,
) -> bool {
    let call = dispatch.call;
    if peer.pieces == 0 {
        if peer.meta {
            let Some(piece) = writer.reserve(dispatch.meta_bytes()) else { return false };
            // SAFETY: the piece has meta_bytes bytes, is 64-byte aligned, and is this writer's.
            let words = unsafe { std::slice::from_raw_parts_mut(piece.cast(), dispatch.meta_bytes() / 4) };
            write_meta(dispatch, rank, token, words);
        }
        store_direct(dispatch, peer, rank, token);
        peer.pieces = 1;
    }
    let mut index = 1;
    for (input, direct) in call.inputs.iter().zip(&peer.direct) {
        let Some(input) = input.as_ref().filter(|_| direct.is_none()) else { continue };
        for piece in 0..dispatch.num_pieces(input) {
            if index == peer.pieces {
                let start = piece * dispatch.piece_bytes;
                let bytes = dispatch.piece_bytes.min(input.row_bytes() - start);
                let Some(address) = writer.reserve(bytes) else { return false };
                let element = input.dtype.bytes();
                let from = row_end(input, token, start / element);
                let to = RowEnd { address, col_pitch: element };
                // SAFETY: the piece has `bytes` bytes; the input row is readable by the caller's word.
                unsafe { copy_row(to, from, element, bytes / element, streaming) };
                peer.pieces += 1;
            }
            index += 1;
        }
    }
    peer.pieces = 0;
    true
}

/// Element (row, col) of a tensor as the end of a row copy.
pub(super) fn row_end(tensor: &Tensor, row: usize, col: usize) -> RowEnd {
    let element = row * tensor.row_stride + col * tensor.col_stride;
    RowEnd {
        address: tensor.data.wrapping_add(element * tensor.dtype.bytes()),
        col_pitch: tensor.col_stride * tensor.dtype.bytes(),
    }
}

/// Stores the payloads that lie in the peer's windows, to every row that the token has there.
fn store_direct(dispatch: &Dispatch<'_>, peer: &mut Sending, rank: usize, token: usize) {
    let shape = dispatch.shape;
    if shape.layout == Layout::Flat {
        // SAFETY: the tail outlives the call: the peer writes its slot again only after this epoch.
        let base = unsafe { *peer.tail } as usize;
        store_row(dispatch, peer, token, base + peer.next);
        peer.rows += 1;
        return;
    }
    for slot in token * shape.topk..(token + 1) * shape.topk {
        let expert = dispatch.state.expert[slot];
        if expert < 0 || shape.experts.owner(expert) != rank {
            continue;
        }
        let local = (expert as u32 - shape.experts.first(rank)) as usize;
        // SAFETY: as above; the tail has a word per local expert of the peer.
        let row = unsafe { *peer.tail.add(1 + local) } as usize + dispatch.state.slot_pos[slot] as usize;
        if (row as u64) < peer.capacity {
            store_row(dispatch, peer, token, row);
            peer.rows += 1;
        } else {
            peer.dropped += 1;
        }
    }
}

fn store_row(dispatch: &Dispatch<'_>, peer: &Sending, token: usize, row: usize) {
    for (input, direct) in dispatch.call.inputs.iter().zip(&peer.direct) {
        let (Some(input), Some(direct)) = (input, direct) else { continue };
        let to =
            RowEnd { address: direct.base.wrapping_add(row * direct.row_pitch), col_pitch: direct.col_pitch };
        // SAFETY: the place was checked to hold `capacity` rows and row < capacity; this row is this
        // rank's alone by the prefix sums; the input row is readable by the caller's word.
        unsafe { copy_row(to, row_end(input, token, 0), input.dtype.bytes(), input.cols, true) };
    }
}

/// Origin, local expert per slot, position per slot, weight per slot.
fn write_meta(dispatch: &Dispatch<'_>, rank: usize, token: usize, words: &mut [u32]) {
    let shape = dispatch.shape;
    let topk = shape.topk;
    words[0] = token as u32;
    for k in 0..topk {
        let slot = token * topk + k;
        let expert = dispatch.state.expert[slot];
        let here = expert >= 0 && shape.experts.owner(expert) == rank;
        words[1 + k] = if here { expert as u32 - shape.experts.first(rank) } else { NO_ROW };
        words[1 + topk + k] = dispatch.state.slot_pos[slot];
        if let Some(weights) = &dispatch.call.topk_weights {
            // SAFETY: [tokens, topk] fp32, readable by the caller's word.
            let weight = unsafe { row_end(weights, token, k).address.cast::<u32>().read() };
            words[1 + 2 * topk + k] = if here { weight } else { 0 };
        }
    }
}
