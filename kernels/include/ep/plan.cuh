// SPDX-License-Identifier: Apache-2.0
//
// plan.cuh: a routing as counts, prefix sums and rows, as ep-core/src/plan does it on the host. Tokens are
// counted in chunks; a bin is an expert, or a rank. Order is by token and slot, never by arrival.
#pragma once

#include "ep/exchange.cuh"
#include "ep/launch.h"

namespace ep {

constexpr int kPlanWarps = EP_PLAN_THREADS / 32;

// The arrays of a plan with their types.
struct PlanView {
    const ep_cuda_plan_t &plan;
    ep_cuda_plan_header_t *header;
    const uint32_t *owner;
    const uint32_t *first;
    int32_t *expert;
    uint32_t *slot_pos;
    uint32_t *rank_pos;
    uint32_t *send_pos;
    uint32_t *chunk_counts;
    uint32_t *column;
    uint32_t *base;
    uint32_t *expert_rows;
    uint32_t *expert_start;

    __device__ explicit PlanView(const ep_cuda_plan_t &p)
        : plan(p),
          header(reinterpret_cast<ep_cuda_plan_header_t *>(p.header)),
          owner(reinterpret_cast<const uint32_t *>(p.owner)),
          first(reinterpret_cast<const uint32_t *>(p.first)),
          expert(reinterpret_cast<int32_t *>(p.expert)),
          slot_pos(reinterpret_cast<uint32_t *>(p.slot_pos)),
          rank_pos(reinterpret_cast<uint32_t *>(p.rank_pos)),
          send_pos(reinterpret_cast<uint32_t *>(p.send_pos)),
          chunk_counts(reinterpret_cast<uint32_t *>(p.chunk_counts)),
          column(reinterpret_cast<uint32_t *>(p.column)),
          base(reinterpret_cast<uint32_t *>(p.base)),
          expert_rows(reinterpret_cast<uint32_t *>(p.expert_rows)),
          expert_start(reinterpret_cast<uint32_t *>(p.expert_start))
    {
    }

    __device__ uint32_t column_words() const { return 1 + plan.num_local; }

    __device__ bool expert_major() const { return plan.layout == 1; }
};

// Bins: the slots of each expert; the tokens of each rank; and, in expert-major layout, the slots of each rank.
__device__ inline uint32_t num_bins(const PlanView &view, uint32_t num_ranks)
{
    return view.plan.num_experts + num_ranks * (view.expert_major() ? 2 : 1);
}

// Adds up the slots of each rank from those of its experts, for `rows` rows of bins.
__device__ inline void sum_ranks(const PlanView &view, uint32_t num_ranks, uint32_t *counts, uint32_t rows)
{
    if (!view.expert_major()) {
        return;
    }
    uint32_t bins = num_bins(view, num_ranks);
    for (uint32_t i = threadIdx.x; i < rows * num_ranks; i += blockDim.x) {
        uint32_t *row = counts + i / num_ranks * bins, rank = i % num_ranks, sum = 0;
        for (uint32_t expert = view.first[rank]; expert < view.first[rank + 1]; ++expert) {
            sum += row[expert];
        }
        row[view.plan.num_experts + num_ranks + rank] = sum;
    }
    __syncthreads();
}

// Ranks that a token goes to.
struct RankSet {
    uint64_t low = 0, high = 0;

    // Adds a rank; true if it was not there.
    __device__ bool add(uint32_t rank)
    {
        uint64_t &word = rank < 64 ? low : high;
        uint64_t bit = 1ull << (rank % 64);
        bool fresh = (word & bit) == 0;
        word |= bit;
        return fresh;
    }
};

__device__ inline int64_t read_id(const ep_cuda_matrix_t &ids, uint32_t token, uint32_t k)
{
    const char *address = reinterpret_cast<const char *>(ids.data + token * ids.row_pitch + k * ids.col_pitch);
    return ids.element == 8 ? *reinterpret_cast<const int64_t *>(address) : *reinterpret_cast<const int32_t *>(address);
}

// Counts the bins of tokens begin..end, one thread a token, into `counts` in shared memory.
template <typename Expert>
__device__ inline void count_tokens(const PlanView &view, uint32_t begin, uint32_t end, uint32_t lane, uint32_t stride,
                                    uint32_t *counts, Expert expert_of)
{
    for (uint32_t token = begin + lane; token < end; token += stride) {
        RankSet ranks;
        for (uint32_t k = 0; k < view.plan.topk; ++k) {
            int32_t expert = expert_of(token, k);
            if (expert >= 0) {
                uint32_t rank = view.owner[expert];
                atomicAdd(&counts[expert], 1u);
                if (ranks.add(rank)) {
                    atomicAdd(&counts[view.plan.num_experts + rank], 1u);
                }
            }
        }
    }
}

// First kernel of an update: copies the ids into the plan and counts each chunk.
__device__ inline void count_chunks(const ep_cuda_plan_args_t &args, uint32_t *counts)
{
    Context ctx(args.group);
    PlanView view(args.plan);
    uint32_t bins = num_bins(view, args.group.num_ranks);
    for (uint32_t chunk = blockIdx.x; chunk < args.num_chunks; chunk += gridDim.x) {
        for (uint32_t bin = threadIdx.x; bin < bins; bin += blockDim.x) {
            counts[bin] = 0;
        }
        __syncthreads();
        uint32_t begin = chunk * args.chunk_tokens;
        uint32_t end = min(begin + args.chunk_tokens, args.num_tokens);
        count_tokens(view, begin, end, threadIdx.x, blockDim.x, counts, [&](uint32_t token, uint32_t k) {
            int64_t id = read_id(args.topk_idx, token, k);
            bool valid = id >= 0 && id < args.plan.num_experts;
            if (!valid && id != -1) {
                // The second kernel tells the peers that this update failed.
                fail_call(ctx, kErrOutOfRange, EP_CUDA_SITE_BAD_ID, int32_t(token), k, uint64_t(id));
            }
            int32_t expert = valid ? int32_t(id) : -1;
            view.expert[token * args.plan.topk + k] = expert;
            return expert;
        });
        __syncthreads();
        sum_ranks(view, args.group.num_ranks, counts, 1);
        for (uint32_t bin = threadIdx.x; bin < bins; bin += blockDim.x) {
            view.chunk_counts[chunk * bins + bin] = counts[bin];
        }
        __syncthreads();
    }
}

// Position of each lane's `key` among equal keys of earlier lanes and of earlier rounds; keys below 0 have
// none. `counts` is the warp's own.
__device__ inline uint32_t take_position(int32_t key, uint32_t *counts)
{
    uint32_t lane = threadIdx.x % 32;
    uint32_t equal = __match_any_sync(0xffffffffu, key);
    uint32_t position = key >= 0 ? counts[key] + __popc(equal & ((1u << lane) - 1)) : uint32_t(EP_CUDA_NO_ROW);
    __syncwarp();
    if (key >= 0 && lane == __ffs(equal) - 1) {
        counts[key] += __popc(equal);
    }
    __syncwarp();
    return position;
}

// True if no earlier slot of the token goes to the same rank.
__device__ inline bool is_first_to_rank(const PlanView &view, uint32_t slot, uint32_t rank)
{
    for (uint32_t earlier = slot - slot % view.plan.topk; earlier < slot; ++earlier) {
        int32_t expert = view.expert[earlier];
        if (expert >= 0 && view.owner[expert] == rank) {
            return false;
        }
    }
    return true;
}

// Gives every slot of a chunk its position within its expert and, at first slots, within its rank.
__device__ inline void place_chunk(const ep_cuda_plan_args_t &args, const PlanView &view, uint32_t chunk,
                                   uint32_t *warp_counts)
{
    uint32_t bins = num_bins(view, args.group.num_ranks), topk = args.plan.topk;
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint32_t *counts = warp_counts + warp * bins;
    for (uint32_t i = threadIdx.x; i < kPlanWarps * bins; i += blockDim.x) {
        warp_counts[i] = 0;
    }
    __syncthreads();
    uint32_t end = min((chunk + 1) * args.chunk_tokens, args.num_tokens);
    uint32_t share = args.chunk_tokens / kPlanWarps;
    uint32_t begin = min(chunk * args.chunk_tokens + warp * share, end);
    end = min(begin + share, end);
    auto expert_of = [&](uint32_t token, uint32_t k) { return view.expert[token * topk + k]; };
    count_tokens(view, begin, end, lane, 32, counts, expert_of);
    __syncthreads();
    sum_ranks(view, args.group.num_ranks, warp_counts, kPlanWarps);
    for (uint32_t bin = threadIdx.x; bin < bins; bin += blockDim.x) {
        uint32_t sum = 0;
        for (uint32_t earlier = 0; earlier < chunk; ++earlier) {
            sum += view.chunk_counts[earlier * bins + bin];
        }
        for (uint32_t w = 0; w < kPlanWarps; ++w) {
            uint32_t count = warp_counts[w * bins + bin];
            warp_counts[w * bins + bin] = sum;
            sum += count;
        }
    }
    __syncthreads();
    for (uint32_t slot0 = begin * topk; slot0 < end * topk; slot0 += 32) {
        uint32_t slot = slot0 + lane;
        int32_t expert = slot < end * topk ? view.expert[slot] : -1;
        uint32_t rank = expert >= 0 ? view.owner[expert] : 0;
        bool first = expert >= 0 && is_first_to_rank(view, slot, rank);
        uint32_t slot_pos = take_position(expert, counts);
        uint32_t rank_pos = take_position(first ? int32_t(args.plan.num_experts + rank) : -1, counts);
        if (view.expert_major()) {
            int32_t bin = int32_t(args.plan.num_experts + args.group.num_ranks + rank);
            uint32_t send_pos = take_position(expert >= 0 ? bin : -1, counts);
            if (slot < end * topk) {
                view.send_pos[slot] = send_pos;
            }
        }
        if (slot < end * topk) {
            view.slot_pos[slot] = slot_pos;
            view.rank_pos[slot] = rank_pos;
        }
    }
    __syncthreads();
}

__device__ inline uint32_t total_of_bin(const ep_cuda_plan_args_t &args, const PlanView &view, uint32_t bin)
{
    uint32_t bins = num_bins(view, args.group.num_ranks), sum = 0;
    for (uint32_t chunk = 0; chunk < args.num_chunks; ++chunk) {
        sum += view.chunk_counts[chunk * bins + bin];
    }
    return sum;
}

// Tells each rank its share of the counts, and reads everyone's. False: the call failed.
__device__ inline bool exchange_counts(const Context &ctx, const ep_cuda_plan_args_t &args, const PlanView &view)
{
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, num_ranks = args.group.num_ranks;
    Signature signature = {};
    signature.plan_hash = args.plan.hash;
    // The first kernel may have found that this update fails.
    signature.op = ctx.lane->verdict == EP_CUDA_VERDICT_OK ? EP_WIRE_OP_PLAN : EP_WIRE_OP_FAILED;
    // Every thread has read the verdict before one of them may change it below.
    __syncthreads();
    for (uint32_t i = warp; i < num_ranks; i += kPlanWarps) {
        uint32_t peer = (args.group.rank + i) % num_ranks;
        publish(ctx, peer, [&](ep_wire_desc_t *desc, uint32_t *tail, uint32_t id) {
            if (id == 0) {
                put_signature(desc, signature);
            }
            uint32_t words = 1 + view.first[peer + 1] - view.first[peer];
            for (uint32_t word = id; word < words; word += 32) {
                uint32_t bin = word == 0 ? args.plan.num_experts + peer : view.first[peer] + word - 1;
                tail[word] = total_of_bin(args, view, bin);
            }
        });
    }
    bool ok = true;
    for (uint32_t peer = warp; peer < num_ranks; peer += kPlanWarps) {
        ep_wire_desc_t *desc = nullptr;
        if (lane == 0) {
            desc = agree(ctx, peer, signature, EP_CUDA_SITE_PLAN_COUNTS);
        }
        desc = reinterpret_cast<ep_wire_desc_t *>(__shfl_sync(0xffffffffu, reinterpret_cast<uint64_t>(desc), 0));
        ok = ok && desc != nullptr;
        // All descriptors are read, also after one that differs: only then may the lane go on.
        for (uint32_t word = lane; ok && word < view.column_words(); word += 32) {
            view.column[peer * view.column_words() + word] = tail_of(desc)[word];
        }
    }
    return __syncthreads_and(ok);
}

// Where each expert's rows begin: one warp, 32 experts at a time.
__device__ inline uint32_t start_experts(const PlanView &view)
{
    uint32_t lane = threadIdx.x % 32, start = 0, local = view.plan.num_local, align = view.plan.alignment;
    for (uint32_t expert0 = 0; expert0 < local; expert0 += 32) {
        uint32_t expert = expert0 + lane;
        uint32_t rows = expert < local ? (view.expert_rows[expert] + align - 1) / align * align : 0;
        uint32_t sum = rows;
        for (uint32_t step = 1; step < 32; step *= 2) {
            uint32_t below = __shfl_up_sync(0xffffffffu, sum, step);
            sum += lane >= step ? below : 0;
        }
        if (expert < local) {
            view.expert_start[expert] = start + sum - rows;
        }
        start += __shfl_sync(0xffffffffu, sum, 31);
    }
    if (lane == 0) {
        view.expert_start[local] = start;
    }
    return start;
}

// Turns the column of counts into first rows, and tells the host.
__device__ inline void place_rows(const Context &ctx, const ep_cuda_plan_args_t &args, const PlanView &view)
{
    __shared__ uint32_t expert_major_rows;
    uint32_t words = view.column_words(), local = args.plan.num_local, num_ranks = args.group.num_ranks;
    for (uint32_t expert = threadIdx.x; expert < local; expert += blockDim.x) {
        uint32_t rows = 0;
        for (uint32_t source = 0; source < num_ranks; ++source) {
            rows += view.column[source * words + 1 + expert];
        }
        view.expert_rows[expert] = rows;
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        uint32_t rows = start_experts(view);
        if (threadIdx.x == 0) {
            expert_major_rows = rows;
        }
    }
    __syncthreads();
    int64_t *host = reinterpret_cast<int64_t *>(args.plan.host_counts);
    for (uint32_t expert = threadIdx.x; expert < local; expert += blockDim.x) {
        uint32_t row = view.expert_start[expert];
        for (uint32_t source = 0; source < num_ranks; ++source) {
            view.base[source * words + 1 + expert] = row;
            row += view.column[source * words + 1 + expert];
        }
        host[3 + expert] = view.expert_rows[expert];
    }
    bool flat = args.plan.layout == 0;
    for (uint32_t source = threadIdx.x; source < num_ranks; source += blockDim.x) {
        uint32_t tokens = 0, rows = 0;
        for (uint32_t earlier = 0; earlier < source; ++earlier) {
            tokens += view.column[earlier * words];
        }
        for (uint32_t expert = 0; expert < local; ++expert) {
            rows += view.column[source * words + 1 + expert];
        }
        view.base[source * words] = tokens;
        host[3 + local + source] = flat ? view.column[source * words] : rows;
        if (source + 1 == num_ranks) {
            uint32_t all = tokens + view.column[source * words];
            view.header->num_tokens = args.num_tokens;
            view.header->num_rows = flat ? all : expert_major_rows;
            view.header->num_recv_tokens = all;
            host[1] = flat ? all : expert_major_rows;
            host[2] = all;
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        view.header->epoch = ctx.epoch;
        // Release: pairs with the host's acquire in `counts`; publishes the counts.
        st_release_sys(reinterpret_cast<uint64_t *>(host), uint64_t(args.sequence));
    }
}

// Second kernel of an update: one block exchanges counts, the others place chunks.
__device__ inline void place_and_exchange(const ep_cuda_plan_args_t &args, uint32_t *shared)
{
    __shared__ uint32_t claimed;
    Context ctx(args.group);
    PlanView view(args.plan);
    for (;;) {
        if (threadIdx.x == 0) {
            claimed = atomicAdd(&ctx.lane->ticket, 1u);
        }
        __syncthreads();
        uint32_t work = claimed;
        __syncthreads();
        if (work > args.num_chunks) {
            break;
        }
        if (work > 0) {
            place_chunk(args, view, work - 1, shared);
        } else if (exchange_counts(ctx, args, view)) {
            place_rows(ctx, args, view);
        } else if (threadIdx.x == 0) {
            view.header->epoch = 0;
            st_release_sys(reinterpret_cast<uint64_t *>(args.plan.host_counts), uint64_t(args.sequence) | 1ull << 63);
        }
    }
    if (is_last_block(ctx)) {
        close_call(ctx);
    }
}

} // namespace ep
