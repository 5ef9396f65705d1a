// SPDX-License-Identifier: Apache-2.0
//
// dispatch_send.cuh: the sending warps of a dispatch. Each row is read once, into shared memory, and stored
// from there to its final place at each destination, or into a ring where the place is not in a window.
#pragma once

#include "ep/plan.cuh"
#include "ep/ring.cuh"
#include "ep/rows.cuh"

namespace ep {

// With messages some warps of a block send and others receive. Receivers of payloads read and write every row,
// senders read each row once for several destinations; without payloads two warps receive what all others send,
// and more would only poll.
__device__ inline uint32_t num_sender_warps(uint32_t active_warps, bool receiving, bool payloads)
{
    if (!receiving) {
        return active_warps;
    }
    return payloads ? max(1u, active_warps * 3 / 8) : max(1u, active_warps - min(2u, active_warps - 1));
}

// What a block knows of a destination. A payload without a base goes through the ring.
struct Destination {
    char *base[EP_WIRE_MAX_PAYLOADS];
    uint64_t row_pitch[EP_WIRE_MAX_PAYLOADS];
    uint64_t col_pitch[EP_WIRE_MAX_PAYLOADS];
    uint64_t capacity;
    const uint32_t *tail;
    MessageLayout messages;
};

// A block's shared memory, beside the stages.
struct DispatchShared {
    Destination destinations[EP_CUDA_MAX_RANKS];
    uint64_t barriers[EP_DISPATCH_WARPS][EP_DISPATCH_MAX_STAGES];
    // Payload i passes a stage at this offset; bulk copies need 16-byte rows on both sides.
    uint32_t stage_offset[EP_WIRE_MAX_PAYLOADS];
    uint32_t stage_bytes;  // of all bulk payloads of a row together
    uint32_t stage_pitch;  // from stage to stage
    uint32_t num_stages;   // of each warp
    uint32_t active_warps; // that have stages
    uint32_t bulk;         // bit i: payload i goes by bulk copies
    uint32_t carries;      // 1: some message carries payloads
    uint32_t ok;
    MessageLayout incoming;
    uint32_t totals[EP_CUDA_MAX_RANKS]; // messages that come from each source
};

__device__ inline void put_i32(uint64_t address, uint64_t index, int32_t value)
{
    if (address != 0) {
        reinterpret_cast<int32_t *>(address)[index] = value;
    }
}

// Writes a local expert id where ids are wanted.
__device__ inline void put_id(const ep_cuda_dispatch_args_t &args, uint64_t index, int32_t id)
{
    if (args.out_idx == 0) {
        return;
    }
    if (args.out_idx_element == 8) {
        reinterpret_cast<int64_t *>(args.out_idx)[index] = id;
    } else {
        reinterpret_cast<int32_t *>(args.out_idx)[index] = id;
    }
}

// Whether a row's origin, ids or weights are wanted beside its payloads.
__device__ inline bool wants_origin(const ep_cuda_dispatch_args_t &args)
{
    return (args.out_idx | args.out_weights | args.src_rank | args.src_token | args.src_slot) != 0;
}

// The messages that peers send to this rank.
__device__ inline void plan_messages(const ep_cuda_dispatch_args_t &args, const PlanView &view,
                                     const Signature &signature, MessageLayout &incoming)
{
    uint32_t through = 0;
    for (uint32_t i = 0; i < args.num_payloads; ++i) {
        through |= (args.places[i].window == 0 ? 1u : 0u) << i;
    }
    // Expert-major rows have places of their own, which only the source knows.
    bool counted = args.plan.layout == 0 && args.rows_per_expert != 0 && view.header->num_rows > args.capacity;
    bool meta = wants_origin(args) || (args.plan.layout == 1 && through != 0) || counted;
    incoming.set(through, meta, args.topk_weights.data != 0, args.plan.topk, signature.row_bytes,
                 args.group.ring_bytes);
}

__device__ inline Signature dispatch_signature(const ep_cuda_dispatch_args_t &args, const PlanView &view)
{
    Signature signature = {};
    signature.plan_epoch = view.header->epoch;
    signature.plan_hash = args.plan.hash;
    // Without an update that worked there is nothing to dispatch, here as on the peers.
    signature.op = signature.plan_epoch != 0 ? EP_WIRE_OP_DISPATCH : EP_WIRE_OP_FAILED;
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
    MessageLayout incoming;
    plan_messages(args, view, signature, incoming);
    for (uint32_t i = threadIdx.x / 32; i < args.group.num_ranks; i += EP_DISPATCH_WARPS) {
        uint32_t peer = (args.group.rank + i) % args.group.num_ranks;
        publish(ctx, peer, [&](ep_wire_desc_t *desc, uint32_t *tail, uint32_t lane) {
            if (lane == 0) {
                put_signature(desc, signature);
                desc->wants = incoming.meta != 0 ? EP_WIRE_WANTS_META : 0;
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
    ep_wire_desc_t *desc = agree(ctx, peer, signature, EP_CUDA_SITE_DISPATCH_CREDIT);
    if (desc == nullptr) {
        return false;
    }
    Destination &to = shared.destinations[peer];
    to.capacity = desc->capacity;
    to.tail = tail_of(desc);
    uint32_t through = 0;
    for (uint32_t i = 0; i < args.num_payloads; ++i) {
        const ep_cuda_matrix_t &own = args.outputs[i];
        ep_wire_place_t place = desc->places[i];
        uint64_t span = place.col_pitch * (own.cols - 1) + own.element;
        through |= (place.window == 0 ? 1u : 0u) << i;
        to.base[i] = nullptr;
        // This rank's own output is reached directly wherever it lies.
        if (peer == args.group.rank) {
            to.base[i] = reinterpret_cast<char *>(own.data);
        } else if (place.window != 0) {
            to.base[i] = resolve(ctx, peer, place, to.capacity, span);
        } else {
            continue;
        }
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
    if (through != 0 && peer != args.group.rank) {
        shared.carries = 1;
    }
    to.messages.set(through, (desc->wants & EP_WIRE_WANTS_META) != 0, args.topk_weights.data != 0, args.plan.topk,
                    signature.row_bytes, args.group.ring_bytes);
    if (to.messages.used() && to.messages.slots == 0) {
        fail(ctx, kErrAborted, EP_CUDA_SITE_RING_TOO_SMALL, int32_t(peer), to.messages.slot_bytes,
             args.group.ring_bytes);
        return false;
    }
    return true;
}

// Decides which payloads pass the stages, and how many stages a warp has.
__device__ inline void plan_stages(const ep_cuda_dispatch_args_t &args, DispatchShared &shared)
{
    uint32_t offset = 0;
    // Two warps at least must have a stage, so that a block can send and receive.
    uint32_t most_bytes = args.shared_bytes / 2 / 128 * 128;
    for (uint32_t i = 0; i < args.num_payloads; ++i) {
        const ep_cuda_matrix_t &in = args.inputs[i];
        uint64_t bytes = uint64_t(in.cols) * in.element;
        bool fits = bytes % 16 == 0 && bulk_aligned(in.data, in.row_pitch, in.col_pitch, in.element) &&
                    offset + bytes <= most_bytes;
        if ((shared.bulk >> i & 1u) != 0 && fits) {
            shared.stage_offset[i] = offset;
            offset += uint32_t(bytes);
        } else {
            shared.bulk &= ~(1u << i);
        }
    }
    shared.stage_bytes = offset;
    shared.stage_pitch = round_up(max(offset, 128u), 128);
    uint32_t stages = args.shared_bytes / shared.stage_pitch;
    shared.active_warps = min(stages, uint32_t(EP_DISPATCH_WARPS));
    shared.num_stages = min(stages / shared.active_warps, uint32_t(EP_DISPATCH_MAX_STAGES));
}

// A warp's stages: a ring of rows in shared memory, each with a barrier that counts its bytes.
struct Stages {
    const DispatchShared &shared;
    char *first;
    uint64_t *barriers;
    uint32_t phases = 0; // bit i: of stage i

    __device__ Stages(DispatchShared &s, char *all)
        : shared(s),
          first(all + threadIdx.x / 32 * s.num_stages * s.stage_pitch),
          barriers(s.barriers[threadIdx.x / 32])
    {
    }

    __device__ char *at(uint32_t stage) const { return first + stage * shared.stage_pitch; }

    __device__ uint32_t after(uint32_t stage) const { return stage + 1 == shared.num_stages ? 0 : stage + 1; }

    // Waits until the bytes announced for a stage are in it.
    __device__ void await(uint32_t stage)
    {
#if __CUDA_ARCH__ >= 900
        while (!mbarrier_try_wait(&barriers[stage], phases >> stage & 1u)) {
        }
        phases ^= 1u << stage;
#endif
    }

    // Waits until the copies out of the stage that comes next have read it. Every lane commits one group a row.
    __device__ void await_free() const
    {
#if __CUDA_ARCH__ >= 900
        if (shared.num_stages == EP_DISPATCH_MAX_STAGES) {
            bulk_wait_read<1>();
        } else {
            bulk_wait_read<0>();
        }
        __syncwarp();
#endif
    }
};

// What a lane knows of one slot of a token.
struct SlotInFlight {
    int32_t expert; // -1: none
    uint32_t rank;
    uint32_t slot_pos;
    uint32_t rank_pos;
    uint32_t weight; // as bits
    int64_t row;     // at the destination; -1: it has none there
};

__device__ inline SlotInFlight look_up_slot(const ep_cuda_dispatch_args_t &args, const PlanView &view,
                                            const DispatchShared &shared, uint32_t token, uint32_t k)
{
    SlotInFlight found{-1, 0, uint32_t(EP_CUDA_NO_ROW), uint32_t(EP_CUDA_NO_ROW), 0, -1};
    if (k >= args.plan.topk) {
        return found;
    }
    uint32_t slot = token * args.plan.topk + k;
    found.expert = view.expert[slot];
    found.slot_pos = view.slot_pos[slot];
    found.rank_pos = view.rank_pos[slot];
    if (args.topk_weights.data != 0) {
        const char *weights = reinterpret_cast<const char *>(args.topk_weights.data);
        weights += token * args.topk_weights.row_pitch + k * args.topk_weights.col_pitch;
        found.weight = *reinterpret_cast<const uint32_t *>(weights);
    }
    if (found.expert < 0) {
        return found;
    }
    found.rank = view.owner[found.expert];
    const Destination &to = shared.destinations[found.rank];
    bool flat = args.plan.layout == 0;
    uint32_t position = flat ? found.rank_pos : found.slot_pos;
    if (position != uint32_t(EP_CUDA_NO_ROW)) {
        uint64_t row = uint64_t(to.tail[flat ? 0 : 1 + found.expert - view.first[found.rank]]) + position;
        found.row = row < to.capacity ? int64_t(row) : -1;
    }
    return found;
}

// A token on its way, in each lane the slots k and k + 32.
struct TokenInFlight {
    uint32_t token;
    uint32_t stage;
    SlotInFlight slots[2];
};

// One warp sends tokens: rows by the copy engine, whatever it cannot take by the warp itself.
struct TokenSender {
    const Context &ctx;
    const ep_cuda_dispatch_args_t &args;
    const PlanView &view;
    DispatchShared &shared;
    Stages stages;
    uint32_t num_slots; // that a lane looks after

    // Starts the token's rows on their way into a stage, and looks up where they go.
    __device__ TokenInFlight load(uint32_t token, uint32_t stage)
    {
        TokenInFlight flight{token, stage, {}};
#if __CUDA_ARCH__ >= 900
        if (shared.stage_bytes != 0 && threadIdx.x % 32 == 0) {
            mbarrier_expect(&stages.barriers[stage], shared.stage_bytes);
            for (uint32_t i = 0; i < args.num_payloads; ++i) {
                if (shared.bulk >> i & 1u) {
                    const ep_cuda_matrix_t &in = args.inputs[i];
                    bulk_load(stages.at(stage) + shared.stage_offset[i],
                              reinterpret_cast<const char *>(in.data) + token * in.row_pitch, in.cols * in.element,
                              &stages.barriers[stage]);
                }
            }
        }
#endif
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i) {
            uint32_t k = i < num_slots ? 32 * i + threadIdx.x % 32 : EP_CUDA_MAX_TOPK;
            flight.slots[i] = look_up_slot(args, view, shared, token, k);
        }
        return flight;
    }

    // Stores the token to all its destinations, and announces its messages. False: the call failed.
    __device__ bool store(const TokenInFlight &flight)
    {
        char *messages[2] = {nullptr, nullptr};
        bool ok = true;
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i) {
            ok = ok && open_message(flight.slots[i], &messages[i]);
        }
        ok = __all_sync(0xffffffffu, ok);
        if (ok) {
            write_metas(flight, messages);
        }
        if (shared.stage_bytes != 0) {
            stages.await(flight.stage);
        }
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i) {
            if (ok && i < num_slots) {
                store_staged(flight.stage, flight.slots[i], messages[i]);
                store_others(flight.token, flight.slots[i], messages[i]);
            }
        }
#if __CUDA_ARCH__ >= 900
        bulk_commit();
#endif
        // A message of a call that failed was not written.
        if (ok && __any_sync(0xffffffffu, messages[0] != nullptr || messages[1] != nullptr)) {
            announce(flight, messages);
        }
        return ok;
    }

    // Announces a token's messages, once their payloads are there: receivers and this warp's next tokens wait for
    // little else.
    __device__ void announce(const TokenInFlight &flight, char *(&messages)[2])
    {
#if __CUDA_ARCH__ >= 900
        if (shared.carries != 0) {
            bulk_wait_written<0>();
            fence_proxy_async_global();
        }
#endif
        // The warp wrote messages together: each lane's release is cumulative over every lane's stores.
        __syncwarp();
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i) {
            const SlotInFlight &slot = flight.slots[i];
            if (messages[i] != nullptr) {
                Ring ring(ctx, args.group.rank, slot.rank, shared.destinations[slot.rank].messages);
                // Release: pairs with the acquire in `Ring::await_message`.
                st_release_sys(ring.full(slot.rank_pos), message_tag(ctx.epoch, slot.rank_pos));
            }
        }
    }

    // True if the slot is the token's first one to a rank that takes messages.
    __device__ bool has_message(const SlotInFlight &slot) const
    {
        if (slot.expert < 0 || slot.rank_pos == uint32_t(EP_CUDA_NO_ROW)) {
            return false;
        }
        const Destination &to = shared.destinations[slot.rank];
        // This rank's own payloads need no message.
        if (slot.rank == args.group.rank && to.messages.meta == 0) {
            return false;
        }
        // A flat row that does not fit has no message; the receiver counts the same way.
        return to.messages.used() && (args.plan.layout != 0 || slot.row >= 0);
    }

    // Waits for room for the slot's message, if it has one. False: the call failed.
    __device__ bool open_message(const SlotInFlight &slot, char **message)
    {
        if (!has_message(slot)) {
            return true;
        }
        Ring ring(ctx, args.group.rank, slot.rank, shared.destinations[slot.rank].messages);
        if (!ring.await_room(ctx, slot.rank, slot.rank_pos, EP_CUDA_SITE_DISPATCH_RING)) {
            return false;
        }
        *message = ring.slot(slot.rank_pos);
        return true;
    }

    // The warp writes the meta of each message together, a slot a lane.
    __device__ void write_metas(const TokenInFlight &flight, char *(&messages)[2])
    {
        uint32_t topk = args.plan.topk, lane = threadIdx.x % 32;
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i) {
            uint32_t opened = __ballot_sync(0xffffffffu, messages[i] != nullptr);
            for (; opened != 0; opened &= opened - 1) {
                uint32_t source = __ffs(opened) - 1;
                uint32_t rank = __shfl_sync(0xffffffffu, flight.slots[i].rank, source);
                uint32_t *words = reinterpret_cast<uint32_t *>(
                    __shfl_sync(0xffffffffu, reinterpret_cast<uint64_t>(messages[i]), source));
                if (shared.destinations[rank].messages.meta == 0) {
                    continue;
                }
                if (lane == 0) {
                    words[0] = flight.token;
                }
#pragma unroll
                for (uint32_t j = 0; j < 2; ++j) {
                    const SlotInFlight &slot = flight.slots[j];
                    uint32_t k = 32 * j + lane;
                    bool here = slot.expert >= 0 && slot.rank == rank;
                    if (k < topk) {
                        words[4 + k] = here ? slot.expert - view.first[rank] : uint32_t(EP_CUDA_NO_ROW);
                        words[4 + topk + k] = slot.slot_pos;
                    }
                    if (k < topk && args.topk_weights.data != 0) {
                        words[4 + 2 * topk + k] = here ? slot.weight : 0;
                    }
                }
            }
        }
    }

    // Each lane starts the copies of its own slot: to its row, and into its message.
    __device__ void store_staged(uint32_t stage, const SlotInFlight &slot, char *message)
    {
#if __CUDA_ARCH__ >= 900
        int64_t row = slot.row;
        const Destination &to = shared.destinations[slot.rank];
        for (uint32_t i = 0; i < args.num_payloads; ++i) {
            if ((shared.bulk >> i & 1u) == 0) {
                continue;
            }
            const char *from = stages.at(stage) + shared.stage_offset[i];
            uint32_t bytes = args.inputs[i].cols * args.inputs[i].element;
            if (row >= 0 && to.base[i] != nullptr) {
                bulk_store(to.base[i] + row * to.row_pitch[i], from, bytes);
            }
            if (message != nullptr && to.base[i] == nullptr) {
                bulk_store(message + to.messages.payload_offset[i], from, bytes);
            }
        }
#endif
    }

    // The warp copies the other payloads, slot by slot.
    __device__ void store_others(uint32_t token, const SlotInFlight &slot, char *message)
    {
        if (shared.bulk == (1u << args.num_payloads) - 1) {
            return;
        }
        uint32_t slots = __ballot_sync(0xffffffffu, slot.row >= 0 || message != nullptr);
        for (; slots != 0; slots &= slots - 1) {
            uint32_t source = __ffs(slots) - 1;
            const Destination &to = shared.destinations[__shfl_sync(0xffffffffu, slot.rank, source)];
            int64_t to_row = __shfl_sync(0xffffffffu, slot.row, source);
            char *to_message =
                reinterpret_cast<char *>(__shfl_sync(0xffffffffu, reinterpret_cast<uint64_t>(message), source));
            for (uint32_t i = 0; i < args.num_payloads; ++i) {
                if (shared.bulk >> i & 1u) {
                    continue;
                }
                const ep_cuda_matrix_t &in = args.inputs[i];
                const char *from = reinterpret_cast<const char *>(in.data) + token * in.row_pitch;
                if (to_row >= 0 && to.base[i] != nullptr) {
                    copy_row(to.base[i] + to_row * to.row_pitch[i], to.col_pitch[i], from, in.col_pitch, in.cols,
                             in.element);
                }
                if (to_message != nullptr && to.base[i] == nullptr) {
                    copy_row(to_message + to.messages.payload_offset[i], in.element, from, in.col_pitch, in.cols,
                             in.element);
                }
            }
        }
    }
};

// The senders of a block: claim tokens until none are left. The next token is loaded and looked up while this one
// is stored.
__device__ inline void send_tokens(const Context &ctx, const ep_cuda_dispatch_args_t &args, const PlanView &view,
                                   DispatchShared &shared, char *all_stages)
{
    uint32_t lane = threadIdx.x % 32, num_tokens = view.header->num_tokens;
    TokenSender sender{ctx, args, view, shared, Stages(shared, all_stages), args.plan.topk > 32 ? 2u : 1u};
    bool ahead = shared.num_stages > 1;
    auto claim = [&] { return lane == 0 ? atomicAdd(&ctx.lane->ticket, 1u) : 0u; };
    auto broadcast = [&](uint32_t value) { return __shfl_sync(0xffffffffu, value, 0); };
    uint32_t token = broadcast(claim()), claimed = claim();
    TokenInFlight flight{};
    if (token < num_tokens) {
        flight = sender.load(token, 0);
    }
    while (token < num_tokens) {
        uint32_t next = broadcast(claimed);
        claimed = next < num_tokens ? claim() : next;
        TokenInFlight next_flight{};
        uint32_t next_stage = sender.stages.after(flight.stage);
        if (ahead && next < num_tokens) {
            sender.stages.await_free();
            next_flight = sender.load(next, next_stage);
        }
        if (!sender.store(flight)) {
            break;
        }
        if (!ahead && next < num_tokens) {
            sender.stages.await_free();
            next_flight = sender.load(next, next_stage);
        }
        token = next;
        flight = next_flight;
    }
#if __CUDA_ARCH__ >= 900
    bulk_wait_written<0>();
    fence_proxy_async_global();
#endif
}

} // namespace ep
