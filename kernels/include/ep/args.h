/* SPDX-License-Identifier: Apache-2.0
 *
 * args.h: what the host passes to a kernel, by value, as its single parameter. Plain C, read by nvcc, by
 * the host compiler and by the test that compares it with ep-cuda/src/args.rs. Addresses are 64-bit numbers:
 * they are valid on the device only.
 */
#ifndef EP_ARGS_H
#define EP_ARGS_H

#include "ep/wire.h"

enum {
    EP_CUDA_MAX_RANKS = 72, /* of one node */
    EP_CUDA_MAX_WINDOWS = 64,
    EP_CUDA_MAX_TOPK = 64,
    EP_CUDA_MAX_CHUNKS = 64, /* pieces in which a plan update counts its tokens */
    EP_CUDA_RING_HEADER_BYTES = 8192, /* words and requests of a ring before its first message */
    EP_CUDA_NO_ROW = -1      /* in slot_pos and rank_pos, as 32 bits */
};

/* A lane's private words, in this rank's device memory; zero at first. */
typedef struct ep_cuda_lane {
    uint64_t epoch;   /* of the last call, advanced by the last block of a call */
    uint32_t ticket;  /* tokens claimed in the call in progress; 0 between calls */
    uint32_t done;    /* blocks that have ended in the call in progress; 0 between calls */
    uint32_t opened;  /* 1 once a block of the call published its descriptors; 0 between calls */
    uint32_t verdict; /* EP_CUDA_VERDICT_ of the call in progress; 0 between calls */
    uint32_t requested; /* tokens whose rows were asked for in the call in progress; 0 between calls */
    uint32_t reserved[9];
    /* Drawn for messages of each peer: from it in a dispatch, to it in a combine; 0 between calls. */
    uint32_t tickets[EP_CUDA_MAX_RANKS];
    uint32_t padding[8];
} ep_cuda_lane_t;

enum { EP_CUDA_VERDICT_OK = 0, EP_CUDA_VERDICT_MISMATCH = 1, EP_CUDA_VERDICT_BROKEN = 2 };

/* Where the first error of a kernel was met. */
enum {
    EP_CUDA_SITE_NONE = 0,
    EP_CUDA_SITE_PLAN_COUNTS = 1,     /* waiting for a peer's counts */
    EP_CUDA_SITE_DISPATCH_CREDIT = 2, /* waiting for a peer's credit */
    EP_CUDA_SITE_DISPATCH_ROWS = 3,   /* waiting for a peer's rows */
    EP_CUDA_SITE_COMBINE_ROWS = 4,    /* waiting for a peer's descriptor */
    EP_CUDA_SITE_COMBINE_READERS = 5, /* waiting for a peer to have read this rank's rows */
    EP_CUDA_SITE_BAD_PLACE = 6,       /* a peer names a window that is not there */
    EP_CUDA_SITE_BAD_ID = 7,          /* topk_idx holds an id out of range: peer = token, expected = slot, seen = id */
    EP_CUDA_SITE_RING_TOO_SMALL = 8,  /* a message of `expected` bytes does not fit a ring of `seen` */
    EP_CUDA_SITE_DISPATCH_RING = 9,   /* waiting for room in a ring, or for a message in it */
    EP_CUDA_SITE_COMBINE_RING = 10,   /* the same in a combine */
    /* A descriptor of `peer` that differs: `expected` is this rank's, `seen` the peer's. */
    EP_CUDA_SITE_FAILED = 20, /* the call of one of them failed before it began */
    EP_CUDA_SITE_OP = 21,
    EP_CUDA_SITE_PLAN_HASH = 22,
    EP_CUDA_SITE_PLAN_EPOCH = 23,
    EP_CUDA_SITE_NUM_PAYLOADS = 24,
    EP_CUDA_SITE_DTYPES = 25,
    EP_CUDA_SITE_FLAGS = 26,
    EP_CUDA_SITE_ROW_BYTES = 27 /* of payload 0; the others follow */
};

/* A rank's report to its host, in pinned memory that the device maps. `state` is claimed by
 * compare-and-swap 0 -> 1, the record is written, then 2 is release-stored. `host_abort` is written by the
 * host; kernels that wait read it. */
typedef struct ep_cuda_report {
    uint32_t state;
    uint32_t site;
    int32_t rank; /* who found it */
    int32_t peer;
    int32_t lane;
    int32_t status; /* EP_ERR_ of ep.h */
    uint64_t epoch;
    uint64_t expected;
    uint64_t seen;
    uint32_t host_abort;
    uint32_t reserved[3];
} ep_cuda_report_t;

/* Everything about the group and the lane that a call needs. */
typedef struct ep_cuda_group {
    uint32_t rank;
    uint32_t num_ranks;
    uint32_t lane;
    uint32_t max_local_experts;
    uint64_t timeout_ns;
    uint64_t report;  /* ep_cuda_report_t, pinned, mapped */
    uint64_t state;   /* ep_cuda_lane_t */
    uint64_t windows; /* [EP_CUDA_MAX_WINDOWS][num_ranks] base addresses, 0: none; windows count from 1 */
    uint64_t window_bytes; /* [EP_CUDA_MAX_WINDOWS][num_ranks] */
    /* Byte offsets into a segment, the same on every rank. */
    uint64_t error_offset; /* ep_wire_error_t; its `state` is the abort word */
    uint64_t line_offset;  /* lines of this lane: + peer * EP_WIRE_LINE_BYTES */
    uint64_t desc_offset;  /* descriptors of this lane: + (peer * DEPTH + epoch % DEPTH) * desc_stride */
    uint64_t desc_stride;
    uint64_t ring_offset; /* staging rings of this lane: + peer * ring_bytes */
    uint64_t ring_bytes;
    uint32_t node_of[EP_CUDA_MAX_RANKS];
    uint64_t segments[EP_CUDA_MAX_RANKS]; /* every rank's segment, as this rank maps it */
} ep_cuda_group_t;

/* What an update leaves for later calls, in the plan's device memory. */
typedef struct ep_cuda_plan_header {
    uint64_t epoch; /* of the update; 0: none, or it failed */
    uint32_t num_tokens;
    uint32_t num_rows; /* that a dispatch delivers here, padding included */
    uint32_t num_recv_tokens;
    uint32_t reserved[11];
} ep_cuda_plan_header_t;

/* The arrays of a plan, as in ep-core/src/plan/state.rs. */
typedef struct ep_cuda_plan {
    uint64_t hash;
    uint32_t topk;
    uint32_t num_experts;
    uint32_t num_local; /* experts of this rank */
    uint32_t layout;    /* EP_LAYOUT_ of ep.h */
    uint32_t alignment;
    uint32_t max_tokens;
    uint64_t header;       /* ep_cuda_plan_header_t */
    uint64_t owner;        /* uint32 [num_experts] */
    uint64_t first;        /* uint32 [num_ranks + 1] */
    uint64_t expert;       /* int32 [max_tokens * topk] */
    uint64_t slot_pos;     /* uint32 [max_tokens * topk] */
    uint64_t rank_pos;     /* uint32 [max_tokens * topk] */
    uint64_t send_pos;     /* uint32 [max_tokens * topk]: among all rows for that rank; expert-major only */
    uint64_t chunk_counts; /* uint32 [EP_CUDA_MAX_CHUNKS][bins], see plan.cuh */
    uint64_t column;       /* uint32 [num_ranks][1 + num_local] */
    uint64_t base;         /* uint32 [num_ranks][1 + num_local] */
    uint64_t expert_rows;  /* uint32 [num_local] */
    uint64_t expert_start; /* uint32 [num_local + 1] */
    /* Pinned, mapped: uint64 sequence of the update, then int64 num_rows, num_recv_tokens,
     * rows_per_expert[num_local], rows_per_source[num_ranks]. The sequence is release-stored last; with bit 63
     * set it says that the update failed. */
    uint64_t host_counts;
} ep_cuda_plan_t;

/* A matrix in device memory; strides in bytes. data 0: absent. */
typedef struct ep_cuda_matrix {
    uint64_t data;
    uint64_t rows;
    uint32_t cols;
    uint32_t element; /* bytes */
    uint64_t row_pitch;
    uint64_t col_pitch;
} ep_cuda_matrix_t;

/* plan_count, plan_place. */
typedef struct ep_cuda_plan_args {
    ep_cuda_group_t group;
    ep_cuda_plan_t plan;
    ep_cuda_matrix_t topk_idx; /* element 4 or 8 */
    uint32_t num_tokens;
    uint32_t num_chunks;   /* at most EP_CUDA_MAX_CHUNKS; chunk c has tokens c * chunk_tokens ... */
    uint32_t chunk_tokens;
    uint32_t sequence; /* of the plan's updates, from 1 */
} ep_cuda_plan_args_t;

/* dispatch. */
typedef struct ep_cuda_dispatch_args {
    ep_cuda_group_t group;
    ep_cuda_plan_t plan;
    uint32_t num_payloads;
    uint32_t dtypes; /* as in the descriptor */
    ep_cuda_matrix_t inputs[EP_WIRE_MAX_PAYLOADS];
    ep_cuda_matrix_t outputs[EP_WIRE_MAX_PAYLOADS]; /* this rank's */
    ep_wire_place_t places[EP_WIRE_MAX_PAYLOADS];   /* the same, as peers find them */
    ep_cuda_matrix_t topk_weights;                  /* [tokens, topk] fp32 */
    uint64_t capacity;
    uint32_t out_idx_element; /* 4 or 8; 0: not wanted */
    uint32_t shared_bytes;    /* dynamic shared memory of a block */
    uint64_t out_idx;     /* [capacity, topk] */
    uint64_t out_weights; /* [capacity, topk or 1] */
    uint64_t src_rank;    /* [capacity] each, or 0 */
    uint64_t src_token;
    uint64_t src_slot;
    uint64_t num_rows; /* one each, or 0 */
    uint64_t num_required;
    uint64_t num_dropped;
    uint64_t rows_per_expert;
    uint64_t expert_offsets;
} ep_cuda_dispatch_args_t;

/* combine. */
typedef struct ep_cuda_combine_args {
    ep_cuda_group_t group;
    ep_cuda_plan_t plan;
    ep_cuda_matrix_t rows; /* this rank's */
    ep_cuda_matrix_t row_weights;
    ep_wire_place_t places[2]; /* the same, as peers find them */
    ep_cuda_matrix_t topk_weights;
    ep_cuda_matrix_t bias[2];
    ep_cuda_matrix_t combined;
    ep_cuda_matrix_t combined_weights;
    uint32_t dtype; /* EP_DTYPE_ of ep.h */
    uint32_t order; /* EP_REDUCE_ of ep.h */
    uint32_t wire_bf16;
    uint32_t shared_bytes; /* dynamic shared memory of a block */
} ep_cuda_combine_args_t;

EP_WIRE_ASSERT(sizeof(ep_cuda_lane_t) == 384);
EP_WIRE_ASSERT(sizeof(ep_cuda_report_t) == 64);
EP_WIRE_ASSERT(sizeof(ep_cuda_plan_header_t) == 64);
EP_WIRE_ASSERT(sizeof(ep_cuda_dispatch_args_t) <= 4096); /* the limit of kernel parameters */
EP_WIRE_ASSERT(sizeof(ep_cuda_combine_args_t) <= 4096);

#endif /* EP_ARGS_H */
