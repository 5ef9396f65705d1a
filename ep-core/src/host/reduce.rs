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

/// What the values of a term are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Values {
    /// The rows' own type.
    #[default]
    Own,
    /// The partial sum of a rank or a node, in fp32.
    F32,
    /// The partial sum of a node, in bf16.
    Bf16,
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
    /// What it holds. A partial sum has no factor, and ends as what it is the sum of.
    pub values: Values,
}

impl Term {
    /// No term.
    pub(super) const NONE: Term =
        Term { row: std::ptr::null(), weight: 1.0, close: Close::Nothing, values: Values::Own };
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

/// By element type: bf16, fp16, fp32.
type OfElement = [ReduceFn; 3];

struct Kernels {
    /// All terms are rows.
    rows: OfElement,
    /// Some terms are partial sums.
    mixed: OfElement,
    /// To partial sums, in fp32 and in bf16.
    to_f32: OfElement,
    to_bf16: OfElement,
}

/// The kernels of one set of processor features, which has these conversions of fp16.
macro_rules! table {
    ($name:ident, $half:ident) => {
        Kernels {
            rows: [
                $name::run::<Bf16, Bf16, false>,
                $name::run::<$half, $half, false>,
                $name::run::<f32, f32, false>,
            ],
            mixed: [
                $name::run::<Bf16, Bf16, true>,
                $name::run::<$half, $half, true>,
                $name::run::<f32, f32, true>,
            ],
            to_f32: [
                $name::run::<Bf16, f32, false>,
                $name::run::<$half, f32, false>,
                $name::run::<f32, f32, false>,
            ],
            to_bf16: [
                $name::run::<Bf16, Bf16, false>,
                $name::run::<$half, Bf16, false>,
                $name::run::<f32, Bf16, false>,
            ],
        }
    };
}

/// Compiles the same body for a set of processor features.
macro_rules! kernels {
    ($name:ident, $($feature:tt)*) => {
        mod $name {
            use super::*;

            $($feature)*
            pub(super) unsafe fn run<E: Element, O: Element, const MIXED: bool>(
                out: *mut u8,
                cols: usize,
                bias: [*const u8; 2],
                terms: &[Term],
                reduction: Reduction,
            ) {
                // SAFETY: by the caller's word.
                unsafe {
                    reduce_row::<E, O, MIXED>(out.cast(), cols, bias.map(|row| row.cast()), terms, reduction)
                }
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
                return if has("avx512") { table!(avx512, F16c) } else { table!(avx2, F16c) };
            }
        }
        table!(baseline, F16)
    })
}

fn index_of(dtype: Dtype) -> Option<usize> {
    match dtype {
        Dtype::Bf16 => Some(0),
        Dtype::F16 => Some(1),
        Dtype::F32 => Some(2),
        _ => None,
    }
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
    let Some(index) = index_of(dtype) else { return false };
    let mixed = terms.iter().any(|term| term.values != Values::Own);
    let kernel = if mixed { kernels().mixed[index] } else { kernels().rows[index] };
    // SAFETY: by the caller's word; the kernel's processor features were detected.
    unsafe { kernel(out, cols, bias, terms, reduction) };
    true
}

/// Adds `terms`, rows of `dtype`, to a partial sum in fp32, or in bf16 if `bf16`; returns false for a type that
/// cannot be added.
///
/// # Safety
/// `out` and the terms' rows hold `cols` elements, aligned to the element; `out` overlaps none.
pub(super) unsafe fn reduce_partial(
    dtype: Dtype,
    bf16: bool,
    out: *mut u8,
    cols: usize,
    terms: &[Term],
    reduction: Reduction,
) -> bool {
    let Some(index) = index_of(dtype) else { return false };
    let kernel = if bf16 { kernels().to_bf16[index] } else { kernels().to_f32[index] };
    // SAFETY: as in `reduce`.
    unsafe { kernel(out, cols, [std::ptr::null(); 2], terms, reduction) };
    true
}

/// # Safety
/// As [`reduce`].
#[inline(always)]
unsafe fn reduce_row<E: Element, O: Element, const MIXED: bool>(
    out: *mut O,
    cols: usize,
    bias: [*const E; 2],
    terms: &[Term],
    reduction: Reduction,
) {
    let mut col = 0;
    // SAFETY: whole blocks, then single columns, all below `cols`.
    unsafe {
        while col + BLOCK <= cols {
            reduce_block::<E, O, MIXED, BLOCK>(out, col, bias, terms, reduction);
            col += BLOCK;
        }
        while col < cols {
            reduce_block::<E, O, MIXED, 1>(out, col, bias, terms, reduction);
            col += 1;
        }
    }
}

/// # Safety
/// As [`reduce`], with `col + N` at most the number of columns.
#[inline(always)]
unsafe fn reduce_block<E: Element, O: Element, const MIXED: bool, const N: usize>(
    out: *mut O,
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
                    add_term::<E, MIXED, N>(&mut sum, term, col);
                }
            }
            Reduction::Ranks => add_partials::<E, MIXED, N>(&mut sum, terms, col, None),
            Reduction::Nodes { bf16 } => add_partials::<E, MIXED, N>(&mut sum, terms, col, Some(bf16)),
        }
        O::store(&sum, &mut *out.add(col).cast::<[O; N]>());
    }
}

/// # Safety
/// As [`reduce_block`].
#[inline(always)]
unsafe fn add_term<E: Element, const MIXED: bool, const N: usize>(
    sum: &mut [f32; N],
    term: &Term,
    col: usize,
) {
    // SAFETY: by the caller's word.
    unsafe {
        match term.values {
            Values::F32 if MIXED => set_row::<f32, N>(sum, term, col),
            Values::Bf16 if MIXED => set_row::<Bf16, N>(sum, term, col),
            _ => {
                let row = &*term.row.cast::<E>().add(col).cast::<[E; N]>();
                E::add_product(sum, row, term.weight);
            }
        }
    }
}

/// A partial sum is what it is: added to +0, a -0 that is left of an underflow would change its sign.
///
/// # Safety
/// As [`reduce_block`], for a row of `E`.
#[inline(always)]
unsafe fn set_row<E: Element, const N: usize>(sum: &mut [f32; N], term: &Term, col: usize) {
    // SAFETY: by the caller's word.
    let row = unsafe { &*term.row.cast::<E>().add(col).cast::<[E; N]>() };
    for (sum, value) in sum.iter_mut().zip(row) {
        *sum = value.widen();
    }
}

/// Partial sums per rank, and per node if `node` says how to round those.
///
/// # Safety
/// As [`reduce_block`].
#[inline(always)]
unsafe fn add_partials<E: Element, const MIXED: bool, const N: usize>(
    sum: &mut [f32; N],
    terms: &[Term],
    col: usize,
    node: Option<bool>,
) {
    let (mut rank_sum, mut node_sum) = ([0f32; N], [0f32; N]);
    for term in terms {
        // SAFETY: by the caller's word.
        unsafe { add_term::<E, MIXED, N>(&mut rank_sum, term, col) };
        if term.close == Close::Nothing {
            continue;
        }
        let Some(bf16) = node else {
            add(sum, &mut rank_sum);
            continue;
        };
        if MIXED && term.values == Values::Bf16 {
            node_sum = std::mem::replace(&mut rank_sum, [0.0; N]);
        } else {
            add(&mut node_sum, &mut rank_sum);
        }
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
        let slow_kernel = if dtype == Dtype::F16 {
            baseline::run::<F16, F16, false>
        } else {
            baseline::run::<Bf16, Bf16, false>
        };
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
        let term = |row: &[u16], weight| Term { row: row.as_ptr().cast(), weight, ..Term::NONE };
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
            .map(|i| {
                let row = rows[i].as_ptr().cast();
                Term { row, weight: 0.3 + i as f32, close: close[i], values: Values::Own }
            })
            .collect();
        let bias = [rows[0].as_ptr().cast(), rows[1].as_ptr().cast()];
        for how in [Reduction::Chain, Reduction::Ranks, Reduction::Nodes { bf16: true }] {
            for dtype in [Dtype::Bf16, Dtype::F16] {
                let [fast, slow] = both(dtype, cols, bias, &terms, how);
                assert_eq!(fast, slow, "{dtype:?} {how:?}");
            }
        }
    }

    #[test]
    fn partial_sums_of_two_nodes_add_up_to_the_sum_in_one_place() {
        let cols = 77;
        let row = |seed: u32| -> Vec<u16> {
            (0..cols as u32).map(|i| ((i + seed).wrapping_mul(2_654_435_761) >> 17 | 0x3000) as u16).collect()
        };
        let rows: Vec<Vec<u16>> = (0..5).map(row).collect();
        let close = [Close::Nothing, Close::Rank, Close::Node, Close::Rank, Close::Node];
        let term = |i: usize| {
            let row = rows[i].as_ptr().cast();
            Term { row, weight: 0.7 - i as f32, close: close[i], values: Values::Own }
        };
        for bf16 in [false, true] {
            let reduction = Reduction::Nodes { bf16 };
            let terms: Vec<Term> = (0..5).map(term).collect();
            let (mut whole, mut parts) = (vec![1u16; cols], vec![2u16; cols]);
            let mut partials = [vec![0f32; cols], vec![0f32; cols]];
            let values = if bf16 { Values::Bf16 } else { Values::F32 };
            // SAFETY: all rows have `cols` elements; a row of fp32 has room for as many bf16.
            unsafe {
                let none = [std::ptr::null(); 2];
                assert!(reduce(Dtype::Bf16, whole.as_mut_ptr().cast(), cols, none, &terms, reduction));
                for (partial, terms) in partials.iter_mut().zip([&terms[..3], &terms[3..]]) {
                    let out = partial.as_mut_ptr().cast();
                    assert!(reduce_partial(
                        Dtype::Bf16,
                        bf16,
                        out,
                        cols,
                        terms,
                        Reduction::Nodes { bf16: false }
                    ));
                }
                let of = |partial: &Vec<f32>| {
                    let row = partial.as_ptr().cast();
                    Term { row, weight: 1.0, close: Close::Node, values }
                };
                let terms: Vec<Term> = partials.iter().map(of).collect();
                assert!(reduce(Dtype::Bf16, parts.as_mut_ptr().cast(), cols, none, &terms, reduction));
            }
            assert_eq!(whole, parts, "bf16 {bf16}");
        }
    }
}
