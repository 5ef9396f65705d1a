//! The memory of a plan: arrays at fixed places in one block, the caller's or the library's.

use std::ops::Range;

use super::ExpertMap;
use crate::config::{Layout, MAX_TOPK, PlanConfig};
use crate::error::{Error, Result};
use crate::tensor::MAX_ROWS;

/// In `slot_pos` and `rank_pos`: the slot has no row of its own there.
pub const NO_ROW: u32 = u32::MAX;

/// What does not change between updates of a plan.
#[derive(Clone, Debug)]
pub struct PlanShape {
    /// Which rank owns which expert.
    pub experts: ExpertMap,
    /// This rank.
    pub rank: usize,
    /// The lane of the plan's calls.
    pub lane: usize,
    /// Slots of a token.
    pub topk: usize,
    /// The most tokens of an update.
    pub max_tokens: usize,
    /// Order of the rows.
    pub layout: Layout,
    /// Rows that each expert's first row is aligned to, at least 1.
    pub alignment: usize,
    /// Of everything on which ranks must agree.
    pub hash: u64,
    /// The set of ranks of another node that each rank is in, counted from 0; [`NO_ROW`] for ranks of this node.
    pub cell_of: Vec<u32>,
    /// How many sets there are.
    pub num_cells: usize,
}

impl PlanShape {
    /// Checks a config.
    ///
    /// # Errors
    /// [`crate::Status::InvalidArgument`], [`crate::Status::OutOfRange`] or [`crate::Status::Capacity`],
    /// naming the field.
    pub fn new(
        config: &PlanConfig,
        rank: usize,
        num_ranks: usize,
        num_lanes: usize,
        max_local_experts: usize,
    ) -> Result<PlanShape> {
        let topk = config.topk as usize;
        if config.lane as usize >= num_lanes {
            return Err(Error::new(
                crate::Status::OutOfRange,
                format!("lane is {}, the group has {num_lanes} lanes, counted from 0", config.lane),
            ));
        }
        if topk == 0 || topk > MAX_TOPK {
            return Err(Error::invalid(format!("topk is {topk}, expected 1 to {MAX_TOPK}")));
        }
        let most = MAX_ROWS as u64 / topk as u64;
        if config.max_tokens > most {
            return Err(Error::invalid(format!(
                "max_tokens is {}, expected at most {most} with topk {topk}",
                config.max_tokens
            )));
        }
        if config.layout == Layout::Flat && config.expert_alignment > 1 {
            return Err(Error::invalid(format!(
                "expert_alignment is {}, but EP_LAYOUT_FLAT has no expert regions to align; use \
                 EP_LAYOUT_EXPERT_MAJOR or 0",
                config.expert_alignment
            )));
        }
        if config.expert_alignment > 1 << 20 {
            return Err(Error::invalid(format!(
                "expert_alignment is {}, expected at most {}",
                config.expert_alignment,
                1 << 20
            )));
        }
        let experts = ExpertMap::new(config, num_ranks, max_local_experts)?;
        padding_fits(config, &experts)?;
        let mut shape = PlanShape {
            experts,
            rank,
            lane: config.lane as usize,
            topk,
            max_tokens: config.max_tokens as usize,
            layout: config.layout,
            alignment: config.expert_alignment.max(1) as usize,
            hash: 0,
            cell_of: Vec::new(),
            num_cells: 0,
        };
        shape.hash = shape.agreed_hash();
        Ok(shape)
    }

    /// The same for a group of several nodes.
    #[must_use]
    pub fn with_cells(mut self, cell_of: &[u32], num_cells: usize) -> PlanShape {
        (self.cell_of, self.num_cells) = (cell_of.to_vec(), num_cells);
        self
    }

    /// FNV-1a over the fields that all ranks share: it meets honest mistakes, not attacks.
    fn agreed_hash(&self) -> u64 {
        let fixed = [self.topk as u32, self.layout as u32, self.alignment as u32];
        let firsts = (0..=self.experts.num_ranks()).map(|rank| match rank {
            0 => 0,
            rank => self.experts.first(rank - 1) + self.experts.num_local(rank - 1) as u32,
        });
        fixed
            .into_iter()
            .chain(firsts)
            .flat_map(u32::to_le_bytes)
            .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
    }

    /// What a descriptor says of the config, see [`crate::wire::DescBody::plan_fields`].
    pub fn described(&self) -> [u32; 4] {
        [self.topk as u32, self.experts.num_experts() as u32, self.layout as u32, self.alignment as u32]
    }

    /// Ranks of the group.
    pub fn num_ranks(&self) -> usize {
        self.experts.num_ranks()
    }

    /// Experts of this rank.
    pub fn num_local(&self) -> usize {
        self.experts.num_local(self.rank)
    }

    /// Words that a source tells this rank per plan: tokens, and assignments per local expert.
    pub fn column_words(&self) -> usize {
        1 + self.num_local()
    }
}

/// Refuses what could not be numbered even if each expert got a single row. Every rank computes it for all, so that
/// all refuse alike.
fn padding_fits(config: &PlanConfig, experts: &ExpertMap) -> Result<()> {
    let alignment = u64::from(config.expert_alignment);
    let padded = |rank: usize| alignment * experts.num_local(rank) as u64;
    match (0..experts.num_ranks()).find(|&rank| padded(rank) > MAX_ROWS as u64) {
        None => Ok(()),
        Some(rank) => Err(Error::new(
            crate::Status::Capacity,
            format!(
                "expert_alignment {alignment} makes {} rows of the {} experts of rank {rank}, at most {MAX_ROWS} can \
                 be numbered",
                padded(rank),
                experts.num_local(rank)
            ),
        )),
    }
}

/// Where the arrays of a plan lie in its memory, in 32-bit words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanLayout {
    expert: Range<usize>,
    slot_pos: Range<usize>,
    rank_pos: Range<usize>,
    send_token: Range<usize>,
    send_start: Range<usize>,
    send_count: Range<usize>,
    expert_count: Range<usize>,
    stamp: Range<usize>,
    column: Range<usize>,
    base: Range<usize>,
    expert_rows: Range<usize>,
    expert_start: Range<usize>,
    cell_token: Range<usize>,
    cell_start: Range<usize>,
    cell_count: Range<usize>,
    cell_stamp: Range<usize>,
    words: usize,
}

impl PlanLayout {
    /// The layout for a shape: linear in max_tokens * topk, in experts, and in ranks * local experts.
    pub fn new(shape: &PlanShape) -> PlanLayout {
        let mut words = 0;
        let mut array = |len: usize| {
            let start = words;
            words = (words + len).next_multiple_of(16);
            start..start + len
        };
        let ranks = shape.num_ranks();
        let slots = shape.max_tokens * shape.topk;
        PlanLayout {
            expert: array(slots),
            slot_pos: array(slots),
            rank_pos: array(slots),
            send_token: array((shape.max_tokens + 1) * shape.topk.min(ranks)),
            send_start: array(ranks),
            send_count: array(ranks),
            expert_count: array(shape.experts.num_experts()),
            stamp: array(ranks),
            column: array(ranks * shape.column_words()),
            base: array(ranks * shape.column_words()),
            expert_rows: array(shape.num_local()),
            expert_start: array(shape.num_local() + 1),
            cell_token: array(shape.max_tokens * shape.topk.min(shape.num_cells)),
            cell_start: array(shape.num_cells),
            cell_count: array(shape.num_cells),
            cell_stamp: array(shape.num_cells),
            words,
        }
    }

    /// Word `index` of `column`, read by a thread that does not hold the plan's lane.
    ///
    /// # Safety
    /// `memory` holds the plan; the caller finds out whether an update ran meanwhile.
    pub unsafe fn read_column(&self, memory: *mut u8, index: usize) -> u32 {
        // SAFETY: inside the array; a torn value is the caller's to detect.
        unsafe { memory.cast::<u32>().add(self.column.start + index).read_volatile() }
    }

    /// Word `index` of `expert_rows`, as [`PlanLayout::read_column`].
    ///
    /// # Safety
    /// As there.
    pub unsafe fn read_expert_rows(&self, memory: *mut u8, index: usize) -> u32 {
        // SAFETY: inside the array; a torn value is the caller's to detect.
        unsafe { memory.cast::<u32>().add(self.expert_rows.start + index).read_volatile() }
    }

    /// Bytes of the whole, a multiple of 64.
    pub fn bytes(&self) -> usize {
        self.words * 4
    }
}

/// The arrays of a plan, borrowed from its memory for one call.
pub struct PlanState<'a> {
    /// `[tokens * topk]`: the expert of each slot, -1 for none.
    pub expert: &'a mut [i32],
    /// `[tokens * topk]`: how many earlier slots of this rank name the same expert.
    pub slot_pos: &'a mut [u32],
    /// `[tokens * topk]`: at the first slot of a token that goes to a rank, how many earlier tokens go
    /// there; [`NO_ROW`] at its other slots.
    pub rank_pos: &'a mut [u32],
    /// The tokens that go to each rank, ascending, rank after rank.
    pub send_token: &'a mut [u32],
    /// `[ranks]`: where each rank's tokens begin in `send_token`.
    pub send_start: &'a mut [u32],
    /// `[ranks]`: how many they are.
    pub send_count: &'a mut [u32],
    /// `[experts]`: this rank's row of counts.
    pub expert_count: &'a mut [u32],
    /// `[ranks]`: the last token that went to each rank, plus one.
    pub stamp: &'a mut [u32],
    /// `[ranks][1 + local experts]`: this rank's column of counts, by source.
    pub column: &'a mut [u32],
    /// `[ranks][1 + local experts]`: the first row of each source, in all and within each local expert.
    pub base: &'a mut [u32],
    /// `[local experts]`: assignments.
    pub expert_rows: &'a mut [u32],
    /// `[local experts + 1]`: first row of each expert, and the end of the last.
    pub expert_start: &'a mut [u32],
    /// The tokens that go to each cell, ascending, cell after cell.
    pub cell_token: &'a mut [u32],
    /// `[cells]`: where each cell's tokens begin in `cell_token`.
    pub cell_start: &'a mut [u32],
    /// `[cells]`: how many they are.
    pub cell_count: &'a mut [u32],
    /// `[cells]`: the last token that went to each cell, plus one.
    pub cell_stamp: &'a mut [u32],
}

impl<'a> PlanState<'a> {
    /// Borrows the arrays from the block at `memory`.
    ///
    /// # Safety
    /// `memory` holds `layout.bytes()` bytes, aligned to 4, and nobody else uses them for `'a`.
    pub unsafe fn borrow(memory: *mut u8, layout: &PlanLayout) -> PlanState<'a> {
        let words = |range: &Range<usize>| {
            // SAFETY: by the caller's word the block is large enough, aligned and not used by others; the
            // ranges of a layout do not overlap, so each array is borrowed once.
            unsafe { std::slice::from_raw_parts_mut(memory.cast::<u32>().add(range.start), range.len()) }
        };
        PlanState {
            expert: bytemuck::cast_slice_mut(words(&layout.expert)),
            slot_pos: words(&layout.slot_pos),
            rank_pos: words(&layout.rank_pos),
            send_token: words(&layout.send_token),
            send_start: words(&layout.send_start),
            send_count: words(&layout.send_count),
            expert_count: words(&layout.expert_count),
            stamp: words(&layout.stamp),
            column: words(&layout.column),
            base: words(&layout.base),
            expert_rows: words(&layout.expert_rows),
            expert_start: words(&layout.expert_start),
            cell_token: words(&layout.cell_token),
            cell_start: words(&layout.cell_start),
            cell_count: words(&layout.cell_count),
            cell_stamp: words(&layout.cell_stamp),
        }
    }

    /// The tokens that go to `rank`, ascending.
    pub fn tokens_to(&self, rank: usize) -> &[u32] {
        let start = self.send_start[rank] as usize;
        &self.send_token[start..start + self.send_count[rank] as usize]
    }

    /// The tokens that go to ranks of `cell`, ascending.
    pub fn tokens_to_cell(&self, cell: usize) -> &[u32] {
        let start = self.cell_start[cell] as usize;
        &self.cell_token[start..start + self.cell_count[cell] as usize]
    }

    /// Turns the column of counts into first rows, by prefix sums. Returns the rows that arrive here.
    ///
    /// # Errors
    /// [`crate::Status::Aborted`], with their number, if they are more than a row number can hold: the peers have
    /// ended the update by then.
    pub fn place_rows(&mut self, shape: &PlanShape) -> Result<u64> {
        let (words, local) = (shape.column_words(), shape.num_local());
        let mut tokens = 0u64;
        for source in 0..shape.num_ranks() {
            self.base[source * words] = tokens as u32;
            tokens += u64::from(self.column[source * words]);
        }
        let mut row = 0u64;
        for expert in 0..local {
            row = row.next_multiple_of(shape.alignment as u64);
            self.expert_start[expert] = row as u32;
            let start = row;
            for source in 0..shape.num_ranks() {
                self.base[source * words + 1 + expert] = row as u32;
                row += u64::from(self.column[source * words + 1 + expert]);
            }
            self.expert_rows[expert] = (row - start) as u32;
        }
        row = row.next_multiple_of(shape.alignment as u64);
        self.expert_start[local] = row as u32;
        let rows = match shape.layout {
            Layout::Flat => tokens,
            Layout::ExpertMajor => row,
        };
        // Flat rows are fewer than assignments, whose positions must fit too.
        let most = rows.max(row);
        if most <= MAX_ROWS as u64 {
            return Ok(rows);
        }
        Err(crate::Error::new(
            crate::Status::Aborted,
            format!(
                "{most} rows arrive at rank {}, at most {MAX_ROWS} can be numbered; the group is broken. Send fewer \
                 tokens in an update, or spread the experts over more ranks",
                shape.rank
            ),
        ))
    }
}
