// SPDX-License-Identifier: Apache-2.0
//
// tickets.cuh: how warps share the work of all rings of a rank. A warp holds a ticket for the next message of each
// peer, and serves whichever can go: nobody waits for one peer while another could be served. Otherwise ranks could
// wait for each other in a circle, each for room in a ring that nobody empties.
#pragma once

#include "ep/wait.cuh"

namespace ep {

constexpr uint32_t kPeersPerLane = (EP_CUDA_MAX_RANKS + 31) / 32;

// Lane l looks after the peers l, l + 32 and l + 64.
struct Tickets {
    const Context &ctx;
    const uint32_t *totals; // messages of each peer in this call
    uint32_t turn;          // the lane whose peer is preferred
    uint32_t late = 0;      // a peer that could not be served at the last look
    uint32_t next[kPeersPerLane] = {};

    // Draws the first tickets.
    __device__ Tickets(const Context &c, const uint32_t *all, uint32_t first) : ctx(c), totals(all), turn(first % 32)
    {
#pragma unroll
        for (uint32_t i = 0; i < kPeersPerLane; ++i) {
            uint32_t peer = 32 * i + threadIdx.x % 32;
            next[i] = peer < ctx.group.num_ranks && totals[peer] != 0 ? draw(peer) : 0;
        }
    }

    __device__ uint32_t draw(uint32_t peer) const { return atomicAdd(&ctx.lane->tickets[peer], 1u); }

    // Chooses a message of the warp that `is_ready(peer, index)` lets go. `left`: there are others that cannot yet.
    template <typename Ready>
    __device__ bool choose(Ready is_ready, uint32_t &peer, uint32_t &index, bool &left)
    {
        uint32_t lane = threadIdx.x % 32;
        left = false;
#pragma unroll
        for (uint32_t i = 0; i < kPeersPerLane; ++i) {
            if (32 * i >= ctx.group.num_ranks) {
                break;
            }
            uint32_t own = 32 * i + lane;
            bool open = own < ctx.group.num_ranks && next[i] < totals[own];
            uint32_t waiting = __ballot_sync(0xffffffffu, open);
            uint32_t ready = __ballot_sync(0xffffffffu, open && is_ready(own, next[i]));
            if (ready != 0) {
                // Peers in turn.
                uint32_t later = ready & ~0u << turn;
                uint32_t which = __ffs(later != 0 ? later : ready) - 1;
                peer = 32 * i + which;
                index = __shfl_sync(0xffffffffu, next[i], which);
                turn = (which + 1) % 32;
                if (lane == which) {
                    next[i] = draw(own);
                }
                return true;
            }
            if (waiting != 0) {
                left = true;
                late = 32 * i + __ffs(waiting) - 1;
            }
        }
        return false;
    }
};

} // namespace ep
