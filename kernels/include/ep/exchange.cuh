// SPDX-License-Identifier: Apache-2.0
//
// exchange.cuh: what every call does, as ep-core/src/host/exchange.rs does it on the host: publish a
// descriptor to each peer, read theirs, agree; say "done with your memory", and wait for the same.
#pragma once

#include "ep/wait.cuh"

namespace ep {

// The part of a descriptor on which ranks must agree.
struct Signature {
    uint64_t plan_epoch;
    uint64_t plan_hash;
    uint32_t op;
    uint32_t flags;
    uint32_t dtypes;
    uint32_t num_payloads;
    uint32_t row_bytes[EP_WIRE_MAX_PAYLOADS];
};

__device__ inline void put_signature(ep_wire_desc_t *desc, const Signature &signature)
{
    desc->plan_epoch = signature.plan_epoch;
    desc->plan_hash = signature.plan_hash;
    desc->op = signature.op;
    desc->flags = signature.flags;
    desc->dtypes = signature.dtypes;
    desc->num_payloads = signature.num_payloads;
    for (int i = 0; i < EP_WIRE_MAX_PAYLOADS; ++i) {
        desc->row_bytes[i] = signature.row_bytes[i];
    }
}

// What differs between two signatures: an EP_CUDA_SITE_, and the two values. 0: nothing.
struct Difference {
    uint32_t site = 0;
    uint64_t own = 0, theirs = 0;

    __device__ void compare(uint32_t what, uint64_t mine, uint64_t other)
    {
        if (site == 0 && mine != other) {
            site = what;
            own = mine;
            theirs = other;
        }
    }
};

__device__ inline Difference difference(const ep_wire_desc_t *desc, const Signature &signature)
{
    Difference found;
    // A call that failed before it began is equal to nothing, not even to its like.
    if (desc->op == EP_WIRE_OP_FAILED || signature.op == EP_WIRE_OP_FAILED) {
        found.site = EP_CUDA_SITE_FAILED;
    }
    found.compare(EP_CUDA_SITE_OP, signature.op, desc->op);
    found.compare(EP_CUDA_SITE_PLAN_HASH, signature.plan_hash, desc->plan_hash);
    found.compare(EP_CUDA_SITE_PLAN_EPOCH, signature.plan_epoch, desc->plan_epoch);
    found.compare(EP_CUDA_SITE_NUM_PAYLOADS, signature.num_payloads, desc->num_payloads);
    found.compare(EP_CUDA_SITE_DTYPES, signature.dtypes, desc->dtypes);
    for (int i = 0; i < EP_WIRE_MAX_PAYLOADS; ++i) {
        found.compare(EP_CUDA_SITE_ROW_BYTES + i, signature.row_bytes[i], desc->row_bytes[i]);
    }
    found.compare(EP_CUDA_SITE_FLAGS, signature.flags, desc->flags);
    return found;
}

// The tail of a descriptor.
__device__ inline uint32_t *tail_of(ep_wire_desc_t *desc)
{
    return reinterpret_cast<uint32_t *>(desc + 1);
}

// A warp publishes a descriptor to `peer`: `fill(desc, tail, lane_id)` writes everything but the epoch.
template <typename Fill>
__device__ inline void publish(const Context &ctx, uint32_t peer, Fill fill)
{
    ep_wire_desc_t *desc = ctx.desc_of(peer, ctx.group.rank);
    fill(desc, tail_of(desc), threadIdx.x % 32);
    // The warp's stores happen before lane 0's release, which is cumulative over them.
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
        // Release: pairs with the acquire in `await_desc`; this is the credit.
        st_release_sys(&desc->epoch, ctx.epoch);
    }
}

// The descriptor of `peer` for this call, or null if the wait failed.
__device__ inline ep_wire_desc_t *await_desc(const Context &ctx, uint32_t peer, uint32_t site)
{
    // Its slot holds an older epoch until then: a peer cannot be further ahead. Pairs with `publish`.
    ep_wire_desc_t *desc = ctx.desc_of(ctx.group.rank, peer);
    return await_word(ctx, &desc->epoch, ctx.epoch, site, peer) ? desc : nullptr;
}

// Reads the descriptor of `peer` and agrees. Null: the call failed, and that is recorded. Nothing moves in a call
// before each of its blocks has read all descriptors; so if one differs, no rank touches another's memory, and
// nobody waits for arrivals.
__device__ inline ep_wire_desc_t *agree(const Context &ctx, uint32_t peer, const Signature &signature, uint32_t site)
{
    ep_wire_desc_t *desc = await_desc(ctx, peer, site);
    if (desc == nullptr) {
        return nullptr;
    }
    Difference found = difference(desc, signature);
    if (found.site != 0) {
        fail_call(ctx, kErrMismatch, found.site, int32_t(peer), found.own, found.theirs);
        return nullptr;
    }
    return desc;
}

// Says to `peer`: this rank touches what your descriptor describes no more.
__device__ inline void arrive(const Context &ctx, uint32_t peer)
{
    // Release: pairs with the acquire in `await_arrival`; cumulative over what this thread has observed.
    st_release_sys(&ctx.line_of(peer, ctx.group.rank)->arrival, ctx.epoch);
}

__device__ inline bool await_arrival(const Context &ctx, uint32_t peer, uint32_t site)
{
    // Pairs with the release in `arrive`; makes the peer's rows visible.
    return await_word(ctx, &ctx.line_of(ctx.group.rank, peer)->arrival, ctx.epoch, site, peer);
}

// True in exactly one block of the call: the first to ask.
__device__ inline bool is_first_block(const Context &ctx)
{
    __shared__ uint32_t first;
    if (threadIdx.x == 0) {
        first = atomicExch(&ctx.lane->opened, 1u) == 0u;
    }
    __syncthreads();
    return first != 0u;
}

// Ends a block. True in the last block of the call, which then sees everything the others wrote.
__device__ inline bool is_last_block(const Context &ctx)
{
    __shared__ uint32_t last;
    // Every thread's own writes first, then the count. Barriers and the count make them happen before what the
    // last block releases to the peers; a fence at system scope in each thread would only cost time.
    __syncthreads();
    if (threadIdx.x == 0) {
        // Acquire and release: pairs with itself in the other blocks.
        last = add_acq_rel_gpu(&ctx.lane->done, 1u) == gridDim.x - 1;
    }
    __syncthreads();
    return last != 0u;
}

// The last block leaves the lane ready for the next call.
__device__ inline void close_call(const Context &ctx)
{
    __syncthreads();
    if (threadIdx.x == 0) {
        ctx.lane->ticket = 0;
        ctx.lane->done = 0;
        ctx.lane->opened = 0;
        ctx.lane->requested = 0;
        ctx.lane->verdict = EP_CUDA_VERDICT_OK;
        ctx.lane->epoch = ctx.epoch;
    }
    for (uint32_t rank = threadIdx.x; rank < EP_CUDA_MAX_RANKS; rank += blockDim.x) {
        ctx.lane->tickets[rank] = 0;
    }
}

// The address of a peer's place, or null if it does not hold `rows` rows of `span` bytes.
__device__ inline char *resolve(const Context &ctx, uint32_t peer, const ep_wire_place_t &place, uint64_t rows,
                                uint64_t span)
{
    if (place.window == 0 || place.window > EP_CUDA_MAX_WINDOWS) {
        return nullptr;
    }
    uint64_t index = uint64_t(place.window - 1) * ctx.group.num_ranks + peer;
    uint64_t base = reinterpret_cast<const uint64_t *>(ctx.group.windows)[index];
    uint64_t bytes = reinterpret_cast<const uint64_t *>(ctx.group.window_bytes)[index];
    uint64_t end = place.offset + (rows == 0 ? 0 : (rows - 1) * place.row_pitch + span);
    return base != 0 && end <= bytes ? reinterpret_cast<char *>(base + place.offset) : nullptr;
}

} // namespace ep
