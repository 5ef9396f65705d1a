//! Conversions between fp32 and the 16-bit formats, written from their definition.

use crate::tensor::Dtype;

/// An IEEE-like 16-bit format: a sign, an exponent, `mantissa` bits.
#[derive(Clone, Copy, Debug)]
struct Format {
    mantissa: i32,
    /// The exponent of the smallest normal number; subnormals are spaced as if they had it.
    min_exponent: i32,
    /// Bits of +infinity.
    infinity: u16,
}

const BF16: Format = Format { mantissa: 7, min_exponent: -126, infinity: 0x7F80 };
const F16: Format = Format { mantissa: 10, min_exponent: -14, infinity: 0x7C00 };

/// The one NaN of 16-bit results.
pub const NAN_16: u16 = 0x7FFF;
/// The one NaN of fp32 results.
pub const NAN_32: u32 = 0x7FFF_FFFF;

/// Rounds to nearest, ties to even; overflow gives infinity, every NaN gives [`NAN_16`].
pub fn f32_to_bf16(x: f32) -> u16 {
    narrow(x, BF16)
}

/// As [`f32_to_bf16`], to fp16.
pub fn f32_to_f16(x: f32) -> u16 {
    narrow(x, F16)
}

/// Exact; a NaN gives some NaN.
pub fn bf16_to_f32(bits: u16) -> f32 {
    widen(bits, BF16)
}

/// Exact; a NaN gives some NaN.
pub fn f16_to_f32(bits: u16) -> f32 {
    widen(bits, F16)
}

/// The numbers in a row of bf16, fp16 or fp32, in native byte order.
pub fn decode(dtype: Dtype, bytes: &[u8]) -> Vec<f32> {
    let pairs = || bytes.chunks_exact(2).map(|b| u16::from_ne_bytes([b[0], b[1]]));
    match dtype {
        Dtype::Bf16 => pairs().map(bf16_to_f32).collect(),
        Dtype::F16 => pairs().map(f16_to_f32).collect(),
        Dtype::F32 => bytes.chunks_exact(4).map(|b| f32::from_ne_bytes([b[0], b[1], b[2], b[3]])).collect(),
        other => panic!("{} cannot be combined", other.name()),
    }
}

/// The bytes of `x` rounded to bf16, fp16 or fp32, with the NaN of results.
pub fn encode(dtype: Dtype, x: f32) -> Vec<u8> {
    match dtype {
        Dtype::Bf16 => f32_to_bf16(x).to_ne_bytes().to_vec(),
        Dtype::F16 => f32_to_f16(x).to_ne_bytes().to_vec(),
        Dtype::F32 if x.is_nan() => NAN_32.to_ne_bytes().to_vec(),
        Dtype::F32 => x.to_ne_bytes().to_vec(),
        other => panic!("{} cannot be combined", other.name()),
    }
}

fn narrow(x: f32, format: Format) -> u16 {
    if x.is_nan() {
        return NAN_16;
    }
    let sign = if x.is_sign_negative() { 0x8000 } else { 0 };
    if x.is_infinite() {
        return sign | format.infinity;
    }
    // Every fp32 is a normal f64, so dividing by a power of two is exact and only the rounding rounds.
    let magnitude = f64::from(x).abs();
    let exponent = exponent_of(magnitude).max(format.min_exponent);
    let units = (magnitude / power_of_two(exponent - format.mantissa)).round_ties_even() as u32;
    // The encodings of neighbouring magnitudes are consecutive integers, also across exponents.
    let bits = units + (((exponent - format.min_exponent) as u32) << format.mantissa);
    sign | bits.min(u32::from(format.infinity)) as u16
}

fn widen(bits: u16, format: Format) -> f32 {
    let magnitude = bits & 0x7FFF;
    let sign = if bits & 0x8000 != 0 { -1.0 } else { 1.0 };
    if magnitude > format.infinity {
        return f32::NAN;
    }
    if magnitude == format.infinity {
        return sign * f32::INFINITY;
    }
    let field = i32::from(magnitude >> format.mantissa);
    let fraction = magnitude & ((1 << format.mantissa) - 1);
    let units = if field == 0 { fraction } else { fraction | 1 << format.mantissa };
    let exponent = format.min_exponent + (field - 1).max(0) - format.mantissa;
    sign * (f64::from(units) * power_of_two(exponent)) as f32
}

/// The exponent of the leading bit; a very small number for zero.
fn exponent_of(magnitude: f64) -> i32 {
    (magnitude.to_bits() >> 52) as i32 - 1023
}

fn power_of_two(exponent: i32) -> f64 {
    f64::from_bits(((exponent + 1023) as u64) << 52)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn same(ours: u16, theirs: u16, theirs_is_nan: bool) -> bool {
        if theirs_is_nan { ours == NAN_16 } else { ours == theirs }
    }

    #[test]
    fn widening_agrees_with_half_for_every_pattern() {
        for bits in 0..=u16::MAX {
            let (ours, theirs) = (bf16_to_f32(bits), half::bf16::from_bits(bits).to_f32());
            assert!(ours.to_bits() == theirs.to_bits() || ours.is_nan() && theirs.is_nan(), "bf16 {bits:#x}");
            let (ours, theirs) = (f16_to_f32(bits), half::f16::from_bits(bits).to_f32());
            assert!(ours.to_bits() == theirs.to_bits() || ours.is_nan() && theirs.is_nan(), "f16 {bits:#x}");
        }
    }

    #[test]
    fn narrowing_agrees_with_half_at_every_value_midpoint_and_neighbour() {
        let check = |x: f32| {
            let (bf16, f16) = (half::bf16::from_f32(x), half::f16::from_f32(x));
            assert!(same(f32_to_bf16(x), bf16.to_bits(), bf16.is_nan()), "bf16 of {:#x}", x.to_bits());
            assert!(same(f32_to_f16(x), f16.to_bits(), f16.is_nan()), "f16 of {:#x}", x.to_bits());
        };
        for bits in 0..=u16::MAX {
            // Each bf16 with the fp32 at it, around it, and at and around the midpoint to the next.
            for low in [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF] {
                check(f32::from_bits(u32::from(bits) << 16 | low));
            }
            // The same for f16, whose spacing in fp32 differs.
            let at = half::f16::from_bits(bits).to_f32();
            let next = half::f16::from_bits(bits.wrapping_add(1)).to_f32();
            for x in [at, (at + next) / 2.0] {
                for step in [-1i32, 0, 1] {
                    check(f32::from_bits(x.to_bits().wrapping_add_signed(step)));
                }
            }
        }
        // And a walk through all of fp32.
        let mut bits = 0u32;
        while let Some(next) = bits.checked_add(2_003) {
            check(f32::from_bits(bits));
            bits = next;
        }
    }

    #[test]
    fn ends_of_the_ranges_are_as_computed_by_hand() {
        assert_eq!(f32_to_f16(65504.0), 0x7BFF);
        assert_eq!(f32_to_f16(65519.996), 0x7BFF);
        assert_eq!(f32_to_f16(65520.0), 0x7C00, "the tie above the largest goes to even: infinity");
        assert_eq!(f32_to_f16(-1e9), 0xFC00);
        assert_eq!(f32_to_f16(2f32.powi(-24)), 1, "the smallest subnormal is kept");
        assert_eq!(f32_to_f16(2f32.powi(-25)), 0, "the tie below it goes to even: zero");
        assert_eq!(f32_to_f16(-0.0), 0x8000);
        assert_eq!(f32_to_bf16(f32::MAX), 0x7F80);
        assert_eq!(f32_to_bf16(f32::from_bits(1 << 16)), 1);
        assert_eq!(f32_to_bf16(f32::from_bits(0x3F80_8000)), 0x3F80, "tie to even, down");
        assert_eq!(f32_to_bf16(f32::from_bits(0x3F81_8000)), 0x3F82, "tie to even, up");
        assert_eq!(f32_to_bf16(-f32::NAN), NAN_16);
        assert_eq!(encode(Dtype::F32, f32::from_bits(0xFFC0_0001)), NAN_32.to_ne_bytes());
        assert_eq!(encode(Dtype::F32, f32::from_bits(1)), 1u32.to_ne_bytes());
    }
}
