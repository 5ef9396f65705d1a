//! The element types of combines: exact widening to fp32, one rounding back.

/// The NaN of every result.
const NAN_BITS: u32 = 0x7FFF_FFFF;

/// An element type of combines.
pub(super) trait Element: Copy {
    /// Exact.
    fn widen(self) -> f32;
    /// To nearest even; NaN has one pattern.
    fn narrow(value: f32) -> Self;

    /// Adds `row` times `weight` to `sum`. Here and below one loop over single elements, which the compiler
    /// makes vectors of and keeps in registers; an array of widened values in between would go to memory.
    #[inline(always)]
    fn add_product<const N: usize>(sum: &mut [f32; N], row: &[Self; N], weight: f32) {
        for (sum, value) in sum.iter_mut().zip(row) {
            *sum = value.widen().mul_add(weight, *sum);
        }
    }

    /// Stores `sum`, rounded.
    #[inline(always)]
    fn store<const N: usize>(sum: &[f32; N], row: &mut [Self; N]) {
        for (out, sum) in row.iter_mut().zip(sum) {
            *out = Self::narrow(*sum);
        }
    }
}

/// bfloat16.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct Bf16(u16);

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

/// IEEE binary16, by arithmetic that every processor has.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct F16(u16);

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

/// As [`F16`], by the processor's own conversions; only kernels whose features hold F16C may use it.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct F16c(F16);

#[cfg(target_arch = "x86_64")]
impl Element for F16c {
    #[inline(always)]
    fn widen(self) -> f32 {
        self.0.widen()
    }

    #[inline(always)]
    fn narrow(value: f32) -> F16c {
        F16c(F16::narrow(value))
    }

    #[inline(always)]
    fn add_product<const N: usize>(sum: &mut [f32; N], row: &[F16c; N], weight: f32) {
        use std::arch::x86_64::{
            _mm_loadu_si128, _mm256_cvtph_ps, _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_set1_ps,
            _mm256_storeu_ps,
        };
        let (sums, last_sums) = sum.as_chunks_mut::<8>();
        let (values, last_values) = row.as_chunks::<8>();
        for (sum, value) in sums.iter_mut().zip(values) {
            // SAFETY: both hold 8 elements, and the kernel was chosen because the processor has F16C and FMA.
            unsafe {
                let value = _mm256_cvtph_ps(_mm_loadu_si128(value.as_ptr().cast()));
                let added = _mm256_fmadd_ps(value, _mm256_set1_ps(weight), _mm256_loadu_ps(sum.as_ptr()));
                _mm256_storeu_ps(sum.as_mut_ptr(), added);
            }
        }
        for (sum, value) in last_sums.iter_mut().zip(last_values) {
            *sum = value.widen().mul_add(weight, *sum);
        }
    }

    #[inline(always)]
    fn store<const N: usize>(sum: &[f32; N], row: &mut [F16c; N]) {
        use std::arch::x86_64::{
            _CMP_UNORD_Q, _MM_FROUND_TO_NEAREST_INT, _mm_storeu_si128, _mm256_blendv_ps, _mm256_cmp_ps,
            _mm256_cvtps_ph, _mm256_loadu_ps, _mm256_set1_ps,
        };
        let (sums, last_sums) = sum.as_chunks::<8>();
        let (outs, last_outs) = row.as_chunks_mut::<8>();
        for (sum, out) in sums.iter().zip(outs) {
            // SAFETY: as in `add_product`.
            unsafe {
                let value = _mm256_loadu_ps(sum.as_ptr());
                let nan = _mm256_cmp_ps::<_CMP_UNORD_Q>(value, value);
                // The conversion keeps the upper bits of a NaN: of this one they are the NaN of results.
                let value = _mm256_blendv_ps(value, _mm256_set1_ps(f32::from_bits(NAN_BITS)), nan);
                _mm_storeu_si128(
                    out.as_mut_ptr().cast(),
                    _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(value),
                );
            }
        }
        for (sum, out) in last_sums.iter().zip(last_outs) {
            *out = F16c::narrow(*sum);
        }
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
}
