// SPDX-License-Identifier: Apache-2.0
//
// combine_serve.cuh: rows that lie outside windows. Their holder puts them into rings, in the order in which the
// owners add them: flat rows as they lie, expert-major rows as the owner asks for them.
#pragma once

#include "ep/combine_terms.cuh"
#include "ep/tickets.cuh"

namespace ep {

// A row on its way through a stage into a ring.
struct RowInFlight {
    uint32_t owner;
    uint32_t index;
    uint64_t row;
    uint32_t stage;
};

// One warp that serves.
struct RowServer {
    const Context &ctx;
    const ep_cuda_combine_args_t &args;
    const PlanView &view;
    CombineShared &shared;
    char *stages;
    uint32_t phases = 0;

    __device__ uint32_t warp() const { return threadIdx.x / 32; }

    __device__ bool staged() const { return shared.stage_bytes != 0; }

    __device__ Ring ring(uint32_t owner) const { return Ring(ctx, args.group.rank, owner, shared.messages); }

    // Whether the row of message `index` for `owner` can go.
    __device__ bool is_ready(uint32_t owner, uint32_t index) const
    {
        return ring(owner).has_room(ctx, index) && (!view.expert_major() || ring(owner).has_request(ctx, index));
    }

    // Looks up the claimed row and starts it on its way into a stage.
    __device__ void load(RowInFlight &flight, uint32_t stage)
    {
        flight.stage = stage;
        if (view.expert_major()) {
            // Every lane acquires: all read what the owner published.
            flight.row = ring(flight.owner).requested_row(flight.index);
        } else {
            flight.row = uint64_t(view.base[flight.owner * view.column_words()]) + flight.index;
        }
#if __CUDA_ARCH__ >= 900
        if (staged() && flight.row != kNoSuchRow && threadIdx.x % 32 == 0) {
            uint64_t *barrier = &shared.barriers[warp()][stage];
            mbarrier_expect(barrier, shared.stage_bytes);
            const char *row = reinterpret_cast<const char *>(args.rows.data) + flight.row * args.rows.row_pitch;
            bulk_load(stage_at(stage), row, shared.stage_bytes, barrier);
        }
#endif
    }

    __device__ char *stage_at(uint32_t stage) const
    {
        return stages + (warp() * EP_COMBINE_STAGES + stage) * round_up(shared.stage_bytes, 128);
    }

    // Stores a row into its slot and announces it.
    __device__ void store(const RowInFlight &flight)
    {
        char *slot = ring(flight.owner).slot(flight.index);
        bool together = !staged() || args.row_weights.data != 0;
        if (flight.row != kNoSuchRow) {
            if (args.row_weights.data != 0) {
                const char *weights = reinterpret_cast<const char *>(args.row_weights.data);
                copy_row(slot + shared.messages.payload_offset[1], 4, weights + flight.row * args.row_weights.row_pitch,
                         args.row_weights.col_pitch, args.row_weights.cols, 4);
            }
            store_payload(flight, slot);
        }
#if __CUDA_ARCH__ >= 900
        bulk_commit();
        bulk_wait_written<0>();
        fence_proxy_async_global();
#endif
        if (together) {
            // The warp copied: lane 0's release is cumulative over every lane's stores.
            __syncwarp();
        }
        if (threadIdx.x % 32 == 0) {
            // Release: pairs with the acquire in `Ring::await_message`.
            st_release_sys(ring(flight.owner).full(flight.index), message_tag(ctx.epoch, flight.index));
        }
    }

    __device__ void store_payload(const RowInFlight &flight, char *slot)
    {
        if (!staged()) {
            const char *row = reinterpret_cast<const char *>(args.rows.data) + flight.row * args.rows.row_pitch;
            copy_row(slot, args.rows.element, row, args.rows.element, args.rows.cols, args.rows.element);
            return;
        }
#if __CUDA_ARCH__ >= 900
        while (!mbarrier_try_wait(&shared.barriers[warp()][flight.stage], phases >> flight.stage & 1u)) {
        }
        phases ^= 1u << flight.stage;
        if (threadIdx.x % 32 == 0) {
            bulk_store(slot, stage_at(flight.stage), shared.stage_bytes);
        }
#endif
    }
};

// The servers of a block: put rows into rings until none is left. One row is loaded while one is stored.
__device__ __noinline__ void serve_rows(const ep_cuda_combine_args_t &args, uint64_t epoch, uint64_t deadline_ns,
                                        CombineShared &shared, char *stages)
{
    Context ctx(args.group, epoch, deadline_ns);
    PlanView view(args.plan);
    RowServer server{ctx, args, view, shared, stages};
    Tickets tickets(ctx, shared.totals, args.group.rank + 1 + blockIdx.x);
    auto is_ready = [&](uint32_t owner, uint32_t index) { return server.is_ready(owner, index); };
    RowInFlight flight{}, next{};
    bool left = true, have = false;
    for (uint32_t idle = 0; left || have;) {
        bool chosen = tickets.choose(is_ready, next.owner, next.index, left);
        if (chosen) {
            server.load(next, have ? flight.stage ^ 1u : 0);
            idle = 0;
        }
        if (have) {
            server.store(flight);
        }
        have = chosen;
        flight = next;
        bool idles = left && !have && threadIdx.x % 32 == 0;
        bool failed = idles && !pause(ctx, ++idle, EP_CUDA_SITE_COMBINE_RING, tickets.late, 0, 0);
        if (__any_sync(0xffffffffu, failed)) {
            break;
        }
    }
}

// Asks for the rows of this rank's tokens that come through rings. One warp of each block, by ticket; entries
// are waited for in the order of tokens, so that what an entry waits for was asked for before.
__device__ __noinline__ void ask_for_rows(const ep_cuda_combine_args_t &args, uint64_t epoch, uint64_t deadline_ns,
                                          const CombineShared &shared)
{
    Context ctx(args.group, epoch, deadline_ns);
    PlanView view(args.plan);
    uint32_t lane = threadIdx.x % 32;
    for (bool ok = true; ok;) {
        uint32_t token = lane == 0 ? atomicAdd(&ctx.lane->requested, 1u) : 0u;
        token = __shfl_sync(0xffffffffu, token, 0);
        if (token >= view.header->num_tokens) {
            break;
        }
        for (uint32_t k = lane; k < args.plan.topk; k += 32) {
            Slot slot = look_up(args, view, shared, token, k);
            if (ok && slot.message >= 0) {
                uint64_t row = slot.row >= 0 ? uint64_t(slot.row) : kNoSuchRow;
                Ring ring(ctx, slot.rank, args.group.rank, shared.messages);
                ok = ring.ask(ctx, slot.rank, uint32_t(slot.message), row, EP_CUDA_SITE_COMBINE_RING);
            }
        }
        ok = __all_sync(0xffffffffu, ok);
    }
}

} // namespace ep
