//! A set of ranks that needs no memory but its own.

use crate::config::MAX_RANKS;

const WORDS: usize = MAX_RANKS.div_ceil(64);

/// Some ranks of a group: bit r % 64 of word r / 64.
pub(super) struct RankSet {
    words: [u64; WORDS],
    /// Words from here on are 0: small groups do not look at all of them.
    end: usize,
}

impl RankSet {
    pub(super) fn new() -> RankSet {
        RankSet { words: [0; WORDS], end: 0 }
    }

    pub(super) fn insert(&mut self, rank: usize) {
        self.words[rank / 64] |= 1 << (rank % 64);
        self.end = self.end.max(rank / 64 + 1);
    }

    pub(super) fn remove(&mut self, rank: usize) {
        self.words[rank / 64] &= !(1 << (rank % 64));
    }

    pub(super) fn contains(&self, rank: usize) -> bool {
        self.words[rank / 64] & 1 << (rank % 64) != 0
    }

    /// Takes a rank out; None if there is none.
    pub(super) fn pop(&mut self) -> Option<usize> {
        let rank = self.iter().next();
        match rank {
            Some(rank) => self.remove(rank),
            None => self.end = 0,
        }
        rank
    }

    /// The ranks, ascending.
    pub(super) fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        self.words[..self.end].iter().enumerate().flat_map(|(index, &word)| {
            std::iter::successors(Some(word), |word| Some(word & word.wrapping_sub(1)))
                .take_while(|&word| word != 0)
                .map(move |word| 64 * index + word.trailing_zeros() as usize)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_put_in_comes_out_in_order_and_once() {
        let mut set = RankSet::new();
        assert_eq!(set.pop(), None);
        for rank in [MAX_RANKS - 1, 64, 0, 63, 64] {
            set.insert(rank);
        }
        set.remove(63);
        assert!(set.contains(0) && !set.contains(63) && set.contains(MAX_RANKS - 1));
        assert_eq!(set.iter().collect::<Vec<_>>(), [0, 64, MAX_RANKS - 1]);
        assert_eq!(
            [set.pop(), set.pop(), set.pop(), set.pop()],
            [Some(0), Some(64), Some(MAX_RANKS - 1), None]
        );
    }
}
