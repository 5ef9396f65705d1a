// SPDX-License-Identifier: Apache-2.0
//
// dispatch_receive.cuh: the receiving warps of a dispatch: take messages out of the rings while later ones
// arrive, and write what only the receiver knows.
#pragma once

#include "ep/dispatch_send.cuh"

namespace ep {

// Messages that `source` sends to this rank.
__device__ inline uint32_t messages_from(const ep_cuda_dispatch_args_t &args, const PlanView &view, uint32_t source)
{
    uint64_t tokens = view.column[source * view.column_words()];
    uint64_t base = view.base[source * view.column_words()];
    if (args.plan.layout == 0) {
        return uint32_t(base < args.capacity ? min(tokens, args.capacity - base) : 0);
    }
    return uint32_t(tokens);
}

// One warp takes one message.
struct MessageTaker {
    const Context &ctx;
    const ep_cuda_dispatch_args_t &args;
    const PlanView &view;
    DispatchShared &shared;
    char *stage;
    uint64_t *barrier;
    uint32_t phase = 0;

    // False: the call failed.
    __device__ bool take(uint32_t source, uint32_t index)
    {
        const MessageLayout &layout = shared.incoming;
        Ring ring(ctx, source, args.group.rank, layout);
        bool there = ring.await_message(ctx, source, index, EP_CUDA_SITE_DISPATCH_RING);
        if (!__all_sync(0xffffffffu, there)) {
            return false;
        }
        const char *message = ring.slot(index);
        // This rank's own payloads went straight to their rows.
        uint32_t through = source == args.group.rank ? 0 : layout.through;
        uint32_t staged = through & shared.bulk;
        load(message, staged);
        bool flat = args.plan.layout == 0;
        const uint32_t *words = reinterpret_cast<const uint32_t *>(message);
        for (uint32_t half = 0; half * 32 < (flat ? 1 : args.plan.topk); ++half) {
            uint32_t k = half * 32 + threadIdx.x % 32;
            int64_t row = flat ? flat_row(source, index) : expert_row(source, words, k);
            if (half == 0) {
                await_stage(staged);
            }
            store(message, through, staged, row);
            if (!flat) {
                write_origin(row, source, words[0], int32_t(k));
                write_weight(row, words, k);
            }
        }
        if (flat && layout.meta != 0) {
            write_flat_origin(source, index, words);
        }
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
            ring.put_back(ctx, index);
        }
#if __CUDA_ARCH__ >= 900
        bulk_commit();
        bulk_wait_read<0>();
#endif
        __syncwarp();
        return true;
    }

    __device__ int64_t flat_row(uint32_t source, uint32_t index)
    {
        return threadIdx.x % 32 == 0 ? int64_t(view.base[source * view.column_words()]) + index : -1;
    }

    __device__ int64_t expert_row(uint32_t source, const uint32_t *words, uint32_t k)
    {
        if (k >= args.plan.topk || words[4 + k] == uint32_t(EP_CUDA_NO_ROW)) {
            return -1;
        }
        uint64_t base = view.base[source * view.column_words() + 1 + words[4 + k]];
        uint64_t row = base + words[4 + args.plan.topk + k];
        return row < args.capacity ? int64_t(row) : -1;
    }

    __device__ void load(const char *message, uint32_t staged)
    {
#if __CUDA_ARCH__ >= 900
        if (staged == 0 || threadIdx.x % 32 != 0) {
            return;
        }
        // The message was written by other threads' copies; this thread's copy engine reads it now.
        fence_proxy_async_global();
        uint32_t bytes = 0;
        for (uint32_t i = 0; i < args.num_payloads; ++i) {
            bytes += (staged >> i & 1u) != 0 ? args.outputs[i].cols * args.outputs[i].element : 0;
        }
        mbarrier_expect(barrier, bytes);
        for (uint32_t i = 0; i < args.num_payloads; ++i) {
            if (staged >> i & 1u) {
                bulk_load(stage + shared.stage_offset[i], message + shared.incoming.payload_offset[i],
                          args.outputs[i].cols * args.outputs[i].element, barrier);
            }
        }
#endif
    }

    __device__ void await_stage(uint32_t staged)
    {
#if __CUDA_ARCH__ >= 900
        if (staged != 0) {
            while (!mbarrier_try_wait(barrier, phase)) {
            }
            phase ^= 1u;
        }
#endif
    }

    // Stores the payloads to the lane's row; what the copy engine cannot take goes by the warp.
    __device__ void store(const char *message, uint32_t through, uint32_t staged, int64_t row)
    {
#if __CUDA_ARCH__ >= 900
        for (uint32_t i = 0; row >= 0 && i < args.num_payloads; ++i) {
            if (staged >> i & 1u) {
                const ep_cuda_matrix_t &out = args.outputs[i];
                bulk_store(reinterpret_cast<char *>(out.data) + row * out.row_pitch, stage + shared.stage_offset[i],
                           out.cols * out.element);
            }
        }
#endif
        if (through == staged) {
            return;
        }
        for (uint32_t rows = __ballot_sync(0xffffffffu, row >= 0); rows != 0; rows &= rows - 1) {
            int64_t to = __shfl_sync(0xffffffffu, row, __ffs(rows) - 1);
            for (uint32_t i = 0; i < args.num_payloads; ++i) {
                if ((through & ~staged) >> i & 1u) {
                    const ep_cuda_matrix_t &out = args.outputs[i];
                    copy_row(reinterpret_cast<char *>(out.data) + to * out.row_pitch, out.col_pitch,
                             message + shared.incoming.payload_offset[i], out.element, out.cols, out.element);
                }
            }
        }
    }

    __device__ void write_origin(int64_t row, uint32_t source, uint32_t token, int32_t slot)
    {
        if (row < 0) {
            return;
        }
        put_i32(args.src_rank, row, int32_t(source));
        put_i32(args.src_token, row, int32_t(token));
        put_i32(args.src_slot, row, slot);
    }

    __device__ void write_weight(int64_t row, const uint32_t *words, uint32_t k)
    {
        if (row >= 0 && args.out_weights != 0) {
            reinterpret_cast<uint32_t *>(args.out_weights)[row] = words[4 + 2 * args.plan.topk + k];
        }
    }

    __device__ void write_flat_origin(uint32_t source, uint32_t index, const uint32_t *words)
    {
        uint32_t topk = args.plan.topk, lane = threadIdx.x % 32;
        int64_t row = int64_t(view.base[source * view.column_words()]) + index;
        if (lane == 0) {
            write_origin(row, source, words[0], -1);
        }
        for (uint32_t k = lane; k < topk; k += 32) {
            put_id(args, row * topk + k, int32_t(words[4 + k]));
            if (args.out_weights != 0) {
                reinterpret_cast<uint32_t *>(args.out_weights)[row * topk + k] = words[4 + 2 * topk + k];
            }
        }
    }
};

// The receivers of a block: claim messages, oldest first, until none are left.
__device__ inline void receive_messages(const Context &ctx, const ep_cuda_dispatch_args_t &args, const PlanView &view,
                                        DispatchShared &shared, char *stages)
{
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, num_ranks = args.group.num_ranks;
    MessageTaker taker{ctx, args, view, shared, stages + warp * EP_DISPATCH_STAGE_BYTES, &shared.barriers[warp]};
    uint32_t most = 0;
    for (uint32_t source = 0; source < num_ranks; ++source) {
        most = max(most, messages_from(args, view, source));
    }
    for (;;) {
        uint32_t ticket = lane == 0 ? atomicAdd(&ctx.lane->taken, 1u) : 0u;
        ticket = __shfl_sync(0xffffffffu, ticket, 0);
        uint32_t source = ticket % num_ranks, index = ticket / num_ranks;
        if (index >= most) {
            break;
        }
        if (index < messages_from(args, view, source) && !taker.take(source, index)) {
            break;
        }
    }
#if __CUDA_ARCH__ >= 900
    bulk_wait_written();
    fence_proxy_async_global();
#endif
}

} // namespace ep
