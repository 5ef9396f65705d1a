//! `ep_combine`: the owner of a token reads its rows where the experts left them, in windows, or takes
//! them from rings in the order in which it asked for them; and adds them.

use super::call::CombineCall;
use super::exchange::{Exchange, Missing};
use super::reduce::{Close, Reduction, Term, reduce};
use super::scratch::{DirectPlace, Fetching, LaneScratch};
use super::send::row_end;
use super::serve::{Server, request_rows, take_token_pieces};
use super::update::Updated;
use crate::config::{Layout, MAX_TOPK, PeerStats, ReduceOrder};
use crate::engine::{Group, LaneState, RingPositions, WindowTable};
use crate::error::Result;
use crate::plan::{NO_ROW, PlanShape, PlanState};
use crate::wire::{DescBody, FLAG_ORDER_SHIFT, FLAG_ROW_WEIGHTS, FLAG_WIRE_BF16, OP_COMBINE};

/// Everything that the two sides of a combine share.
pub(super) struct Combine<'a> {
    pub(super) group: &'a Group,
    pub(super) shape: &'a PlanShape,
    pub(super) state: &'a PlanState<'a>,
    pub(super) call: &'a CombineCall,
    pub(super) num_tokens: usize,
    /// Columns of one piece of a row in a ring: the rows of a token fit a quarter of it together.
    pub(super) piece_cols: usize,
}

/// One term before its address is known.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Wanted {
    pub(super) rank: usize,
    pub(super) slot: usize,
    pub(super) row: u32,
    /// How many earlier rows of the token the same rank has.
    pub(super) ordinal: usize,
}

impl Combine<'_> {
    /// Weights of a row that travel with it.
    pub(super) fn weights_per_row(&self) -> usize {
        match (&self.call.row_weights, self.shape.layout) {
            (None, _) => 0,
            (Some(_), Layout::Flat) => self.shape.topk,
            (Some(_), Layout::ExpertMajor) => 1,
        }
    }

    /// Bytes of a row's piece that begins at column `col`.
    pub(super) fn piece_bytes(&self, col: usize) -> usize {
        self.piece_cols.min(self.call.rows.cols - col) * self.call.rows.dtype.bytes()
    }

    /// The rows of a token, in slot order, without those that were dropped. `peers` knows the holders.
    pub(super) fn wanted(&self, peers: &[Fetching], token: usize, wanted: &mut [Wanted; MAX_TOPK]) -> usize {
        let mut count = 0;
        for slot in token * self.shape.topk..(token + 1) * self.shape.topk {
            let expert = self.state.expert[slot];
            if expert < 0 {
                continue;
            }
            let rank = self.shape.experts.owner(expert);
            let position = match self.shape.layout {
                Layout::Flat if self.state.rank_pos[slot] == NO_ROW => continue,
                Layout::Flat => self.state.rank_pos[slot],
                Layout::ExpertMajor => self.state.slot_pos[slot],
            };
            let word = match self.shape.layout {
                Layout::Flat => 0,
                Layout::ExpertMajor => 1 + (expert as u32 - self.shape.experts.first(rank)) as usize,
            };
            // SAFETY: the holder's tail has this word, and outlives the call.
            let row = unsafe { *peers[rank].tail.add(word) } + position;
            if u64::from(row) < peers[rank].capacity {
                let ordinal = wanted[..count].iter().filter(|earlier| earlier.rank == rank).count();
                wanted[count] = Wanted { rank, slot, row, ordinal };
                count += 1;
            }
        }
        count
    }
}

/// Runs a combine.
pub(crate) fn combine(
    group: &Group,
    lane: &mut LaneState,
    shape: &PlanShape,
    state: &PlanState<'_>,
    updated: &Updated,
    call: &CombineCall,
) -> Result<()> {
    let windows = WindowTable::of(group);
    let body = describe(shape, updated, call, &windows);
    let mut exchange = Exchange::begin(group, shape.lane, lane, body, call.deadline);
    let combine = Combine {
        group,
        shape,
        state,
        call,
        num_tokens: updated.num_tokens,
        piece_cols: piece_cols(group.layout.ring_bytes(), shape, call),
    };
    let words = shape.column_words();
    let first = group.perturb.first_peer(group.rank, group.num_ranks);
    for peer in (0..group.num_ranks).map(|i| (first + i) % group.num_ranks) {
        let base = &state.base[peer * words..(peer + 1) * words];
        exchange.publish(peer, &body, words, |tail| tail.copy_from_slice(base))?;
    }

    let LaneState { rings, scratch, .. } = lane;
    let LaneScratch { fetching, serving, .. } = scratch;
    let mut owner = Owner::new(&combine, &windows, fetching);
    let mut server = Server::new(&combine, &body, serving);
    loop {
        let bell = exchange.bell();
        let mut progress = owner.read_descriptors(&mut exchange)?;
        progress |= server.serve(&mut exchange, owner.peers, rings)?;
        progress |= owner.fetch(&mut exchange, rings)?;
        if owner.finished() && owner.peers_are_done(&exchange) {
            break;
        }
        if progress {
            exchange.check_deadline("its tokens")?;
            exchange.progressed();
        } else {
            exchange.wait(bell, |exchange| owner.missing(exchange))?;
        }
    }
    owner.discard_rest(&exchange, rings);
    exchange.verdict()?;
    owner.count_stats();
    Ok(())
}

/// Both sides of a ring come to the same number: all of it is in the signature or in the group's config.
fn piece_cols(ring_bytes: usize, shape: &PlanShape, call: &CombineCall) -> usize {
    let rows = match shape.layout {
        Layout::Flat => 1,
        Layout::ExpertMajor => shape.topk,
    };
    let bytes = (ring_bytes / 4 / rows) & !63;
    (bytes / call.rows.dtype.bytes()).min(call.rows.cols)
}

fn describe(shape: &PlanShape, updated: &Updated, call: &CombineCall, windows: &WindowTable) -> DescBody {
    let mut body = DescBody {
        plan_epoch: updated.epoch,
        plan_hash: shape.hash,
        op: OP_COMBINE,
        num_payloads: 1,
        dtypes: call.rows.dtype as u32,
        flags: (call.order as u32) << FLAG_ORDER_SHIFT,
        capacity: call.rows.rows as u64,
        ..DescBody::default()
    };
    body.row_bytes[0] = call.rows.row_bytes() as u32;
    body.places[0] = windows.place(&call.rows);
    if call.wire_bf16 {
        body.flags |= FLAG_WIRE_BF16;
    }
    if let Some(weights) = &call.row_weights {
        body.flags |= FLAG_ROW_WEIGHTS;
        body.places[1] = windows.place(weights);
    }
    // Both come one way, so that a holder's ring is either used for a token or not.
    if body.places[0].window == 0 || (call.row_weights.is_some() && body.places[1].window == 0) {
        body.places[0].window = 0;
        body.places[1].window = 0;
    }
    body
}

/// The owner's side: fetches and adds the rows of this rank's tokens, in token order.
struct Owner<'a> {
    combine: &'a Combine<'a>,
    windows: &'a WindowTable,
    peers: &'a mut [Fetching],
    token: usize,
    col: usize,
    wanted: [Wanted; MAX_TOPK],
    num_wanted: usize,
    /// The token in progress was looked up.
    opened: bool,
}

/// Tokens that are added before the server's side gets its turn.
const TOKENS_PER_TURN: usize = 16;

impl<'a> Owner<'a> {
    fn new(combine: &'a Combine<'a>, windows: &'a WindowTable, peers: &'a mut [Fetching]) -> Owner<'a> {
        peers.fill(Fetching::default());
        let wanted = [Wanted::default(); MAX_TOPK];
        Owner { combine, windows, peers, token: 0, col: 0, wanted, num_wanted: 0, opened: false }
    }

    fn read_descriptors(&mut self, exchange: &mut Exchange<'_>) -> Result<bool> {
        let mut progress = false;
        for rank in 0..self.peers.len() {
            if self.peers[rank].known {
                continue;
            }
            let words = 1 + self.combine.shape.experts.num_local(rank);
            let Some(desc) = exchange.peek(rank, words) else { continue };
            progress = true;
            let peer = &mut self.peers[rank];
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
                    let place = &desc.body.places[i];
                    let base = self.windows.resolve(rank, place, desc.body.capacity, span as u64);
                    let base = base.ok_or_else(|| super::dispatch::bad_place(exchange, rank))?;
                    let row_pitch = place.row_pitch as usize;
                    found[i] = Some(DirectPlace { base, row_pitch, col_pitch: place.col_pitch as usize });
                }
                let peer = &mut self.peers[rank];
                [peer.rows, peer.row_weights] = found;
            }
        }
        Ok(progress)
    }

    /// Adds tokens until rows are missing, or it is the server's turn.
    fn fetch(&mut self, exchange: &mut Exchange<'_>, rings: &mut [RingPositions]) -> Result<bool> {
        if exchange.mismatched() {
            return self.say_done(exchange);
        }
        if self.peers.iter().any(|peer| !peer.known) {
            return Ok(false);
        }
        let before = (self.token, self.col);
        let mut progress = false;
        for _ in 0..TOKENS_PER_TURN {
            progress |= request_rows(self.combine, exchange, self.peers, rings)?;
            if self.token == self.combine.num_tokens {
                break;
            }
            exchange.step()?;
            if !self.add_token(exchange, rings) {
                break;
            }
        }
        self.publish_tails(exchange, rings);
        if self.token == self.combine.num_tokens {
            progress |= self.say_done(exchange)?;
        }
        Ok(progress || (self.token, self.col) != before)
    }

    /// Tells the holders that this rank reads their rows no more.
    fn say_done(&mut self, exchange: &Exchange<'_>) -> Result<bool> {
        let mut progress = false;
        for (rank, peer) in self.peers.iter_mut().enumerate() {
            if peer.known && !peer.arrived {
                exchange.arrive(rank)?;
                peer.arrived = true;
                progress = true;
            }
        }
        Ok(progress)
    }

    /// Adds one token, or goes on with it. False: a piece is missing.
    fn add_token(&mut self, exchange: &Exchange<'_>, rings: &mut [RingPositions]) -> bool {
        if !self.opened {
            self.num_wanted = self.combine.wanted(self.peers, self.token, &mut self.wanted);
            let node_of = &self.combine.group.node_of;
            match self.combine.call.order {
                ReduceOrder::TopkSlot => {}
                ReduceOrder::Rank => sort(&mut self.wanted[..self.num_wanted], |want| (0, want.rank)),
                ReduceOrder::NodeRank => {
                    sort(&mut self.wanted[..self.num_wanted], |want| (node_of[want.rank], want.rank));
                }
            }
            for peer in self.peers.iter_mut() {
                peer.rows_of_token = 0;
                peer.weights_taken = false;
                peer.piece = None;
            }
            for wanted in &self.wanted[..self.num_wanted] {
                self.peers[wanted.rank].rows_of_token += 1;
                self.peers[wanted.rank].rows_read += 1;
            }
            self.clear_weights();
            self.opened = true;
        }
        let cols = self.combine.call.rows.cols;
        while self.col < cols {
            let through_ring =
                self.wanted[..self.num_wanted].iter().any(|w| self.peers[w.rank].rows.is_none());
            let width = if through_ring { self.combine.piece_cols.min(cols - self.col) } else { cols };
            if through_ring
                && !take_token_pieces(
                    self.combine,
                    exchange,
                    self.peers,
                    rings,
                    self.col,
                    |rank, i, weight| {
                        put_weight(
                            self.combine,
                            &self.wanted[..self.num_wanted],
                            self.token,
                            rank,
                            i,
                            weight,
                        );
                    },
                )
            {
                return false;
            }
            self.add_columns(width);
            for (rank, peer) in self.peers.iter_mut().enumerate() {
                if peer.piece.take().is_some() {
                    let bytes = peer.rows_of_token * padded(self.combine.piece_bytes(self.col));
                    let mut reader = exchange.ring_reader(rank, rings[rank].taken);
                    reader.take(bytes);
                    rings[rank].taken = reader.position();
                }
            }
            self.col += width;
        }
        self.copy_direct_weights();
        (self.token, self.col, self.opened) = (self.token + 1, 0, false);
        true
    }

    /// Adds `width` columns of the token in progress from `self.col`.
    fn add_columns(&self, width: usize) {
        let call = self.combine.call;
        let element = call.rows.dtype.bytes();
        let mut terms = [Term { row: std::ptr::null(), weight: 1.0, close: Close::Nothing }; MAX_TOPK];
        let wanted = &self.wanted[..self.num_wanted];
        for (i, want) in wanted.iter().enumerate() {
            let peer = &self.peers[want.rank];
            terms[i].row = match (&peer.rows, peer.piece) {
                (Some(place), _) => {
                    place.base.wrapping_add(want.row as usize * place.row_pitch + self.col * element)
                }
                (None, Some(piece)) => {
                    piece.wrapping_add(want.ordinal * padded(self.combine.piece_bytes(self.col)))
                }
                // Not reached: `take_token_pieces` found a piece for every ring holder of the token.
                (None, None) => continue,
            };
            if let Some(weights) = &call.topk_weights {
                let end = row_end(weights, self.token, want.slot % self.combine.shape.topk);
                // SAFETY: [tokens, topk] fp32, readable by the caller's word.
                terms[i].weight = unsafe { end.address.cast::<f32>().read() };
            }
            terms[i].close = self.close_after(i);
        }
        let bias = call.bias.map(|bias| {
            bias.map_or(std::ptr::null(), |bias| row_end(&bias, self.token, self.col).address.cast_const())
        });
        let reduction = match (call.order, self.combine.shape.layout) {
            (ReduceOrder::TopkSlot, _) | (ReduceOrder::Rank, Layout::Flat) => Reduction::Chain,
            (ReduceOrder::Rank, Layout::ExpertMajor) => Reduction::Ranks,
            (ReduceOrder::NodeRank, _) => Reduction::Nodes { bf16: call.wire_bf16 },
        };
        let out = row_end(&call.combined, self.token, self.col).address;
        // SAFETY: rows, biases and output hold these columns: places were checked against the capacity,
        // the caller vouches for his tensors, and a term's row was published before it was read.
        unsafe { reduce(call.rows.dtype, out, width, bias, &terms[..self.num_wanted], reduction) };
    }

    /// What ends with the i-th term of the token: its rank's sum, its node's sum.
    fn close_after(&self, i: usize) -> Close {
        let node_of = &self.combine.group.node_of;
        let rank = self.wanted[i].rank;
        match self.wanted[..self.num_wanted].get(i + 1) {
            Some(next) if next.rank == rank => Close::Nothing,
            Some(next) if node_of[next.rank] == node_of[rank] => Close::Rank,
            _ => Close::Node,
        }
    }

    /// Every slot of the token has weight 0 until its row brings one.
    fn clear_weights(&self) {
        if let Some(out) = &self.combine.call.combined_weights {
            let row = row_end(out, self.token, 0).address;
            // SAFETY: [tokens, topk] fp32, contiguous, writable by the caller's word.
            unsafe { row.write_bytes(0, out.row_bytes()) };
        }
    }

    /// Takes the weights of rows that are read where they lie.
    fn copy_direct_weights(&self) {
        let per_row = self.combine.weights_per_row();
        for want in &self.wanted[..self.num_wanted] {
            let Some(place) = self.peers[want.rank].row_weights else { continue };
            let weights = place.base.wrapping_add(want.row as usize * place.row_pitch);
            for k in 0..per_row {
                // SAFETY: the place was checked to hold `capacity` rows of `per_row` weights.
                let weight = unsafe { weights.cast::<u32>().add(k).read() };
                let wanted = &self.wanted[..self.num_wanted];
                put_weight(self.combine, wanted, self.token, want.rank, want.ordinal * per_row + k, weight);
            }
        }
    }

    fn publish_tails(&self, exchange: &mut Exchange<'_>, rings: &[RingPositions]) {
        for (rank, peer) in self.peers.iter().enumerate() {
            if peer.rows.is_none() {
                let mut reader = exchange.ring_reader(rank, rings[rank].taken);
                exchange.give_back(rank, &mut reader, false);
            }
        }
    }

    fn finished(&self) -> bool {
        self.peers.iter().all(|peer| peer.known && peer.arrived)
    }

    /// True once no peer reads this rank's rows any more.
    fn peers_are_done(&self, exchange: &Exchange<'_>) -> bool {
        let done = |(rank, peer): (usize, &Fetching)| peer.differs || exchange.has_arrived(rank);
        self.peers.iter().enumerate().all(done)
    }

    fn missing(&self, exchange: &Exchange<'_>) -> Missing {
        let num_ranks = self.peers.len();
        let unknown = Missing::among(num_ranks, "the rows' place", |rank| !self.peers[rank].known);
        if unknown.count > 0 {
            return unknown;
        }
        let absent = |rank: usize| {
            let peer = &self.peers[rank];
            self.opened && peer.rows_of_token > 0 && peer.rows.is_none() && peer.piece.is_none()
        };
        let pieces = Missing::among(num_ranks, "rows through the ring", absent);
        if pieces.count > 0 {
            return pieces;
        }
        Missing::among(num_ranks, "the end of its reading", |rank| {
            !self.peers[rank].differs && !exchange.has_arrived(rank)
        })
    }

    /// After a call that failed on all ranks: pieces and requests on the way are void.
    fn discard_rest(&self, exchange: &Exchange<'_>, rings: &mut [RingPositions]) {
        if !exchange.mismatched() {
            return;
        }
        for (rank, ring) in rings.iter_mut().enumerate() {
            let mut reader = exchange.ring_reader(rank, ring.taken);
            reader.discard();
            reader.publish(true);
            ring.taken = reader.position();
            ring.served = exchange.discard_requests(rank);
        }
    }

    fn count_stats(&self) {
        let row_bytes = self.combine.call.rows.row_bytes() as u64;
        let counters = &self.combine.group.lanes[self.combine.shape.lane].counters;
        for (peer, counters) in self.peers.iter().zip(counters) {
            let bytes_combined = peer.rows_read * row_bytes;
            counters.add(&PeerStats { calls: 1, bytes_combined, ..PeerStats::default() });
        }
    }
}

/// A piece's room in a ring of several rows.
pub(super) fn padded(bytes: usize) -> usize {
    bytes.next_multiple_of(64)
}

/// This rank's own tensor as a place.
fn own_place(tensor: &crate::tensor::Tensor) -> DirectPlace {
    let col_pitch = tensor.col_stride * tensor.dtype.bytes();
    DirectPlace { base: tensor.data, row_pitch: tensor.row_pitch(), col_pitch }
}

/// Orders rows by `key`; slots of a rank keep their order. There are at most `topk`, and few of them are
/// out of order: insertion is fast enough and does not allocate.
fn sort(wanted: &mut [Wanted], key: impl Fn(&Wanted) -> (usize, usize)) {
    for i in 1..wanted.len() {
        let mut j = i;
        while j > 0 && key(&wanted[j - 1]) > key(&wanted[j]) {
            wanted.swap(j - 1, j);
            j -= 1;
        }
    }
}

/// Stores the i-th weight that `rank` returned for a token: in flat layout of slot i, in expert-major of
/// the rank's i-th row. Slots of other ranks are not the rank's to tell.
fn put_weight(combine: &Combine<'_>, wanted: &[Wanted], token: usize, rank: usize, i: usize, weight: u32) {
    let Some(out) = &combine.call.combined_weights else { return };
    let topk = combine.shape.topk;
    let k = match combine.shape.layout {
        Layout::Flat => {
            let expert = combine.state.expert[token * topk + i];
            if expert < 0 || combine.shape.experts.owner(expert) != rank {
                return;
            }
            i
        }
        Layout::ExpertMajor => {
            let Some(want) = wanted.iter().find(|want| want.rank == rank && want.ordinal == i) else {
                return;
            };
            want.slot % topk
        }
    };
    // SAFETY: [tokens, topk] fp32, writable by the caller's word.
    unsafe { row_end(out, token, k).address.cast::<u32>().write(weight) };
}
