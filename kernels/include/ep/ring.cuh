// SPDX-License-Identifier: Apache-2.0
//
// ring.cuh: staging rings for outputs outside windows. A ring lies in the receiver's memory, one per source,
// and is small enough to stay in the cache. Message i of a call has slot i mod slots; a word per slot says
// which message is in it, and a word per slot in the source's memory says which one was taken out. So many
// warps put and take at once, in any order, and nothing is counted by atomics.
#pragma once

#include "ep/wait.cuh"

namespace ep {

constexpr uint32_t kMaxSlots = 256;
// An area begins with a `full` word per slot, written by the peer when it put a message here; then a `taken`
// word per slot, written by the peer when it took a message out of its own ring for this rank; then the peer's
// requests, each a tag and a row.
constexpr uint32_t kTakenOffset = kMaxSlots * 8;
constexpr uint32_t kRequestsOffset = kTakenOffset + kMaxSlots * 8;
constexpr uint32_t kMaxRequests = 256;
constexpr uint32_t kSlotsOffset = kRequestsOffset + kMaxRequests * 16;
static_assert(kSlotsOffset == EP_CUDA_RING_HEADER_BYTES, "the host reckons with it");

__host__ __device__ constexpr uint32_t round_up(uint32_t value, uint32_t to)
{
    return (value + to - 1) / to * to;
}

// How a message is laid out; source and receiver come to the same numbers.
struct MessageLayout {
    uint32_t through; // bit i: payload i is in the message
    uint32_t meta;    // words: token, then local expert and position per slot, then a weight per slot; 0: none
    uint32_t payload_offset[EP_WIRE_MAX_PAYLOADS];
    uint32_t slot_bytes;
    uint32_t slots; // 0: a message does not fit the ring

    __host__ __device__ void set(uint32_t through_mask, bool has_meta, bool has_weights, uint32_t topk,
                                 const uint32_t *row_bytes, uint64_t ring_bytes)
    {
        through = through_mask;
        meta = has_meta ? 4 + topk * (has_weights ? 3 : 2) : 0;
        uint32_t offset = round_up(4 * meta, 16);
        for (int i = 0; i < EP_WIRE_MAX_PAYLOADS; ++i) {
            payload_offset[i] = offset;
            offset += (through >> i & 1u) != 0 ? round_up(row_bytes[i], 16) : 0;
        }
        fit(offset, ring_bytes);
    }

    // The messages of a combine: a row, then its weights.
    __host__ __device__ void set_row(uint32_t row_bytes, uint32_t weight_bytes, uint64_t ring_bytes)
    {
        through = 1;
        meta = 0;
        payload_offset[0] = 0;
        payload_offset[1] = round_up(row_bytes, 16);
        fit(payload_offset[1] + weight_bytes, ring_bytes);
    }

    __host__ __device__ void fit(uint32_t bytes, uint64_t ring_bytes)
    {
        slot_bytes = round_up(bytes, 128);
        uint64_t most = slot_bytes == 0 || ring_bytes < kSlotsOffset ? 0 : (ring_bytes - kSlotsOffset) / slot_bytes;
        slots = most < kMaxSlots ? uint32_t(most) : kMaxSlots;
    }

    __host__ __device__ bool used() const { return slot_bytes != 0; }
};

// The word that says "message `index` of call `epoch`". Later messages have larger words.
__device__ __forceinline__ uint64_t message_tag(uint64_t epoch, uint32_t index)
{
    return epoch << 32 | (uint64_t(index) + 1);
}

// The receiver of a ring asks its source for a row: request i becomes message i.
struct Request {
    uint64_t tag; // of the message; written last
    uint64_t row;
};

// In a request: the row is behind the holder's capacity, and its message is empty.
constexpr uint64_t kNoSuchRow = ~0ull;

// One direction of one ring: from a source to a receiver.
struct Ring {
    char *area;        // of the receiver, for the source
    uint64_t *taken;   // of the source, for the receiver
    Request *requests; // behind `taken`
    uint32_t slots;
    uint32_t slot_bytes;

    __device__ Ring(const Context &ctx, uint32_t source, uint32_t receiver, const MessageLayout &layout)
        : area(reinterpret_cast<char *>(ctx.group.segments[receiver] + ctx.group.ring_offset +
                                        source * ctx.group.ring_bytes)),
          taken(reinterpret_cast<uint64_t *>(ctx.group.segments[source] + ctx.group.ring_offset +
                                             receiver * ctx.group.ring_bytes + kTakenOffset)),
          requests(reinterpret_cast<Request *>(taken + kMaxSlots)),
          slots(layout.slots),
          slot_bytes(layout.slot_bytes)
    {
    }

    __device__ uint64_t *full(uint32_t index) const { return reinterpret_cast<uint64_t *>(area) + index % slots; }

    __device__ char *slot(uint32_t index) const { return area + kSlotsOffset + uint64_t(index % slots) * slot_bytes; }

    // True if a wait for the room, or for the message, would end at once. Relaxed: a hint.
    __device__ bool has_room(const Context &ctx, uint32_t index) const
    {
        return index < slots || ld_relaxed_sys(taken + index % slots) >= message_tag(ctx.epoch, index - slots);
    }

    __device__ bool has_message(const Context &ctx, uint32_t index) const
    {
        return ld_relaxed_sys(full(index)) >= message_tag(ctx.epoch, index);
    }

    // Waits until the slot of message `index` may be written. In a call's first lap it may: the last call took
    // all its messages out before it ended.
    __device__ bool await_room(const Context &ctx, uint32_t receiver, uint32_t index, uint32_t site) const
    {
        // Pairs with the release in `put_back`; the receiver reads the slot no more.
        return index < slots || await_word(ctx, taken + index % slots, message_tag(ctx.epoch, index - slots), site,
                                           receiver);
    }

    // Waits until message `index` is in its slot.
    __device__ bool await_message(const Context &ctx, uint32_t source, uint32_t index, uint32_t site) const
    {
        // Pairs with the release of the `full` word by the source; makes the message visible.
        return await_word(ctx, full(index), message_tag(ctx.epoch, index), site, source);
    }

    // The receiver asks for the row of message `index`. Its entry is free once the message that had it is here.
    // False: the call failed.
    __device__ bool ask(const Context &ctx, uint32_t source, uint32_t index, uint64_t row, uint32_t site) const
    {
        if (index >= kMaxRequests && !await_message(ctx, source, index - kMaxRequests, site)) {
            return false;
        }
        Request *request = requests + index % kMaxRequests;
        *reinterpret_cast<volatile uint64_t *>(&request->row) = row;
        // Release: pairs with the acquire in `requested_row`; publishes the row.
        st_release_sys(&request->tag, message_tag(ctx.epoch, index));
        return true;
    }

    // True if the row of message `index` was asked for. Relaxed: a hint.
    __device__ bool has_request(const Context &ctx, uint32_t index) const
    {
        return ld_relaxed_sys(&requests[index % kMaxRequests].tag) == message_tag(ctx.epoch, index);
    }

    // The row that was asked for, after `has_request`.
    __device__ uint64_t requested_row(uint32_t index) const
    {
        const Request *request = requests + index % kMaxRequests;
        // Acquire: pairs with the release in `ask`.
        ld_acquire_sys(&request->tag);
        return *reinterpret_cast<const volatile uint64_t *>(&request->row);
    }

    // Says that the slot of message `index` may be written again.
    __device__ void put_back(const Context &ctx, uint32_t index) const
    {
        // Release: pairs with the acquire in `await_room`.
        st_release_sys(taken + index % slots, message_tag(ctx.epoch, index));
    }
};

} // namespace ep
