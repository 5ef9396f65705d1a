//! A checksum that depends on the place of every byte.

use crate::rng::mix;

/// Goes on from `state` over `data`.
pub fn checksum(state: u64, data: &[u8]) -> u64 {
    // Four independent chains, so that the multiplications overlap.
    let mut lanes = [mix(state), mix(state ^ 1), mix(state ^ 2), mix(state ^ 3)];
    let step = |lane: u64, word: u64| (lane ^ word).wrapping_mul(0x9FB2_1C65_1E98_DF25).rotate_left(29);
    let mut blocks = data.chunks_exact(32);
    for block in &mut blocks {
        for (lane, word) in lanes.iter_mut().zip(block.chunks_exact(8)) {
            *lane = step(*lane, word.iter().rev().fold(0, |bits, &byte| bits << 8 | u64::from(byte)));
        }
    }
    let rest = blocks.remainder().iter().fold(data.len() as u64, |lane, &byte| step(lane, u64::from(byte)));
    lanes.into_iter().fold(rest, |sum, lane| mix(sum ^ lane))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_and_its_place_matter() {
        let data: Vec<u8> = (0..100).collect();
        let whole = checksum(0, &data);
        for i in 0..data.len() {
            let mut other = data.clone();
            other[i] ^= 1;
            assert_ne!(checksum(0, &other), whole);
        }
        let mut swapped = data.clone();
        swapped.swap(3, 70);
        assert_ne!(checksum(0, &swapped), whole);
        assert_ne!(checksum(0, &data[..99]), whole);
        assert_ne!(checksum(1, &data), whole);
    }
}
