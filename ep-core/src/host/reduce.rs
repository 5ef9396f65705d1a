//! The sum of a combine: fp32, one fused multiply-add a term, one rounding, in the order that the caller
//! named. Columns are taken in blocks that stay in registers while all terms pass.

use std::sync::OnceLock;

#[cfg(target_arch = "x86_64")]
use super::element::F16c;
use super::element::{Bf16, Element, F16};
use crate::tensor::Dtype;

/// What ends with a term.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Close {
    /// Nothing.
    #[default]
    Nothing,
    /// The partial sum of a rank.
    Rank,
    /// The partial sums of a rank and of its node.
    Node,
}

/// One term: columns of a row, and their factor.
#[derive(Clone, Copy, Debug)]
pub struct Term {
    /// First column, aligned to the element.
    pub row: *const u8,
    /// The factor.
    pub weight: f32,
    /// What ends with this term; `Nothing` in a chain.
    pub close: Close,
}

/// How terms add up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduction {
    /// One after the other onto the bias.
    Chain,
    /// Per rank from +0, then onto the bias.
    Ranks,
    /// Per rank, per node from +0, rounded to bf16 if asked, then onto the bias.
    Nodes {
        /// Node partials are rounded.
        bf16: bool,
    },
}

/// Columns of one block: with 512-bit vectors four accumulators, with 256-bit ones eight.
const BLOCK: usize = 64;

type ReduceFn = unsafe fn(*mut u8, usize, [*const u8; 2], &[Term], Reduction);

struct Kernels {
    bf16: ReduceFn,
    f16: ReduceFn,
    f32: ReduceFn,
}

/// Compiles the same body for a set of processor features.
macro_rules! kernels {
    ($name:ident, $($feature:tt)*) => {
        mod $name {
            use super::*;

            $($feature)*
            pub(super) unsafe fn run<E: Element>(
                out: *mut u8,
                cols: usize,
                bias: [*const u8; 2],
                terms: &[Term],
                reduction: Reduction,
            ) {
                // SAFETY: by the caller's word.
                unsafe { reduce_row::<E>(out.cast(), cols, bias.map(|row| row.cast()), terms, reduction) }
            }
        }
    };
}

kernels!(baseline,);
#[cfg(target_arch = "x86_64")]
kernels!(avx2, #[target_feature(enable = "avx2,fma,f16c")]);
#[cfg(target_arch = "x86_64")]
kernels!(avx512, #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]);

fn kernels() -> &'static Kernels {
    static KERNELS: OnceLock<Kernels> = OnceLock::new();
    KERNELS.get_or_init(|| {
        #[cfg(target_arch = "x86_64")]
        {
            let has = |name: &str| match name {
                "avx512" => {
                    std::arch::is_x86_feature_detected!("avx512f")
                        && std::arch::is_x86_feature_detected!("avx512bw")
                        && std::arch::is_x86_feature_detected!("avx512dq")
                        && std::arch::is_x86_feature_detected!("avx512vl")
                }
                _ => true,
            };
            // Every processor with AVX2 has the other two, but an emulator may not.
            if std::arch::is_x86_feature_detected!("avx2")
                && std::arch::is_x86_feature_detected!("fma")
                && std::arch::is_x86_feature_detected!("f16c")
            {
                if has("avx512") {
                    return Kernels {
                        bf16: avx512::run::<Bf16>,
                        f16: avx512::run::<F16c>,
                        f32: avx512::run::<f32>,
                    };
                }
                return Kernels { bf16: avx2::run::<Bf16>, f16: avx2::run::<F16c>, f32: avx2::run::<f32> };
            }
        }
        Kernels { bf16: baseline::run::<Bf16>, f16: baseline::run::<F16>, f32: baseline::run::<f32> }
    })
}

/// Adds `terms` to the biases (null: absent) and writes `cols` columns of `dtype`, one of bf16, fp16 and
/// fp32; returns false for any other.
///
/// # Safety
/// `out`, the biases and the terms' rows hold `cols` elements, aligned to the element; `out` overlaps none.
pub unsafe fn reduce(
    dtype: Dtype,
    out: *mut u8,
    cols: usize,
    bias: [*const u8; 2],
    terms: &[Term],
    reduction: Reduction,
) -> bool {
    let kernels = kernels();
    let kernel = match dtype {
        Dtype::Bf16 => kernels.bf16,
        Dtype::F16 => kernels.f16,
        Dtype::F32 => kernels.f32,
        _ => return false,
    };
    // SAFETY: by the caller's word; the kernel's processor features were detected.
    unsafe { kernel(out, cols, bias, terms, reduction) };
    true
}

/// # Safety
/// As [`reduce`].
#[inline(always)]
unsafe fn reduce_row<E: Element>(
    out: *mut E,
    cols: usize,
    bias: [*const E; 2],
    terms: &[Term],
    reduction: Reduction,
) {
    let mut col = 0;
    // SAFETY: whole blocks, then single columns, all below `cols`.
    unsafe {
        while col + BLOCK <= cols {
            reduce_block::<E, BLOCK>(out, col, bias, terms, reduction);
            col += BLOCK;
        }
        while col < cols {
            reduce_block::<E, 1>(out, col, bias, terms, reduction);
            col += 1;
        }
    }
}

/// # Safety
/// As [`reduce`], with `col + N` at most the number of columns.
#[inline(always)]
unsafe fn reduce_block<E: Element, const N: usize>(
    out: *mut E,
    col: usize,
    bias: [*const E; 2],
    terms: &[Term],
    reduction: Reduction,
) {
    let mut sum = [0f32; N];
    for (i, bias) in bias.into_iter().filter(|bias| !bias.is_null()).enumerate() {
        // SAFETY: by the caller's word.
        let row = unsafe { &*bias.add(col).cast::<[E; N]>() };
        for (sum, value) in sum.iter_mut().zip(row) {
            *sum = if i == 0 { value.widen() } else { *sum + value.widen() };
        }
    }
    // SAFETY: by the caller's word.
    unsafe {
        match reduction {
            Reduction::Chain => {
                for term in terms {
                    add_term::<E, N>(&mut sum, term, col);
                }
            }
            Reduction::Ranks => add_partials::<E, N>(&mut sum, terms, col, None),
            Reduction::Nodes { bf16 } => add_partials::<E, N>(&mut sum, terms, col, Some(bf16)),
        }
        let row = &mut *out.add(col).cast::<[E; N]>();
        E::store(&sum, row);
    }
}

/// # Safety
/// As [`reduce_block`].
#[inline(always)]
unsafe fn add_term<E: Element, const N: usize>(sum: &mut [f32; N], term: &Term, col: usize) {
    // SAFETY: by the caller's word.
    let row = unsafe { &*term.row.cast::<E>().add(col).cast::<[E; N]>() };
    E::add_product(sum, row, term.weight);
}

/// Partial sums per rank, and per node if `node` says how to round those.
///
/// # Safety
/// As [`reduce_block`].
#[inline(always)]
unsafe fn add_partials<E: Element, const N: usize>(
    sum: &mut [f32; N],
    terms: &[Term],
    col: usize,
    node: Option<bool>,
) {
    let (mut rank_sum, mut node_sum) = ([0f32; N], [0f32; N]);
    for term in terms {
        // SAFETY: by the caller's word.
        unsafe { add_term::<E, N>(&mut rank_sum, term, col) };
        if term.close == Close::Nothing {
            continue;
        }
        let Some(bf16) = node else {
            add(sum, &mut rank_sum);
            continue;
        };
        add(&mut node_sum, &mut rank_sum);
        if term.close == Close::Node {
            if bf16 {
                node_sum.iter_mut().for_each(|value| *value = Bf16::narrow(*value).widen());
            }
            add(sum, &mut node_sum);
        }
    }
}

/// Adds `part` to `sum` and clears it.
#[inline(always)]
fn add<const N: usize>(sum: &mut [f32; N], part: &mut [f32; N]) {
    for (sum, part) in sum.iter_mut().zip(part) {
        *sum += *part;
        *part = 0.0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The kernel in use and the baseline, over these rows.
    fn both(
        dtype: Dtype,
        cols: usize,
        bias: [*const u8; 2],
        terms: &[Term],
        how: Reduction,
    ) -> [Vec<u16>; 2] {
        let (mut fast, mut slow) = (vec![1u16; cols], vec![2u16; cols]);
        let slow_kernel = if dtype == Dtype::F16 { baseline::run::<F16> } else { baseline::run::<Bf16> };
        // SAFETY: all rows have `cols` elements.
        unsafe {
            assert!(reduce(dtype, fast.as_mut_ptr().cast(), cols, bias, terms, how));
            slow_kernel(slow.as_mut_ptr().cast(), cols, bias, terms, how);
        }
        [fast, slow]
    }

    #[test]
    fn every_fp16_value_passes_every_kernel_alike() {
        let all: Vec<u16> = (0..=u16::MAX).collect();
        let others: Vec<u16> = all.iter().map(|bits| bits.wrapping_mul(40_503).rotate_left(5)).collect();
        let term = |row: &[u16], weight| Term { row: row.as_ptr().cast(), weight, close: Close::Nothing };
        let bias = [others.as_ptr().cast(), std::ptr::null()];
        for (bias, terms) in [
            ([std::ptr::null(); 2], vec![term(&all, 1.0)]),
            ([std::ptr::null(); 2], vec![term(&all, 1.0 / 1024.0)]),
            (bias, vec![term(&all, 0.7), term(&others, -1.3)]),
        ] {
            let [fast, slow] = both(Dtype::F16, all.len(), bias, &terms, Reduction::Chain);
            assert_eq!(fast, slow);
        }
        let [same, _] =
            both(Dtype::F16, all.len(), [std::ptr::null(); 2], &[term(&all, 1.0)], Reduction::Chain);
        for (bits, out) in (0..=u16::MAX).zip(same) {
            // A sum begins with +0, so -0 does not come back.
            let expected = match bits {
                0x8000 => 0,
                bits if bits & 0x7FFF > 0x7C00 => 0x7FFF,
                bits => bits,
            };
            assert_eq!(out, expected, "{bits:#x}");
        }
    }

    #[test]
    fn every_kernel_gives_the_same_bits() {
        let cols = 200;
        let row = |seed: u32| -> Vec<u16> {
            (0..cols as u32).map(|i| ((i + seed).wrapping_mul(2_654_435_761) >> 16) as u16).collect()
        };
        let rows: Vec<Vec<u16>> = (0..6).map(row).collect();
        let close = [Close::Nothing, Close::Rank, Close::Node, Close::Rank, Close::Nothing, Close::Node];
        let terms: Vec<Term> = (0..6)
            .map(|i| Term { row: rows[i].as_ptr().cast(), weight: 0.3 + i as f32, close: close[i] })
            .collect();
        let bias = [rows[0].as_ptr().cast(), rows[1].as_ptr().cast()];
        for how in [Reduction::Chain, Reduction::Ranks, Reduction::Nodes { bf16: true }] {
            for dtype in [Dtype::Bf16, Dtype::F16] {
                let [fast, slow] = both(dtype, cols, bias, &terms, how);
                assert_eq!(fast, slow, "{dtype:?} {how:?}");
            }
        }
    }
}
