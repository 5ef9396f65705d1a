// SPDX-License-Identifier: Apache-2.0
//
// dispatch.cuh: each row is read once, into shared memory, and stored from there to the final place at each
// of its destinations. Blocks publish credits, wait for the peers', claim tokens by ticket, and the last one
// waits for the peers' rows.
#pragma once

#include "ep/plan.cuh"

namespace ep {

// What a block knows of a destination.
struct Destination {
    char *base[EP_WIRE_MAX_PAYLOADS];
    uint64_t row_pitch[EP_WIRE_MAX_PAYLOADS];
    uint64_t col_pitch[EP_WIRE_MAX_PAYLOADS];
    uint64_t capacity;
    const uint32_t *tail;
};

// A block's shared memory, beside the stages.
struct DispatchShared {
    Destination destinations[EP_CUDA_MAX_RANKS];
    uint64_t barriers[EP_DISPATCH_WARPS];
    // Payload i passes the stage at this offset; bulk copies need 16-byte rows on both sides.
    uint32_t stage_offset[EP_WIRE_MAX_PAYLOADS];
    uint32_t stage_bytes; // of all bulk payloads of a row together
    uint32_t bulk;        // bit i: payload i goes by bulk copies
    uint32_t ok;
};

__device__ inline Signature dispatch_signature(const ep_cuda_dispatch_args_t &args, const PlanView &view)
{
    Signature signature = {};
    signature.plan_epoch = view.header->epoch;
    signature.plan_hash = args.plan.hash;
    signature.op = EP_WIRE_OP_DISPATCH;
    signature.flags = args.topk_weights.data != 0 ? EP_WIRE_FLAG_TOPK_WEIGHTS : 0;
    signature.dtypes = args.dtypes;
    signature.num_payloads = args.num_payloads;
    for (uint32_t i = 0; i < args.num_payloads; ++i) {
        signature.row_bytes[i] = args.outputs[i].cols * args.outputs[i].element;
    }
    return signature;
}

// Says to each peer where its rows go.
__device__ inline void give_credits(const Context &ctx, const ep_cuda_dispatch_args_t &args, const PlanView &view,
                                    const Signature &signature)
{
    for (uint32_t i = threadIdx.x / 32; i < args.group.num_ranks; i += EP_DISPATCH_WARPS) {
        uint32_t peer = (args.group.rank + i) % args.group.num_ranks;
        publish(ctx, peer, [&](ep_wire_desc_t *desc, uint32_t *tail, uint32_t lane) {
            if (lane == 0) {
                put_signature(desc, signature);
                desc->wants = 0;
                desc->capacity = args.capacity;
            }
            if (lane < args.num_payloads) {
                desc->places[lane] = args.places[lane];
            }
            for (uint32_t word = lane; word < view.column_words(); word += 32) {
                tail[word] = view.base[peer * view.column_words() + word];
            }
        });
    }
}

// True if a bulk copy can move rows of this pitch from or to this address.
__device__ inline bool bulk_aligned(uint64_t address, uint64_t row_pitch, uint64_t col_pitch, uint32_t element)
{
    return address % 16 == 0 && row_pitch % 16 == 0 && col_pitch == element;
}

// Reads the credit of `peer`. False: the call failed.
__device__ inline bool read_credit(const Context &ctx, const ep_cuda_dispatch_args_t &args, const Signature &signature,
                                   uint32_t peer, DispatchShared &shared)
{
    ep_wire_desc_t *desc = await_desc(ctx, peer, EP_CUDA_SITE_DISPATCH_CREDIT);
    if (desc == nullptr) {
        return false;
    }
    if (!same_signature(desc, signature)) {
        fail(ctx, kErrMismatch, EP_CUDA_SITE_DISPATCH_CREDIT, int32_t(peer), signature.op, desc->op);
        return false;
    }
    Destination &to = shared.destinations[peer];
    to.capacity = desc->capacity;
    to.tail = tail_of(desc);
    for (uint32_t i = 0; i < args.num_payloads; ++i) {
        const ep_cuda_matrix_t &own = args.outputs[i];
        ep_wire_place_t place = desc->places[i];
        uint64_t span = place.col_pitch * (own.cols - 1) + own.element;
        // This rank's own output is reached directly wherever it lies.
        to.base[i] = peer == args.group.rank ? reinterpret_cast<char *>(own.data)
                                             : resolve(ctx, peer, place, to.capacity, span);
        to.row_pitch[i] = place.row_pitch;
        to.col_pitch[i] = place.col_pitch;
        if (to.base[i] == nullptr && to.capacity != 0) {
            fail(ctx, kErrAborted, EP_CUDA_SITE_BAD_PLACE, int32_t(peer), place.window, place.offset);
            return false;
        }
        if (!bulk_aligned(reinterpret_cast<uint64_t>(to.base[i]), to.row_pitch[i], to.col_pitch[i], own.element)) {
            atomicAnd(&shared.bulk, ~(1u << i));
        }
    }
    return true;
}

// Decides which payloads pass the stages; each warp has one stage.
__device__ inline void plan_stages(const ep_cuda_dispatch_args_t &args, DispatchShared &shared)
{
    uint32_t offset = 0;
    for (uint32_t i = 0; i < args.num_payloads; ++i) {
        const ep_cuda_matrix_t &in = args.inputs[i];
        uint32_t bytes = in.cols * in.element;
        bool fits = bytes % 16 == 0 && bulk_aligned(in.data, in.row_pitch, in.col_pitch, in.element) &&
                    offset + bytes <= EP_DISPATCH_STAGE_BYTES;
        if ((shared.bulk >> i & 1u) != 0 && fits) {
            shared.stage_offset[i] = offset;
            offset += bytes;
        } else {
            shared.bulk &= ~(1u << i);
        }
    }
    shared.stage_bytes = offset;
}

// The row of slot `k` of a token at its destination, or -1 if it has none there.
__device__ inline int64_t row_of_slot(const ep_cuda_dispatch_args_t &args, const PlanView &view,
                                      const DispatchShared &shared, uint32_t token, uint32_t k, uint32_t *rank)
{
    uint32_t slot = token * args.plan.topk + k;
    int32_t expert = k < args.plan.topk ? view.expert[slot] : -1;
    if (expert < 0) {
        return -1;
    }
    *rank = view.owner[expert];
    const Destination &to = shared.destinations[*rank];
    bool flat = args.plan.layout == 0;
    uint32_t position = flat ? view.rank_pos[slot] : view.slot_pos[slot];
    if (position == uint32_t(EP_CUDA_NO_ROW)) {
        return -1;
    }
    uint64_t row = uint64_t(to.tail[flat ? 0 : 1 + expert - view.first[*rank]]) + position;
    return row < to.capacity ? int64_t(row) : -1;
}

// A warp copies one row element by element, or 16 bytes at a time where both sides allow it.
__device__ inline void copy_row(char *to, uint64_t to_pitch, const char *from, uint64_t from_pitch, uint32_t cols,
                                uint32_t element)
{
    uint32_t lane = threadIdx.x % 32, bytes = cols * element;
    bool contiguous = to_pitch == element && from_pitch == element;
    uint64_t aligned = (reinterpret_cast<uint64_t>(to) | reinterpret_cast<uint64_t>(from)) % 16;
    if (contiguous && aligned == 0) {
        for (uint32_t i = lane; i < bytes / 16; i += 32) {
            st_row(reinterpret_cast<uint4 *>(to) + i, ld_row(reinterpret_cast<const uint4 *>(from) + i));
        }
        for (uint32_t i = bytes / 16 * 16 + lane; i < bytes; i += 32) {
            to[i] = from[i];
        }
        return;
    }
    for (uint32_t col = lane; col < cols; col += 32) {
        for (uint32_t byte = 0; byte < element; ++byte) {
            to[col * to_pitch + byte] = from[col * from_pitch + byte];
        }
    }
}

// One warp sends one token: rows by the copy engine, whatever it cannot take by the warp itself.
struct TokenSender {
    const ep_cuda_dispatch_args_t &args;
    const PlanView &view;
    DispatchShared &shared;
    char *stage;
    uint64_t *barrier;
    uint32_t phase = 0;

    __device__ void load(uint32_t token)
    {
#if __CUDA_ARCH__ >= 900
        if (shared.stage_bytes != 0 && threadIdx.x % 32 == 0) {
            mbarrier_expect(barrier, shared.stage_bytes);
            for (uint32_t i = 0; i < args.num_payloads; ++i) {
                if (shared.bulk >> i & 1u) {
                    const ep_cuda_matrix_t &in = args.inputs[i];
                    bulk_load(stage + shared.stage_offset[i], reinterpret_cast<const char *>(in.data) + token * in.row_pitch,
                              in.cols * in.element, barrier);
                }
            }
        }
#endif
    }

    __device__ void store(uint32_t token)
    {
        for (uint32_t k0 = 0; k0 < args.plan.topk; k0 += 32) {
            uint32_t rank = 0;
            int64_t row = row_of_slot(args, view, shared, token, k0 + threadIdx.x % 32, &rank);
            if (k0 == 0) {
                await_stage();
            }
            store_staged(rank, row);
            store_others(token, rank, row);
        }
#if __CUDA_ARCH__ >= 900
        bulk_commit();
#endif
    }

    __device__ void await_stage()
    {
#if __CUDA_ARCH__ >= 900
        if (shared.stage_bytes != 0) {
            while (!mbarrier_try_wait(barrier, phase)) {
            }
            phase ^= 1u;
        }
#endif
    }

    // Each lane starts the copies of its own slot.
    __device__ void store_staged(uint32_t rank, int64_t row)
    {
#if __CUDA_ARCH__ >= 900
        if (row < 0) {
            return;
        }
        const Destination &to = shared.destinations[rank];
        for (uint32_t i = 0; i < args.num_payloads; ++i) {
            if (shared.bulk >> i & 1u) {
                bulk_store(to.base[i] + row * to.row_pitch[i], stage + shared.stage_offset[i],
                           args.inputs[i].cols * args.inputs[i].element);
            }
        }
#endif
    }

    // The warp copies the other payloads, slot by slot.
    __device__ void store_others(uint32_t token, uint32_t rank, int64_t row)
    {
        uint32_t all = (1u << args.num_payloads) - 1;
        if (shared.bulk == all) {
            return;
        }
        for (uint32_t slots = __ballot_sync(0xffffffffu, row >= 0); slots != 0; slots &= slots - 1) {
            uint32_t source = __ffs(slots) - 1;
            uint32_t to_rank = __shfl_sync(0xffffffffu, rank, source);
            int64_t to_row = __shfl_sync(0xffffffffu, row, source);
            const Destination &to = shared.destinations[to_rank];
            for (uint32_t i = 0; i < args.num_payloads; ++i) {
                if ((shared.bulk >> i & 1u) == 0) {
                    const ep_cuda_matrix_t &in = args.inputs[i];
                    copy_row(to.base[i] + to_row * to.row_pitch[i], to.col_pitch[i],
                             reinterpret_cast<const char *>(in.data) + token * in.row_pitch, in.col_pitch, in.cols,
                             in.element);
                }
            }
        }
    }
};

// The senders of a block: claim tokens until none are left.
__device__ inline void send_tokens(const Context &ctx, const ep_cuda_dispatch_args_t &args, const PlanView &view,
                                   DispatchShared &shared, char *stages)
{
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    TokenSender sender{args, view, shared, stages + warp * EP_DISPATCH_STAGE_BYTES, &shared.barriers[warp]};
    uint32_t num_tokens = view.header->num_tokens;
    auto claim = [&] { return lane == 0 ? atomicAdd(&ctx.lane->ticket, 1u) : 0u; };
    uint32_t next = claim();
    for (;;) {
        uint32_t token = __shfl_sync(0xffffffffu, next, 0);
        if (token >= num_tokens) {
            break;
        }
#if __CUDA_ARCH__ >= 900
        bulk_wait_read<0>();
#endif
        __syncwarp();
        sender.load(token);
        next = claim();
        sender.store(token);
    }
#if __CUDA_ARCH__ >= 900
    bulk_wait_written();
    fence_proxy_async_global();
#endif
}

__device__ inline void put_count(uint64_t address, uint64_t index, int64_t value)
{
    if (address != 0) {
        reinterpret_cast<int64_t *>(address)[index] = value;
    }
}

// The numbers of a dispatch; all zero if it failed.
__device__ inline void write_counts(const ep_cuda_dispatch_args_t &args, const PlanView &view, bool ok)
{
    bool flat = args.plan.layout == 0;
    uint64_t required = ok ? view.header->num_rows : 0, capacity = args.capacity;
    uint64_t real = flat ? required : 0, kept = flat ? min(required, capacity) : 0;
    for (uint32_t expert = 0; expert < args.plan.num_local; ++expert) {
        uint64_t start = view.expert_start[expert], rows = ok ? view.expert_rows[expert] : 0;
        uint64_t fit = start < capacity ? min(rows, capacity - start) : 0;
        if (!flat) {
            real += rows;
            kept += fit;
        }
        put_count(args.rows_per_expert, expert, int64_t(flat ? rows : fit));
        put_count(args.expert_offsets, expert, int64_t(ok ? start : 0));
    }
    put_count(args.expert_offsets, args.plan.num_local, int64_t(ok ? view.expert_start[args.plan.num_local] : 0));
    put_count(args.num_rows, 0, int64_t(min(required, capacity)));
    put_count(args.num_required, 0, int64_t(required));
    put_count(args.num_dropped, 0, int64_t(real - kept));
}

// Zeroes the rows between experts that no source writes.
__device__ inline void fill_padding(const ep_cuda_dispatch_args_t &args, const PlanView &view)
{
    if (args.plan.layout == 0 || args.plan.alignment == 1) {
        return;
    }
    uint32_t warp = blockIdx.x * EP_DISPATCH_WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    for (uint32_t expert = warp; expert < args.plan.num_local; expert += gridDim.x * EP_DISPATCH_WARPS) {
        uint64_t end = min(uint64_t(view.expert_start[expert + 1]), args.capacity);
        for (uint64_t row = view.expert_start[expert] + view.expert_rows[expert]; row < end; ++row) {
            for (uint32_t i = 0; i < args.num_payloads; ++i) {
                const ep_cuda_matrix_t &out = args.outputs[i];
                char *to = reinterpret_cast<char *>(out.data) + row * out.row_pitch;
                for (uint32_t col = lane; col < out.cols; col += 32) {
                    for (uint32_t byte = 0; byte < out.element; ++byte) {
                        to[col * out.col_pitch + byte] = 0;
                    }
                }
            }
        }
    }
}

// The last block: tells the peers, waits for them, writes the counts.
__device__ inline void finish_dispatch(const Context &ctx, const ep_cuda_dispatch_args_t &args, const PlanView &view,
                                       bool ok)
{
    for (uint32_t peer = threadIdx.x; ok && peer < args.group.num_ranks; peer += blockDim.x) {
        arrive(ctx, peer);
    }
    for (uint32_t peer = threadIdx.x; ok && peer < args.group.num_ranks; peer += blockDim.x) {
        ok = await_arrival(ctx, peer, EP_CUDA_SITE_DISPATCH_ROWS);
    }
    ok = __syncthreads_and(ok);
    if (threadIdx.x == 0) {
        write_counts(args, view, ok);
    }
    close_call(ctx);
}

__device__ inline void dispatch(const ep_cuda_dispatch_args_t &args, DispatchShared &shared, char *stages)
{
    Context ctx(args.group);
    PlanView view(args.plan);
    Signature signature = dispatch_signature(args, view);
    if (threadIdx.x == 0) {
        shared.bulk = (1u << args.num_payloads) - 1;
        shared.ok = view.header->epoch != 0 && !is_broken(ctx);
#if __CUDA_ARCH__ >= 900
        for (int warp = 0; warp < EP_DISPATCH_WARPS; ++warp) {
            mbarrier_init(&shared.barriers[warp], 1);
        }
        fence_mbarrier_init();
#else
        shared.bulk = 0;
#endif
    }
    __syncthreads();
    bool ok = shared.ok;
    if (ok && is_first_block(ctx)) {
        give_credits(ctx, args, view, signature);
    }
    for (uint32_t peer = threadIdx.x; ok && peer < args.group.num_ranks; peer += blockDim.x) {
        ok = read_credit(ctx, args, signature, peer, shared);
    }
    ok = __syncthreads_and(ok);
    if (ok) {
        if (threadIdx.x == 0) {
            plan_stages(args, shared);
        }
        __syncthreads();
        fill_padding(args, view);
        send_tokens(ctx, args, view, shared, stages);
    }
    if (is_last_block(ctx)) {
        finish_dispatch(ctx, args, view, ctx.lane->verdict == EP_CUDA_VERDICT_OK && ok);
    }
}

} // namespace ep
