//! How a message is spread over NICs. Pure arithmetic.

use super::command::UNIT;

/// Messages of this many bytes and more are cut over all NICs of their link; smaller ones go whole over one.
pub const CUT_BYTES: u64 = 64 << 10;

/// Writes of a message over a link with `num_nics` NICs, all of which `mask` must allow for a cut: the receiver
/// counts on one write over each.
pub(super) fn pieces(bytes: u64, num_nics: usize, mask: u64) -> usize {
    let all = (1u64 << num_nics) - 1;
    if bytes >= CUT_BYTES && (mask & all == all || mask & all == 0) { num_nics } else { 1 }
}

/// Offset and bytes of piece `piece` of `pieces`. Cuts are multiples of [`UNIT`].
pub(super) fn piece(bytes: u64, pieces: usize, piece: usize) -> (u64, u64) {
    if pieces == 1 {
        return (0, bytes);
    }
    let share = bytes.div_ceil(pieces as u64).next_multiple_of(UNIT);
    let begin = (share * piece as u64).min(bytes);
    (begin, share.min(bytes - begin))
}

/// The NIC number `turn`, counted round, of the `num_nics` NICs of a link that `mask` allows; of all of them if it
/// allows none.
pub(super) fn pick(mask: u64, num_nics: usize, turn: u64) -> usize {
    let all = (1u64 << num_nics) - 1;
    let allowed = if mask & all == 0 { all } else { mask & all };
    if allowed == 1 {
        return 0;
    }
    let mut rest = allowed;
    for _ in 0..turn % u64::from(allowed.count_ones()) {
        rest &= rest - 1;
    }
    rest.trailing_zeros() as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_tile_the_message_at_multiples_of_16() {
        for bytes in [0, 1, 15, 16, 17, CUT_BYTES - 16, CUT_BYTES, CUT_BYTES + 16, 100_000, 1 << 28] {
            for count in 1..=8 {
                let mut end = 0;
                for index in 0..count {
                    let (begin, length) = piece(bytes, count, index);
                    assert_eq!(begin, end, "{bytes} bytes in {count}");
                    assert!(begin.is_multiple_of(UNIT) || length == 0);
                    end += length;
                }
                assert_eq!(end, bytes);
            }
        }
        assert_eq!(pieces(CUT_BYTES - 1, 4, u64::MAX), 1);
        assert_eq!(pieces(CUT_BYTES, 4, u64::MAX), 4);
        assert_eq!(pieces(CUT_BYTES, 4, 0), 4, "no NIC allowed means all");
        assert_eq!(pieces(CUT_BYTES, 4, 0b0111), 1, "not over a NIC that may not be used");
        assert_eq!(piece(CUT_BYTES, 4, 3).1, CUT_BYTES / 4, "equal shares");
    }

    #[test]
    fn nics_take_turns_within_the_mask() {
        let turns = |mask, count| -> Vec<usize> { (0..6).map(|turn| pick(mask, count, turn)).collect() };
        assert_eq!(turns(u64::MAX, 1), [0; 6]);
        assert_eq!(turns(u64::MAX, 4), [0, 1, 2, 3, 0, 1]);
        assert_eq!(turns(0b1010, 4), [1, 3, 1, 3, 1, 3]);
        assert_eq!(turns(0b1000, 2), [0, 1, 0, 1, 0, 1], "a mask without any of them means all");
        assert_eq!(turns(0, 3), [0, 1, 2, 0, 1, 2]);
    }
}
