//! Numbers that every rank can work out alone: contents of rows, and routings.

/// One round of splitmix64: a good mix of `x`.
pub fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

/// A number for a list of numbers.
pub fn hash(parts: &[u64]) -> u64 {
    parts.iter().fold(0x6C69_6265_7021, |state, &part| mix(state ^ mix(part)))
}

/// A stream of numbers.
pub struct Rng(u64);

impl Rng {
    /// The stream that belongs to a list of numbers.
    pub fn new(parts: &[u64]) -> Rng {
        Rng(hash(parts))
    }

    /// The next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix(self.0)
    }

    /// A number in `0..bound`.
    pub fn below(&mut self, bound: usize) -> usize {
        ((u128::from(self.next_u64()) * bound as u128) >> 64) as usize
    }

    /// A number in (0, 1].
    pub fn unit(&mut self) -> f32 {
        ((self.next_u64() >> 40) + 1) as f32 / (1u64 << 24) as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_stay_below_their_bound_and_reach_all_of_it() {
        let mut rng = Rng::new(&[1, 2]);
        let mut seen = [false; 7];
        for _ in 0..1000 {
            seen[rng.below(7)] = true;
            let unit = rng.unit();
            assert!(unit > 0.0 && unit <= 1.0);
        }
        assert_eq!(seen, [true; 7]);
    }
}
