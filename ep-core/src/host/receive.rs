//! The receiving half of a dispatch: takes messages from the rings, and writes everything that only the
//! receiver knows.

use super::copy::{RowEnd, copy_row};
use super::dispatch::Dispatch;
use super::exchange::Exchange;
use super::item::row_end;
use super::ring::RingReader;
use super::scratch::{Receiving, Sending};
use crate::config::Layout;
use crate::engine::RingPositions;
use crate::error::Result;
use crate::plan::NO_ROW;
use crate::tensor::{Dtype, Tensor};
use crate::wire::{DescBody, MAX_PAYLOADS, WANTS_META};

/// Takes the rows that arrive.
pub(super) struct Receiver<'a> {
    dispatch: &'a Dispatch<'a>,
    /// By channel.
    peers: &'a mut [Receiving],
    num_locals: usize,
    meta: bool,
    /// Payloads that come through the ring, from other ranks.
    through_ring: [bool; MAX_PAYLOADS],
    /// Delivered assignments are counted from the messages, because some are dropped.
    count_experts: bool,
}

impl<'a> Receiver<'a> {
    pub(super) fn new(
        dispatch: &'a Dispatch<'a>,
        body: &DescBody,
        peers: &'a mut [Receiving],
    ) -> Receiver<'a> {
        let call = dispatch.call;
        let mut through_ring = [false; MAX_PAYLOADS];
        for (i, through) in through_ring.iter_mut().enumerate().take(call.num_payloads) {
            *through = body.places[i].window == 0;
        }
        let meta = body.wants & WANTS_META != 0;
        let count_experts = dispatch.shape.layout == Layout::Flat
            && !call.rows_per_expert.is_null()
            && dispatch.updated.num_rows > call.capacity as u64;
        let num_locals = dispatch.group.topology.locals().len();
        let receiver = Receiver { dispatch, peers, num_locals, meta, through_ring, count_experts };
        for channel in 0..receiver.peers.len() {
            let expected = receiver.expected_in(channel);
            receiver.peers[channel] = Receiving { expected, ..Receiving::default() };
        }
        receiver
    }

    /// Messages that come by `channel`: those of the rank at its place, or those that it passes on.
    fn expected_in(&self, channel: usize) -> usize {
        let topology = &self.dispatch.group.topology;
        let place = channel % self.num_locals;
        if !self.meta && (place == topology.own_place() || !self.through_ring.contains(&true)) {
            return 0;
        }
        match channel < self.num_locals {
            true => self.expected_messages(topology.locals()[place]),
            false => topology.served_by(place).iter().map(|&source| self.expected_messages(source)).sum(),
        }
    }

    pub(super) fn peers(&self) -> &[Receiving] {
        self.peers
    }

    fn expected_messages(&self, source: usize) -> usize {
        let words = self.dispatch.shape.column_words();
        let tokens = self.dispatch.state.column[source * words] as usize;
        match self.dispatch.shape.layout {
            Layout::Flat => {
                let base = self.dispatch.state.base[source * words] as usize;
                tokens.min(self.dispatch.call.capacity.saturating_sub(base))
            }
            Layout::ExpertMajor => tokens,
        }
    }

    /// Takes what has come. Returns true if anything had.
    pub(super) fn take(
        &mut self,
        exchange: &mut Exchange<'_>,
        rings: &mut [RingPositions],
        sending: &[Sending],
    ) -> Result<bool> {
        let mut progress = false;
        for (place, sent) in sending.iter().enumerate() {
            if self.peers[place].finished {
                continue;
            }
            let mut all_taken = true;
            for channel in (place..self.peers.len()).step_by(self.num_locals) {
                if !exchange.mismatched() && self.peers[channel].taken < self.peers[channel].expected {
                    progress |= self.take_from(exchange, channel, &mut rings[channel])?;
                }
                let peer = &self.peers[channel];
                all_taken &= peer.taken == peer.expected || exchange.mismatched();
            }
            if sent.credited && (sent.differs || (all_taken && exchange.has_arrived(place))) {
                self.peers[place].finished = true;
                progress = true;
            }
        }
        Ok(progress)
    }

    /// True once every rank of this node has said that it is done and all its messages were taken.
    pub(super) fn finished(&self) -> bool {
        self.peers[..self.num_locals].iter().all(|peer| peer.finished)
    }

    fn take_from(
        &mut self,
        exchange: &mut Exchange<'_>,
        channel: usize,
        ring: &mut RingPositions,
    ) -> Result<bool> {
        exchange.step()?;
        let place = channel % self.num_locals;
        let mut reader = exchange.ring_reader(channel, ring.taken);
        let before = (self.peers[channel].taken, self.peers[channel].pieces);
        while self.peers[channel].taken < self.peers[channel].expected {
            if !self.take_message(channel, &mut reader) {
                break;
            }
            self.peers[channel].taken += 1;
            exchange.give_back(place, &mut reader, false);
        }
        let done = self.peers[channel].taken == self.peers[channel].expected;
        exchange.give_back(place, &mut reader, done);
        ring.taken = reader.position();
        Ok((self.peers[channel].taken, self.peers[channel].pieces) != before)
    }

    /// Takes one message, or goes on with it. False: its next piece is not there yet.
    fn take_message(&mut self, channel: usize, reader: &mut RingReader<'_>) -> bool {
        let dispatch = self.dispatch;
        let topology = &dispatch.group.topology;
        let relayed = channel >= self.num_locals;
        if self.peers[channel].pieces == 0 {
            let mut position = self.peers[channel].taken as u32;
            let mut source = topology.locals()[channel % self.num_locals];
            if self.meta || relayed {
                let bytes = dispatch.head_bytes(relayed, self.meta);
                let Some(piece) = reader.peek(bytes) else { return false };
                // SAFETY: the piece has these bytes, is 64-byte aligned, and stays until it is taken.
                let mut words = unsafe { std::slice::from_raw_parts(piece.cast::<u32>(), bytes / 4) };
                if relayed {
                    (source, position) = (words[0] as usize, words[1]);
                    words = &words[2..];
                }
                self.begin_message(channel, source, position);
                if self.meta {
                    self.read_meta(channel, words);
                }
                reader.take(bytes);
            } else {
                self.begin_message(channel, source, position);
            }
            self.peers[channel].pieces = 1;
        }
        if channel % self.num_locals == topology.own_place() {
            self.peers[channel].pieces = 0;
            return true;
        }
        let mut index = 1;
        for (i, output) in dispatch.call.outputs.iter().enumerate() {
            let Some(output) = output.as_ref().filter(|_| self.through_ring[i]) else { continue };
            for piece in 0..dispatch.num_pieces(output) {
                if index == self.peers[channel].pieces {
                    let start = piece * dispatch.piece_bytes;
                    let bytes = dispatch.piece_bytes.min(output.row_bytes() - start);
                    let Some(address) = reader.peek(bytes) else { return false };
                    self.store_piece(channel, output, start, bytes, address);
                    reader.take(bytes);
                    self.peers[channel].pieces += 1;
                }
                index += 1;
            }
        }
        self.peers[channel].pieces = 0;
        true
    }

    /// Stores one piece of a row to every row that the message has here.
    fn store_piece(&self, channel: usize, output: &Tensor, start: usize, bytes: usize, address: *const u8) {
        let element = output.dtype.bytes();
        let from = RowEnd { address: address.cast_mut(), col_pitch: element };
        let peer = &self.peers[channel];
        for &row in &peer.rows[..peer.num_rows] {
            let to = row_end(output, row as usize, start / element);
            // SAFETY: row < capacity = rows of the output, which is writable by the caller's word; the
            // piece has `bytes` bytes.
            unsafe { copy_row(to, from, element, bytes / element, true) };
        }
    }

    /// The message of the `position`-th token of `source`, and its row in flat layout.
    fn begin_message(&mut self, channel: usize, source: usize, position: u32) {
        let base = self.dispatch.state.base[source * self.dispatch.shape.column_words()];
        let peer = &mut self.peers[channel];
        peer.source = source;
        peer.rows[0] = base + position;
        peer.num_rows = 1;
    }

    fn read_meta(&mut self, channel: usize, words: &[u32]) {
        let (topk, source) = (self.dispatch.shape.topk, self.peers[channel].source);
        let (token, locals, positions) = (words[0], &words[1..1 + topk], &words[1 + topk..1 + 2 * topk]);
        let weights = &words[1 + 2 * topk..];
        if self.dispatch.shape.layout == Layout::Flat {
            self.write_flat_origin(channel, token, locals, weights);
            return;
        }
        self.peers[channel].num_rows = 0;
        let bases = &self.dispatch.state.base[source * self.dispatch.shape.column_words()..];
        for k in (0..topk).filter(|&k| locals[k] != NO_ROW) {
            let row = bases[1 + locals[k] as usize] + positions[k];
            if row as usize >= self.dispatch.call.capacity {
                continue;
            }
            let peer = &mut self.peers[channel];
            peer.rows[peer.num_rows] = row;
            peer.num_rows += 1;
            self.write_origin(row as usize, source as i32, token as i32, k as i32);
            if let Some(out) = &self.dispatch.call.out_weights {
                put(out, row as usize, 0, weights[k]);
            }
        }
    }

    fn write_flat_origin(&self, channel: usize, token: u32, locals: &[u32], weights: &[u32]) {
        let call = self.dispatch.call;
        let row = self.peers[channel].rows[0] as usize;
        self.write_origin(row, self.peers[channel].source as i32, token as i32, -1);
        for (k, &local) in locals.iter().enumerate() {
            if let Some(out) = &call.out_idx {
                put_id(out, row, k, local);
            }
            if let Some(out) = &call.out_weights {
                put(out, row, k, weights[k]);
            }
            if self.count_experts && local != NO_ROW {
                // SAFETY: one per local expert, writable by the caller's word.
                unsafe { *call.rows_per_expert.add(local as usize) += 1 };
            }
        }
    }

    fn write_origin(&self, row: usize, rank: i32, token: i32, slot: i32) {
        let call = self.dispatch.call;
        for (array, value) in [(call.src_rank, rank), (call.src_token, token), (call.src_slot, slot)] {
            if !array.is_null() {
                // SAFETY: [capacity] and row < capacity; writable by the caller's word.
                unsafe { array.add(row).write(value) };
            }
        }
    }

    /// Writes the rows that no source writes: padding between experts, and what lies behind the last row.
    pub(super) fn fill_gaps(&self) {
        let (shape, call, state) = (self.dispatch.shape, self.dispatch.call, self.dispatch.state);
        if self.count_experts {
            for expert in 0..shape.num_local() {
                // SAFETY: one per local expert, writable by the caller's word.
                unsafe { call.rows_per_expert.add(expert).write(0) };
            }
        }
        if shape.layout == Layout::ExpertMajor {
            for expert in 0..shape.num_local() {
                let start = (state.expert_start[expert] + state.expert_rows[expert]) as usize;
                let end = (state.expert_start[expert + 1] as usize).min(call.capacity);
                for row in start..end {
                    self.clear_origin(row);
                    for output in call.outputs.iter().flatten() {
                        zero_row(output, row);
                    }
                }
            }
        }
        for row in self.dispatch.updated.num_rows.min(call.capacity as u64) as usize..call.capacity {
            self.clear_origin(row);
        }
    }

    /// A row that holds no token: sources and ids -1, weights 0.
    fn clear_origin(&self, row: usize) {
        let call = self.dispatch.call;
        self.write_origin(row, -1, -1, -1);
        for out in call.out_idx.iter() {
            (0..out.cols).for_each(|k| put_id(out, row, k, NO_ROW));
        }
        for out in call.out_weights.iter() {
            (0..out.cols).for_each(|k| put(out, row, k, 0));
        }
    }

    /// The numbers of a call that succeeded.
    pub(super) fn write_counts(&self) {
        let (shape, call, state) = (self.dispatch.shape, self.dispatch.call, self.dispatch.state);
        let required = self.dispatch.updated.num_rows;
        let capacity = call.capacity as u64;
        let delivered = |expert: usize| {
            let room = capacity.saturating_sub(state.expert_start[expert].into());
            room.min(state.expert_rows[expert].into())
        };
        let real: u64 = match shape.layout {
            Layout::Flat => required,
            Layout::ExpertMajor => state.expert_rows.iter().map(|&rows| u64::from(rows)).sum(),
        };
        let kept: u64 = match shape.layout {
            Layout::Flat => required.min(capacity),
            Layout::ExpertMajor => (0..shape.num_local()).map(delivered).sum(),
        };
        // SAFETY: each is null or the caller's to write.
        unsafe {
            put_i64(call.num_rows, 0, required.min(capacity));
            put_i64(call.num_required, 0, required);
            put_i64(call.num_dropped, 0, real - kept);
            for expert in 0..shape.num_local() {
                if !self.count_experts {
                    let rows = match shape.layout {
                        Layout::Flat => state.expert_rows[expert].into(),
                        Layout::ExpertMajor => delivered(expert),
                    };
                    put_i64(call.rows_per_expert, expert, rows);
                }
            }
            for expert in 0..=shape.num_local() {
                put_i64(call.expert_offsets, expert, state.expert_start[expert].into());
            }
        }
    }
}

/// # Safety
/// `array` is null or has room for element `index`.
unsafe fn put_i64(array: *mut i64, index: usize, value: u64) {
    if !array.is_null() {
        // SAFETY: by the caller's word.
        unsafe { array.add(index).write(value as i64) };
    }
}

/// Writes the bits of an fp32 element.
fn put(tensor: &Tensor, row: usize, col: usize, bits: u32) {
    // SAFETY: inside the tensor, which is the caller's to write.
    unsafe { row_end(tensor, row, col).address.cast::<u32>().write(bits) };
}

/// Writes a local expert id, -1 for [`NO_ROW`].
fn put_id(tensor: &Tensor, row: usize, col: usize, local: u32) {
    let id = local as i32;
    let address = row_end(tensor, row, col).address;
    // SAFETY: inside the tensor, which is the caller's to write.
    unsafe {
        match tensor.dtype {
            Dtype::I64 => address.cast::<i64>().write(id.into()),
            _ => address.cast::<i32>().write(id),
        }
    }
}

fn zero_row(tensor: &Tensor, row: usize) {
    let element = tensor.dtype.bytes();
    let end = row_end(tensor, row, 0);
    // SAFETY: every element is inside the tensor, which is the caller's to write.
    unsafe {
        if end.col_pitch == element {
            return end.address.write_bytes(0, tensor.row_bytes());
        }
        for col in 0..tensor.cols {
            end.address.add(col * end.col_pitch).write_bytes(0, element);
        }
    }
}
