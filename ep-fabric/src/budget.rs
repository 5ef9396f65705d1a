//! Room in the completion queue: nothing throttles peers' immediates, and one too many kills the endpoint.

use ep_core::{Error, Result, Status};

use crate::transport::Limits;

/// Checks that a NIC's queue takes everything that may lie in it unpolled: own writes, and for each of
/// `num_peers` peers the `per_peer` immediates that one may have in flight to this NIC.
///
/// # Errors
/// [`Status::Capacity`] with the numbers and what to change.
pub fn check(limits: &Limits, num_peers: usize, per_peer: usize) -> Result<()> {
    let inbound = num_peers.saturating_mul(per_peer);
    if limits.tx_depth.saturating_add(inbound) <= limits.cq_depth {
        return Ok(());
    }
    let Limits { tx_depth, cq_depth, name, .. } = limits;
    let room = cq_depth.saturating_sub(*tx_depth);
    Err(Error::new(
        Status::Capacity,
        format!(
            "{name}: {tx_depth} own writes and {num_peers} peers x {per_peer} immediates need {} completions, and the \
             queue holds {cq_depth}; at most {} peers fit: raise EP_FABRIC_CQ_DEPTH, lower EP_FABRIC_TX_DEPTH, or let \
             peers have fewer in flight",
            tx_depth.saturating_add(inbound),
            room / per_peer.max(1)
        ),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(tx_depth: usize, cq_depth: usize) -> Limits {
        Limits { max_write: 1 << 30, tx_depth, cq_depth, name: String::from("efa-direct rdmap1") }
    }

    #[test]
    fn the_queue_is_filled_to_the_last_place_and_not_further() {
        check(&limits(2048, 2560), 64, 8).unwrap();
        check(&limits(2048, 6144), 512, 8).unwrap();
        let error = check(&limits(2048, 2559), 64, 8).unwrap_err();
        assert_eq!(error.status, Status::Capacity);
        for part in ["2048", "64 peers x 8", "2560", "2559", "63 peers", "EP_FABRIC_CQ_DEPTH"] {
            assert!(error.message.contains(part), "{part} is not in {error}");
        }
    }

    #[test]
    fn absurd_numbers_do_not_overflow() {
        assert!(check(&limits(usize::MAX, usize::MAX - 1), usize::MAX, usize::MAX).is_err());
        assert!(check(&limits(16, 16), 5, 0).is_ok());
    }
}
