//! The sending half of a dispatch: each row is read once and stored to each of its destinations.

use super::copy::RowEnd;
use super::dispatch::{Dispatch, bad_place};
use super::exchange::{Exchange, PeerDesc};
use super::item::{Item, Sent, row_end, send_item};
use super::scratch::{DirectPlace, Sending};
use super::store::Filling;
use crate::config::Layout;
use crate::engine::{RingPositions, WindowTable};
use crate::error::Result;
use crate::tensor::Tensor;
use crate::wire::{MAX_PAYLOADS, WANTS_META};

/// Tokens that go to all their destinations before the next ones are touched, in bytes of their rows: they
/// stay in the first-level cache from the first destination to the last.
const BLOCK_BYTES: usize = 64 << 10;

/// Sends this rank's tokens.
pub(super) struct Sender<'a> {
    dispatch: &'a Dispatch<'a>,
    windows: &'a WindowTable,
    /// By place.
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

    /// Reads the credits of the ranks of this node that have come. A peer whose signature differs is owed nothing.
    pub(super) fn read_credits(&mut self, exchange: &mut Exchange<'_>) -> Result<bool> {
        let mut progress = false;
        for (place, &rank) in self.dispatch.group.topology.locals().iter().enumerate() {
            if self.peers[place].credited {
                continue;
            }
            let words = 1 + self.dispatch.shape.experts.num_local(rank);
            let Some(desc) = exchange.peek(rank, words) else { continue };
            progress = true;
            self.peers[place].credited = true;
            if exchange.matches(&desc) {
                self.open(exchange, place, &desc)?;
            } else {
                self.peers[place].done = true;
                self.peers[place].differs = true;
            }
        }
        Ok(progress)
    }

    /// Takes a credit: where rows go, and how many fit.
    fn open(&mut self, exchange: &Exchange<'_>, place: usize, desc: &PeerDesc<'_>) -> Result<()> {
        let rank = self.dispatch.group.topology.locals()[place];
        let call = self.dispatch.call;
        let mut direct = [None; MAX_PAYLOADS];
        let mut all_direct = true;
        for (i, input) in call.inputs.iter().enumerate().take(call.num_payloads) {
            let (Some(input), Some(output)) = (input, &call.outputs[i]) else { continue };
            let at = &desc.body.places[i];
            // This rank's own output is direct wherever it lies.
            let base = if rank == self.dispatch.group.rank {
                output.data
            } else if at.window == 0 {
                all_direct = false;
                continue;
            } else {
                let span = at.col_pitch * (input.cols as u64 - 1) + input.dtype.bytes() as u64;
                match self.windows.resolve(rank, at, desc.body.capacity, span) {
                    Some(base) => base,
                    None => return Err(bad_place(exchange, rank)),
                }
            };
            direct[i] = Some(DirectPlace {
                base,
                row_pitch: at.row_pitch as usize,
                col_pitch: at.col_pitch as usize,
            });
        }
        let tokens = self.dispatch.state.tokens_to(rank).len();
        let fit = match self.dispatch.shape.layout {
            Layout::Flat => tokens.min(desc.body.capacity.saturating_sub(desc.tail[0].into()) as usize),
            Layout::ExpertMajor => tokens,
        };
        let peer = &mut self.peers[place];
        peer.meta = desc.body.wants & WANTS_META != 0;
        peer.messages = peer.meta || !all_direct;
        peer.direct = direct;
        peer.tail = desc.tail.as_ptr();
        peer.capacity = desc.body.capacity;
        peer.end = fit;
        peer.tally.dropped = (tokens - fit) as u64;
        Ok(())
    }

    /// Sends what can be sent now: one block of tokens to every destination that has room. Destinations
    /// that lag behind do not hold the others up. `forwarded`: this rank owes nobody rows of other nodes any more.
    pub(super) fn send(
        &mut self,
        exchange: &mut Exchange<'_>,
        rings: &mut [RingPositions],
        forwarded: bool,
    ) -> Result<bool> {
        let num_peers = self.peers.len();
        let stop = exchange.mismatched();
        let limit = self.first_token().saturating_add(self.block_tokens);
        let group = self.dispatch.group;
        let first = group.perturb.first_peer(group.topology.own_place(), num_peers);
        let mut progress = false;
        for place in (0..num_peers).map(|i| (first + i) % num_peers) {
            if !self.peers[place].credited || self.peers[place].done {
                continue;
            }
            if !stop {
                progress |= self.send_to(exchange, place, limit, &mut rings[place])?;
            }
            if stop || (forwarded && self.peers[place].next == self.peers[place].end) {
                exchange.arrive(place)?;
                self.peers[place].done = true;
                progress = true;
            }
        }
        Ok(progress)
    }

    /// The first token that a destination with room still needs.
    fn first_token(&self) -> u32 {
        let next = |(&rank, peer): (&usize, &Sending)| {
            let open = peer.credited && !peer.done && !peer.blocked && peer.next < peer.end;
            open.then(|| self.dispatch.state.tokens_to(rank)[peer.next])
        };
        self.dispatch
            .group
            .topology
            .locals()
            .iter()
            .zip(self.peers.iter())
            .filter_map(next)
            .min()
            .unwrap_or(0)
    }

    /// Sends the tokens for the rank at `place` before `limit`; a destination that was blocked catches up by a block.
    fn send_to(
        &mut self,
        exchange: &mut Exchange<'_>,
        place: usize,
        limit: u32,
        ring: &mut RingPositions,
    ) -> Result<bool> {
        exchange.step()?;
        let rank = self.dispatch.group.topology.locals()[place];
        let tokens = self.dispatch.state.tokens_to(rank);
        let peer = &mut self.peers[place];
        let mut limit = limit;
        if peer.blocked && peer.next < peer.end {
            limit = limit.max(tokens[peer.next].saturating_add(self.block_tokens));
        }
        let mut filling = Filling::begin(exchange, place, ring);
        let before = (peer.next, peer.pieces);
        peer.blocked = false;
        while peer.next < peer.end && tokens[peer.next] < limit {
            let (token, position) = (tokens[peer.next] as usize, peer.next);
            let item = OwnToken { dispatch: self.dispatch, token, position, tail: peer.tail };
            let (mut pieces, mut tally) = (peer.pieces, peer.tally);
            let sent = send_item(self.dispatch, peer, rank, &item, &mut filling, &mut pieces, &mut tally);
            (peer.pieces, peer.tally) = (pieces, tally);
            if sent != Sent::Done {
                peer.blocked = true;
                break;
            }
            peer.next += 1;
        }
        if filling.publish(ring).is_some() {
            exchange.ring(place);
        }
        Ok((peer.next, peer.pieces) != before)
    }
}

/// A token of this rank.
struct OwnToken<'a> {
    dispatch: &'a Dispatch<'a>,
    token: usize,
    /// Its place in the list of tokens for the destination.
    position: usize,
    tail: *const u32,
}

impl OwnToken<'_> {
    fn slots(&self) -> std::ops::Range<usize> {
        let topk = self.dispatch.shape.topk;
        self.token * topk..(self.token + 1) * topk
    }
}

impl Item for OwnToken<'_> {
    #[inline(always)]
    fn source(&self) -> Option<usize> {
        None
    }

    #[inline(always)]
    fn token(&self) -> u32 {
        self.token as u32
    }

    #[inline(always)]
    fn position(&self) -> u32 {
        self.position as u32
    }

    #[inline(always)]
    fn experts(&self) -> &[i32] {
        &self.dispatch.state.expert[self.slots()]
    }

    #[inline(always)]
    fn slot_pos(&self) -> &[u32] {
        &self.dispatch.state.slot_pos[self.slots()]
    }

    #[inline(always)]
    fn weights(&self) -> Option<RowEnd> {
        self.dispatch.call.topk_weights.as_ref().map(|weights| row_end(weights, self.token, 0))
    }

    #[inline(always)]
    fn tail(&self) -> *const u32 {
        self.tail
    }

    #[inline(always)]
    fn is_whole(&self) -> bool {
        true
    }

    #[inline(always)]
    fn row(&self, i: usize, start: usize, _piece: usize) -> Option<RowEnd> {
        let input = self.dispatch.call.inputs[i].as_ref()?;
        Some(row_end(input, self.token, start / input.dtype.bytes()))
    }
}
