//! A workload whose results follow from its seeds: small integers in fp32, so that every sum is exact.
//! It shares no arithmetic with the library.

use std::sync::Arc;

use ep_core::Result;
use ep_core::config::{
    CombineInputs, CombineOutputs, DispatchInputs, DispatchOutputs, Layout, Options, PlanConfig,
};
use ep_core::engine::{Group, Plan, Stream, Window};
use ep_core::tensor::{Dtype, RawTensor};

use crate::rng::{Rng, hash};

/// Where dispatched rows lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Window,
    /// Outside windows, so that every row passes through a ring.
    Ring,
}

/// What all ranks agree on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) num_ranks: usize,
    pub(crate) min_tokens: usize,
    pub(crate) max_tokens: usize,
    pub(crate) topk: usize,
    pub(crate) num_experts: usize,
    pub(crate) cols: usize,
    pub(crate) layout: Layout,
    pub(crate) alignment: usize,
    pub(crate) place: Place,
    pub(crate) lane: u32,
}

/// A row that arrives: whose it is, and the expert it is for where rows have one.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Arrival {
    source: usize,
    token: usize,
    expert: Option<usize>,
}

impl Shape {
    /// A few tokens, two experts a rank.
    pub(crate) fn small(num_ranks: usize, layout: Layout, place: Place) -> Shape {
        Shape {
            num_ranks,
            min_tokens: 0,
            max_tokens: 12,
            topk: 3,
            num_experts: 2 * num_ranks,
            cols: 48,
            layout,
            alignment: if layout == Layout::Flat { 1 } else { 4 },
            place,
            lane: 0,
        }
    }

    /// More bytes than a ring holds, from every rank to every rank.
    pub(crate) fn large(num_ranks: usize, layout: Layout, place: Place) -> Shape {
        Shape {
            min_tokens: 96,
            max_tokens: 96,
            topk: 4,
            cols: 1024,
            ..Shape::small(num_ranks, layout, place)
        }
    }

    /// Any of the above: the seed chooses.
    pub(crate) fn random(num_ranks: usize, rng: &mut Rng) -> Shape {
        let layout = [Layout::Flat, Layout::ExpertMajor][rng.below(2)];
        let place = [Place::Window, Place::Ring][rng.below(2)];
        let num_experts = 1 + rng.below(3 * num_ranks);
        Shape {
            max_tokens: 1 + rng.below(40),
            topk: 1 + rng.below(5),
            num_experts,
            cols: 1 + rng.below(300),
            alignment: if layout == Layout::Flat { 1 } else { 1 + rng.below(8) },
            ..Shape::small(num_ranks, layout, place)
        }
    }

    pub(crate) fn plan_config(&self) -> PlanConfig {
        PlanConfig {
            lane: self.lane,
            topk: self.topk as u32,
            num_experts: self.num_experts as u32,
            experts_per_rank: None,
            max_tokens: self.max_tokens as u64,
            layout: self.layout,
            expert_alignment: if self.layout == Layout::Flat { 0 } else { self.alignment as u32 },
        }
    }

    pub(crate) fn owner(&self, expert: usize) -> usize {
        let (each, more) = (self.num_experts / self.num_ranks, self.num_experts % self.num_ranks);
        // The first ranks have one more.
        let of_first = more * (each + 1);
        if expert < of_first { expert / (each + 1) } else { more + (expert - of_first) / each }
    }

    /// Rows that fit whatever the routing.
    pub(crate) fn capacity(&self) -> usize {
        let per_token = if self.layout == Layout::Flat { 1 } else { self.topk };
        let experts = self.num_experts.div_ceil(self.num_ranks);
        self.num_ranks * self.max_tokens * per_token + experts * (self.alignment - 1)
    }

    fn num_tokens(&self, seed: u64, rank: usize) -> usize {
        let choices = self.max_tokens - self.min_tokens + 1;
        self.min_tokens + hash(&[seed, 1, rank as u64]) as usize % choices
    }

    pub(crate) fn ids(&self, seed: u64, rank: usize) -> Vec<i32> {
        let mut rng = Rng::new(hash(&[seed, 2, rank as u64]));
        let slots = self.num_tokens(seed, rank) * self.topk;
        // One slot in nine names no expert; a token may name one twice.
        let id = |_| if rng.below(9) == 0 { -1 } else { rng.below(self.num_experts) as i32 };
        (0..slots).map(id).collect()
    }

    fn value(&self, seed: u64, rank: usize, token: usize, col: usize) -> f32 {
        let row = hash(&[seed, 3, rank as u64, token as u64]);
        ((row >> (col % 8 * 8)) & 0xFF) as f32 + (col % 5) as f32
    }

    /// What an expert, or in flat layout a rank, adds to each element of a row.
    fn addend(&self, rank: usize, expert: Option<usize>) -> f32 {
        expert.map_or(1000 + 10 * rank, |expert| 5000 + 10 * expert) as f32
    }

    /// The rows of `rank` in order; None for padding.
    fn arrivals(&self, seed: u64, rank: usize) -> Vec<Option<Arrival>> {
        let ids: Vec<Vec<i32>> = (0..self.num_ranks).map(|source| self.ids(seed, source)).collect();
        let mut rows = Vec::new();
        let owners: Vec<usize> = (0..self.num_experts).map(|expert| self.owner(expert)).collect();
        if self.layout == Layout::Flat {
            for (source, ids) in ids.iter().enumerate() {
                for (token, slots) in ids.chunks(self.topk).enumerate() {
                    if slots.iter().any(|&id| id >= 0 && owners[id as usize] == rank) {
                        rows.push(Some(Arrival { source, token, expert: None }));
                    }
                }
            }
            return rows;
        }
        for expert in (0..self.num_experts).filter(|&expert| owners[expert] == rank) {
            rows.resize(rows.len().next_multiple_of(self.alignment), None);
            for (source, ids) in ids.iter().enumerate() {
                for (slot, _) in ids.iter().enumerate().filter(|(_, id)| **id == expert as i32) {
                    let token = slot / self.topk;
                    rows.push(Some(Arrival { source, token, expert: Some(expert) }));
                }
            }
        }
        rows.resize(rows.len().next_multiple_of(self.alignment), None);
        rows
    }
}

/// One rank with everything that its calls need: after `prepare`, calls allocate nothing here.
pub(crate) struct Member {
    pub(crate) shape: Shape,
    pub(crate) group: Arc<Group>,
    pub(crate) plan: Plan,
    pub(crate) options: Options,
    window: Option<Window>,
    outside: Vec<f32>,
    seed: u64,
    tokens: usize,
    ids: Vec<i32>,
    input: Vec<f32>,
    combined: Vec<f32>,
    src_rank: Vec<i32>,
    src_token: Vec<i32>,
    num_rows: Vec<i64>,
    /// Ask for each row's origin, which then comes through the ring.
    pub(crate) origins: bool,
    /// Columns that calls leave out, for a rank that disagrees with the others.
    pub(crate) fewer_cols: usize,
}

impl Member {
    /// Collective where rows lie in a window.
    pub(crate) fn new(group: &Arc<Group>, shape: Shape) -> Result<Member> {
        let elements = shape.capacity() * shape.cols;
        let (window, outside) = match shape.place {
            Place::Window => (Some(Window::allocate(group, 4 * elements)?), Vec::new()),
            Place::Ring => (None, vec![0.0; elements]),
        };
        // SAFETY: the plan allocates its memory itself.
        let plan = unsafe { Plan::create(group, &shape.plan_config(), None) }?;
        Ok(Member {
            group: group.clone(),
            plan,
            options: Options::default(),
            window,
            outside,
            seed: 0,
            tokens: 0,
            ids: Vec::with_capacity(shape.max_tokens * shape.topk),
            input: Vec::with_capacity(shape.max_tokens * shape.cols),
            combined: Vec::with_capacity(shape.max_tokens * shape.cols),
            src_rank: vec![0; shape.capacity()],
            src_token: vec![0; shape.capacity()],
            num_rows: vec![0; 1],
            origins: true,
            fewer_cols: 0,
            shape,
        })
    }

    fn rank(&self) -> usize {
        self.group.rank()
    }

    /// Goes on with rows outside windows.
    pub(crate) fn release_window(&mut self) {
        self.outside = vec![0.0; self.shape.capacity() * self.shape.cols];
        self.window = None;
    }

    pub(crate) fn rows(&mut self) -> &mut [f32] {
        let elements = self.shape.capacity() * self.shape.cols;
        match &self.window {
            None => &mut self.outside,
            // SAFETY: the window has this many elements, is aligned to pages, and no call is in progress,
            // so no peer writes it.
            Some(window) => unsafe { std::slice::from_raw_parts_mut(window.data().cast(), elements) },
        }
    }

    /// Derives this rank's inputs from `seed`.
    pub(crate) fn prepare(&mut self, seed: u64) {
        let (shape, rank) = (self.shape, self.rank());
        self.seed = seed;
        self.tokens = shape.num_tokens(seed, rank);
        self.ids.clear();
        self.ids.extend(shape.ids(seed, rank));
        self.input.clear();
        for token in 0..self.tokens {
            self.input.extend((0..shape.cols).map(|col| shape.value(seed, rank, token, col)));
        }
        self.combined.clear();
        self.combined.resize(self.tokens * shape.cols, f32::NAN);
        self.rows().fill(f32::NAN);
    }

    /// Gives the next update an expert that does not exist.
    pub(crate) fn spoil_ids(&mut self) {
        self.tokens = self.tokens.max(1);
        self.ids.resize(self.tokens * self.shape.topk, -1);
        self.ids[0] = self.shape.num_experts as i32;
    }

    pub(crate) fn update(&mut self, stream: Option<&Stream>) -> Result<()> {
        let ids = self.ids.as_mut_ptr().cast();
        let ids = RawTensor::contiguous(ids, Dtype::I32, self.tokens, self.shape.topk);
        // SAFETY: the ids are there until the caller has synchronized.
        unsafe { self.plan.update(&ids, &self.options, stream) }
    }

    pub(crate) fn dispatch(&mut self, stream: Option<&Stream>) -> Result<()> {
        let (shape, tokens, origins) = (self.shape, self.tokens, self.origins);
        let cols = shape.cols - self.fewer_cols;
        let rows = self.rows().as_mut_ptr().cast();
        let mut inputs = DispatchInputs { num_payloads: 1, ..DispatchInputs::default() };
        inputs.payloads[0] = RawTensor::contiguous(self.input.as_mut_ptr().cast(), Dtype::F32, tokens, cols);
        let mut outputs = DispatchOutputs { num_payloads: 1, ..DispatchOutputs::default() };
        outputs.payloads[0] = RawTensor::contiguous(rows, Dtype::F32, shape.capacity(), cols);
        outputs.num_rows = self.num_rows.as_mut_ptr();
        if origins {
            outputs.src_rank = self.src_rank.as_mut_ptr();
            outputs.src_token = self.src_token.as_mut_ptr();
        }
        // SAFETY: all arrays have the shapes said here, and stay until the caller has synchronized.
        unsafe { self.plan.dispatch(&inputs, &outputs, &self.options, stream) }
    }

    pub(crate) fn combine(&mut self, stream: Option<&Stream>) -> Result<()> {
        let (shape, tokens) = (self.shape, self.tokens);
        let cols = shape.cols - self.fewer_cols;
        let rows = self.rows().as_mut_ptr().cast();
        let rows = RawTensor::contiguous(rows, Dtype::F32, shape.capacity(), cols);
        let combined = RawTensor::contiguous(self.combined.as_mut_ptr().cast(), Dtype::F32, tokens, cols);
        let inputs = CombineInputs { rows, ..CombineInputs::default() };
        let outputs = CombineOutputs { combined, ..CombineOutputs::default() };
        // SAFETY: as above.
        unsafe { self.plan.combine(&inputs, &outputs, &self.options, stream) }
    }

    /// Compares what arrived with what must.
    pub(crate) fn check_dispatch(&mut self) {
        let (shape, seed, rank) = (self.shape, self.seed, self.rank());
        let expected = shape.arrivals(seed, rank);
        assert_eq!(
            self.num_rows[0] as usize,
            expected.len(),
            "rows of rank {rank}, seed {seed:#x}, {shape:?}"
        );
        for (row, arrival) in expected.iter().enumerate() {
            let origin = arrival.map_or((-1, -1), |from| (from.source as i32, from.token as i32));
            if self.origins {
                let found = (self.src_rank[row], self.src_token[row]);
                assert_eq!(found, origin, "origin of row {row} of rank {rank}, seed {seed:#x}, {shape:?}");
            }
            let found = &self.rows()[row * shape.cols..(row + 1) * shape.cols];
            for (col, &found) in found.iter().enumerate() {
                let expected = arrival.map_or(0.0, |from| shape.value(seed, from.source, from.token, col));
                assert_eq!(found, expected, "({row}, {col}) of rank {rank}, seed {seed:#x}, {shape:?}");
            }
        }
    }

    /// The experts' work, in place.
    pub(crate) fn compute(&mut self) {
        let (shape, seed, rank) = (self.shape, self.seed, self.rank());
        let arrivals = shape.arrivals(seed, rank);
        for (row, arrival) in arrivals.into_iter().enumerate() {
            if let Some(arrival) = arrival {
                let addend = shape.addend(rank, arrival.expert);
                let row = &mut self.rows()[row * shape.cols..(row + 1) * shape.cols];
                row.iter_mut().for_each(|element| *element += addend);
            }
        }
    }

    /// Compares the combined tokens with what they must be.
    pub(crate) fn check_combine(&self) {
        let (shape, seed, rank) = (self.shape, self.seed, self.rank());
        for (token, slots) in self.ids.chunks(shape.topk).enumerate() {
            let mut holders: Vec<(usize, Option<usize>)> = slots
                .iter()
                .filter(|&&id| id >= 0)
                .map(|&id| match shape.layout {
                    Layout::Flat => (shape.owner(id as usize), None),
                    Layout::ExpertMajor => (0, Some(id as usize)),
                })
                .collect();
            if shape.layout == Layout::Flat {
                holders.sort_unstable();
                holders.dedup();
            }
            let addends: f32 = holders.iter().map(|&(rank, expert)| shape.addend(rank, expert)).sum();
            for col in 0..shape.cols {
                let expected = holders.len() as f32 * shape.value(seed, rank, token, col) + addends;
                let found = self.combined[token * shape.cols + col];
                assert_eq!(found, expected, "({token}, {col}) of rank {rank}, seed {seed:#x}, {shape:?}");
            }
        }
    }

    /// The calls of a round, without a look at the results.
    pub(crate) fn calls(&mut self, seed: u64) -> Result<()> {
        self.prepare(seed);
        self.update(None)?;
        self.dispatch(None)?;
        self.combine(None)
    }

    /// A round whose results are checked.
    pub(crate) fn round(&mut self, seed: u64) -> Result<()> {
        self.prepare(seed);
        self.update(None)?;
        self.dispatch(None)?;
        self.check_dispatch();
        self.compute();
        self.combine(None)?;
        self.check_combine();
        Ok(())
    }
}
