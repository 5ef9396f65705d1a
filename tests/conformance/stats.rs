//! What `ep_group_stats` must have counted for a job.

use ep::capi::{EpPeerStats, ep_group_stats};
use ep_core::reference::Routing;

use crate::abi::expect_ok;
use crate::case::Op;
use crate::job::Job;
use crate::rank::Member;

/// The counters of a member, without times.
pub fn read(member: &Member, num_ranks: usize) -> Result<Vec<EpPeerStats>, String> {
    let mut stats = vec![EpPeerStats::default(); num_ranks];
    // SAFETY: the group is alive and there is an entry per rank.
    let status = unsafe { ep_group_stats(member.group, stats.as_mut_ptr(), num_ranks as u32) };
    expect_ok(status, "ep_group_stats")?;
    for peer in &mut stats {
        (peer.wait_dispatch_ns, peer.wait_combine_ns) = (0, 0);
    }
    Ok(stats)
}

/// Compares what was counted since `before` with what the job's cases in this group move.
pub fn check(
    job: &Job,
    group: usize,
    rank: usize,
    before: &[EpPeerStats],
    after: &[EpPeerStats],
) -> Result<(), String> {
    let mut expected = before.to_vec();
    for case in job.cases.iter().filter(|case| case.group == group) {
        let mut routing = case.first_routing();
        for op in &case.ops {
            if let Op::Update(update) = op {
                routing = &update.routing;
            }
            if !matches!(op, Op::Counts(_)) {
                expected.iter_mut().for_each(|peer| peer.calls += 1);
            }
            for (peer, stats) in expected.iter_mut().enumerate() {
                add(stats, routing, op, rank, peer);
            }
        }
    }
    if after == expected {
        return Ok(());
    }
    let peer = (0..after.len()).find(|&peer| after[peer] != expected[peer]).unwrap_or(0);
    Err(format!("stats of peer {peer}: found {:?}, expected {:?}", after[peer], expected[peer]))
}

fn add(stats: &mut EpPeerStats, routing: &Routing, op: &Op, rank: usize, peer: usize) {
    match op {
        Op::Update(_) | Op::Counts(_) => {}
        Op::Dispatch(dispatch) => {
            let delivered = |from: usize, to: usize| {
                let sources = dispatch.expected[to].src_rank.iter();
                sources.filter(|&&source| source == from as i32).count() as u64
            };
            let row_bytes: usize = dispatch.specs.iter().map(|spec| spec.row_bytes()).sum();
            let sent = delivered(rank, peer);
            stats.rows_sent += sent;
            stats.bytes_sent += sent * row_bytes as u64;
            stats.rows_received += delivered(peer, rank);
            stats.rows_dropped += routing.counts(peer).rows_per_source[rank] as u64 - sent;
        }
        Op::Combine(combine) => {
            let row_bytes = combine.cols * combine.dtype.bytes();
            let held = combine.rows[peer].len() / row_bytes;
            let rows = routing.rows(peer).rows;
            let own = rows.iter().take(held).flatten().filter(|source| source.rank == rank).count();
            stats.bytes_combined += (own * row_bytes) as u64;
        }
    }
}
