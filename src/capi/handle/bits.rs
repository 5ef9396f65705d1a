//! The bits of a handle.
//!
//! From the lowest: 4 that are zero, 20 of index, 20 of generation, 3 of kind. That is below 2^47, as
//! some languages want pointers to be, and the kinds are such that the usual addresses of a Linux
//! process (heap 5, stack and mappings 7, small programs 0) are not handles.

const INDEX_SHIFT: u32 = 4;
const GENERATION_SHIFT: u32 = 24;
const KIND_SHIFT: u32 = 44;
const FIELD_MASK: usize = (1 << 20) - 1;

/// The most objects of one kind that are alive at a time.
pub(super) const MAX_OBJECTS: usize = FIELD_MASK + 1;
/// The last generation of a slot; the first is 1, so an all-zero field never fits.
pub(super) const MAX_GENERATION: u64 = FIELD_MASK as u64;

const _: () = assert!(usize::BITS == 64, "handles use 47 bits of a pointer");

/// What a handle names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Group = 1,
    Window = 2,
    Plan = 3,
    Stream = 4,
}

impl Kind {
    const ALL: [Kind; 4] = [Kind::Group, Kind::Window, Kind::Plan, Kind::Stream];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Kind::Group => "ep_group_t",
            Kind::Window => "ep_window_t",
            Kind::Plan => "ep_plan_t",
            Kind::Stream => "ep_stream_t",
        }
    }
}

/// A handle, taken apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bits {
    pub(super) kind: Kind,
    /// 1 to [`MAX_GENERATION`].
    pub(super) generation: u64,
    /// Below [`MAX_OBJECTS`].
    pub(super) index: usize,
}

impl Bits {
    pub(super) fn encode(self) -> usize {
        (self.kind as usize) << KIND_SHIFT
            | (self.generation as usize) << GENERATION_SHIFT
            | self.index << INDEX_SHIFT
    }

    /// `None` for what cannot be a handle.
    pub(super) fn decode(handle: usize) -> Option<Bits> {
        let kind = Kind::ALL.into_iter().find(|kind| *kind as usize == handle >> KIND_SHIFT)?;
        let generation = (handle >> GENERATION_SHIFT & FIELD_MASK) as u64;
        let bits = Bits { kind, generation, index: handle >> INDEX_SHIFT & FIELD_MASK };
        (generation != 0 && bits.encode() == handle).then_some(bits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_are_found_again_and_differ() {
        let mut seen = std::collections::HashSet::new();
        for kind in Kind::ALL {
            for generation in [1, 2, MAX_GENERATION] {
                for index in [0, 1, MAX_OBJECTS - 1] {
                    let bits = Bits { kind, generation, index };
                    let handle = bits.encode();
                    assert!(handle < 1 << 47 && handle.is_multiple_of(16) && seen.insert(handle));
                    assert_eq!(Bits::decode(handle), Some(bits));
                    for bit in 0..INDEX_SHIFT {
                        assert_eq!(Bits::decode(handle | 1 << bit), None);
                    }
                    assert_eq!(Bits::decode(handle | 1 << 47), None);
                }
            }
        }
    }

    #[test]
    fn addresses_are_no_handles() {
        let on_stack = 0u64;
        let on_heap = Box::new(0u64);
        for address in [&raw const on_stack, &raw const *on_heap, std::ptr::from_ref("static").cast()] {
            assert_eq!(Bits::decode(address.addr() & !15), None, "{address:p}");
        }
        assert_eq!(Bits::decode(usize::MAX), None);
        assert_eq!(Bits::decode(1 << KIND_SHIFT), None, "generation 0");
    }
}
