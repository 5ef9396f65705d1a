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

// The row of slot `k` of a message, in expert-major layout, or -1.
__device__ inline int64_t row_of_expert(const ep_cuda_dispatch_args_t &args, const PlanView &view, uint32_t source,
                                        const uint32_t *words, uint32_t k)
{
    if (k >= args.plan.topk || words[4 + k] == uint32_t(EP_CUDA_NO_ROW)) {
        return -1;
    }
    uint64_t base = view.base[source * view.column_words() + 1 + words[4 + k]];
    uint64_t row = base + words[4 + args.plan.topk + k];
    return row < args.capacity ? int64_t(row) : -1;
}

__device__ inline void write_origin(const ep_cuda_dispatch_args_t &args, int64_t row, uint32_t source, uint32_t token,
                                    int32_t slot)
{
    put_i32(args.src_rank, row, int32_t(source));
    put_i32(args.src_token, row, int32_t(token));
    put_i32(args.src_slot, row, slot);
}

__device__ inline void write_weight(const ep_cuda_dispatch_args_t &args, uint64_t index, uint32_t bits)
{
    if (args.out_weights != 0) {
        reinterpret_cast<uint32_t *>(args.out_weights)[index] = bits;
    }
}

// Slot `k` of a flat row: its local expert and its weight.
__device__ inline void write_flat_slot(const ep_cuda_dispatch_args_t &args, const PlanView &view, int64_t row,
                                       uint32_t k, const uint32_t *words)
{
    uint32_t topk = args.plan.topk, local = words[4 + k];
    put_id(args, row * topk + k, int32_t(local));
    write_weight(args, row * topk + k, words[4 + 2 * topk + k]);
    // With drops the assignments that arrive are counted one by one.
    if (local != uint32_t(EP_CUDA_NO_ROW) && args.rows_per_expert != 0 && view.header->num_rows > args.capacity) {
        atomicAdd(reinterpret_cast<unsigned long long *>(args.rows_per_expert) + local, 1ull);
    }
}

// A message on its way into a stage.
struct MessageInFlight {
    uint32_t source;
    uint32_t index;
    uint32_t stage;
    uint32_t staged; // payloads that pass the stage
    const char *data;
};

// One warp takes messages with payloads, one after the other.
struct MessageTaker {
    const Context &ctx;
    const ep_cuda_dispatch_args_t &args;
    const PlanView &view;
    DispatchShared &shared;
    Stages stages;

    __device__ bool is_there(uint32_t source, uint32_t index) const
    {
        bool there = Ring(ctx, source, args.group.rank, shared.incoming).has_message(ctx, index);
        return __all_sync(0xffffffffu, there);
    }

    // Waits for a message and starts its payloads on their way. False: the call failed.
    __device__ bool load(uint32_t source, uint32_t index, uint32_t stage, MessageInFlight &flight)
    {
        Ring ring(ctx, source, args.group.rank, shared.incoming);
        bool there = ring.await_message(ctx, source, index, EP_CUDA_SITE_DISPATCH_RING);
        if (!__all_sync(0xffffffffu, there)) {
            return false;
        }
        // This rank's own payloads went straight to their rows.
        uint32_t through = source == args.group.rank ? 0 : shared.incoming.through;
        flight = {source, index, stage, through & shared.bulk, ring.slot(index)};
#if __CUDA_ARCH__ >= 900
        if (flight.staged != 0 && threadIdx.x % 32 == 0) {
            // Other threads' copies wrote the message; this thread's copy engine reads it now.
            fence_proxy_async_global();
            uint32_t bytes = 0;
            for (uint32_t i = 0; i < args.num_payloads; ++i) {
                bytes += (flight.staged >> i & 1u) != 0 ? args.outputs[i].cols * args.outputs[i].element : 0;
            }
            mbarrier_expect(&stages.barriers[stage], bytes);
            for (uint32_t i = 0; i < args.num_payloads; ++i) {
                if (flight.staged >> i & 1u) {
                    bulk_load(stages.at(stage) + shared.stage_offset[i],
                              flight.data + shared.incoming.payload_offset[i],
                              args.outputs[i].cols * args.outputs[i].element, &stages.barriers[stage]);
                }
            }
        }
#endif
        return true;
    }

    // Stores a message to its rows and gives its slot back.
    __device__ void store(const MessageInFlight &flight)
    {
        bool flat = args.plan.layout == 0;
        const uint32_t *words = reinterpret_cast<const uint32_t *>(flight.data);
        for (uint32_t half = 0; half * 32 < (flat ? 1 : args.plan.topk); ++half) {
            uint32_t k = half * 32 + threadIdx.x % 32;
            int64_t row = flat ? flat_row(flight) : row_of_expert(args, view, flight.source, words, k);
            if (half == 0 && flight.staged != 0) {
                stages.await(flight.stage);
            }
            store_rows(flight, row);
            if (!flat && row >= 0) {
                write_origin(args, row, flight.source, words[0], int32_t(k));
                write_weight(args, row, words[4 + 2 * args.plan.topk + k]);
            }
        }
        if (flat && shared.incoming.meta != 0) {
            write_flat_slots(flight, words);
        }
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
            Ring(ctx, flight.source, args.group.rank, shared.incoming).put_back(ctx, flight.index);
        }
#if __CUDA_ARCH__ >= 900
        bulk_commit();
#endif
    }

    __device__ int64_t flat_row(const MessageInFlight &flight)
    {
        return threadIdx.x % 32 == 0 ? int64_t(view.base[flight.source * view.column_words()]) + flight.index : -1;
    }

    // Stores the payloads to the lane's row; what the copy engine cannot take goes by the warp.
    __device__ void store_rows(const MessageInFlight &flight, int64_t row)
    {
#if __CUDA_ARCH__ >= 900
        for (uint32_t i = 0; row >= 0 && i < args.num_payloads; ++i) {
            if (flight.staged >> i & 1u) {
                const ep_cuda_matrix_t &out = args.outputs[i];
                bulk_store(reinterpret_cast<char *>(out.data) + row * out.row_pitch,
                           stages.at(flight.stage) + shared.stage_offset[i], out.cols * out.element);
            }
        }
#endif
        uint32_t through = flight.source == args.group.rank ? 0 : shared.incoming.through;
        if (through == flight.staged) {
            return;
        }
        for (uint32_t rows = __ballot_sync(0xffffffffu, row >= 0); rows != 0; rows &= rows - 1) {
            int64_t to = __shfl_sync(0xffffffffu, row, __ffs(rows) - 1);
            for (uint32_t i = 0; i < args.num_payloads; ++i) {
                if ((through & ~flight.staged) >> i & 1u) {
                    const ep_cuda_matrix_t &out = args.outputs[i];
                    copy_row(reinterpret_cast<char *>(out.data) + to * out.row_pitch, out.col_pitch,
                             flight.data + shared.incoming.payload_offset[i], out.element, out.cols, out.element);
                }
            }
        }
    }

    __device__ void write_flat_slots(const MessageInFlight &flight, const uint32_t *words)
    {
        uint32_t lane = threadIdx.x % 32;
        int64_t row = int64_t(view.base[flight.source * view.column_words()]) + flight.index;
        if (lane == 0) {
            write_origin(args, row, flight.source, words[0], -1);
        }
        for (uint32_t k = lane; k < args.plan.topk; k += 32) {
            write_flat_slot(args, view, row, k, words);
        }
    }
};

// Takes messages with payloads, oldest first; the next one is loaded while this one is stored.
__device__ inline void take_messages(const Context &ctx, const ep_cuda_dispatch_args_t &args, const PlanView &view,
                                     DispatchShared &shared, char *all_stages, uint32_t most)
{
    uint32_t num_ranks = args.group.num_ranks;
    MessageTaker taker{ctx, args, view, shared, Stages(shared, all_stages)};
    // Claims the next message, and a ticket ahead; false: there is none.
    auto draw = [&] { return threadIdx.x % 32 == 0 ? atomicAdd(&ctx.lane->taken, 1u) : 0u; };
    uint32_t drawn = draw();
    auto claim = [&](uint32_t &source, uint32_t &index) {
        do {
            uint32_t ticket = __shfl_sync(0xffffffffu, drawn, 0);
            drawn = draw();
            source = ticket % num_ranks;
            index = ticket / num_ranks;
        } while (index < most && index >= messages_from(args, view, source));
        return index < most;
    };
    uint32_t source, index;
    MessageInFlight flight{};
    bool more = claim(source, index) && taker.load(source, index, 0, flight);
    bool ahead = shared.num_stages > 1;
    while (more) {
        MessageInFlight next{};
        uint32_t next_stage = taker.stages.after(flight.stage);
        bool claimed = claim(source, index);
        // A message is stored before the warp waits for the next one, or its source might wait for its slot.
        if (ahead && claimed && taker.is_there(source, index)) {
            taker.stages.await_free();
            more = taker.load(source, index, next_stage, next);
            taker.store(flight);
        } else {
            taker.store(flight);
            if (claimed) {
                taker.stages.await_free();
                more = taker.load(source, index, next_stage, next);
            }
        }
        more = more && claimed;
        flight = next;
    }
}

// Takes messages without payloads, one a lane. Lanes that wait hold back those that do not, so a ring must
// hold as many messages as a warp takes: the smallest ring has 64 of the largest.
__device__ inline void take_origins(const Context &ctx, const ep_cuda_dispatch_args_t &args, const PlanView &view,
                                    DispatchShared &shared, uint32_t most)
{
    uint32_t num_ranks = args.group.num_ranks, topk = args.plan.topk, lane = threadIdx.x % 32;
    for (;;) {
        uint32_t ticket = lane == 0 ? atomicAdd(&ctx.lane->taken, 32u) : 0u;
        ticket = __shfl_sync(0xffffffffu, ticket, 0) + lane;
        uint32_t source = ticket % num_ranks, index = ticket / num_ranks;
        if (__all_sync(0xffffffffu, index >= most)) {
            break;
        }
        if (index >= messages_from(args, view, source)) {
            continue;
        }
        Ring ring(ctx, source, args.group.rank, shared.incoming);
        if (!ring.await_message(ctx, source, index, EP_CUDA_SITE_DISPATCH_RING)) {
            continue;
        }
        const uint32_t *words = reinterpret_cast<const uint32_t *>(ring.slot(index));
        if (args.plan.layout == 0) {
            int64_t row = int64_t(view.base[source * view.column_words()]) + index;
            write_origin(args, row, source, words[0], -1);
            for (uint32_t k = 0; k < topk; ++k) {
                write_flat_slot(args, view, row, k, words);
            }
        } else {
            for (uint32_t k = 0; k < topk; ++k) {
                int64_t row = row_of_expert(args, view, source, words, k);
                if (row >= 0) {
                    write_origin(args, row, source, words[0], int32_t(k));
                    write_weight(args, row, words[4 + 2 * topk + k]);
                }
            }
        }
        ring.put_back(ctx, index);
    }
}

// The receivers of a block.
__device__ inline void receive_messages(const Context &ctx, const ep_cuda_dispatch_args_t &args, const PlanView &view,
                                        DispatchShared &shared, char *all_stages)
{
    uint32_t most = 0;
    for (uint32_t source = 0; source < args.group.num_ranks; ++source) {
        most = max(most, messages_from(args, view, source));
    }
    if (shared.incoming.through == 0) {
        take_origins(ctx, args, view, shared, most);
    } else {
        take_messages(ctx, args, view, shared, all_stages, most);
    }
#if __CUDA_ARCH__ >= 900
    bulk_wait_written<0>();
    fence_proxy_async_global();
#endif
}

} // namespace ep
