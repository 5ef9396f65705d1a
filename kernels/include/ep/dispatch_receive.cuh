// SPDX-License-Identifier: Apache-2.0
//
// dispatch_receive.cuh: the receiving warps of a dispatch: take messages out of the rings while later ones
// arrive, and write what only the receiver knows.
#pragma once

#include "ep/dispatch_send.cuh"
#include "ep/tickets.cuh"

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

    // Starts the payloads of a message that is there on their way.
    __device__ void load(uint32_t source, uint32_t index, uint32_t stage, MessageInFlight &flight)
    {
        Ring ring(ctx, source, args.group.rank, shared.incoming);
        // It is there: this only acquires what it holds.
        ring.await_message(ctx, source, index, EP_CUDA_SITE_DISPATCH_RING);
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

// Takes messages with payloads: one is loaded while one is stored.
__device__ inline void take_messages(const Context &ctx, const ep_cuda_dispatch_args_t &args, const PlanView &view,
                                     DispatchShared &shared, char *all_stages)
{
    MessageTaker taker{ctx, args, view, shared, Stages(shared, all_stages)};
    Tickets tickets(ctx, shared.totals, args.group.rank + blockIdx.x);
    auto is_ready = [&](uint32_t source, uint32_t index) {
        return Ring(ctx, source, args.group.rank, shared.incoming).has_message(ctx, index);
    };
    MessageInFlight flight{}, next{};
    bool left = true, have = false, ahead = shared.num_stages > 1;
    for (uint32_t idle = 0; left || have;) {
        uint32_t source, index;
        // With one stage, a message is stored before the next one is loaded.
        bool chosen = (ahead || !have) && tickets.choose(is_ready, source, index, left);
        if (chosen) {
            taker.stages.await_free();
            taker.load(source, index, have ? taker.stages.after(flight.stage) : flight.stage, next);
            idle = 0;
        }
        if (have) {
            taker.store(flight);
        }
        left = left || (!ahead && have);
        have = chosen;
        flight = next;
        bool idles = left && !have && threadIdx.x % 32 == 0;
        bool failed = idles && !pause(ctx, ++idle, EP_CUDA_SITE_DISPATCH_RING, tickets.late, 0, 0);
        if (__any_sync(0xffffffffu, failed)) {
            break;
        }
    }
}

// Writes what a message without payloads says, and gives its slot back.
__device__ inline void take_origin(const Context &ctx, const ep_cuda_dispatch_args_t &args, const PlanView &view,
                                   const Ring &ring, uint32_t source, uint32_t index)
{
    uint32_t topk = args.plan.topk;
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

// Takes messages without payloads, one a lane: as many lanes for each source as there are, a ticket each.
__device__ inline void take_origins(const Context &ctx, const ep_cuda_dispatch_args_t &args, const PlanView &view,
                                    DispatchShared &shared)
{
    uint32_t num_ranks = args.group.num_ranks, lane = threadIdx.x % 32;
    uint32_t holders = 32 * kPeersPerLane / num_ranks * num_ranks, tickets[kPeersPerLane];
    auto draw = [&](uint32_t source) { return atomicAdd(&ctx.lane->tickets[source], 1u); };
#pragma unroll
    for (uint32_t i = 0; i < kPeersPerLane; ++i) {
        uint32_t holder = 32 * i + lane;
        tickets[i] = holder < holders ? draw(holder % num_ranks) : ~0u;
    }
    for (uint32_t idle = 1;; ++idle) {
        bool left = false, took = false;
        uint32_t late = 0;
#pragma unroll
        for (uint32_t i = 0; i < kPeersPerLane; ++i) {
            uint32_t source = (32 * i + lane) % num_ranks;
            if (tickets[i] >= shared.totals[source]) {
                continue;
            }
            left = true;
            late = source;
            Ring ring(ctx, source, args.group.rank, shared.incoming);
            if (ring.has_message(ctx, tickets[i])) {
                // It is there: this only acquires what it holds.
                ring.await_message(ctx, source, tickets[i], EP_CUDA_SITE_DISPATCH_RING);
                take_origin(ctx, args, view, ring, source, tickets[i]);
                tickets[i] = draw(source);
                took = true;
            }
        }
        uint32_t waiting = __ballot_sync(0xffffffffu, left);
        if (waiting == 0) {
            break;
        }
        if (__any_sync(0xffffffffu, took)) {
            idle = 0;
            continue;
        }
        late = __shfl_sync(0xffffffffu, late, __ffs(waiting) - 1);
        bool failed = lane == 0 && !pause(ctx, idle, EP_CUDA_SITE_DISPATCH_RING, late, 0, 0);
        if (__any_sync(0xffffffffu, failed)) {
            break;
        }
    }
}

// The receivers of a block.
__device__ inline void receive_messages(const Context &ctx, const ep_cuda_dispatch_args_t &args, const PlanView &view,
                                        DispatchShared &shared, char *all_stages)
{
    if (shared.incoming.through == 0) {
        take_origins(ctx, args, view, shared);
    } else {
        take_messages(ctx, args, view, shared, all_stages);
    }
#if __CUDA_ARCH__ >= 900
    bulk_wait_written<0>();
    fence_proxy_async_global();
#endif
}

} // namespace ep
