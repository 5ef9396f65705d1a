/* SPDX-License-Identifier: Apache-2.0
 *
 * wire.h: what ranks write into each other's memory. Plain C, read by the host compiler, by nvcc and by
 * the test that compares it with ep-core/src/wire.rs. One definition for every backend.
 *
 * All integers are little-endian. Offsets and sizes are fixed: ranks of one group run one version.
 */
#ifndef EP_WIRE_H
#define EP_WIRE_H

#include <stdint.h>

enum {
    EP_WIRE_VERSION = 3,
    EP_WIRE_DEPTH = 3,        /* descriptors in flight per (lane, pair): epochs e, e+1, e+2 */
    EP_WIRE_LINE_BYTES = 128, /* two cache lines: adjacent-line prefetch would couple neighbours */
    EP_WIRE_MAX_PAYLOADS = 4,
    EP_WIRE_REQUESTS = 1024, /* entries of a request ring */
    EP_WIRE_ERROR_TEXT = 256,
    EP_WIRE_RECORD_ALIGN = 16 /* records and rows in messages between nodes */
};

/* ep_wire_desc.op */
enum {
    EP_WIRE_OP_PLAN = 1,
    EP_WIRE_OP_DISPATCH = 2,
    EP_WIRE_OP_COMBINE = 3,
    EP_WIRE_OP_FAILED = 4 /* the writer's call failed before it began: equal to nothing, itself included */
};

/* ep_wire_desc.flags: part of the signature, so both sides must agree ... */
enum {
    EP_WIRE_FLAG_TOPK_WEIGHTS = 1, /* dispatch carries weights */
    EP_WIRE_FLAG_ROW_WEIGHTS = 2,  /* combine returns weights */
    EP_WIRE_FLAG_ORDER_SHIFT = 4,  /* combine: reduce order in bits 4-5 */
    EP_WIRE_FLAG_WIRE_BF16 = 64    /* combine: node partials are rounded to bf16 */
};

/* ep_wire_desc.wants: ... and what only the writer of the descriptor decides. */
enum { EP_WIRE_WANTS_META = 1 /* dispatch: send each row's origin, ids and weights through the ring */ };

/* Where a matrix lies for a peer. window 0: not in a window; its rows pass through the staging ring. */
typedef struct ep_wire_place {
    uint32_t window;
    uint32_t reserved;
    uint64_t offset;    /* bytes into the owner's part of the window */
    uint64_t row_pitch; /* bytes between rows */
    uint64_t col_pitch; /* bytes between elements of a row */
} ep_wire_place_t;

/* A descriptor: one per (lane, writer, epoch mod depth), in the reader's memory, followed by a tail of
 * 1 + max_local_experts 32-bit words. The writer fills everything, then release-stores `epoch`: that
 * store publishes the descriptor, and is the credit.
 *
 *   op        places                      capacity  tail[0]               tail[1 + local expert]
 *   PLAN      -                           -         tokens for you        assignments for each of your experts
 *   DISPATCH  payloads[i]: write here     rows      row of your token 0   row of your first assignment to each
 *   COMBINE   [0] rows, [1] row weights:  rows      as DISPATCH           of my experts
 *             read here
 */
typedef struct ep_wire_desc {
    uint64_t epoch; /* number of the call in its lane, from 1 */

    /* Signature: equal on all ranks of a call, or the call fails on all. */
    uint64_t plan_epoch; /* the call that updated the plan; 0 in PLAN */
    uint64_t plan_hash;  /* of the plan's config */
    uint32_t op;
    uint32_t flags;
    uint32_t dtypes; /* a byte per payload */
    uint32_t num_payloads;
    uint32_t row_bytes[EP_WIRE_MAX_PAYLOADS];

    uint32_t wants;
    /* topk, num_experts, layout, expert_alignment: only for the text about plan_hashes that differ. 0 where the
     * writer is a device. */
    uint32_t plan_fields[4];
    uint32_t reserved[11];
    uint64_t capacity;
    ep_wire_place_t places[EP_WIRE_MAX_PAYLOADS];
} ep_wire_desc_t;

/* A descriptor on its way to ranks of another node. Behind it: the words of each rank's tail, `num_ranks` numbers,
 * then the tails (of PLAN; empty otherwise). The rank that takes it copies body and tail into its own memory and
 * that of the others, as if the writer had stored them there. */
typedef struct ep_wire_relay_desc {
    ep_wire_desc_t desc;
    uint64_t rows_first;     /* messages of rows sent on this link and lane before this call */
    uint64_t requests_first; /* requests likewise */
    uint32_t num_tokens;     /* tokens that the writer sends to these ranks, or asks them for */
    uint32_t num_ranks;
    uint32_t reserved[2];
} ep_wire_relay_desc_t;

/* What a message of rows, a request and a response begin with; records follow.
 *
 *   rows, request   token, topk x expert (-1: not there), topk x position within (source, expert) or (source, rank)
 *                   (-1: no row), topk x weight if the call has weights; rows: then the payload's rows
 *   response        a bit per slot whose row is there, topk x weight if the call returns weights, then rows
 *
 * Records and rows are padded to EP_WIRE_RECORD_ALIGN. */
typedef struct ep_wire_chunk {
    uint64_t epoch;
    uint32_t first;   /* the first token, by its place among those that go to these ranks */
    uint32_t records; /* tokens */
    uint32_t piece;   /* rows: the piece of the one token's payloads that is here, or -1: all of every token */
    uint32_t col;     /* requests and responses: first column, and columns */
    uint32_t cols;
    uint32_t reserved[9];
} ep_wire_chunk_t;

/* The words that one peer writes into a rank's memory, per lane. */
typedef struct ep_wire_line {
    uint64_t arrival;      /* an epoch: the peer touches what my descriptor of it describes no more */
    uint64_t ring_head;    /* bytes the peer has put into its staging ring here */
    uint64_t ring_tail;    /* bytes the peer has taken from my staging ring there */
    uint64_t request_head; /* row requests the peer has put into its request ring here */
    uint64_t request_tail; /* row requests the peer has taken from mine there */
    uint64_t reserved[11];
} ep_wire_line_t;

/* The first error that broke the group. `state` is claimed by compare-and-swap 0 -> 1, the record is
 * written, then state 2 is release-stored. */
typedef struct ep_wire_error {
    uint32_t state;
    int32_t status;
    int32_t rank; /* who found it */
    int32_t peer; /* whom it is about, or -1 */
    int32_t lane;
    uint32_t reserved;
    uint64_t epoch;
    char text[EP_WIRE_ERROR_TEXT];
} ep_wire_error_t;

#if defined(__cplusplus)
#define EP_WIRE_ASSERT(c) static_assert(c, #c)
#else
#define EP_WIRE_ASSERT(c) _Static_assert(c, #c)
#endif
EP_WIRE_ASSERT(sizeof(ep_wire_place_t) == 32);
EP_WIRE_ASSERT(sizeof(ep_wire_desc_t) == 256);
EP_WIRE_ASSERT(sizeof(ep_wire_line_t) == EP_WIRE_LINE_BYTES);
EP_WIRE_ASSERT(sizeof(ep_wire_error_t) == 288);
EP_WIRE_ASSERT(sizeof(ep_wire_relay_desc_t) == 288);
EP_WIRE_ASSERT(sizeof(ep_wire_chunk_t) == 64);

#endif /* EP_WIRE_H */
