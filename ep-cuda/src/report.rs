//! What a kernel wrote about its error, read from pinned memory and told as a sentence.

use std::mem::offset_of;
use std::sync::atomic::{AtomicU32, Ordering};

use ep_core::Status;
use ep_core::config::ErrorInfo;
use ep_core::host::{dtypes_differ, op_name};

use crate::args::{Report, site};
use crate::pinned::Pinned;

const WRITTEN: u32 = 2;

/// A rank's report, shared with the kernels of its group.
#[derive(Debug)]
pub(crate) struct ReportBox {
    memory: Pinned,
}

impl ReportBox {
    pub(crate) fn new(memory: Pinned) -> ReportBox {
        ReportBox { memory }
    }

    /// Address for kernels.
    pub(crate) fn device(&self) -> u64 {
        self.memory.device()
    }

    fn word(&self, offset: usize) -> &AtomicU32 {
        // SAFETY: inside the block, aligned, and only accessed as a whole word on either side.
        unsafe { AtomicU32::from_ptr(self.memory.host().add(offset).cast()) }
    }

    /// Tells the kernels that wait to give up.
    pub(crate) fn abort(&self) {
        // Release: pairs with the acquire loads of kernels that wait; nothing else is published.
        self.word(offset_of!(Report, host_abort)).store(1, Ordering::Release);
    }

    /// The report, once a kernel has written it.
    pub(crate) fn read(&self) -> Option<Report> {
        // Acquire: pairs with the kernel's release of `state`; makes the record visible.
        if self.word(offset_of!(Report, state)).load(Ordering::Acquire) != WRITTEN {
            return None;
        }
        // SAFETY: the block holds a report, which no kernel writes between WRITTEN and `clear`.
        Some(unsafe { self.memory.host().cast::<Report>().read_volatile() })
    }

    /// Lets the next error be reported.
    pub(crate) fn clear(&self) {
        // Release: pairs with the kernels' compare-and-swap; the record was read.
        self.word(offset_of!(Report, state)).store(0, Ordering::Release);
    }
}

/// The report as the engine tells errors.
pub(crate) fn describe(report: &Report) -> ErrorInfo {
    let status = match Status::from_code(report.status) {
        Some(Status::Ok) | None => Status::Internal,
        Some(status) => status,
    };
    // The peer of a bad id is a token.
    let peer = if report.site == site::BAD_ID { None } else { usize::try_from(report.peer).ok() };
    ErrorInfo {
        status,
        rank: usize::try_from(report.rank).unwrap_or(0),
        peer,
        lane: usize::try_from(report.lane).ok(),
        epoch: report.epoch,
        text: sentence(report, status),
    }
}

fn sentence(report: &Report, status: Status) -> String {
    let Report { rank, peer, lane, epoch, expected, seen, .. } = *report;
    let call = format!("(lane {lane}, call {epoch})");
    match (status, report.site) {
        (_, site::BAD_PLACE) => format!(
            "rank {peer} names window {seen} {call}, which rank {rank} does not have; it was released while \
             calls still used it"
        ),
        (_, site::BAD_ID) => format!(
            "topk_idx of token {peer}, slot {expected} is {}, expected -1 or an expert of the plan",
            seen.cast_signed()
        ),
        (_, site::RING_TOO_SMALL) => format!(
            "a row with its origin takes {expected} bytes {call}, a staging ring has {seen}; raise ring_bytes, or \
             place the outputs in a window"
        ),
        // A peer's host ended the group, and its text has not come yet.
        (_, 0) => format!("rank {rank} broke the group {call}"),
        (Status::Mismatch, what) => format!(
            "ranks {rank} and {peer} do not match in call {epoch} of lane {lane}: {}; every rank issues the same \
             calls in a lane, with the same shapes",
            difference(what, expected, seen)
        ),
        (_, what) => {
            let (entry, thing) = waited_for(what);
            format!(
                "rank {rank} waited in {entry} {call} for {thing} of rank {peer} until its deadline (expected \
                 {expected}, seen {seen})"
            )
        }
    }
}

/// What two descriptors differ in.
fn difference(what: u32, own: u64, peer: u64) -> String {
    match what {
        site::FAILED => String::from("the call of one of them failed before it began"),
        site::OP => format!("one is in {}, the other in {}", op_name(own as u32), op_name(peer as u32)),
        site::PLAN_HASH => {
            String::from("their plans have different configs (topk, experts, layout or alignment)")
        }
        site::PLAN_EPOCH => format!("their plans were updated in different calls, {own} and {peer}"),
        site::NUM_PAYLOADS => format!("num_payloads: {own} and {peer}"),
        site::DTYPES => dtypes_differ(own as u32, peer as u32, name_of_row),
        site::FLAGS => format!("weights, reduce_order or wire_dtype (flags {own:#x} and {peer:#x})"),
        _ => {
            let name = name_of_row(what.saturating_sub(site::ROW_BYTES) as usize);
            format!("bytes of a row of {name}: {own} and {peer}")
        }
    }
}

/// A report does not say of which operation it is: the first payload may be the rows of a combine.
fn name_of_row(i: usize) -> String {
    if i == 0 { String::from("payloads[0], or of a combine's rows") } else { format!("payloads[{i}]") }
}

fn waited_for(what: u32) -> (&'static str, &'static str) {
    match what {
        site::PLAN_COUNTS => ("ep_plan_update", "the counts"),
        site::DISPATCH_CREDIT => ("ep_dispatch", "the credit"),
        site::DISPATCH_ROWS => ("ep_dispatch", "the rows"),
        site::DISPATCH_RING => ("ep_dispatch", "room or rows in the ring"),
        site::COMBINE_ROWS => ("ep_combine", "the rows"),
        site::COMBINE_RING => ("ep_combine", "room or rows in the ring"),
        site::COMBINE_READERS => ("ep_combine", "the last read"),
        _ => ("a call", "an unknown word"),
    }
}

#[cfg(test)]
mod tests {
    use ep_core::wire;

    use super::*;

    fn report(site: u32, status: Status) -> Report {
        let numbers =
            Report { rank: 1, peer: 3, lane: 0, epoch: 17, expected: 17, seen: 16, ..Report::default() };
        Report { site, status: status.code(), state: WRITTEN, ..numbers }
    }

    #[test]
    fn a_sentence_names_site_rank_peer_epoch_expected_and_seen() {
        let info = describe(&report(site::DISPATCH_ROWS, Status::Timeout));
        for part in ["ep_dispatch", "rank 1", "rows of rank 3", "call 17", "lane 0", "expected 17", "seen 16"]
        {
            assert!(info.text.contains(part), "{} should contain {part}", info.text);
        }
        assert_eq!((info.status, info.rank, info.peer, info.lane), (Status::Timeout, 1, Some(3), Some(0)));
    }

    #[test]
    fn a_mismatch_says_what_differs() {
        let mismatch = |site, expected, seen| {
            describe(&Report { expected, seen, ..report(site, Status::Mismatch) }).text
        };
        let (dispatch, combine) = (u64::from(wire::OP_DISPATCH), u64::from(wire::OP_COMBINE));
        for (text, part) in [
            (mismatch(site::OP, dispatch, combine), "one is in ep_dispatch, the other in ep_combine"),
            (mismatch(site::ROW_BYTES + 2, 64, 32), "row of payloads[2]: 64 and 32"),
            (mismatch(site::DTYPES, 0x103, 0x203), "payloads[1]: EP_DTYPE_BF16 and EP_DTYPE_F16"),
            (mismatch(site::FAILED, 0, 0), "failed before it began"),
        ] {
            assert!(text.contains(part) && text.contains("ranks 1 and 3"), "{text} should contain {part}");
        }
    }

    #[test]
    fn a_bad_id_is_about_a_token() {
        let bad =
            Report { seen: (-7i64).cast_unsigned(), expected: 5, ..report(site::BAD_ID, Status::OutOfRange) };
        let info = describe(&bad);
        assert_eq!(info.peer, None);
        assert!(info.text.contains("token 3, slot 5 is -7"), "{}", info.text);
    }

    #[test]
    fn garbage_becomes_a_defect_and_not_a_panic() {
        let info =
            describe(&Report { site: 99, status: 12345, rank: -4, peer: -1, lane: -1, ..Report::default() });
        assert_eq!((info.status, info.rank, info.peer, info.lane), (Status::Internal, 0, None, None));
    }
}
