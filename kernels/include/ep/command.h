/* SPDX-License-Identifier: Apache-2.0
 *
 * command.h: what a producer on a host or a device tells the proxy between nodes, 16 bytes at a time. Plain C,
 * read by the host compiler, by nvcc and by the test that compares it with ep-core/src/net/command.rs.
 *
 * A ring lies in memory that both sides see: `depth` commands, a power of two, all zero at first, and a word
 * `posted`. Its single producer writes command number n (from 0) into place n mod depth once
 * n - posted < depth (acquire), each word by a release store. Both words carry the phase of the lap,
 * EP_COMMAND_PHASE(n, depth), in their top bit; the consumer has a command when it has acquired both in the
 * phase that it expects, and writes nothing back but `posted`, the number of commands that it has taken.
 */
#ifndef EP_COMMAND_H
#define EP_COMMAND_H

#include <stdint.h>

enum {
    EP_COMMAND_BYTES = 16,
    EP_COMMAND_UNIT = 16, /* bytes of the unit of offsets and lengths */
    EP_COMMAND_SEND = 1,  /* send a slot */
    EP_COMMAND_CREDIT = 2 /* give credit: `seq` messages are freed */
};

/* stream = lane * EP_STREAM_RADIX + kind */
enum {
    EP_STREAM_RADIX = 8,
    EP_STREAM_DESC = 0,
    EP_STREAM_ROWS = 1,
    EP_STREAM_REQUEST = 2,
    EP_STREAM_RESPONSE = 3,
    EP_STREAM_ERROR = 4,
    EP_STREAM_CREDIT = 5
};

/* First word: phase:1 op:3 link:13 stream:7 seq:16 length:24. Second word: phase:1 source:31 target:32. */
enum {
    EP_COMMAND_PHASE_AT = 63,
    EP_COMMAND_OP_AT = 60,
    EP_COMMAND_LINK_AT = 47,
    EP_COMMAND_STREAM_AT = 40,
    EP_COMMAND_SEQ_AT = 24,
    EP_COMMAND_LENGTH_BITS = 24,
    EP_COMMAND_SOURCE_AT = 32,
    EP_COMMAND_SOURCE_BITS = 31
};

#define EP_COMMAND_PHASE(position, depth) (((uint64_t)(position) / (uint64_t)(depth) & 1) ^ 1)

#if defined(__CUDACC__)
#define EP_COMMAND_FN static __host__ __device__ inline
#else
#define EP_COMMAND_FN static inline
#endif

typedef struct ep_command {
    uint64_t words[2];
} ep_command_t;

/* `bytes`, `source` (in the region) and `target` (in the peer's landing area) are multiples of EP_COMMAND_UNIT. */
EP_COMMAND_FN ep_command_t ep_command_pack(uint64_t phase, uint32_t op, uint32_t link, uint32_t stream, uint32_t seq,
                                           uint64_t bytes, uint64_t source, uint64_t target)
{
    ep_command_t command;
    command.words[0] = phase << EP_COMMAND_PHASE_AT | (uint64_t)(op & 7u) << EP_COMMAND_OP_AT |
                       (uint64_t)(link & 0x1FFFu) << EP_COMMAND_LINK_AT |
                       (uint64_t)(stream & 0x7Fu) << EP_COMMAND_STREAM_AT |
                       (uint64_t)(seq & 0xFFFFu) << EP_COMMAND_SEQ_AT |
                       (bytes / EP_COMMAND_UNIT & (((uint64_t)1 << EP_COMMAND_LENGTH_BITS) - 1));
    command.words[1] = phase << EP_COMMAND_PHASE_AT |
                       (source / EP_COMMAND_UNIT & (((uint64_t)1 << EP_COMMAND_SOURCE_BITS) - 1))
                           << EP_COMMAND_SOURCE_AT |
                       (target / EP_COMMAND_UNIT & 0xFFFFFFFFu);
    return command;
}

#if defined(__cplusplus)
#define EP_COMMAND_ASSERT(c) static_assert(c, #c)
#else
#define EP_COMMAND_ASSERT(c) _Static_assert(c, #c)
#endif
EP_COMMAND_ASSERT(sizeof(ep_command_t) == EP_COMMAND_BYTES);
EP_COMMAND_ASSERT(EP_COMMAND_LENGTH_BITS == EP_COMMAND_SEQ_AT);
EP_COMMAND_ASSERT(EP_COMMAND_SEQ_AT + 16 == EP_COMMAND_STREAM_AT);
EP_COMMAND_ASSERT(EP_COMMAND_STREAM_AT + 7 == EP_COMMAND_LINK_AT);
EP_COMMAND_ASSERT(EP_COMMAND_LINK_AT + 13 == EP_COMMAND_OP_AT);
EP_COMMAND_ASSERT(EP_COMMAND_OP_AT + 3 == EP_COMMAND_PHASE_AT);
EP_COMMAND_ASSERT(EP_COMMAND_SOURCE_AT + EP_COMMAND_SOURCE_BITS == EP_COMMAND_PHASE_AT);

#endif /* EP_COMMAND_H */
