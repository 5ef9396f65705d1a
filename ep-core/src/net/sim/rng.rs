//! Seeded numbers: splitmix64.

/// A generator whose numbers depend on its seed only.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// With this seed.
    pub fn new(seed: u64) -> Rng {
        Rng(seed)
    }

    /// Any number.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut value = self.0;
        value = (value ^ (value >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        value = (value ^ (value >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        value ^ (value >> 31)
    }

    /// A number in `0..bound`; 0 if there is none.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.draw() % bound.max(1)
    }

    /// True once in `one_in` times; never for 0.
    pub fn once_in(&mut self, one_in: u64) -> bool {
        one_in != 0 && self.below(one_in) == 0
    }
}
