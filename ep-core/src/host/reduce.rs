//! The sum of a combine: fp32, one fused multiply-add a term, one rounding, in the order that the caller
//! named. Columns are taken in blocks that stay in registers while all terms pass.

use std::sync::OnceLock;

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

/// The NaN of every result.
const NAN_BITS: u32 = 0x7FFF_FFFF;

/// An element type of combines.
trait Element: Copy {
    /// Exact.
    fn widen(self) -> f32;
    /// To nearest even; NaN has one pattern.
    fn narrow(value: f32) -> Self;
}

#[derive(Clone, Copy)]
#[repr(transparent)]
struct Bf16(u16);

impl Element for Bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.0) << 16)
    }

    #[inline(always)]
    fn narrow(value: f32) -> Bf16 {
        let bits = value.to_bits();
        let rounded = (bits.wrapping_add(0x7FFF + (bits >> 16 & 1)) >> 16) as u16;
        Bf16(if value.is_nan() { 0x7FFF } else { rounded })
    }
}

#[derive(Clone, Copy)]
#[repr(transparent)]
struct F16(u16);

impl Element for F16 {
    /// Shifts the exponent by multiplication, which also makes subnormals right.
    #[inline(always)]
    fn widen(self) -> f32 {
        let bits = u32::from(self.0);
        let (sign, magnitude) = ((bits & 0x8000) << 16, bits & 0x7FFF);
        let special = if magnitude >= 0x7C00 { 0x7F80_0000 } else { 0 };
        let value = f32::from_bits(magnitude << 13) * f32::from_bits(0x7780_0000); // 2^112
        f32::from_bits(value.to_bits() | special | sign)
    }

    /// Normal results round on the bit pattern; subnormal ones by adding a number whose last place is
    /// that of the smallest subnormal.
    #[inline(always)]
    fn narrow(value: f32) -> F16 {
        let bits = value.to_bits();
        let (sign, magnitude) = ((bits >> 16 & 0x8000) as u16, bits & 0x7FFF_FFFF);
        let normal = (magnitude.wrapping_add(0xC800_0FFF + (magnitude >> 13 & 1))) >> 13;
        let small = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
        let finite = if magnitude < 0x3880_0000 { small } else { normal };
        let clamped = if magnitude >= 0x477F_F000 { 0x7C00 } else { finite };
        F16(if magnitude > 0x7F80_0000 { 0x7FFF } else { clamped as u16 | sign })
    }
}

impl Element for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }

    #[inline(always)]
    fn narrow(value: f32) -> f32 {
        if value.is_nan() { f32::from_bits(NAN_BITS) } else { value }
    }
}

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

/// The kernels of one set of processor features.
macro_rules! table {
    ($name:ident) => {
        Kernels {
            rows: [
                $name::run::<Bf16, Bf16, false>,
                $name::run::<F16, F16, false>,
                $name::run::<f32, f32, false>,
            ],
            mixed: [
                $name::run::<Bf16, Bf16, true>,
                $name::run::<F16, F16, true>,
                $name::run::<f32, f32, true>,
            ],
            to_f32: [
                $name::run::<Bf16, f32, false>,
                $name::run::<F16, f32, false>,
                $name::run::<f32, f32, false>,
            ],
            to_bf16: [
                $name::run::<Bf16, Bf16, false>,
                $name::run::<F16, Bf16, false>,
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
kernels!(avx2, #[target_feature(enable = "avx2,fma")]);
#[cfg(target_arch = "x86_64")]
kernels!(avx512, #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]);

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
            if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma") {
                return if has("avx512") { table!(avx512) } else { table!(avx2) };
            }
        }
        table!(baseline)
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
        let row = &mut *out.add(col).cast::<[O; N]>();
        for (out, sum) in row.iter_mut().zip(sum) {
            *out = O::narrow(sum);
        }
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
                for (sum, value) in sum.iter_mut().zip(row) {
                    *sum = value.widen().mul_add(term.weight, *sum);
                }
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

    #[test]
    fn half_precision_conversions_agree_with_the_half_crate() {
        for bits in 0..=u16::MAX {
            let (ours, theirs) = (F16(bits).widen(), half::f16::from_bits(bits).to_f32());
            assert!(ours.to_bits() == theirs.to_bits() || (ours.is_nan() && theirs.is_nan()), "{bits:#x}");
            assert_eq!(Bf16(bits).widen().to_bits(), u32::from(bits) << 16);
        }
        let mut bits = 1u32;
        for _ in 0..4_000_000 {
            bits = bits.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let value = f32::from_bits(bits);
            if value.is_nan() {
                assert_eq!((F16::narrow(value).0, Bf16::narrow(value).0), (0x7FFF, 0x7FFF));
            } else {
                assert_eq!(F16::narrow(value).0, half::f16::from_f32(value).to_bits(), "{value:e}");
                assert_eq!(Bf16::narrow(value).0, half::bf16::from_f32(value).to_bits(), "{value:e}");
            }
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
        for reduction in [Reduction::Chain, Reduction::Ranks, Reduction::Nodes { bf16: true }] {
            let (mut fast, mut slow) = (vec![1u16; cols], vec![2u16; cols]);
            let bias = [rows[0].as_ptr().cast(), rows[1].as_ptr().cast()];
            // SAFETY: all rows have `cols` elements.
            unsafe {
                assert!(reduce(Dtype::Bf16, fast.as_mut_ptr().cast(), cols, bias, &terms, reduction));
                baseline::run::<Bf16, Bf16, false>(slow.as_mut_ptr().cast(), cols, bias, &terms, reduction);
            }
            assert_eq!(fast, slow);
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
