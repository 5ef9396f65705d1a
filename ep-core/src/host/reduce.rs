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
                if has("avx512") {
                    return Kernels {
                        bf16: avx512::run::<Bf16>,
                        f16: avx512::run::<F16>,
                        f32: avx512::run::<f32>,
                    };
                }
                return Kernels { bf16: avx2::run::<Bf16>, f16: avx2::run::<F16>, f32: avx2::run::<f32> };
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
        for (out, sum) in row.iter_mut().zip(sum) {
            *out = E::narrow(sum);
        }
    }
}

/// # Safety
/// As [`reduce_block`].
#[inline(always)]
unsafe fn add_term<E: Element, const N: usize>(sum: &mut [f32; N], term: &Term, col: usize) {
    // SAFETY: by the caller's word.
    let row = unsafe { &*term.row.cast::<E>().add(col).cast::<[E; N]>() };
    for (sum, value) in sum.iter_mut().zip(row) {
        *sum = value.widen().mul_add(term.weight, *sum);
    }
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
            .map(|i| Term { row: rows[i].as_ptr().cast(), weight: 0.3 + i as f32, close: close[i] })
            .collect();
        for reduction in [Reduction::Chain, Reduction::Ranks, Reduction::Nodes { bf16: true }] {
            let (mut fast, mut slow) = (vec![1u16; cols], vec![2u16; cols]);
            let bias = [rows[0].as_ptr().cast(), rows[1].as_ptr().cast()];
            // SAFETY: all rows have `cols` elements.
            unsafe {
                assert!(reduce(Dtype::Bf16, fast.as_mut_ptr().cast(), cols, bias, &terms, reduction));
                baseline::run::<Bf16>(slow.as_mut_ptr().cast(), cols, bias, &terms, reduction);
            }
            assert_eq!(fast, slow);
        }
    }
}
