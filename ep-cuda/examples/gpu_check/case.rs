//! What one comparison runs: shapes, routing and data, all from a seed.

use ep_core::config::{Layout, PlanConfig};
use ep_core::tensor::Dtype;

/// SplitMix64.
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64, rank: usize, what: u64) -> Rng {
        Rng(seed
            ^ (rank as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)
            ^ what.wrapping_mul(0xd1b5_4a32_d192_ed03))
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, end: usize) -> usize {
        if end == 0 { 0 } else { (self.next() % end as u64) as usize }
    }

    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }
}

/// One payload of a dispatch.
#[derive(Clone, Copy, Debug)]
pub struct Payload {
    pub dtype: Dtype,
    pub cols: usize,
    /// The output lies in the window.
    pub window: bool,
}

#[derive(Clone, Debug)]
pub struct Case {
    pub seed: u64,
    pub tokens: Vec<usize>,
    pub topk: usize,
    pub experts: usize,
    pub layout: Layout,
    pub alignment: u32,
    pub payloads: Vec<Payload>,
    pub weights: bool,
    pub origins: bool,
    /// Rows of the outputs, in per mille of what arrives; 1000: exact.
    pub capacity: usize,
    /// Rows of the outputs and of the combine, without asking for the counts.
    pub static_rows: Option<usize>,
    pub ids64: bool,
    /// `EP_REDUCE_`.
    pub order: i32,
    pub bias: usize,
    pub combine_dtype: Dtype,
    pub combine_cols: usize,
    pub combine_window: bool,
    pub return_weights: bool,
    pub wild: bool,
}

/// Elements that a rank sends at most in a random case.
const WORK: usize = 4 << 20;

impl Case {
    /// A random case; the same on every rank.
    pub fn random(seed: u64, num_ranks: usize) -> Case {
        let mut rng = Rng::new(seed, 0, 77);
        let layout = rng.pick(&[Layout::Flat, Layout::ExpertMajor]);
        let experts = rng.pick(&[num_ranks, 8, 17, 64, 256]).max(1);
        let topk = rng.pick(&[1, 2, 3, 6, 8, 16]);
        let most = rng.pick(&[1, 7, 64, 300, 1024]);
        // The host has to do the same.
        let widest = (WORK / (most * topk)).max(64);
        let payload = |rng: &mut Rng| {
            let dtype = rng.pick(&[Dtype::Bf16, Dtype::F8E4M3, Dtype::F32, Dtype::F16, Dtype::I32]);
            // Rows of a multiple of 16 bytes mostly, since others take the slow path.
            let cols = match rng.one_in(5) {
                true => 1 + rng.below(100),
                false => rng.pick(&[16, 64, 128, 512, 2048, 7168]),
            };
            Payload { dtype, cols: cols.min(widest / 16 * 16), window: !rng.one_in(3) }
        };
        let count = 1 + rng.below(3);
        let orders: &[i32] = if layout == Layout::Flat { &[0, 2, 3] } else { &[0, 1, 2, 3] };
        Case {
            seed,
            tokens: (0..num_ranks).map(|_| if rng.one_in(6) { 0 } else { rng.below(most + 1) }).collect(),
            topk,
            experts,
            layout,
            alignment: if layout == Layout::Flat { 0 } else { rng.pick(&[0, 1, 8, 128]) },
            payloads: (0..count).map(|_| payload(&mut rng)).collect(),
            weights: !rng.one_in(3),
            origins: !rng.one_in(3),
            capacity: rng.pick(&[1000, 1000, 1000, 1300, 600]),
            static_rows: None,
            ids64: rng.one_in(2),
            order: rng.pick(orders),
            bias: rng.below(3),
            combine_dtype: rng.pick(&[Dtype::Bf16, Dtype::Bf16, Dtype::F16, Dtype::F32]),
            combine_cols: rng.pick(&[8, 64, 512, 2048, 7168, 33]).min(widest / 16 * 16),
            combine_window: !rng.one_in(2),
            return_weights: rng.one_in(3),
            wild: rng.one_in(4),
        }
    }

    /// The shape that the benchmark has.
    pub fn large(
        seed: u64,
        num_ranks: usize,
        tokens: usize,
        hidden: usize,
        topk: usize,
        experts: usize,
    ) -> Case {
        let payload = Payload { dtype: Dtype::Bf16, cols: hidden, window: true };
        Case {
            seed,
            tokens: vec![tokens; num_ranks],
            topk,
            experts,
            layout: Layout::Flat,
            alignment: 0,
            payloads: vec![payload],
            weights: true,
            origins: true,
            capacity: 1000,
            static_rows: None,
            ids64: true,
            order: 0,
            bias: 0,
            combine_dtype: Dtype::Bf16,
            combine_cols: hidden,
            combine_window: true,
            return_weights: false,
            wild: false,
        }
    }

    pub fn plan(&self, lane: u32) -> PlanConfig {
        PlanConfig {
            lane,
            topk: self.topk as u32,
            num_experts: self.experts as u32,
            experts_per_rank: None,
            max_tokens: self.tokens.iter().copied().max().unwrap_or(0) as u64,
            layout: self.layout,
            expert_alignment: self.alignment,
        }
    }

    /// A rank's ids, `[tokens, topk]`, some -1, some named twice.
    pub fn ids(&self, rank: usize) -> Vec<i64> {
        let mut rng = Rng::new(self.seed, rank, 1);
        let mut ids = Vec::with_capacity(self.tokens[rank] * self.topk);
        for _ in 0..self.tokens[rank] {
            let start = ids.len();
            while ids.len() < start + self.topk {
                let id = rng.below(self.experts) as i64;
                if self.seed % 2 == 1 && rng.one_in(9) {
                    ids.push(-1);
                } else if self.experts <= self.topk || !ids[start..].contains(&id) {
                    ids.push(id);
                }
            }
        }
        ids
    }

    /// `rows * cols` elements of `dtype`, as bytes.
    pub fn data(&self, rank: usize, what: u64, dtype: Dtype, elements: usize) -> Vec<u8> {
        let mut rng = Rng::new(self.seed, rank, 100 + what);
        let mut bytes = Vec::with_capacity(elements * dtype.bytes());
        for _ in 0..elements {
            let bits = rng.next();
            let wild = self.wild && bits >> 54 == 0;
            match dtype {
                // Exponents around 1, so that sums round; any bits when wild.
                Dtype::Bf16 if !wild => {
                    let exponent = 118 + (bits >> 20) % 14;
                    let value = (bits as u16 & 0x807f) | (exponent as u16) << 7;
                    bytes.extend_from_slice(&value.to_le_bytes());
                }
                Dtype::F16 if !wild => {
                    let exponent = 10 + (bits >> 20) % 10;
                    let value = (bits as u16 & 0x83ff) | (exponent as u16) << 10;
                    bytes.extend_from_slice(&value.to_le_bytes());
                }
                Dtype::F32 if !wild => {
                    let exponent = 118 + (bits >> 40) % 14;
                    let value = (bits as u32 & 0x807f_ffff) | (exponent as u32) << 23;
                    bytes.extend_from_slice(&value.to_le_bytes());
                }
                _ => bytes.extend_from_slice(&bits.to_le_bytes()[..dtype.bytes()]),
            }
        }
        bytes
    }
}
