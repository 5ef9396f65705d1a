// SPDX-License-Identifier: Apache-2.0
//
// wait.cuh: waiting with a deadline and an abort word, and what happens when a wait fails. Nothing traps:
// the first error becomes a record, every block leaves, and the context lives on.
#pragma once

#include "ep/args.h"
#include "ep/ptx.cuh"

namespace ep {

enum : int32_t { kErrOutOfRange = 3, kErrMismatch = 100, kErrTimeout = 200, kErrAborted = 202 };

// What a call knows of its group, in every thread.
struct Context {
    const ep_cuda_group_t &group;
    ep_cuda_lane_t *lane;
    uint64_t epoch;
    uint64_t deadline_ns;

    __device__ explicit Context(const ep_cuda_group_t &g)
        : group(g),
          lane(reinterpret_cast<ep_cuda_lane_t *>(g.state)),
          // Advanced by the last block of a call only, after all its blocks read it.
          epoch(*reinterpret_cast<volatile uint64_t *>(g.state) + 1),
          deadline_ns(global_timer_ns() + g.timeout_ns)
    {
    }

    // For functions that are not inlined: passed by reference, a context would live in memory.
    __device__ Context(const ep_cuda_group_t &g, uint64_t its_epoch, uint64_t its_deadline_ns)
        : group(g), lane(reinterpret_cast<ep_cuda_lane_t *>(g.state)), epoch(its_epoch), deadline_ns(its_deadline_ns)
    {
    }

    __device__ ep_cuda_report_t *report() const { return reinterpret_cast<ep_cuda_report_t *>(group.report); }

    __device__ ep_wire_error_t *error_of(uint32_t rank) const
    {
        return reinterpret_cast<ep_wire_error_t *>(group.segments[rank] + group.error_offset);
    }

    __device__ ep_wire_line_t *line_of(uint32_t owner, uint32_t writer) const
    {
        return reinterpret_cast<ep_wire_line_t *>(group.segments[owner] + group.line_offset +
                                                  writer * EP_WIRE_LINE_BYTES);
    }

    __device__ ep_wire_desc_t *desc_of(uint32_t owner, uint32_t writer) const
    {
        uint64_t slot = uint64_t(writer) * EP_WIRE_DEPTH + epoch % EP_WIRE_DEPTH;
        return reinterpret_cast<ep_wire_desc_t *>(group.segments[owner] + group.desc_offset +
                                                  slot * group.desc_stride);
    }
};

// Writes a record into a rank's memory unless one is there.
__device__ inline void write_error(ep_wire_error_t *error, int32_t status, uint32_t site, int32_t rank, int32_t peer,
                                   int32_t lane, uint64_t epoch)
{
    if (atomicCAS_system(&error->state, 0u, 1u) != 0) {
        return;
    }
    error->status = status;
    error->rank = rank;
    error->peer = peer;
    error->lane = lane;
    error->reserved = site;
    error->epoch = epoch;
    // Release: pairs with the acquire in `adopt_error`; publishes the record.
    st_release_sys(&error->state, 2u);
}

// Tells this rank's host.
__device__ inline void write_report(ep_cuda_report_t *report, int32_t status, uint32_t site, int32_t rank,
                                    int32_t peer, int32_t lane, uint64_t epoch, uint64_t expected, uint64_t seen)
{
    if (atomicCAS_system(&report->state, 0u, 1u) != 0) {
        return;
    }
    report->status = status;
    report->site = site;
    report->rank = rank;
    report->peer = peer;
    report->lane = lane;
    report->epoch = epoch;
    report->expected = expected;
    report->seen = seen;
    // Release: pairs with the host's acquire load of `state`; publishes the record.
    st_release_sys(&report->state, 2u);
}

// The group is broken by what this thread saw: records it here first, then with every peer.
__device__ inline void fail(const Context &ctx, int32_t status, uint32_t site, int32_t peer, uint64_t expected,
                            uint64_t seen)
{
    int32_t rank = int32_t(ctx.group.rank), lane = int32_t(ctx.group.lane);
    atomicExch(&ctx.lane->verdict, uint32_t(EP_CUDA_VERDICT_BROKEN));
    write_error(ctx.error_of(ctx.group.rank), status, site, rank, peer, lane, ctx.epoch);
    write_report(ctx.report(), status, site, rank, peer, lane, ctx.epoch, expected, seen);
    for (uint32_t other = 0; other < ctx.group.num_ranks; ++other) {
        write_error(ctx.error_of(other), status, site, rank, peer, lane, ctx.epoch);
    }
}

// This call fails, and the group lives on: tells this rank's host, once a call.
__device__ inline void fail_call(const Context &ctx, int32_t status, uint32_t site, int32_t peer, uint64_t expected,
                                 uint64_t seen)
{
    if (atomicCAS(&ctx.lane->verdict, uint32_t(EP_CUDA_VERDICT_OK), uint32_t(EP_CUDA_VERDICT_MISMATCH)) ==
        EP_CUDA_VERDICT_OK) {
        write_report(ctx.report(), status, site, int32_t(ctx.group.rank), peer, int32_t(ctx.group.lane), ctx.epoch,
                     expected, seen);
    }
}

// How long a record may take to be written by the rank that claimed it.
constexpr uint64_t kRecordNs = 50 * 1000 * 1000;

// A peer's record, or the host's abort: becomes this rank's report.
__device__ inline void adopt_error(const Context &ctx)
{
    ep_wire_error_t *error = ctx.error_of(ctx.group.rank);
    uint64_t give_up = global_timer_ns() + kRecordNs;
    // Acquire: pairs with the release in `write_error`.
    while (ld_acquire_sys(&error->state) == 1u && global_timer_ns() < give_up) {
    }
    atomicExch(&ctx.lane->verdict, uint32_t(EP_CUDA_VERDICT_BROKEN));
    write_report(ctx.report(), error->status, error->reserved, error->rank, error->peer, error->lane, error->epoch, 0,
                 0);
}

// True if the group is broken, here or by a peer.
__device__ inline bool is_broken(const Context &ctx)
{
    return ld_relaxed_sys(&ctx.error_of(ctx.group.rank)->state) != 0u;
}

// Polls between which a waiting thread lets the others of its SM work.
constexpr uint32_t kEagerPolls = 16;
constexpr uint32_t kPauseNs = 32;

// Between two looks at what is not there yet; `polls` counts them from 1. False: the deadline passed or the group
// broke, and that is recorded.
__device__ inline bool pause(const Context &ctx, uint32_t polls, uint32_t site, uint32_t peer, uint64_t expected,
                             uint64_t seen)
{
    if (polls > kEagerPolls) {
        __nanosleep(kPauseNs);
    }
    if (polls % 256 != 0) {
        return true;
    }
    if (is_broken(ctx)) {
        adopt_error(ctx);
        return false;
    }
    if (ld_relaxed_sys(&ctx.report()->host_abort) != 0u) {
        fail(ctx, kErrAborted, site, int32_t(peer), expected, seen);
        return false;
    }
    if (global_timer_ns() > ctx.deadline_ns) {
        fail(ctx, kErrTimeout, site, int32_t(peer), expected, seen);
        return false;
    }
    return true;
}

// Polls a monotonic word until it is at least `expected`. Polls are relaxed: an acquire load empties the
// first-level cache each time. False: the deadline passed or the group broke, and that is recorded.
__device__ inline bool await_word(const Context &ctx, const uint64_t *word, uint64_t expected, uint32_t site,
                                  uint32_t peer)
{
    uint64_t seen;
    for (uint32_t polls = 1; (seen = ld_relaxed_sys(word)) < expected; ++polls) {
        if (!pause(ctx, polls, site, peer, expected, seen)) {
            return false;
        }
    }
    // Acquire: pairs with the release that the caller names; what the writer did before is visible.
    ld_acquire_sys(word);
    return true;
}

} // namespace ep
