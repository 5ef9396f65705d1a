//! The contexts of writes in flight: memory that the provider may use until a write completes.

use crate::sys::fi_context2;

/// A fixed number of contexts; their addresses do not change.
pub(crate) struct Slots {
    slots: Box<[Slot]>,
    free: Vec<u32>,
}

/// The provider's memory comes first: the address of the slot is that of its context.
#[repr(C)]
struct Slot {
    provider: fi_context2,
    context: u64,
    /// Where the peer's count is; [`FREE`] if nothing is in flight.
    entry: u32,
}

const FREE: u32 = u32::MAX;

/// What a slot was taken for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct InFlight {
    pub(crate) context: u64,
    pub(crate) entry: u32,
}

impl Slots {
    pub(crate) fn new(count: usize) -> Slots {
        let slot = || Slot {
            provider: fi_context2 { internal: [std::ptr::null_mut(); 8] },
            context: 0,
            entry: FREE,
        };
        Slots { slots: (0..count).map(|_| slot()).collect(), free: (0..count as u32).rev().collect() }
    }

    /// Takes a free slot; none if as many writes are in flight as there may be.
    #[inline]
    pub(crate) fn take(&mut self, what: InFlight) -> Option<*mut fi_context2> {
        let at = self.free.pop()?;
        let slot = &mut self.slots[at as usize];
        (slot.context, slot.entry) = (what.context, what.entry);
        Some((&raw mut *slot).cast())
    }

    /// Gives back the slot at an address that the provider returned. None for an address that is no slot's in use.
    #[inline]
    pub(crate) fn give_back(&mut self, address: usize) -> Option<InFlight> {
        let offset = address.checked_sub(self.slots.as_ptr().addr())?;
        let slot = self.slots.get_mut(offset / size_of::<Slot>())?;
        if offset % size_of::<Slot>() != 0 || slot.entry == FREE {
            return None;
        }
        let what = InFlight { context: slot.context, entry: slot.entry };
        slot.entry = FREE;
        // Never grows: it had room for all slots when it was made.
        self.free.push((offset / size_of::<Slot>()) as u32);
        Some(what)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_run_out_and_come_back_once() {
        let mut slots = Slots::new(2);
        let what = |context| InFlight { context, entry: 7 };
        let first = slots.take(what(1)).unwrap().addr();
        let second = slots.take(what(2)).unwrap().addr();
        assert!(slots.take(what(3)).is_none());
        assert_eq!(slots.give_back(first), Some(what(1)));
        assert_eq!(slots.give_back(first), None, "given back twice");
        assert_eq!(slots.give_back(second + 8), None, "inside a slot");
        assert_eq!(slots.give_back(0), None);
        assert_eq!(slots.give_back(usize::MAX), None);
        assert_eq!(slots.take(what(4)).unwrap().addr(), first);
        assert_eq!(slots.give_back(second), Some(what(2)));
    }
}
