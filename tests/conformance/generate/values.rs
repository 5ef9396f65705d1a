//! Payload kinds and numbers.

use ep_core::reference::float;
use ep_core::tensor::Dtype;

use crate::case::PayloadSpec;
use crate::rng::Rng;

/// A set of payloads of which no row has more than about `budget` bytes in all.
pub fn specs(rng: &mut Rng, budget: usize) -> Vec<PayloadSpec> {
    let hidden = |rng: &mut Rng, bytes: usize| {
        rng.pick(&[1, 3, 7, 16, 33, 64, 100, 128, 255, 256, 512, 1000, 1024, 2048, 4096, 7168, 30_000])
            .min(budget / bytes)
            .max(1)
    };
    let opaque =
        |rng: &mut Rng| (rng.pick(&[16, 32, 48, 112, 256, 1040, 4096]).min(budget) / 16 * 16).max(16);
    match rng.below(8) {
        0 | 1 => vec![PayloadSpec::rows(Dtype::Bf16, hidden(rng, 2))],
        2 => vec![PayloadSpec::rows(Dtype::F16, hidden(rng, 2))],
        3 => vec![PayloadSpec::rows(Dtype::F32, hidden(rng, 4))],
        4 | 5 => {
            let values = PayloadSpec::rows(rng.pick(&[Dtype::F8E4M3, Dtype::F8E5M2]), hidden(rng, 1));
            let block = rng.pick(&[128, 128, 32, 48, 7]);
            let scales = values.cols.div_ceil(block);
            let dtype = rng.pick(&[Dtype::F32, Dtype::Ue8m0, Dtype::I32]);
            vec![values, PayloadSpec { dtype, cols: scales, column_major: rng.once_in(2) }]
        }
        6 => vec![PayloadSpec::rows(Dtype::Opaque, opaque(rng))],
        _ => (0..rng.within(2..=4))
            .map(|_| match rng.pick(&Dtype::ALL) {
                Dtype::Opaque => PayloadSpec::rows(Dtype::Opaque, opaque(rng)),
                dtype => {
                    let cols = rng.within(1..=200).min(budget / 4 / dtype.bytes()).max(1);
                    PayloadSpec { dtype, cols, column_major: rng.once_in(4) }
                }
            })
            .collect(),
    }
}

/// What numbers are like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Numbers {
    /// Small integers, of which all sums are exact.
    Small,
    /// Both signs, magnitudes around 1.
    Normal,
    /// As normal, and now and then an end of the format: NaN, infinities, zeros, subnormals, the largest.
    Wild,
}

/// One number.
pub fn number(rng: &mut Rng, kind: Numbers) -> f32 {
    let bits = rng.next();
    let sign = if bits & 1 == 0 { 1.0 } else { -1.0 };
    match kind {
        Numbers::Small => sign * ((bits >> 8) % 9) as f32,
        Numbers::Wild if (bits >> 8).is_multiple_of(6) => {
            let ends = [
                f32::NAN,
                f32::from_bits(0xFF80_0001),
                f32::INFINITY,
                f32::NEG_INFINITY,
                0.0,
                -0.0,
                f32::from_bits(1),
                f32::from_bits(0x807F_FFFF),
                f32::MIN_POSITIVE,
                f32::MAX,
                f32::MIN,
                65504.0,
                65520.0,
                6.0e-8,
                -3.0e-5,
                1.0e-40,
            ];
            ends[(bits >> 16) as usize % ends.len()]
        }
        Numbers::Normal | Numbers::Wild => {
            let mantissa = 1.0 + (bits >> 40) as f32 / (1u32 << 24) as f32;
            sign * mantissa * 2f32.powi(((bits >> 8) % 13) as i32 - 8)
        }
    }
}

/// `count` numbers of a dtype.
pub fn number_bytes(rng: &mut Rng, kind: Numbers, dtype: Dtype, count: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(count * dtype.bytes());
    for _ in 0..count {
        let x = number(rng, kind);
        // NaNs of all patterns, not only the canonical one of the encoder.
        match dtype {
            Dtype::F32 => bytes.extend_from_slice(&x.to_ne_bytes()),
            Dtype::Bf16 if x.is_nan() => {
                bytes.extend_from_slice(&(0x7F81u16 | (rng.next() as u16)).to_ne_bytes())
            }
            Dtype::F16 if x.is_nan() => {
                bytes.extend_from_slice(&(0x7C01u16 | (rng.next() as u16)).to_ne_bytes())
            }
            _ => bytes.extend_from_slice(&float::encode(dtype, x)),
        }
    }
    bytes
}
