//! The error record of a group: the first error wins, and every reachable rank learns it.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bytemuck::Zeroable;

use crate::config::ErrorInfo;
use crate::error::{Error, Status};
use crate::layout;
use crate::mem::Words;
use crate::wire::{ERROR_TEXT, ErrorBody};

const STATE_NONE: u32 = 0;
pub(super) const STATE_WRITING: u32 = 1;
const STATE_SET: u32 = 2;

/// Writes `info` into a rank's segment unless an error is there already.
pub(super) fn record(segment: &Words, info: &ErrorInfo) {
    let state = segment.u32(layout::ERROR);
    // Acquire on failure is not needed: whoever lost the race reads the record through `read`.
    // Relaxed success is enough: the record is published by the release store below.
    if state.compare_exchange(STATE_NONE, STATE_WRITING, Ordering::Relaxed, Ordering::Relaxed).is_err() {
        return;
    }
    let body = body_of(info);
    let address = segment.at(layout::ERROR + 4, size_of::<ErrorBody>());
    // SAFETY: the claim above makes this rank the record's only writer, and readers wait for STATE_SET.
    unsafe { address.cast::<ErrorBody>().write_unaligned(body) };
    // Release: pairs with the acquire in `read`; publishes the record.
    state.store(STATE_SET, Ordering::Release);
}

/// The record of `info`.
pub fn body_of(info: &ErrorInfo) -> ErrorBody {
    let mut body = ErrorBody::zeroed();
    body.status = info.status.code();
    body.rank = info.rank as i32;
    body.peer = info.peer.map_or(-1, |peer| peer as i32);
    body.lane = info.lane.map_or(-1, |lane| lane as i32);
    body.epoch = info.epoch;
    let text = truncated(&info.text, ERROR_TEXT - 1);
    body.text[..text.len()].copy_from_slice(text.as_bytes());
    body
}

/// True once a record can be read, or is being written.
pub(super) fn is_set(segment: &Words) -> bool {
    // Relaxed: whoever reads the record acquires it then.
    segment.u32(layout::ERROR).load(Ordering::Relaxed) != STATE_NONE
}

/// How long a reader waits for a record that is being written: its writer may have died in between.
const WRITER_PATIENCE: Duration = Duration::from_millis(20);

/// The record, if there is one; what is only claimed is waited for a little.
pub(super) fn read(segment: &Words) -> Option<ErrorInfo> {
    // Acquire: pairs with the release in `record`; makes the record visible.
    let state = || segment.u32(layout::ERROR).load(Ordering::Acquire);
    if state() == STATE_NONE {
        return None;
    }
    let claimed = Instant::now();
    while state() != STATE_SET {
        if claimed.elapsed() > WRITER_PATIENCE {
            return None;
        }
        std::thread::yield_now();
    }
    let address = segment.at(layout::ERROR + 4, size_of::<ErrorBody>());
    // SAFETY: STATE_SET was seen with acquire, and a set record is never written again.
    let body = unsafe { address.cast::<ErrorBody>().read_unaligned() };
    Some(info_of(&body))
}

/// What a record says.
pub(super) fn info_of(body: &ErrorBody) -> ErrorInfo {
    let len = body.text.iter().position(|&byte| byte == 0).unwrap_or(ERROR_TEXT);
    ErrorInfo {
        status: Status::from_code(body.status).unwrap_or(Status::Internal),
        rank: body.rank.max(0) as usize,
        peer: usize::try_from(body.peer).ok(),
        lane: usize::try_from(body.lane).ok(),
        epoch: body.epoch,
        text: String::from_utf8_lossy(&body.text[..len]).into_owned(),
    }
}

/// What a call returns that meets `info`: its own status for the rank that found it, Aborted otherwise
/// unless the root cause is a lost or late peer, which every rank reports as such.
pub(super) fn as_error(info: &ErrorInfo, own_rank: usize) -> Error {
    let text = if info.rank == own_rank || info.text.starts_with(&format!("rank {} ", info.rank)) {
        info.text.clone()
    } else {
        format!("rank {} reported: {}", info.rank, info.text)
    };
    Error::new(info.status, text)
}

/// What is known of an error whose writer stopped before it had written what it was.
pub(super) fn unfinished() -> ErrorInfo {
    ErrorInfo {
        status: Status::Aborted,
        rank: 0,
        peer: None,
        lane: None,
        epoch: 0,
        text: String::from("a rank broke the group and stopped before it could say why"),
    }
}

fn truncated(text: &str, bytes: usize) -> &str {
    let mut end = text.len().min(bytes);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}
