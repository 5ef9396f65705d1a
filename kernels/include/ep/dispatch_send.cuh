// SPDX-License-Identifier: Apache-2.0
//
// dispatch_send.cuh: the sending warps of a dispatch. Each row is read once, into shared memory, and stored
// from there to its final place at each destination, or into a ring where the place is not in a window.
#pragma once

#include "ep/plan.cuh"
#include "ep/ring.cuh"

namespace ep {

// Warps of a block that send when others receive; without messages all of them send.
constexpr uint32_t kSenderWarps = 7;

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
    uint64_t barriers[EP_DISPATCH_WARPS];
    // Payload i passes the stage at this offset; bulk copies need 16-byte rows on both sides.
    uint32_t stage_offset[EP_WIRE_MAX_PAYLOADS];
    uint32_t stage_bytes; // of all bulk payloads of a row together
    uint32_t bulk;        // bit i: payload i goes by bulk copies
    uint32_t ok;
    MessageLayout incoming;
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
__device__ inline void plan_messages(const ep_cuda_dispatch_args_t &args, const Signature &signature,
                                     MessageLayout &incoming)
{
    uint32_t through = 0;
    for (uint32_t i = 0; i < args.num_payloads; ++i) {
        through |= (args.places[i].window == 0 ? 1u : 0u) << i;
    }
    // Expert-major rows have places of their own, which only the source knows.
    bool meta = wants_origin(args) || (args.plan.layout == 1 && through != 0);
    incoming.set(through, meta, args.topk_weights.data != 0, args.plan.topk, signature.row_bytes,
                 args.group.ring_bytes);
}

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
    MessageLayout incoming;
    plan_messages(args, signature, incoming);
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
    to.messages.set(through, (desc->wants & EP_WIRE_WANTS_META) != 0, args.topk_weights.data != 0, args.plan.topk,
                    signature.row_bytes, args.group.ring_bytes);
    if (to.messages.used() && to.messages.slots == 0) {
        fail(ctx, kErrAborted, EP_CUDA_SITE_RING_TOO_SMALL, int32_t(peer), to.messages.slot_bytes,
             args.group.ring_bytes);
        return false;
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

// A message that a lane has put into a ring and not yet announced.
struct Announcement {
    uint64_t *word = nullptr;
    uint64_t tag = 0;
};

// One warp sends one token: rows by the copy engine, whatever it cannot take by the warp itself.
struct TokenSender {
    const Context &ctx;
    const ep_cuda_dispatch_args_t &args;
    const PlanView &view;
    DispatchShared &shared;
    char *stage;
    uint64_t *barrier;
    uint32_t phase = 0;
    Announcement pending[2]; // of slots k and k + 32

    // Brings the token's rows into the stage.
    __device__ void load(uint32_t token)
    {
#if __CUDA_ARCH__ >= 900
        if (shared.stage_bytes != 0 && threadIdx.x % 32 == 0) {
            mbarrier_expect(barrier, shared.stage_bytes);
            for (uint32_t i = 0; i < args.num_payloads; ++i) {
                if (shared.bulk >> i & 1u) {
                    const ep_cuda_matrix_t &in = args.inputs[i];
                    bulk_load(stage + shared.stage_offset[i],
                              reinterpret_cast<const char *>(in.data) + token * in.row_pitch, in.cols * in.element,
                              barrier);
                }
            }
        }
#endif
    }

    // Stores the token to all its destinations. False: the call failed.
    __device__ bool store(uint32_t token)
    {
        bool ok = true;
        for (uint32_t half = 0; half * 32 < args.plan.topk; ++half) {
            uint32_t k = half * 32 + threadIdx.x % 32, rank = 0;
            int64_t row = row_of_slot(args, view, shared, token, k, &rank);
            char *message = nullptr;
            ok = ok && open_message(token, k, rank, pending[half], &message);
            ok = __all_sync(0xffffffffu, ok);
            if (half == 0) {
                await_stage();
            }
            if (ok) {
                store_staged(rank, row, message);
                store_others(token, rank, row, message);
            }
        }
#if __CUDA_ARCH__ >= 900
        bulk_commit();
#endif
        return ok;
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

    // At the first slot of a token that goes to a rank with messages: waits for room and writes the meta.
    __device__ bool open_message(uint32_t token, uint32_t k, uint32_t rank, Announcement &announcement, char **message)
    {
        uint32_t slot = token * args.plan.topk + k;
        if (k >= args.plan.topk || view.expert[slot] < 0 || view.rank_pos[slot] == uint32_t(EP_CUDA_NO_ROW)) {
            return true;
        }
        rank = view.owner[view.expert[slot]];
        const Destination &to = shared.destinations[rank];
        uint32_t index = view.rank_pos[slot];
        // A flat row that does not fit has no message; the receiver counts the same way.
        if (!to.messages.used() || (args.plan.layout == 0 && to.tail[0] + uint64_t(index) >= to.capacity)) {
            return true;
        }
        Ring ring(ctx, args.group.rank, rank, to.messages);
        if (!ring.await_room(ctx, rank, index, EP_CUDA_SITE_DISPATCH_RING)) {
            return false;
        }
        *message = ring.slot(index);
        announcement.word = ring.full(index);
        announcement.tag = message_tag(ctx.epoch, index);
        if (to.messages.meta != 0) {
            write_meta(token, rank, reinterpret_cast<uint32_t *>(*message));
        }
        return true;
    }

    __device__ void write_meta(uint32_t token, uint32_t rank, uint32_t *words)
    {
        uint32_t topk = args.plan.topk;
        words[0] = token;
        for (uint32_t k = 0; k < topk; ++k) {
            int32_t expert = view.expert[token * topk + k];
            bool here = expert >= 0 && view.owner[expert] == rank;
            words[4 + k] = here ? expert - view.first[rank] : uint32_t(EP_CUDA_NO_ROW);
            words[4 + topk + k] = view.slot_pos[token * topk + k];
            if (args.topk_weights.data != 0) {
                const char *weight = reinterpret_cast<const char *>(args.topk_weights.data) +
                                     token * args.topk_weights.row_pitch + k * args.topk_weights.col_pitch;
                words[4 + 2 * topk + k] = here ? *reinterpret_cast<const uint32_t *>(weight) : 0;
            }
        }
    }

    // Each lane starts the copies of its own slot: to its row, and into its message.
    __device__ void store_staged(uint32_t rank, int64_t row, char *message)
    {
#if __CUDA_ARCH__ >= 900
        const Destination &to = shared.destinations[rank];
        for (uint32_t i = 0; i < args.num_payloads; ++i) {
            if ((shared.bulk >> i & 1u) == 0) {
                continue;
            }
            const char *from = stage + shared.stage_offset[i];
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
    __device__ void store_others(uint32_t token, uint32_t rank, int64_t row, char *message)
    {
        if (shared.bulk == (1u << args.num_payloads) - 1) {
            return;
        }
        uint32_t slots = __ballot_sync(0xffffffffu, row >= 0 || message != nullptr);
        for (; slots != 0; slots &= slots - 1) {
            uint32_t source = __ffs(slots) - 1;
            const Destination &to = shared.destinations[__shfl_sync(0xffffffffu, rank, source)];
            int64_t to_row = __shfl_sync(0xffffffffu, row, source);
            char *to_message = reinterpret_cast<char *>(
                __shfl_sync(0xffffffffu, reinterpret_cast<uint64_t>(message), source));
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

    // Ends the last token: its rows are written, its messages announced, and the stage is free.
    __device__ void settle()
    {
#if __CUDA_ARCH__ >= 900
        bool any = pending[0].word != nullptr || pending[1].word != nullptr;
        if (__any_sync(0xffffffffu, any)) {
            bulk_wait_written();
            fence_proxy_async_global();
        } else {
            bulk_wait_read<0>();
        }
#endif
        // The warp copied rows together; lanes announce what others wrote, too.
        __threadfence_system();
        __syncwarp();
        for (Announcement &announcement : pending) {
            if (announcement.word != nullptr) {
                // Release: pairs with the acquire in `Ring::await_message`.
                st_release_sys(announcement.word, announcement.tag);
                announcement.word = nullptr;
            }
        }
    }
};

// The senders of a block: claim tokens until none are left.
__device__ inline void send_tokens(const Context &ctx, const ep_cuda_dispatch_args_t &args, const PlanView &view,
                                   DispatchShared &shared, char *stages)
{
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    TokenSender sender{ctx, args, view, shared, stages + warp * EP_DISPATCH_STAGE_BYTES, &shared.barriers[warp]};
    uint32_t num_tokens = view.header->num_tokens;
    auto claim = [&] { return lane == 0 ? atomicAdd(&ctx.lane->ticket, 1u) : 0u; };
    uint32_t next = claim();
    for (;;) {
        uint32_t token = __shfl_sync(0xffffffffu, next, 0);
        if (token >= num_tokens) {
            break;
        }
        sender.load(token);
        next = claim();
        if (!sender.store(token)) {
            break;
        }
        sender.settle();
    }
#if __CUDA_ARCH__ >= 900
    bulk_wait_written();
    fence_proxy_async_global();
#endif
}

} // namespace ep
