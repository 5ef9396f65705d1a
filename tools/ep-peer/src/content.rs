//! What rows hold: numbers that follow from where a row comes from, so that any rank can say what must
//! arrive. They are finite, of both signs and of magnitudes between 1/128 and 2, in every float format.

use ep_core::tensor::Dtype;

use crate::rng::{hash, mix};

/// Fills a row of `dtype` with the numbers that belong to `name`.
pub fn fill_row(row: &mut [u8], dtype: Dtype, name: &[u64]) {
    let (keep, set) = match dtype {
        Dtype::Bf16 => (0xBFFF_BFFF_BFFF_BFFF, 0x3C00_3C00_3C00_3C00),
        Dtype::F16 => (0xBFFF_BFFF_BFFF_BFFF, 0x2000_2000_2000_2000),
        Dtype::F32 => (0xBFFF_FFFF_BFFF_FFFF, 0x3C00_0000_3C00_0000),
        _ => (u64::MAX, 0),
    };
    let start = hash(name);
    let mut words = row.chunks_exact_mut(8);
    let mut count = 0u64;
    let mut next = || {
        count += 1;
        (mix(start.wrapping_add(count)) & keep) | set
    };
    for word in &mut words {
        word.copy_from_slice(&next().to_ne_bytes());
    }
    let rest = words.into_remainder();
    let bytes = next().to_ne_bytes();
    rest.copy_from_slice(&bytes[..rest.len()]);
}

#[cfg(test)]
mod tests {
    use ep_core::reference::float::decode;

    use super::*;

    #[test]
    fn rows_are_finite_and_differ_by_name() {
        for dtype in [Dtype::Bf16, Dtype::F16, Dtype::F32] {
            let mut rows = [vec![0; 4100], vec![0; 4100]];
            fill_row(&mut rows[0], dtype, &[1, 2]);
            fill_row(&mut rows[1], dtype, &[2, 1]);
            assert_ne!(rows[0], rows[1]);
            for x in decode(dtype, &rows[0]) {
                assert!(x.is_finite() && x.abs() >= 1.0 / 128.0 && x.abs() <= 2.0, "{dtype:?} {x}");
            }
        }
    }
}
