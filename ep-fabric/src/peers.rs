//! The peers of a NIC: their ids, and what is in flight to them.

use ep_core::Result;

use crate::av::AddressVector;
use crate::sys::fi_addr_t;
use crate::transport::PeerId;

/// The peers that were connected. Ids are positions in a dense table.
#[derive(Default)]
pub(crate) struct Peers {
    ids: Vec<Option<Known>>,
    entries: Vec<Option<Entry>>,
}

/// What the data path looks up.
#[derive(Clone, Copy)]
pub(crate) struct Known {
    pub(crate) address: fi_addr_t,
    /// Where its count of writes is.
    pub(crate) entry: u32,
}

/// One address: the provider knows it once, however many ids it has here.
struct Entry {
    bytes: Vec<u8>,
    address: fi_addr_t,
    num_ids: u32,
    in_flight: u32,
}

impl Peers {
    /// Makes an address known, or gives one that is known another id.
    ///
    /// # Errors
    /// As [`AddressVector::insert`].
    pub(crate) fn connect(&mut self, vector: &AddressVector, bytes: &[u8]) -> Result<PeerId> {
        let known =
            self.entries.iter().position(|entry| entry.as_ref().is_some_and(|entry| entry.bytes == bytes));
        let at = match known {
            Some(at) => at,
            None => {
                let entry =
                    Entry { bytes: bytes.to_vec(), address: vector.insert(bytes)?, num_ids: 0, in_flight: 0 };
                place(&mut self.entries, entry)
            }
        };
        let entry = self.entries[at].as_mut().expect("found or placed above");
        entry.num_ids += 1;
        let known = Known { address: entry.address, entry: at as u32 };
        // An id of an address with writes in flight is not free: its entry is, only after they completed.
        Ok(PeerId(place(&mut self.ids, known) as u32))
    }

    /// Forgets an id. The address goes when its last id and its last write have.
    pub(crate) fn disconnect(&mut self, vector: &AddressVector, peer: PeerId) {
        let Some(known) = self.ids.get_mut(peer.0 as usize).and_then(Option::take) else { return };
        if let Some(entry) = &mut self.entries[known.entry as usize] {
            entry.num_ids -= 1;
        }
        self.forget_unused(vector, known.entry);
    }

    #[inline]
    pub(crate) fn get(&self, peer: PeerId) -> Option<Known> {
        self.ids.get(peer.0 as usize).copied().flatten()
    }

    /// Counts a write that was posted.
    #[inline]
    pub(crate) fn posted(&mut self, entry: u32) {
        if let Some(entry) = &mut self.entries[entry as usize] {
            entry.in_flight += 1;
        }
    }

    /// Counts a write that completed.
    #[inline]
    pub(crate) fn completed(&mut self, vector: &AddressVector, at: u32) {
        if let Some(entry) = &mut self.entries[at as usize] {
            entry.in_flight -= 1;
            if entry.num_ids == 0 {
                self.forget_unused(vector, at);
            }
        }
    }

    /// Removing a peer from the provider while a write to it is in flight loses the completion.
    #[cold]
    fn forget_unused(&mut self, vector: &AddressVector, at: u32) {
        let slot = &mut self.entries[at as usize];
        if let Some(entry) = slot.take_if(|entry| entry.num_ids == 0 && entry.in_flight == 0) {
            vector.remove(entry.address);
        }
    }
}

/// Puts a value at the first free place.
fn place<T>(places: &mut Vec<Option<T>>, value: T) -> usize {
    let at = places.iter().position(Option::is_none).unwrap_or(places.len());
    if at == places.len() {
        places.push(None);
    }
    places[at] = Some(value);
    at
}
