// SPDX-License-Identifier: Apache-2.0
//
// combine.cuh: a warp takes a token, reads its rows where the experts left them, or takes them out of rings, and
// adds them in registers. The call ends on a rank when every peer has said that it reads this rank's rows no more.
#pragma once

#include "ep/combine_serve.cuh"

namespace ep {

__device__ inline Signature combine_signature(const ep_cuda_combine_args_t &args, const PlanView &view)
{
    Signature signature = {};
    signature.plan_epoch = view.header->epoch;
    signature.plan_hash = args.plan.hash;
    signature.op = signature.plan_epoch != 0 ? EP_WIRE_OP_COMBINE : EP_WIRE_OP_FAILED;
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

// False, and recorded, if a ring cannot hold a row.
__device__ inline bool fits_ring(const Context &ctx, const ep_cuda_combine_args_t &args, const CombineShared &shared,
                                 uint32_t peer)
{
    if (shared.messages.slots == 0) {
        fail(ctx, kErrAborted, EP_CUDA_SITE_RING_TOO_SMALL, int32_t(peer), shared.messages.slot_bytes,
             args.group.ring_bytes);
    }
    return shared.messages.slots != 0;
}

// Prepares the rings, before descriptors are read: what goes through them, and how much of it this rank sends.
__device__ inline void plan_rings(const ep_cuda_combine_args_t &args, const PlanView &view, const Signature &signature,
                                  CombineShared &shared)
{
    bool flat = args.plan.layout == 0;
    if (threadIdx.x == 0) {
        uint32_t row = signature.row_bytes[0];
        uint32_t weights = args.row_weights.data == 0 ? 0 : 4 * (flat ? args.plan.topk : 1);
        shared.messages.set_row(row, weights, args.group.ring_bytes);
        shared.stage_bytes = 0;
        shared.num_servers = 0;
        if (args.rows.data != 0 && args.places[0].window == 0 && args.rows.rows != 0 && args.group.num_ranks > 1) {
            bool bulk = __CUDA_ARCH__ >= 900 && (args.rows.data | args.rows.row_pitch | row) % 16 == 0;
            uint32_t fit = args.shared_bytes / (EP_COMBINE_STAGES * round_up(row, 128));
            shared.stage_bytes = bulk && fit != 0 ? row : 0;
            shared.num_servers = shared.stage_bytes != 0 ? min(fit, uint32_t(EP_COMBINE_SERVERS)) : EP_COMBINE_SERVERS;
        }
#if __CUDA_ARCH__ >= 900
        for (int server = 0; server < EP_COMBINE_SERVERS; ++server) {
            for (int stage = 0; stage < EP_COMBINE_STAGES; ++stage) {
                mbarrier_init(&shared.barriers[server][stage], 1);
            }
        }
        fence_mbarrier_init();
#endif
    }
    for (uint32_t owner = threadIdx.x; owner < args.group.num_ranks; owner += blockDim.x) {
        const uint32_t *column = view.column + owner * view.column_words();
        uint32_t total = 0;
        for (uint32_t expert = 0; !flat && expert < args.plan.num_local; ++expert) {
            total += column[1 + expert];
        }
        uint64_t base = view.base[owner * view.column_words()];
        uint64_t room = base < args.rows.rows ? args.rows.rows - base : 0;
        total = flat ? uint32_t(min(uint64_t(column[0]), room)) : total;
        // What stays on this rank is added where it lies.
        shared.totals[owner] = owner == args.group.rank ? 0 : total;
    }
    __syncthreads();
}

// Reads where the rows of `peer` lie. False: the call failed.
__device__ inline bool read_holder(const Context &ctx, const ep_cuda_combine_args_t &args, const Signature &signature,
                                   uint32_t peer, CombineShared &shared)
{
    ep_wire_desc_t *desc = agree(ctx, peer, signature, EP_CUDA_SITE_COMBINE_ROWS);
    if (desc == nullptr) {
        return false;
    }
    Holder &holder = shared.holders[peer];
    bool own = peer == args.group.rank;
    holder.capacity = desc->capacity;
    holder.tail = tail_of(desc);
    ep_wire_place_t rows = desc->places[0], weights = desc->places[1];
    // This rank's own rows have no place for peers if they are outside windows.
    holder.row_pitch = own ? args.rows.row_pitch : rows.row_pitch;
    holder.weight_pitch = own ? args.row_weights.row_pitch : weights.row_pitch;
    holder.through = !own && rows.window == 0 && holder.capacity != 0 ? 1 : 0;
    if (holder.through != 0) {
        shared.through = 1;
        return fits_ring(ctx, args, shared, peer);
    }
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
__device__ inline void return_weights(const Context &ctx, const ep_cuda_combine_args_t &args, const PlanView &view,
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
                if (other.rank == found.rank && other.row >= 0) {
                    found = other;
                }
            }
        }
        uint32_t bits = 0;
        if (found.row >= 0) {
            const char *weights = weights_of(ctx, shared, found);
            bits = *reinterpret_cast<const volatile uint32_t *>(weights + (flat ? 4 * k : 0));
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

// Waits for the messages of the warp's token. False: the call failed.
__device__ inline bool await_messages(const Context &ctx, const ep_cuda_combine_args_t &args,
                                      const CombineShared &shared)
{
    bool ok = true;
    for (uint32_t k = threadIdx.x % 32; k < args.plan.topk; k += 32) {
        uint64_t message = shared.messages_of[threadIdx.x / 32][k];
        if (ok && message != 0) {
            Ring ring(ctx, uint32_t(message >> 32), args.group.rank, shared.messages);
            ok = ring.await_message(ctx, uint32_t(message >> 32), uint32_t(message) - 1, EP_CUDA_SITE_COMBINE_RING);
        }
    }
    return __all_sync(0xffffffffu, ok);
}

// Gives the slots of the token's messages back: the warp's loads have returned.
__device__ inline void put_back_messages(const Context &ctx, const ep_cuda_combine_args_t &args,
                                         const CombineShared &shared)
{
    for (uint32_t k = threadIdx.x % 32; k < args.plan.topk; k += 32) {
        uint64_t message = shared.messages_of[threadIdx.x / 32][k];
        if (message != 0) {
            Ring ring(ctx, uint32_t(message >> 32), args.group.rank, shared.messages);
            ring.put_back(ctx, uint32_t(message) - 1);
        }
    }
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
        uint32_t count = list_terms(ctx, args, view, shared, token);
        if (shared.through != 0 && !await_messages(ctx, args, shared)) {
            break;
        }
        if (vectors) {
            add_token<E, 16 / sizeof(E), kHow>(args, token, terms, count);
        } else {
            add_token<E, 1, kHow>(args, token, terms, count);
        }
        return_weights(ctx, args, view, shared, token);
        __syncwarp();
        if (shared.through != 0) {
            put_back_messages(ctx, args, shared);
            __syncwarp();
        }
    }
}

// One kernel per element type and way of adding: each gets the registers it needs.
template <typename E, uint32_t kHow>
__device__ inline void combine(const ep_cuda_combine_args_t &args, CombineShared &shared, char *stages)
{
    Context ctx(args.group);
    PlanView view(args.plan);
    Signature signature = combine_signature(args, view);
    if (threadIdx.x == 0) {
        shared.ok = !is_broken(ctx);
        shared.vectors = 1;
        shared.through = 0;
    }
    __syncthreads();
    bool ok = shared.ok;
    if (ok && is_first_block(ctx)) {
        show_rows(ctx, args, view, signature);
    }
    plan_rings(args, view, signature, shared);
    static_assert(EP_COMBINE_THREADS >= EP_CUDA_MAX_RANKS, "a thread for each peer, so that all are read");
    if (ok && threadIdx.x < args.group.num_ranks) {
        ok = read_holder(ctx, args, signature, threadIdx.x, shared);
    }
    ok = __syncthreads_and(ok);
    if (ok) {
        // These warps add, too, when there is nothing left to serve or to ask for.
        uint32_t warp = threadIdx.x / 32;
        if (warp < shared.num_servers) {
            serve_rows(args, ctx.epoch, ctx.deadline_ns, shared, stages);
        } else if (warp == shared.num_servers && shared.through != 0 && view.expert_major()) {
            ask_for_rows(args, ctx.epoch, ctx.deadline_ns, shared);
        }
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
