// SPDX-License-Identifier: Apache-2.0
//
// combine.cuh: a warp takes a token, reads its rows where the experts left them and adds them in registers.
// The call ends on a rank when every peer has said that it reads this rank's rows no more.
#pragma once

#include "ep/plan.cuh"
#include "ep/reduce.cuh"

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
};

struct CombineShared {
    Holder holders[EP_CUDA_MAX_RANKS];
    Term terms[kCombineWarps][EP_CUDA_MAX_TOPK];
    uint32_t ok;
    uint32_t vectors; // 0 once a holder's rows are not 16-byte aligned
};

__device__ inline Signature combine_signature(const ep_cuda_combine_args_t &args, const PlanView &view)
{
    Signature signature = {};
    signature.plan_epoch = view.header->epoch;
    signature.plan_hash = args.plan.hash;
    signature.op = EP_WIRE_OP_COMBINE;
    signature.flags = args.order << EP_WIRE_FLAG_ORDER_SHIFT;
    signature.flags |= args.row_weights.data != 0 ? EP_WIRE_FLAG_ROW_WEIGHTS : 0;
    signature.flags |= args.wire_bf16 != 0 ? EP_WIRE_FLAG_WIRE_BF16 : 0;
    signature.dtypes = args.dtype;
    signature.num_payloads = 1;
    signature.row_bytes[0] = args.combined.cols * args.combined.element;
    return signature;
}

// Says to each peer where its rows lie.
__device__ inline void show_rows(const Context &ctx, const ep_cuda_combine_args_t &args, const PlanView &view,
                                 const Signature &signature)
{
    for (uint32_t i = threadIdx.x / 32; i < args.group.num_ranks; i += kCombineWarps) {
        uint32_t peer = (args.group.rank + i) % args.group.num_ranks;
        publish(ctx, peer, [&](ep_wire_desc_t *desc, uint32_t *tail, uint32_t lane) {
            if (lane == 0) {
                put_signature(desc, signature);
                desc->wants = 0;
                desc->capacity = args.rows.rows;
            }
            if (lane < 2) {
                desc->places[lane] = args.places[lane];
            }
            for (uint32_t word = lane; word < view.column_words(); word += 32) {
                tail[word] = view.base[peer * view.column_words() + word];
            }
        });
    }
}

// Reads where the rows of `peer` lie. False: the call failed.
__device__ inline bool read_holder(const Context &ctx, const ep_cuda_combine_args_t &args, const Signature &signature,
                                   uint32_t peer, CombineShared &shared)
{
    ep_wire_desc_t *desc = await_desc(ctx, peer, EP_CUDA_SITE_COMBINE_ROWS);
    if (desc == nullptr) {
        return false;
    }
    if (!same_signature(desc, signature)) {
        fail(ctx, kErrMismatch, EP_CUDA_SITE_COMBINE_ROWS, int32_t(peer), signature.op, desc->op);
        return false;
    }
    Holder &holder = shared.holders[peer];
    bool own = peer == args.group.rank;
    holder.capacity = desc->capacity;
    holder.tail = tail_of(desc);
    ep_wire_place_t rows = desc->places[0], weights = desc->places[1];
    holder.row_pitch = rows.row_pitch;
    holder.weight_pitch = weights.row_pitch;
    holder.rows = own ? reinterpret_cast<const char *>(args.rows.data)
                      : resolve(ctx, peer, rows, holder.capacity, signature.row_bytes[0]);
    uint32_t per_row = args.plan.layout == 0 ? args.plan.topk : 1;
    holder.weights = own ? reinterpret_cast<const char *>(args.row_weights.data)
                         : resolve(ctx, peer, weights, holder.capacity, 4 * per_row);
    bool missing = holder.rows == nullptr || (args.row_weights.data != 0 && holder.weights == nullptr);
    if (missing && holder.capacity != 0) {
        fail(ctx, kErrAborted, EP_CUDA_SITE_BAD_PLACE, int32_t(peer), rows.window, rows.offset);
        return false;
    }
    if ((reinterpret_cast<uint64_t>(holder.rows) | holder.row_pitch) % 16 != 0) {
        atomicAnd(&shared.vectors, 0u);
    }
    return true;
}

// A slot of the token in progress, in one lane.
struct Slot {
    uint32_t k;
    uint32_t rank;
    int64_t row;  // -1: no term
    uint32_t key; // terms are added by ascending key
};

constexpr uint32_t kNoTerm = 0xffffffffu;

__device__ inline Slot look_up(const ep_cuda_combine_args_t &args, const PlanView &view, const CombineShared &shared,
                               uint32_t token, uint32_t k)
{
    Slot found{k, 0, -1, kNoTerm};
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
    if (row >= holder.capacity) {
        return found;
    }
    found.row = int64_t(row);
    uint32_t major = args.order == 1 ? 0 : found.rank; // EP_REDUCE_TOPK_SLOT
    if (args.order == 3) {                             // EP_REDUCE_NODE_RANK
        major |= args.group.node_of[found.rank] << 8;
    }
    found.key = major << 8 | k;
    return found;
}

// Lists the terms of a token in their order. Returns their number.
__device__ inline uint32_t list_terms(const ep_cuda_combine_args_t &args, const PlanView &view,
                                      const CombineShared &shared, uint32_t token, Term *terms)
{
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
        if (slot.row >= 0) {
            const Holder &holder = shared.holders[slot.rank];
            Term &term = terms[before];
            term.row = holder.rows + slot.row * holder.row_pitch;
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

// The sum that a column group starts from.
template <typename E, int kWidth>
__device__ __forceinline__ void add_bias(const ep_cuda_combine_args_t &args, uint32_t token, uint64_t offset,
                                         Sum<kWidth> &sum)
{
    sum.clear();
#pragma unroll
    for (int which = 0; which < 2; ++which) {
        if (args.bias[which].data == 0) {
            continue;
        }
        const char *row = reinterpret_cast<const char *>(args.bias[which].data) + token * args.bias[which].row_pitch;
        Pack<E, kWidth> bias = Pack<E, kWidth>::load(row + offset);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
            sum.values[i] = which == 0 ? bias.at(i) : __fadd_rn(sum.values[i], bias.at(i));
        }
    }
}

// `kGroups` groups of columns of a token, `kWidth` neighbouring elements a lane in each.
template <typename E, int kWidth, uint32_t kHow, uint32_t kBatch, int kGroups>
__device__ __forceinline__ void add_groups(const ep_cuda_combine_args_t &args, uint32_t token, const Term *terms,
                                           uint32_t count, uint64_t offset)
{
    constexpr uint64_t kStride = 32 * kWidth * sizeof(E);
    char *out = reinterpret_cast<char *>(args.combined.data) + token * args.combined.row_pitch + offset;
    Sum<kWidth> sums[kGroups];
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
        add_bias<E, kWidth>(args, token, offset + group * kStride, sums[group]);
    }
    add_terms<E, kWidth, kHow, kBatch, kGroups>(sums, terms, count, offset, kStride);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
        Pack<E, kWidth>::of(sums[group].values).store(out + group * kStride);
    }
}

template <typename E, int kWidth, uint32_t kHow, uint32_t kBatch, int kGroups>
__device__ inline void add_columns(const ep_cuda_combine_args_t &args, uint32_t token, const Term *terms,
                                   uint32_t count)
{
    constexpr uint64_t kStride = 32 * kWidth * sizeof(E);
    uint64_t end = uint64_t(args.combined.cols) * sizeof(E);
    uint64_t offset = threadIdx.x % 32 * kWidth * sizeof(E);
    // Not unrolled further: registers hold the loads of one round.
#pragma unroll 1
    for (; offset + (kGroups - 1) * kStride < end; offset += kGroups * kStride) {
        add_groups<E, kWidth, kHow, kBatch, kGroups>(args, token, terms, count, offset);
    }
#pragma unroll 1
    for (; kGroups > 1 && offset < end; offset += kStride) {
        add_groups<E, kWidth, kHow, kBatch, 1>(args, token, terms, count, offset);
    }
}

// A lane has twelve loads in flight, of four rows; partial sums need the registers, and make do with four.
template <typename E, int kWidth, uint32_t kHow>
__device__ inline void add_token(const ep_cuda_combine_args_t &args, uint32_t token, const Term *terms, uint32_t count)
{
    constexpr int kGroups = kHow == kChain && kWidth > 1 ? 3 : 1;
    add_columns<E, kWidth, kHow, 4, kGroups>(args, token, terms, count);
}

// What came back for each slot of a token.
__device__ inline void return_weights(const ep_cuda_combine_args_t &args, const PlanView &view,
                                      const CombineShared &shared, uint32_t token)
{
    if (args.combined_weights.data == 0) {
        return;
    }
    for (uint32_t k = threadIdx.x % 32; k < args.plan.topk; k += 32) {
        uint32_t slot = token * args.plan.topk + k;
        Slot found = look_up(args, view, shared, token, k);
        bool flat = args.plan.layout == 0;
        if (flat && view.expert[slot] >= 0) {
            // The row of a later slot of the same rank is that of the first one.
            found.rank = view.owner[view.expert[slot]];
            for (uint32_t first = 0; found.row < 0 && first < k; ++first) {
                Slot other = look_up(args, view, shared, token, first);
                found.row = other.rank == found.rank ? other.row : -1;
            }
        }
        uint32_t bits = 0;
        if (found.row >= 0) {
            const Holder &holder = shared.holders[found.rank];
            bits = *reinterpret_cast<const volatile uint32_t *>(holder.weights + found.row * holder.weight_pitch +
                                                                (flat ? 4 * k : 0));
        }
        reinterpret_cast<uint32_t *>(args.combined_weights.data)[slot] = bits;
    }
}

// True if 16-byte accesses reach every row of this call.
__device__ inline bool has_vectors(const ep_cuda_combine_args_t &args, const CombineShared &shared)
{
    uint64_t mixed = args.combined.data | args.combined.row_pitch | args.bias[0].data | args.bias[0].row_pitch |
                     args.bias[1].data | args.bias[1].row_pitch |
                     (uint64_t(args.combined.cols) * args.combined.element);
    return shared.vectors != 0 && mixed % 16 == 0;
}

template <typename E, uint32_t kHow>
__device__ inline void add_tokens(const Context &ctx, const ep_cuda_combine_args_t &args, const PlanView &view,
                                  CombineShared &shared)
{
    uint32_t lane = threadIdx.x % 32;
    Term *terms = shared.terms[threadIdx.x / 32];
    bool vectors = has_vectors(args, shared);
    auto claim = [&] { return lane == 0 ? atomicAdd(&ctx.lane->ticket, 1u) : 0u; };
    uint32_t next = claim();
    for (;;) {
        uint32_t token = __shfl_sync(0xffffffffu, next, 0);
        if (token >= view.header->num_tokens) {
            break;
        }
        next = claim();
        uint32_t count = list_terms(args, view, shared, token, terms);
        if (vectors) {
            add_token<E, 16 / sizeof(E), kHow>(args, token, terms, count);
        } else {
            add_token<E, 1, kHow>(args, token, terms, count);
        }
        return_weights(args, view, shared, token);
        __syncwarp();
    }
}

// One kernel per element type and way of adding: each gets the registers it needs.
template <typename E, uint32_t kHow>
__device__ inline void combine(const ep_cuda_combine_args_t &args, CombineShared &shared)
{
    Context ctx(args.group);
    PlanView view(args.plan);
    Signature signature = combine_signature(args, view);
    if (threadIdx.x == 0) {
        shared.ok = view.header->epoch != 0 && !is_broken(ctx);
        shared.vectors = 1;
    }
    __syncthreads();
    bool ok = shared.ok;
    if (ok && is_first_block(ctx)) {
        show_rows(ctx, args, view, signature);
    }
    for (uint32_t peer = threadIdx.x; ok && peer < args.group.num_ranks; peer += blockDim.x) {
        ok = read_holder(ctx, args, signature, peer, shared);
    }
    ok = __syncthreads_and(ok);
    if (ok) {
        add_tokens<E, kHow>(ctx, args, view, shared);
    }
    if (is_last_block(ctx)) {
        ok = ok && ctx.lane->verdict == EP_CUDA_VERDICT_OK;
        for (uint32_t peer = threadIdx.x; ok && peer < args.group.num_ranks; peer += blockDim.x) {
            arrive(ctx, peer);
        }
        for (uint32_t peer = threadIdx.x; ok && peer < args.group.num_ranks; peer += blockDim.x) {
            ok = await_arrival(ctx, peer, EP_CUDA_SITE_COMBINE_READERS);
        }
        close_call(ctx);
    }
}

} // namespace ep
