//! Proof that both ends of a connection know the secret of the id, which itself is never sent.
//!
//! Each end sends a fresh nonce, and each proves itself with a MAC over both nonces and what the rank
//! says about itself. The labels keep one end's proof from being played back as the other's.

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use super::wire::JOIN_BYTES;
use crate::error::{Error, Result};

pub(super) const NONCE_BYTES: usize = 32;
pub(super) const MAC_BYTES: usize = 32;

pub(super) type Nonce = [u8; NONCE_BYTES];

/// Which end makes the proof.
#[derive(Clone, Copy)]
pub(super) enum Side {
    Rank,
    Root,
}

/// What a proof is about.
pub(super) struct Transcript<'a> {
    pub(super) rank_nonce: &'a Nonce,
    pub(super) root_nonce: &'a Nonce,
    pub(super) join: &'a [u8; JOIN_BYTES],
}

pub(super) fn nonce() -> Result<Nonce> {
    let mut nonce = [0; NONCE_BYTES];
    getrandom::fill(&mut nonce).map_err(|error| Error::system("getrandom", error))?;
    Ok(nonce)
}

/// The proof of `side`.
pub(super) fn prove(secret: &[u8; 32], side: Side, transcript: &Transcript<'_>) -> [u8; MAC_BYTES] {
    mac(secret, side, transcript).finalize().into_bytes().into()
}

/// Whether `proof` is that of `side`, compared in constant time.
pub(super) fn verify(secret: &[u8; 32], side: Side, transcript: &Transcript<'_>, proof: &[u8]) -> bool {
    mac(secret, side, transcript).verify_slice(proof).is_ok()
}

fn mac(secret: &[u8; 32], side: Side, transcript: &Transcript<'_>) -> Hmac<Sha256> {
    let mut mac = <Hmac<Sha256> as KeyInit>::new_from_slice(secret).expect("HMAC takes a key of any length");
    mac.update(match side {
        Side::Rank => b"libep bootstrap 1 rank",
        Side::Root => b"libep bootstrap 1 root",
    });
    mac.update(transcript.rank_nonce);
    mac.update(transcript.root_nonce);
    mac.update(transcript.join);
    mac
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proof_holds_for_its_side_secret_and_transcript_alone() {
        let (one, two) = (nonce().unwrap(), nonce().unwrap());
        assert_ne!(one, two);
        let join = [7; JOIN_BYTES];
        let transcript = Transcript { rank_nonce: &one, root_nonce: &two, join: &join };
        let proof = prove(&[1; 32], Side::Rank, &transcript);
        assert!(verify(&[1; 32], Side::Rank, &transcript, &proof));
        assert!(!verify(&[2; 32], Side::Rank, &transcript, &proof));
        assert!(!verify(&[1; 32], Side::Root, &transcript, &proof));
        assert!(!verify(&[1; 32], Side::Rank, &transcript, &proof[..31]));
        let swapped = Transcript { rank_nonce: &two, root_nonce: &one, join: &join };
        assert!(!verify(&[1; 32], Side::Rank, &swapped, &proof));
        let other = Transcript { join: &[8; JOIN_BYTES], ..transcript };
        assert!(!verify(&[1; 32], Side::Rank, &other, &proof));
    }
}
