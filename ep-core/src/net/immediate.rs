//! The 32 bits that come with every write, and how their short numbers become long again.
//!
//! `link:13 | incarnation:2 | stream:7 | cut:1 | number:9`, from the top. `link` is the receiver's own number for
//! (group, sender), told at connection. A stale incarnation is dropped. `cut` says that the message comes in as
//! many writes as the link has NICs, all with this immediate. `number` is the message's number in its stream, or
//! for a credit how many messages it frees: an increment, because additions need no order.

/// Numbers of links: 0 is never given out, see [`Immediate::link`].
pub const MAX_LINKS: usize = 1 << LINK_BITS;
/// Incarnations before the first comes again.
pub const INCARNATIONS: u8 = 1 << INCARNATION_BITS;
/// The largest window of a stream: numbers of two windows must differ.
pub const MAX_WINDOW: u32 = 1 << (NUMBER_BITS - 1);

const LINK_BITS: u32 = 13;
const INCARNATION_BITS: u32 = 2;
const STREAM_BITS: u32 = 7;
const CUT_BITS: u32 = 1;
/// Bits of a message's number.
pub const NUMBER_BITS: u32 = 9;

const CUT_AT: u32 = NUMBER_BITS;
const STREAM_AT: u32 = CUT_AT + CUT_BITS;
const INCARNATION_AT: u32 = STREAM_AT + STREAM_BITS;
const LINK_AT: u32 = INCARNATION_AT + INCARNATION_BITS;

const _: () = assert!(LINK_AT + LINK_BITS == 32, "the fields fill the immediate");
const _: () = assert!(LINK_AT >= 16, "an immediate cut to 16 bits names link 0, which does not exist");
const _: () = assert!(MAX_LINKS >= 4096);

/// A decoded immediate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Immediate {
    /// The receiver's number for the sender, in `1..MAX_LINKS`. 0 comes only from a network that lost the upper
    /// half of the immediate, as one release of libfabric did.
    pub link: u16,
    /// The use of that number.
    pub incarnation: u8,
    /// [`super::Stream::id`].
    pub stream: u8,
    /// One of several writes.
    pub cut: bool,
    /// The low bits of the number, or a credit's increment.
    pub number: u16,
}

/// The low `bits` bits of a word.
const fn mask(bits: u32) -> u32 {
    (1 << bits) - 1
}

impl Immediate {
    /// Packs the fields; bits that a field does not have are dropped.
    pub const fn encode(self) -> u32 {
        (self.link as u32 & mask(LINK_BITS)) << LINK_AT
            | (self.incarnation as u32 & mask(INCARNATION_BITS)) << INCARNATION_AT
            | (self.stream as u32 & mask(STREAM_BITS)) << STREAM_AT
            | (self.cut as u32) << CUT_AT
            | self.number as u32 & mask(NUMBER_BITS)
    }

    /// Unpacks any 32 bits.
    pub const fn decode(bits: u32) -> Immediate {
        Immediate {
            link: (bits >> LINK_AT & mask(LINK_BITS)) as u16,
            incarnation: (bits >> INCARNATION_AT & mask(INCARNATION_BITS)) as u8,
            stream: (bits >> STREAM_AT & mask(STREAM_BITS)) as u8,
            cut: bits >> CUT_AT & 1 != 0,
            number: (bits & mask(NUMBER_BITS)) as u16,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_come_back_and_do_not_touch_each_other() {
        let whole = Immediate { link: 8191, incarnation: 3, stream: 127, cut: true, number: 511 };
        assert_eq!(whole.encode(), u32::MAX);
        let zero = Immediate { link: 0, incarnation: 0, stream: 0, cut: false, number: 0 };
        let single = [
            (Immediate { link: 8191, ..zero }, 0xFFF8_0000),
            (Immediate { incarnation: 3, ..zero }, 0x0006_0000),
            (Immediate { stream: 127, ..zero }, 0x0001_FC00),
            (Immediate { cut: true, ..zero }, 0x0000_0200),
            (Immediate { number: 511, ..zero }, 0x0000_01FF),
        ];
        for (fields, bits) in single {
            assert_eq!(fields.encode(), bits, "{fields:?}");
            assert_eq!(Immediate::decode(bits), fields);
        }
        let mut bits = 0x9E37_79B9u32;
        for _ in 0..100_000 {
            bits = bits.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            assert_eq!(Immediate::decode(bits).encode(), bits);
        }
    }

    #[test]
    fn an_immediate_cut_to_16_bits_names_link_0() {
        let whole = Immediate { link: 8191, incarnation: 3, stream: 127, cut: true, number: 511 };
        assert_eq!(Immediate::decode(whole.encode() & 0xFFFF).link, 0);
    }
}
