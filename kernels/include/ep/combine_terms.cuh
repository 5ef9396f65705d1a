// SPDX-License-Identifier: Apache-2.0
//
// combine_terms.cuh: which rows a token's sum has, where they lie, and in which order they are added.
#pragma once

#include "ep/plan.cuh"
#include "ep/reduce.cuh"
#include "ep/ring.cuh"
#include "ep/rows.cuh"

namespace ep {

constexpr int kCombineWarps = EP_COMBINE_THREADS / 32;

// What a block knows of a rank that holds rows.
struct Holder {
    const char *rows;
    const char *weights;
    uint64_t row_pitch;
    uint64_t weight_pitch;
    uint64_t capacity;
    const uint32_t *tail;
    uint32_t through; // 1: its rows come through the ring
};

struct CombineShared {
    Holder holders[EP_CUDA_MAX_RANKS];
    Term terms[kCombineWarps][EP_CUDA_MAX_TOPK];
    // By slot of a warp's token: its message, as rank << 32 | index + 1, or 0.
    uint64_t messages_of[kCombineWarps][EP_CUDA_MAX_TOPK];
    uint64_t barriers[EP_COMBINE_SERVERS][EP_COMBINE_STAGES];
    uint32_t totals[EP_CUDA_MAX_RANKS]; // rows that each owner takes through its ring
    MessageLayout messages;             // of every ring of this call
    uint32_t stage_bytes;               // of a row in a server's stage; 0: the servers copy without
    uint32_t num_servers;
    uint32_t through; // 1: rows of some holder come through a ring
    uint32_t ok;
    uint32_t vectors; // 0 once a holder's rows are not 16-byte aligned
};

// A slot of the token in progress, in one lane.
struct Slot {
    uint32_t k;
    uint32_t rank;
    int64_t row;     // -1: no term
    uint32_t key;    // terms are added by ascending key
    int64_t message; // that brings the row through a ring; -1: none does
};

constexpr uint32_t kNoTerm = 0xffffffffu;

__device__ inline Slot look_up(const ep_cuda_combine_args_t &args, const PlanView &view, const CombineShared &shared,
                               uint32_t token, uint32_t k)
{
    Slot found{k, 0, -1, kNoTerm, -1};
    uint32_t slot = token * args.plan.topk + k;
    int32_t expert = k < args.plan.topk ? view.expert[slot] : -1;
    if (expert < 0) {
        return found;
    }
    found.rank = view.owner[expert];
    const Holder &holder = shared.holders[found.rank];
    bool flat = args.plan.layout == 0;
    uint32_t position = flat ? view.rank_pos[slot] : view.slot_pos[slot];
    if (position == uint32_t(EP_CUDA_NO_ROW)) {
        return found;
    }
    uint64_t row = uint64_t(holder.tail[flat ? 0 : 1 + expert - view.first[found.rank]]) + position;
    if (holder.through != 0 && !flat) {
        // Also of a row that was dropped: the holder has not the token's place among the others.
        found.message = view.send_pos[slot];
    }
    if (row >= holder.capacity) {
        return found;
    }
    if (holder.through != 0 && flat) {
        found.message = position;
    }
    found.row = int64_t(row);
    uint32_t major = args.order == 1 ? 0 : found.rank; // EP_REDUCE_TOPK_SLOT
    if (args.order == 3) {                             // EP_REDUCE_NODE_RANK
        major |= args.group.node_of[found.rank] << 8;
    }
    found.key = major << 8 | k;
    return found;
}

// Where the row of a slot lies.
__device__ inline const char *row_of(const Context &ctx, const CombineShared &shared, const Slot &slot)
{
    const Holder &holder = shared.holders[slot.rank];
    if (holder.through != 0) {
        return Ring(ctx, slot.rank, ctx.group.rank, shared.messages).slot(uint32_t(slot.message));
    }
    return holder.rows + slot.row * holder.row_pitch;
}

// Where the weights of a slot's row lie.
__device__ inline const char *weights_of(const Context &ctx, const CombineShared &shared, const Slot &slot)
{
    const Holder &holder = shared.holders[slot.rank];
    if (holder.through != 0) {
        return row_of(ctx, shared, slot) + shared.messages.payload_offset[1];
    }
    return holder.weights + slot.row * holder.weight_pitch;
}

// Lists the terms of a token in their order. Returns their number.
__device__ inline uint32_t list_terms(const Context &ctx, const ep_cuda_combine_args_t &args, const PlanView &view,
                                      CombineShared &shared, uint32_t token)
{
    Term *terms = shared.terms[threadIdx.x / 32];
    uint32_t lane = threadIdx.x % 32;
    Slot slots[2] = {look_up(args, view, shared, token, lane), look_up(args, view, shared, token, lane + 32)};
    uint32_t count = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const Slot &slot = slots[half];
        uint32_t before = 0, next = kNoTerm;
        for (uint32_t i = 0; i < min(args.plan.topk, 64u); ++i) {
            uint32_t low = __shfl_sync(0xffffffffu, slots[0].key, i % 32);
            uint32_t high = __shfl_sync(0xffffffffu, slots[1].key, i % 32);
            uint32_t other = i < 32 ? low : high;
            before += other < slot.key;
            next = other > slot.key ? min(next, other) : next;
        }
        count += __popc(__ballot_sync(0xffffffffu, slot.row >= 0));
        if (shared.through != 0 && slot.k < args.plan.topk) {
            uint64_t message = slot.message < 0 ? 0 : uint64_t(slot.rank) << 32 | uint64_t(slot.message + 1);
            shared.messages_of[threadIdx.x / 32][slot.k] = message;
        }
        if (slot.row >= 0) {
            Term &term = terms[before];
            term.row = row_of(ctx, shared, slot);
            term.weight = 1.0f;
            if (args.topk_weights.data != 0) {
                term.weight = *reinterpret_cast<const float *>(args.topk_weights.data +
                                                               token * args.topk_weights.row_pitch +
                                                               slot.k * args.topk_weights.col_pitch);
            }
            bool same_rank = next != kNoTerm && next >> 8 == slot.key >> 8;
            bool same_node = next != kNoTerm && next >> 16 == slot.key >> 16;
            term.close = same_rank ? kCloseNothing : same_node ? kCloseRank : kCloseNode;
        }
    }
    __syncwarp();
    return count;
}

} // namespace ep
