//! What a rank tells the others so that they can connect: its NICs, its region's keys, and for each peer the
//! link's number and where that peer's messages land. The bytes come from other machines: any bytes are
//! survived, and none is believed beyond its bounds.

use super::immediate::MAX_LINKS;
use super::layout::MAX_NICS;
use super::transport::{MAX_ADDRESS_BYTES, RemoteRegion};
use crate::error::{Error, Result, Status};

const MAGIC: [u8; 4] = *b"EPNT";
/// Version of the offer, of immediates and of what they mean. Ranks of one group must agree.
const VERSION: u32 = 1;

/// One NIC, as peers see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NicOffer {
    pub(super) address: Vec<u8>,
    pub(super) region: RemoteRegion,
    /// Bytes of its largest write.
    pub(super) max_write: u64,
}

/// One link's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LinkOffer {
    /// For whom it is.
    pub(super) peer: u32,
    /// What the peer puts into its immediates.
    pub(super) number: u16,
    pub(super) incarnation: u8,
    /// Where the peer's messages land, in the region.
    pub(super) landing: u64,
}

/// All that a rank offers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Offer {
    pub(super) rank: u32,
    /// Of the layout.
    pub(super) fingerprint: u64,
    pub(super) nics: Vec<NicOffer>,
    pub(super) links: Vec<LinkOffer>,
}

impl Offer {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(64 + 96 * self.nics.len() + 16 * self.links.len());
        bytes.extend(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(self.rank.to_le_bytes());
        bytes.extend(self.fingerprint.to_le_bytes());
        bytes.extend((self.nics.len() as u32).to_le_bytes());
        bytes.extend((self.links.len() as u32).to_le_bytes());
        for nic in &self.nics {
            bytes.extend((nic.address.len() as u32).to_le_bytes());
            bytes.extend(&nic.address);
            bytes.extend(nic.region.key.to_le_bytes());
            bytes.extend(nic.region.base.to_le_bytes());
            bytes.extend(nic.region.bytes.to_le_bytes());
            bytes.extend(nic.max_write.to_le_bytes());
        }
        for link in &self.links {
            bytes.extend(link.peer.to_le_bytes());
            bytes.extend(link.number.to_le_bytes());
            bytes.extend(u16::from(link.incarnation).to_le_bytes());
            bytes.extend(link.landing.to_le_bytes());
        }
        bytes
    }

    /// Reads an offer.
    ///
    /// # Errors
    /// [`Status::Mismatch`] for another version, [`Status::Bootstrap`] for anything that is no offer.
    pub(super) fn decode(bytes: &[u8]) -> Result<Offer> {
        let mut reader = Reader { rest: bytes };
        if reader.take::<4>()? != MAGIC {
            return Err(broken("does not begin as one"));
        }
        let version = reader.u32()?;
        if version != VERSION {
            let text =
                format!("its network has version {version} and this rank's has {VERSION}: use one release");
            return Err(Error::new(Status::Mismatch, text));
        }
        let (rank, fingerprint) = (reader.u32()?, reader.u64()?);
        let (num_nics, num_links) = (reader.u32()? as usize, reader.u32()? as usize);
        if num_nics == 0 || num_nics > MAX_NICS || num_links >= MAX_LINKS {
            return Err(broken(&format!("it has {num_nics} NICs and {num_links} links")));
        }
        let nics = (0..num_nics).map(|_| reader.nic()).collect::<Result<Vec<_>>>()?;
        let links = (0..num_links).map(|_| reader.link()).collect::<Result<Vec<_>>>()?;
        if !reader.rest.is_empty() {
            return Err(broken(&format!("{} bytes follow it", reader.rest.len())));
        }
        Ok(Offer { rank, fingerprint, nics, links })
    }

    /// The end of the link that is for `rank`.
    pub(super) fn link_for(&self, rank: usize) -> Option<&LinkOffer> {
        self.links.iter().find(|link| link.peer as usize == rank)
    }
}

struct Reader<'a> {
    rest: &'a [u8],
}

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N]> {
        let Some((head, rest)) = self.rest.split_first_chunk::<N>() else {
            return Err(broken("it ends early"));
        };
        self.rest = rest;
        Ok(*head)
    }

    fn u32(&mut self) -> Result<u32> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64> {
        self.take().map(u64::from_le_bytes)
    }

    fn nic(&mut self) -> Result<NicOffer> {
        let length = self.u32()? as usize;
        if length > MAX_ADDRESS_BYTES || length > self.rest.len() {
            return Err(broken(&format!("a NIC's address has {length} bytes")));
        }
        let (address, rest) = self.rest.split_at(length);
        self.rest = rest;
        let region = RemoteRegion { key: self.u64()?, base: self.u64()?, bytes: self.u64()? };
        Ok(NicOffer { address: address.to_vec(), region, max_write: self.u64()? })
    }

    fn link(&mut self) -> Result<LinkOffer> {
        let (peer, number) = (self.u32()?, u16::from_le_bytes(self.take()?));
        let incarnation = u16::from_le_bytes(self.take()?);
        let landing = self.u64()?;
        let known = number != 0
            && (number as usize) < MAX_LINKS
            && incarnation < u16::from(super::immediate::INCARNATIONS)
            && landing < 1 << 48;
        if !known {
            return Err(broken(&format!("it has a link {number}.{incarnation} at {landing}")));
        }
        Ok(LinkOffer { peer, number, incarnation: incarnation as u8, landing })
    }
}

fn broken(what: &str) -> Error {
    Error::new(Status::Bootstrap, format!("what it sent to connect to its NICs is not that: {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer(num_nics: usize, num_links: usize) -> Offer {
        let nic = |index: usize| NicOffer {
            address: vec![index as u8; index * 7 % (MAX_ADDRESS_BYTES + 1)],
            region: RemoteRegion { key: index as u64 * 77, base: u64::MAX - index as u64, bytes: 4096 },
            max_write: 1 << 30,
        };
        let link = |index: usize| LinkOffer {
            peer: index as u32 * 3,
            number: index as u16 + 1,
            incarnation: (index % 4) as u8,
            landing: index as u64 * 4096,
        };
        Offer {
            rank: 5,
            fingerprint: 0x0123_4567_89AB_CDEF,
            nics: (0..num_nics).map(nic).collect(),
            links: (0..num_links).map(link).collect(),
        }
    }

    #[test]
    fn offers_come_back() {
        for (num_nics, num_links) in [(1, 0), (1, 1), (4, 300), (MAX_NICS, MAX_LINKS - 1)] {
            let offer = offer(num_nics, num_links);
            assert_eq!(Offer::decode(&offer.encode()), Ok(offer));
        }
    }

    #[test]
    fn another_version_is_a_mismatch_and_says_both() {
        let mut bytes = offer(1, 1).encode();
        bytes[4] = 9;
        let error = Offer::decode(&bytes).unwrap_err();
        assert_eq!(error.status, Status::Mismatch);
        assert!(error.message.contains("version 9") && error.message.contains("has 1"), "{error}");
    }

    #[test]
    fn every_shorter_and_longer_offer_is_refused() {
        let bytes = offer(2, 3).encode();
        for length in 0..bytes.len() {
            assert!(Offer::decode(&bytes[..length]).is_err(), "{length} bytes");
        }
        let longer = [&bytes[..], &[0]].concat();
        assert!(Offer::decode(&longer).unwrap_err().message.contains("1 bytes follow"));
    }

    #[test]
    fn changed_bytes_are_refused_or_stay_inside_their_bounds() {
        let good = offer(3, 40).encode();
        let mut random = 0x5EED_u64;
        for _ in 0..200_000 {
            let mut bytes = good.clone();
            for _ in 0..3 {
                random =
                    random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let at = (random >> 33) as usize % bytes.len();
                bytes[at] = (random >> 20) as u8;
            }
            if let Ok(offer) = Offer::decode(&bytes) {
                assert!(offer.nics.len() <= MAX_NICS && offer.links.len() < MAX_LINKS);
                assert!(offer.nics.iter().all(|nic| nic.address.len() <= MAX_ADDRESS_BYTES));
                assert!(
                    offer.links.iter().all(|link| link.number != 0 && (link.number as usize) < MAX_LINKS)
                );
                assert_eq!(offer.encode(), bytes, "what was read is what was there");
            }
        }
    }

    #[test]
    fn random_bytes_are_refused() {
        let mut random = 1u64;
        for length in 0..3000 {
            let bytes: Vec<u8> = (0..length)
                .map(|_| {
                    random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    (random >> 40) as u8
                })
                .collect();
            assert!(Offer::decode(&bytes).is_err());
        }
    }
}
