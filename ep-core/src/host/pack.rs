//! The sending half of a dispatch between nodes: each token goes once to each cell, in messages of as many tokens as
//! fit. A token that does not fit a message by itself goes piece by piece.

use super::between::BetweenState;
use super::call::DispatchCall;
use super::copy::{RowEnd, copy_row};
use super::dispatch::Dispatch;
use super::exchange::{Exchange, Missing};
use super::item::row_end;
use super::scratch_between::CellState;
use crate::config::Layout;
use crate::engine::{Cell, Group, Net};
use crate::error::{Error, Result, Status};
use crate::net::Kind;
use crate::plan::PlanShape;
use crate::tensor::Tensor;
use crate::wire::{CHUNK_BYTES, Chunk, RECORD_ALIGN, WHOLE};

/// How tokens lie in messages. Both sides come to the same: all of it is in the signature or in the group's config.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Packing {
    /// Bytes of a token's ids, positions and weights, padded.
    pub(super) head_bytes: usize,
    /// Bytes of a whole token, padded.
    pub(super) record_bytes: usize,
    /// Tokens of a message; 0: tokens go in pieces.
    pub(super) per_message: usize,
    /// The largest piece that fits; 0 if tokens go whole.
    piece_limit: usize,
}

/// Bytes of a token's origin, ids, positions and weights.
pub(super) fn meta_bytes(shape: &PlanShape, call: &DispatchCall) -> usize {
    4 * (1 + shape.topk * (2 + usize::from(call.topk_weights.is_some())))
}

/// Bytes of a row in a message.
pub(super) fn padded(bytes: usize) -> usize {
    bytes.next_multiple_of(RECORD_ALIGN)
}

impl Packing {
    /// # Errors
    /// [`Status::Capacity`] if not even the ids of a token fit a message.
    pub(super) fn new(group: &Group, shape: &PlanShape, call: &DispatchCall) -> Result<Packing> {
        let Some(net) = &group.net else { return Ok(Packing::default()) };
        let room = net.chunk_bytes(Kind::Rows) - CHUNK_BYTES;
        let head_bytes = padded(meta_bytes(shape, call));
        let payloads = call.inputs.iter().flatten().map(|input| padded(input.row_bytes()));
        let record_bytes = head_bytes + payloads.sum::<usize>();
        let per_message = room / record_bytes;
        let piece_limit = if per_message == 0 { room.saturating_sub(head_bytes) & !63 } else { 0 };
        if per_message == 0 && piece_limit == 0 {
            return Err(Error::new(
                Status::Capacity,
                format!(
                    "the ids and weights of a token have {head_bytes} bytes, and a message between nodes has {room}; \
                     raise chunk_bytes in the group's config"
                ),
            ));
        }
        Ok(Packing { head_bytes, record_bytes, per_message, piece_limit })
    }

    /// Bytes of a piece of a row, of which a ring has at most `in_ring`.
    pub(super) fn piece_bytes(&self, in_ring: usize) -> usize {
        if self.piece_limit == 0 { in_ring } else { in_ring.min(self.piece_limit) }
    }
}

impl Dispatch<'_> {
    /// Pieces of a token that goes in pieces.
    pub(super) fn pieces_of_token(&self) -> usize {
        self.call.inputs.iter().flatten().map(|input| self.num_pieces(input)).sum()
    }

    /// Piece `number` of a token that goes in pieces: its payload, where it begins, and its bytes.
    fn piece(&self, number: usize) -> Option<(&Tensor, usize, usize)> {
        let mut left = number;
        for input in self.call.inputs.iter().flatten() {
            let pieces = self.num_pieces(input);
            if left < pieces {
                let start = left * self.piece_bytes;
                return Some((input, start, self.piece_bytes.min(input.row_bytes() - start)));
            }
            left -= pieces;
        }
        None
    }
}

/// True once all tokens are on their way to all cells.
pub(super) fn all_packed(dispatch: &Dispatch<'_>, cells: &[CellState]) -> bool {
    cells.iter().enumerate().all(|(cell, state)| state.next == dispatch.state.tokens_to_cell(cell).len())
}

/// Sends one message to every cell that can take one. True if any could.
pub(super) fn pack(
    dispatch: &Dispatch<'_>,
    exchange: &Exchange<'_>,
    cells: &mut [CellState],
) -> Result<bool> {
    let Some(net) = dispatch.group.net.as_ref().filter(|_| !exchange.mismatched()) else { return Ok(false) };
    let topology = &dispatch.group.topology;
    let mut progress = false;
    // Ranks of one node begin with different cells, so that not all of them send to one at a time.
    let num_cells = cells.len();
    let first = dispatch.group.perturb.first_peer(dispatch.group.rank, num_cells.max(1));
    for index in (0..num_cells).map(|i| (first + i) % num_cells) {
        let (cell, state) = (&topology.cells()[index], &mut cells[index]);
        let tokens = &dispatch.state.tokens_to_cell(index)[state.next..];
        if tokens.is_empty() || !has_room(net, exchange, cell, state) {
            continue;
        }
        exchange.step()?;
        send_message(dispatch, net, exchange, cell, state, tokens)?;
        progress = true;
    }
    Ok(progress)
}

/// True if the next message of rows has a slot on both sides.
fn has_room(net: &Net, exchange: &Exchange<'_>, cell: &Cell, state: &CellState) -> bool {
    let rows = exchange.stream(Kind::Rows);
    let window = net.port.layout().window(rows);
    state.rows < net.port.credit(cell.link, rows) + window && net.port.can_stage(cell.link, rows, state.rows)
}

/// The relays that have no room for rows that are left.
pub(super) fn missing_room_in_cells(
    exchange: &Exchange<'_>,
    dispatch: &Dispatch<'_>,
    between: &BetweenState,
) -> Missing {
    let waiting = |(index, state): (usize, &CellState)| {
        let left = state.next < dispatch.state.tokens_to_cell(index).len();
        left.then(|| exchange.group.topology.cells()[index].relay)
    };
    Missing::of(between.cells.iter().enumerate().filter_map(waiting), "room for rows")
}

fn send_message(
    dispatch: &Dispatch<'_>,
    net: &Net,
    exchange: &Exchange<'_>,
    cell: &Cell,
    state: &mut CellState,
    tokens: &[u32],
) -> Result<()> {
    let (packing, rows) = (&dispatch.packing, exchange.stream(Kind::Rows));
    let slot = net.port.slot_staging(cell.link, rows, state.rows);
    let whole = packing.per_message != 0;
    let records = tokens.len().min(packing.per_message.max(1));
    let head = Chunk {
        epoch: exchange.epoch,
        first: state.next as u32,
        records: records as u32,
        piece: if whole { WHOLE } else { state.piece as u32 },
        ..Chunk::default()
    };
    // SAFETY: the slot is this call's, since it may be staged; it has room for the header and, by the arithmetic of
    // `Packing`, for the records or the piece behind it.
    let bytes = unsafe {
        slot.cast::<Chunk>().write(head);
        let mut at = slot.add(CHUNK_BYTES);
        for &token in &tokens[..records] {
            at = write_head(dispatch, cell, token as usize, at);
            if whole {
                for input in dispatch.call.inputs.iter().flatten() {
                    write_row(input, token as usize, 0, input.cols, at);
                    at = at.add(padded(input.row_bytes()));
                }
            } else if let Some((input, start, bytes)) = dispatch.piece(state.piece) {
                let element = input.dtype.bytes();
                write_row(input, token as usize, start / element, bytes / element, at);
                at = at.add(bytes);
            }
        }
        at.offset_from(slot) as usize
    };
    net.port.send(cell.link, rows, state.rows, bytes).map_err(|error| exchange.defect(cell.relay, error))?;
    state.rows += 1;
    state.piece += usize::from(!whole);
    if whole || state.piece == dispatch.pieces_of_token() {
        (state.next, state.piece) = (state.next + records, 0);
    }
    Ok(())
}

/// Writes the ids, positions and weights of a token; slots of other ranks are left empty.
///
/// # Safety
/// `at` has room for them and is aligned to words.
unsafe fn write_head(dispatch: &Dispatch<'_>, cell: &Cell, token: usize, at: *mut u8) -> *mut u8 {
    let (shape, state, topk) = (dispatch.shape, dispatch.state, dispatch.shape.topk);
    let weights = dispatch.call.topk_weights.as_ref();
    let words = 1 + topk * (2 + usize::from(weights.is_some()));
    // SAFETY: by the caller's word.
    let words = unsafe { std::slice::from_raw_parts_mut(at.cast::<u32>(), words) };
    words[0] = token as u32;
    let positions = match shape.layout {
        Layout::Flat => &state.rank_pos,
        Layout::ExpertMajor => &state.slot_pos,
    };
    for k in 0..topk {
        let slot = token * topk + k;
        let expert = state.expert[slot];
        let there = expert >= 0 && cell.ranks.binary_search(&shape.experts.owner(expert)).is_ok();
        words[1 + k] = if there { expert as u32 } else { u32::MAX };
        words[1 + topk + k] = positions[slot];
        if let Some(weights) = weights {
            // SAFETY: [tokens, topk] fp32, readable by the caller's word.
            words[1 + 2 * topk + k] = unsafe { row_end(weights, token, k).address.cast::<u32>().read() };
        }
    }
    at.wrapping_add(dispatch.packing.head_bytes)
}

/// Copies columns of a row.
///
/// # Safety
/// `at` has room for them.
unsafe fn write_row(input: &Tensor, token: usize, col: usize, cols: usize, at: *mut u8) {
    let element = input.dtype.bytes();
    let to = RowEnd { address: at, col_pitch: element };
    // SAFETY: by the caller's word; the input row is readable by that of the call's caller.
    unsafe { copy_row(to, row_end(input, token, col), element, cols, false) };
}
