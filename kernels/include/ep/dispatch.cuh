// SPDX-License-Identifier: Apache-2.0
//
// dispatch.cuh: a dispatch as its blocks run it: publish credits, wait for the peers', send and receive by
// ticket; the last block tells the peers, waits for their rows and writes the counts.
#pragma once

#include "ep/dispatch_receive.cuh"

namespace ep {

__device__ inline void put_count(uint64_t address, uint64_t index, int64_t value)
{
    if (address != 0) {
        reinterpret_cast<int64_t *>(address)[index] = value;
    }
}

// Adds up over a block.
__device__ inline uint64_t block_sum(uint64_t value)
{
    __shared__ unsigned long long sum;
    if (threadIdx.x == 0) {
        sum = 0;
    }
    __syncthreads();
    if (value != 0) {
        atomicAdd(&sum, static_cast<unsigned long long>(value));
    }
    __syncthreads();
    return sum;
}

// The numbers of a dispatch; all zero if it failed. Called by a whole block.
__device__ inline void write_counts(const ep_cuda_dispatch_args_t &args, const PlanView &view, bool ok)
{
    bool flat = args.plan.layout == 0;
    uint64_t required = ok ? view.header->num_rows : 0, capacity = args.capacity;
    uint64_t missing = 0;
    for (uint32_t expert = threadIdx.x; expert < args.plan.num_local; expert += blockDim.x) {
        uint64_t start = view.expert_start[expert], rows = ok ? view.expert_rows[expert] : 0;
        uint64_t fit = start < capacity ? min(rows, capacity - start) : 0;
        missing += rows - fit;
        if (!flat || required <= capacity) {
            put_count(args.rows_per_expert, expert, int64_t(flat ? rows : fit));
        }
        put_count(args.expert_offsets, expert, int64_t(ok ? start : 0));
    }
    missing = block_sum(missing);
    if (threadIdx.x == 0) {
        uint64_t dropped = flat ? required - min(required, capacity) : missing;
        put_count(args.expert_offsets, args.plan.num_local, int64_t(ok ? view.expert_start[args.plan.num_local] : 0));
        put_count(args.num_rows, 0, int64_t(min(required, capacity)));
        put_count(args.num_required, 0, int64_t(required));
        put_count(args.num_dropped, 0, int64_t(dropped));
    }
}

// A row that holds no token: sources and ids -1, weights 0.
__device__ inline void clear_origin(const ep_cuda_dispatch_args_t &args, uint64_t row)
{
    put_i32(args.src_rank, row, -1);
    put_i32(args.src_token, row, -1);
    put_i32(args.src_slot, row, -1);
    uint32_t per_row = args.plan.layout == 0 ? args.plan.topk : 1;
    for (uint32_t k = 0; k < per_row; ++k) {
        put_id(args, row * per_row + k, -1);
        if (args.out_weights != 0) {
            reinterpret_cast<uint32_t *>(args.out_weights)[row * per_row + k] = 0;
        }
    }
}

__device__ inline void zero_row(const ep_cuda_matrix_t &out, uint64_t row)
{
    char *to = reinterpret_cast<char *>(out.data) + row * out.row_pitch;
    for (uint32_t col = threadIdx.x % 32; col < out.cols; col += 32) {
        for (uint32_t byte = 0; byte < out.element; ++byte) {
            to[col * out.col_pitch + byte] = 0;
        }
    }
}

// Writes the rows that no source writes: padding between experts, and what lies behind the last row.
__device__ inline void fill_gaps(const ep_cuda_dispatch_args_t &args, const PlanView &view)
{
    uint32_t warp = blockIdx.x * EP_DISPATCH_WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    uint32_t num_experts = args.plan.layout == 0 ? 0 : args.plan.num_local;
    for (uint32_t expert = warp; expert < num_experts; expert += gridDim.x * EP_DISPATCH_WARPS) {
        uint64_t end = min(uint64_t(view.expert_start[expert + 1]), args.capacity);
        for (uint64_t row = view.expert_start[expert] + view.expert_rows[expert]; row < end; ++row) {
            for (uint32_t i = 0; i < args.num_payloads; ++i) {
                zero_row(args.outputs[i], row);
            }
            if (lane == 0) {
                clear_origin(args, row);
            }
        }
    }
    uint64_t thread = blockIdx.x * uint64_t(blockDim.x) + threadIdx.x;
    for (uint64_t row = view.header->num_rows + thread; wants_origin(args) && row < args.capacity;
         row += gridDim.x * uint64_t(blockDim.x)) {
        clear_origin(args, row);
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
    write_counts(args, view, ok);
    // What follows in the stream may index by these: rows that did not come have none.
    for (uint64_t row = threadIdx.x; !ok && wants_origin(args) && row < args.capacity; row += blockDim.x) {
        clear_origin(args, row);
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
        shared.carries = 0;
        shared.ok = !is_broken(ctx);
#if __CUDA_ARCH__ >= 900
        for (int warp = 0; warp < EP_DISPATCH_WARPS; ++warp) {
            for (int stage = 0; stage < EP_DISPATCH_MAX_STAGES; ++stage) {
                mbarrier_init(&shared.barriers[warp][stage], 1);
            }
        }
        fence_mbarrier_init();
#else
        shared.bulk = 0;
#endif
    }
    __syncthreads();
    bool ok = shared.ok;
    if (ok && is_first_block(ctx)) {
        // Before the credits: receivers add to these, and only after the credits do messages arrive.
        for (uint32_t expert = threadIdx.x; args.rows_per_expert != 0 && expert < args.plan.num_local;
             expert += blockDim.x) {
            put_count(args.rows_per_expert, expert, 0);
        }
        __syncthreads();
        give_credits(ctx, args, view, signature);
    }
    static_assert(EP_DISPATCH_THREADS >= EP_CUDA_MAX_RANKS, "a thread for each peer, so that all are read");
    if (ok && threadIdx.x < args.group.num_ranks) {
        ok = read_credit(ctx, args, signature, threadIdx.x, shared);
    }
    ok = __syncthreads_and(ok);
    if (ok) {
        if (threadIdx.x == 0) {
            plan_stages(args, shared);
            plan_messages(args, view, signature, shared.incoming);
        }
        __syncthreads();
        if (threadIdx.x < args.group.num_ranks) {
            bool empty = threadIdx.x == args.group.rank && shared.incoming.meta == 0;
            shared.totals[threadIdx.x] = empty ? 0 : messages_from(args, view, threadIdx.x);
        }
        __syncthreads();
        uint32_t warp = threadIdx.x / 32;
        const MessageLayout &incoming = shared.incoming;
        uint32_t num_senders = num_sender_warps(shared.active_warps, incoming.used(), incoming.through != 0);
        fill_gaps(args, view);
        if (warp < num_senders) {
            send_tokens(ctx, args, view, shared, stages);
        } else if (warp < shared.active_warps) {
            receive_messages(ctx, args, view, shared, stages);
        }
    }
    if (is_last_block(ctx)) {
        finish_dispatch(ctx, args, view, ctx.lane->verdict == EP_CUDA_VERDICT_OK && ok);
    }
}

} // namespace ep
