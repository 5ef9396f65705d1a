//! The experts of the demonstration: a scale and a shift that each expert has of its own, in fp32,
//! rounded once to bf16.

/// Applies expert `expert` to one number.
fn expert(expert: usize, x: f32) -> f32 {
    let scale = 0.75 + (expert % 61) as f32 / 128.0;
    let shift = (expert % 7) as f32 / 64.0 - 3.0 / 64.0;
    x * scale + shift
}

fn widen(bits: [u8; 2]) -> f32 {
    f32::from_bits(u32::from(u16::from_ne_bytes(bits)) << 16)
}

/// To nearest even; the numbers of the demonstration are finite.
fn narrow(x: f32) -> [u8; 2] {
    let bits = x.to_bits();
    ((bits.wrapping_add(0x7FFF + (bits >> 16 & 1)) >> 16) as u16).to_ne_bytes()
}

/// Replaces a row of bf16 by what one expert makes of it.
pub(crate) fn apply(row: &mut [u8], id: usize) {
    for x in row.as_chunks_mut::<2>().0 {
        *x = narrow(expert(id, widen(*x)));
    }
}

/// Replaces a row of bf16 by the weighted sum of what several experts make of it.
pub(crate) fn apply_weighted(row: &mut [u8], experts: &[(usize, f32)]) {
    for x in row.as_chunks_mut::<2>().0 {
        let value = widen(*x);
        *x = narrow(experts.iter().map(|&(id, weight)| weight * expert(id, value)).sum());
    }
}

#[cfg(test)]
mod tests {
    use ep_core::reference::float::{bf16_to_f32, f32_to_bf16};

    use super::*;

    #[test]
    fn conversions_agree_with_the_reference() {
        for bits in (0..0x7F80u16).chain(0x8000..0xFF80) {
            assert_eq!(widen(bits.to_ne_bytes()).to_bits(), bf16_to_f32(bits).to_bits());
        }
        let mut bits = 1u32;
        for _ in 0..100_000 {
            bits = bits.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let x = f32::from_bits(bits);
            if x.is_finite() {
                assert_eq!(narrow(x), f32_to_bf16(x).to_ne_bytes(), "{x:e}");
            }
        }
    }

    #[test]
    fn one_expert_of_weight_one_is_the_expert_itself() {
        let row: Vec<u8> = [1.0f32, -0.5, 0.125].iter().flat_map(|x| f32_to_bf16(*x).to_ne_bytes()).collect();
        let (mut one, mut many) = (row.clone(), row);
        apply(&mut one, 9);
        apply_weighted(&mut many, &[(9, 1.0)]);
        assert_eq!(one, many);
    }
}
