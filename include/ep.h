/* SPDX-License-Identifier: Apache-2.0
 *
 * ep.h: expert-parallel dispatch and combine. This header is the manual.
 *
 * A mixture-of-experts layer sends each token to the ranks that own its top-k experts (dispatch) and
 * sums what the experts return (combine). A program uses the library in this order:
 *
 *   ep_group_create      once, by every rank                         collective
 *   ep_window_allocate   once, for outputs that peers write directly collective, optional
 *   ep_plan_create       once per routing that is alive at a time    local
 *   ep_plan_update       per batch: takes topk_idx                   collective, stream-ordered
 *   ep_plan_counts       the sizes of what will arrive               local, waits
 *   ep_dispatch          rows go to their experts                    collective, stream-ordered
 *   ep_combine           rows come back and are summed               collective, stream-ordered
 *   ep_group_destroy     once                                        local, bounded
 *
 * WORDS. Rank: a member of the group (a process, or a thread with a group of its own). Token: an input
 * row. Slot: one of a token's top-k places, `k` in 0..topk. Row: one line of a dispatched payload.
 * Window: memory of a rank that its peers may write and read. Lane: an ordered sequence of collective
 * calls. Plan: one routing, reusable.
 *
 * LANES. Within a lane every rank issues the same sequence of collective calls. Between lanes nothing is
 * ordered. A group has as many lanes as its config says; a plan belongs to one. Calls that meet in a lane
 * and do not match fail on every rank with EP_ERR_MISMATCH, and the next calls work again.
 *
 * STREAMS. `void *stream` orders work. Host backend: NULL runs the call before it returns, an
 * `ep_stream_t *` queues it on that stream's own thread. CUDA backend: a `cudaStream_t`.
 * "Stream-ordered" means that inputs and outputs belong to the call until the work on the stream is done.
 *
 * STATUS. Every call that can fail returns an `ep_status_t`. The ranges say how far the damage reaches:
 *     0         EP_OK
 *     1 –  99   caller error: nothing was done, nothing changed, call again with the mistake corrected
 *   100 – 199   this call failed: outputs are undefined within their bounds, the objects still work
 *   200 – 299   the group is broken: abort or destroy it; the process and its device go on working
 *   300 –       the process or device is lost
 * ep_last_error() has the sentence that goes with it. Outputs are written only on success, but for the
 * payloads of a failed call (100 and up).
 *
 * STRUCTS begin with `struct_size`. Set it to sizeof the struct (the EP_*_INIT values do) and leave what
 * you do not need zero: zero always means the default. A struct of an older header is accepted and
 * extended with zeros. A struct of a newer header is accepted if what this library does not know is zero,
 * and refused with EP_ERR_UNKNOWN_FIELD otherwise.
 *
 * THREADS. Different groups are independent. Calls on one group may come from several threads if they are
 * of different lanes. ep_group_abort, ep_group_health and ep_last_error may be called by any thread at
 * any time, until ep_group_destroy is called.
 *
 * FORK. A child may not use what its parent made: every call with such a handle returns EP_ERR_BAD_HANDLE
 * there and changes nothing. It may make objects of its own.
 *
 * NO CALL ends the process, lets a panic or exception out, or waits without a deadline.
 */
#ifndef EP_H
#define EP_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(EP_STATIC)
#define EP_API
#else
#define EP_API __attribute__((visibility("default")))
#endif

/* ---- Version ------------------------------------------------------------------------------------- */

#define EP_VERSION_MAJOR 0
#define EP_VERSION_MINOR 1
#define EP_VERSION_PATCH 0
#define EP_VERSION_NUMBER (EP_VERSION_MAJOR * 10000 + EP_VERSION_MINOR * 100 + EP_VERSION_PATCH)

/* EP_VERSION_NUMBER of the library that is loaded. Any thread. */
EP_API uint32_t ep_version(void);

/* ---- Status -------------------------------------------------------------------------------------- */

typedef int32_t ep_status_t;

enum {
    EP_OK = 0,

    EP_ERR_INVALID_ARGUMENT = 1, /* null, misaligned, negative, too large, or contradicts another argument */
    EP_ERR_UNKNOWN_FIELD = 2,    /* struct_size is too small, or a field unknown to this library is not zero */
    EP_ERR_OUT_OF_RANGE = 3,     /* an expert id, rank or lane outside its range; the text names it */
    EP_ERR_CAPACITY = 4,         /* more tokens, rows or bytes than the object was made for */
    EP_ERR_INVALID_STATE = 5,    /* calls in the wrong order, such as a dispatch before ep_plan_update */
    EP_ERR_UNSUPPORTED = 6,      /* not offered by this backend; the text says what is */
    EP_ERR_BAD_HANDLE = 7,       /* null, of another kind, of another group, or already destroyed */

    EP_ERR_MISMATCH = 100,      /* ranks disagree: configuration, or the calls that met in a lane */
    EP_ERR_BOOTSTRAP = 101,     /* the ranks could not meet; the text names who is missing */
    EP_ERR_OUT_OF_MEMORY = 102, /* memory could not be allocated or mapped */
    EP_ERR_SYSTEM = 103,        /* the operating system refused; the text names the call */
    EP_ERR_NOT_READY = 104,     /* the result is not there yet; call again */

    EP_ERR_TIMEOUT = 200,   /* a peer did not do its part before the deadline; the text names it */
    EP_ERR_PEER_LOST = 201, /* a peer died or left; the text names it */
    EP_ERR_ABORTED = 202,   /* the group was aborted, or an earlier call broke it; the text repeats why */
    EP_ERR_INTERNAL = 203,  /* a defect of the library was caught; please report the text */

    EP_ERR_DEVICE_LOST = 300 /* the device's context is lost */
};

/* How far a status reaches. */
enum { EP_SCOPE_NONE = 0, EP_SCOPE_CALLER = 1, EP_SCOPE_CALL = 2, EP_SCOPE_GROUP = 3, EP_SCOPE_PROCESS = 4 };

/* The name of a status, such as "EP_ERR_TIMEOUT"; "EP_ERR_UNKNOWN" for any other number. Static text. */
EP_API const char *ep_status_name(ep_status_t status);

/* The EP_SCOPE_ value of a status. */
EP_API int32_t ep_status_scope(ep_status_t status);

/* The sentence of the last failed call of this thread: what was wrong, what was expected, what to do.
 * Empty before the first failure. Valid until the next ep_ call of the same thread. Never NULL. */
EP_API const char *ep_last_error(void);

/* ---- Tensors ------------------------------------------------------------------------------------- */

enum {
    EP_DTYPE_BF16 = 1,
    EP_DTYPE_F16 = 2,
    EP_DTYPE_F32 = 3,
    EP_DTYPE_F8_E4M3 = 4,
    EP_DTYPE_F8_E5M2 = 5,
    EP_DTYPE_UE8M0 = 6,  /* one-byte power-of-two scales */
    EP_DTYPE_OPAQUE = 7, /* bytes that the library does not interpret; rows of a multiple of 16 bytes */
    EP_DTYPE_I32 = 8,    /* also: four packed UE8M0 scales */
    EP_DTYPE_I64 = 9
};

/* A matrix of `rows` x `cols` elements: element (r, c) is at data + (r * row_stride + c * col_stride)
 * elements. Strides are in elements; row_stride 0 means cols * col_stride, col_stride 0 means 1.
 * `data` may be NULL when rows is 0, and is aligned to the element (EP_DTYPE_OPAQUE: to 16 bytes).
 * A tensor that is all zero is absent. Distinct elements may not overlap. */
typedef struct ep_tensor {
    void *data;
    int32_t dtype;
    uint32_t reserved;
    int64_t rows;
    int64_t cols;
    int64_t row_stride;
    int64_t col_stride;
} ep_tensor_t;

/* ---- Meeting: how ranks find each other ------------------------------------------------------------ */

/* Names a rendezvous and holds its secret. Plain bytes: send it to the other ranks as you like. */
typedef struct ep_unique_id {
    uint8_t bytes[128];
} ep_unique_id_t;

/* Makes a rendezvous served by this process, on the address in EP_BOOTSTRAP_ADDR ("ip" or "host", with
 * ":port" if the system shall not choose one), without it on 127.0.0.1. An address that is not this host's
 * but leads here by translation, as a Kubernetes Service does, needs the port: peers connect to it, this
 * process listens at all its addresses. The process must stay until every rank has destroyed its group.
 * Local, does not block (but for resolving a host name), any thread.
 * Errors: EP_ERR_SYSTEM, EP_ERR_INVALID_ARGUMENT (what EP_BOOTSTRAP_ADDR holds). */
EP_API ep_status_t ep_unique_id_create(ep_unique_id_t *id_out);

/* Makes the same id in every process from an address that all know ("host:port", as torchrun's
 * MASTER_ADDR and a free port) and a secret that all share; rank 0 serves it. Local, any thread.
 * Errors: EP_ERR_INVALID_ARGUMENT, EP_ERR_SYSTEM (the host name does not resolve). */
EP_API ep_status_t ep_unique_id_from_address(const char *address, const char *secret, ep_unique_id_t *id_out);

/* All ranks give `bytes` bytes at `send`; `recv` gets num_ranks * bytes, by rank. Returns 0 on success.
 * Called by the creating thread, during ep_group_create and ep_window_allocate only. If it blocks, its
 * deadline is its own. */
typedef int32_t (*ep_all_gather_fn)(void *ctx, const void *send, void *recv, size_t bytes);

/* How the ranks of one group meet. Exactly one of all_gather, unique_id and file is set. */
typedef struct ep_bootstrap {
    uint32_t struct_size;
    uint32_t reserved_flags;
    int32_t rank;
    int32_t num_ranks;
    ep_all_gather_fn all_gather; /* the caller's own, such as MPI's or torch.distributed's */
    void *all_gather_ctx;
    const ep_unique_id_t *unique_id; /* the built-in TCP rendezvous */
    const char *file;                /* the same, its id found through a file that rank 0 writes */
    uint32_t timeout_ms;             /* 0: 30 s. How long to wait for absent ranks */
    uint32_t reserved;
} ep_bootstrap_t;

#define EP_BOOTSTRAP_INIT { sizeof(ep_bootstrap_t), 0, 0, 0, NULL, NULL, NULL, NULL, 0, 0 }

/* ---- Group --------------------------------------------------------------------------------------- */

typedef struct ep_group ep_group_t;

enum { EP_BACKEND_AUTO = 0, EP_BACKEND_HOST = 1, EP_BACKEND_CUDA = 2 };

/* How ranks reach each other. AUTO: shared memory if all ranks have it, otherwise shared memory inside a node and
 * the network between nodes. SHARED_MEMORY: nothing else. FABRIC: the network between ranks of different nodes, also
 * where they could share memory. */
enum { EP_TRANSPORT_AUTO = 0, EP_TRANSPORT_SHARED_MEMORY = 1, EP_TRANSPORT_FABRIC = 2 };

/* How a token comes to the ranks of another node. RELAY (AUTO): once, to a rank of that node that passes it on.
 * DIRECT: to each rank by itself, more bytes and fewer steps. */
enum { EP_ROUTE_AUTO = 0, EP_ROUTE_RELAY = 1, EP_ROUTE_DIRECT = 2 };

/* Every rank gives the same values, but for node_id. */
typedef struct ep_group_config {
    uint32_t struct_size;
    uint32_t reserved_flags;
    int32_t backend;            /* EP_BACKEND_ */
    uint32_t num_lanes;         /* 0: 2. At most 16 */
    uint32_t timeout_ms;        /* 0: 30 s. Deadline of a collective call, unless its options say otherwise */
    uint32_t node_id;           /* 0: found by trying to reach the peers' memory. Ranks of one id form a node */
    uint32_t max_local_experts; /* 0: 256. The most experts that any plan places on one rank */
    uint32_t ring_bytes;        /* 0: chosen. Bytes of each staging ring, for outputs outside windows */
    int32_t transport;          /* EP_TRANSPORT_ */
    int32_t route;              /* EP_ROUTE_ */
    uint32_t chunk_bytes;       /* 0: chosen. Bytes of the largest message between nodes, 2 KiB to 64 MiB */
    uint32_t chunk_window;      /* 0: chosen. Messages of a kind on their way between two ranks, at most 64 */
} ep_group_config_t;

#define EP_GROUP_CONFIG_INIT { sizeof(ep_group_config_t), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }

/* Makes the group. Collective; blocks up to the bootstrap's timeout. Borrows its arguments until it
 * returns. The ranks compare their configs: a difference is EP_ERR_MISMATCH on every rank, naming two
 * ranks and the field. After a failure nothing is left.
 * Errors: EP_ERR_INVALID_ARGUMENT, EP_ERR_MISMATCH, EP_ERR_BOOTSTRAP, EP_ERR_OUT_OF_MEMORY,
 * EP_ERR_SYSTEM, EP_ERR_UNSUPPORTED (ranks that cannot reach each other; a backend or network that is not there). */
EP_API ep_status_t ep_group_create_versioned(uint32_t header_version, const ep_group_config_t *config,
                                             const ep_bootstrap_t *bootstrap, ep_group_t **group_out);

static inline ep_status_t ep_group_create(const ep_group_config_t *config, const ep_bootstrap_t *bootstrap,
                                          ep_group_t **group_out)
{
    return ep_group_create_versioned(EP_VERSION_NUMBER, config, bootstrap, group_out);
}

/* Frees the group. Local: peers are not waited for. Waits up to timeout_ms (0: 5 s) for this rank's own
 * calls to end; if they do not, the group is aborted first. Plans and windows of the group must not be
 * used afterwards, but for ep_plan_destroy and ep_window_release. NULL is allowed. */
EP_API ep_status_t ep_group_destroy(ep_group_t *group, uint32_t timeout_ms);

/* Breaks the group: calls in progress and later ones return EP_ERR_ABORTED, here and, as soon as they
 * see it, on the peers. So does an ep_window_allocate in progress, unless it is inside the caller's own
 * all_gather, which has its own deadline. Local, never waits, any thread. */
EP_API ep_status_t ep_group_abort(ep_group_t *group);

enum { EP_RANK_ALIVE = 0, EP_RANK_LOST = 1 };

/* The first error that broke the group. status is EP_OK while nothing has. Of a group on a device also, once
 * each and while nothing broke it, errors of single calls that were found after the call was queued
 * (EP_ERR_MISMATCH, EP_ERR_OUT_OF_RANGE); the group lives on. */
typedef struct ep_error_info {
    uint32_t struct_size;
    ep_status_t status;
    int32_t rank;  /* the rank that found it */
    int32_t peer;  /* the rank it is about, or -1 */
    int32_t lane;  /* or -1 */
    uint32_t reserved;
    uint64_t epoch; /* the number of the call in its lane */
    char text[256]; /* what was waited for, expected and seen */
} ep_error_info_t;

#define EP_ERROR_INFO_INIT { sizeof(ep_error_info_t), 0, 0, 0, 0, 0, 0, { 0 } }

/* Polls the group without waiting: `error_out` (may be NULL) and one EP_RANK_ value per rank in
 * `states_out` (may be NULL when num_states is 0; otherwise num_states is the number of ranks).
 * Local, lock-free, any thread. */
EP_API ep_status_t ep_group_health(ep_group_t *group, ep_error_info_t *error_out, int32_t *states_out,
                                   uint32_t num_states);

typedef struct ep_group_info {
    uint32_t struct_size;
    int32_t rank;
    int32_t num_ranks;
    int32_t num_nodes;
    int32_t node; /* of this rank, 0..num_nodes */
    int32_t backend;
    uint32_t num_lanes;
    uint32_t timeout_ms;
    uint32_t max_local_experts;
    uint32_t ring_bytes;
    uint64_t memory_bytes; /* this rank's control words and rings; touched pages only are resident */
    uint64_t window_bytes; /* this rank's windows that are alive */
    char backend_reason[256];
    int32_t transport;      /* EP_TRANSPORT_SHARED_MEMORY, or EP_TRANSPORT_FABRIC between nodes */
    int32_t route;          /* EP_ROUTE_; this and the next three are 0 without a network */
    uint32_t chunk_bytes;
    uint32_t chunk_window;
    uint64_t network_bytes; /* this rank's memory for messages between nodes, all of it touched */
    char transport_reason[256];
} ep_group_info_t;

#define EP_GROUP_INFO_INIT                                                                                    \
    { sizeof(ep_group_info_t), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, { 0 }, 0, 0, 0, 0, 0, { 0 } }

/* Sizes, limits, and the chosen backend and transport with the reasons. Local, any thread. */
EP_API ep_status_t ep_group_query(ep_group_t *group, ep_group_info_t *info_out);

/* What this rank did with one peer, since the group was made. Rows to a rank of another node count as sent whether
 * they fit there or not; those that do not are dropped by the rank that passes them on, and counted there, as its own
 * peer. */
typedef struct ep_peer_stats {
    uint64_t calls;            /* collective calls completed with the peer */
    uint64_t rows_sent;        /* dispatch rows to the peer */
    uint64_t bytes_sent;       /* dispatch payload bytes to the peer */
    uint64_t rows_received;    /* dispatch rows from the peer */
    uint64_t bytes_combined;   /* combine payload bytes read from the peer */
    uint64_t rows_dropped;     /* dispatch rows to the peer that exceeded its capacity */
    uint64_t wait_dispatch_ns; /* time in which the peer was the last thing missing */
    uint64_t wait_combine_ns;
} ep_peer_stats_t;

/* Writes one entry per rank; num_peers is the number of ranks. Local, any thread. The numbers of a lane
 * are consistent between its calls. */
EP_API ep_status_t ep_group_stats(ep_group_t *group, ep_peer_stats_t *stats_out, uint32_t num_peers);

/* ---- Streams of the host backend ------------------------------------------------------------------- */

typedef struct ep_stream ep_stream_t;

/* A queue with a thread that runs collective calls in order. Give one to each lane that shall work while
 * others do. It holds at most 64 calls; one more waits for room. Local, any thread. */
EP_API ep_status_t ep_stream_create(ep_stream_t **stream_out);

/* Waits until all calls queued so far are done and returns the first error among them, which it clears.
 * While an error is kept, the stream skips collective calls. timeout_ms 0: no more than 1 day.
 * Errors: EP_ERR_NOT_READY when time is up, otherwise those of the calls. */
EP_API ep_status_t ep_stream_synchronize(ep_stream_t *stream, uint32_t timeout_ms);

/* Ends the thread after the calls queued so far (each has its deadline). NULL is allowed. */
EP_API ep_status_t ep_stream_destroy(ep_stream_t *stream);

/* ---- Windows -------------------------------------------------------------------------------------- */

typedef struct ep_window ep_window_t;

/* Memory that peers write and read directly, so that a dispatch stores each row where it stays and a
 * combine reads it where the expert left it. `bytes` may differ between ranks and may be 0. The memory is
 * zero, page-aligned, and touched. Collective over the group; at most 64 windows are alive at a time.
 * What a call is given lies wholly in one window or outside of all; memory that lies partly in one is
 * EP_ERR_INVALID_ARGUMENT there.
 * Errors: EP_ERR_OUT_OF_MEMORY, EP_ERR_BOOTSTRAP, EP_ERR_CAPACITY. */
EP_API ep_status_t ep_window_allocate(ep_group_t *group, size_t bytes, ep_window_t **window_out);

/* Makes a window of memory that the caller has. EP_ERR_UNSUPPORTED where peers cannot map it (always on
 * the host backend, whose peers map only memory that the library allocated). Collective. */
EP_API ep_status_t ep_window_register(ep_group_t *group, void *data, size_t bytes, ep_window_t **window_out);

/* Address and size of this rank's part. Local, any thread. */
EP_API ep_status_t ep_window_data(ep_window_t *window, void **data_out, size_t *bytes_out);

/* Ends the use of the window on this rank. Local. No call of any rank that writes or reads this rank's
 * part may be in progress. After it this rank cannot reach its peers' parts either: a call in which one of
 * them still uses its part breaks the group (EP_ERR_PEER_LOST). The memory returns to the system when every
 * rank has released it or left. After a failed call it stays safe to release: a late writer keeps its own
 * mapping. NULL is allowed. */
EP_API ep_status_t ep_window_release(ep_window_t *window);

/* ---- Plan ----------------------------------------------------------------------------------------- */

typedef struct ep_plan ep_plan_t;

enum {
    /* One row per (token, rank): ordered by source rank, then source token. A token of which several
     * experts live on a rank arrives there once. */
    EP_LAYOUT_FLAT = 0,
    /* One row per (token, slot): ordered by local expert, then source rank, source token, slot. Each
     * expert begins at a multiple of expert_alignment; the rows between are padding. */
    EP_LAYOUT_EXPERT_MAJOR = 1
};

/* Every rank gives the same values, but for max_tokens. */
typedef struct ep_plan_config {
    uint32_t struct_size;
    uint32_t reserved_flags;
    uint32_t lane;
    uint32_t topk;        /* 1..256 */
    uint32_t num_experts; /* over all ranks, 1..1048576 */
    uint32_t num_experts_per_rank;
    /* NULL: even, the first num_experts % num_ranks ranks have one more. Otherwise num_experts_per_rank
     * (the number of ranks) entries that add up to num_experts; 0 is allowed. Borrowed until the call
     * returns. Rank r owns the experts that follow those of rank r - 1. */
    const uint32_t *experts_per_rank;
    uint64_t max_tokens; /* of this rank, in any update; 0 is allowed */
    int32_t layout;      /* EP_LAYOUT_ */
    uint32_t expert_alignment; /* rows; 0: 1. EP_LAYOUT_EXPERT_MAJOR only */
} ep_plan_config_t;

#define EP_PLAN_CONFIG_INIT { sizeof(ep_plan_config_t), 0, 0, 0, 0, 0, NULL, 0, 0, 0 }

/* How much memory a plan needs: linear in max_tokens * topk and in num_experts. Local, any thread. */
EP_API ep_status_t ep_plan_bytes(ep_group_t *group, const ep_plan_config_t *config, size_t *bytes_out);

/* Makes a plan. `memory` is at least ep_plan_bytes long, aligned to 64 bytes, and the plan's until it is
 * destroyed; NULL: the library allocates it. Local, does not block. As many plans as you like. */
EP_API ep_status_t ep_plan_create(ep_group_t *group, const ep_plan_config_t *config, void *memory,
                                  size_t memory_bytes, ep_plan_t **plan_out);

/* Local. No call that uses the plan may be in progress. NULL is allowed. */
EP_API ep_status_t ep_plan_destroy(ep_plan_t *plan);

/* How a call is carried out. NULL and all-zero mean the defaults. */
typedef struct ep_options {
    uint32_t struct_size;
    uint32_t reserved_flags;
    uint32_t timeout_ms;  /* 0: the group's */
    uint32_t num_sms;     /* 0: chosen. CUDA backend: how many SMs the call may use */
    int32_t reduce_order; /* EP_REDUCE_, ep_combine only */
    int32_t wire_dtype;   /* EP_REDUCE_NODE_RANK: EP_DTYPE_F32 (also 0) or EP_DTYPE_BF16 */
} ep_options_t;

#define EP_OPTIONS_INIT { sizeof(ep_options_t), 0, 0, 0, 0, 0 }

/* Takes a routing: topk_idx is [tokens, topk] of EP_DTYPE_I32 or EP_DTYPE_I64 with any strides; an id is
 * in 0..num_experts, or -1 for "none". A token may name an expert more than once: each slot counts by
 * itself (its own row in EP_LAYOUT_EXPERT_MAJOR, its own term in a combine); in EP_LAYOUT_FLAT the token
 * still arrives once per rank. The ids are copied. What was dispatched with the plan's earlier routing
 * can no longer be combined with it.
 * Collective in the plan's lane, stream-ordered, capturable; each rank has its own number of tokens.
 * Errors: EP_ERR_OUT_OF_RANGE (names token, slot and id), EP_ERR_CAPACITY (tokens > max_tokens), with a
 * NULL stream before anything is exchanged; EP_ERR_MISMATCH, EP_ERR_TIMEOUT, EP_ERR_PEER_LOST;
 * EP_ERR_ABORTED, which breaks the group, if more than 2^31 - 1 rows arrive at a rank. */
EP_API ep_status_t ep_plan_update(ep_plan_t *plan, const ep_tensor_t *topk_idx, const ep_options_t *options,
                                  void *stream);

/* The arrays may be NULL; their lengths are checked otherwise. */
typedef struct ep_counts {
    uint32_t struct_size;
    uint32_t num_local_experts; /* in: length of rows_per_expert, 0 if NULL */
    uint32_t num_ranks;         /* in: length of rows_per_source, 0 if NULL */
    uint32_t reserved;
    int64_t *rows_per_expert; /* assignments to each local expert, without padding */
    int64_t *rows_per_source; /* rows from each rank, in the plan's layout */
    int64_t num_rows;         /* out: rows that a dispatch delivers here, padding included */
    int64_t num_tokens;       /* out: distinct (source rank, token) pairs that arrive here */
} ep_counts_t;

#define EP_COUNTS_INIT { sizeof(ep_counts_t), 0, 0, 0, NULL, NULL, 0, 0 }

/* Waits up to timeout_ms (0: the group's) until the plan's last update is done, and says how much will
 * arrive. The only call that makes the host wait for a device. Local; not capturable.
 * Errors: EP_ERR_INVALID_STATE (never updated), EP_ERR_NOT_READY, and those of the update. */
EP_API ep_status_t ep_plan_counts(ep_plan_t *plan, uint32_t timeout_ms, ep_counts_t *counts_out);

/* ---- Dispatch ------------------------------------------------------------------------------------- */

#define EP_MAX_PAYLOADS 4

/* Up to four tensors with a row per token, such as data and its fp8 scales. Same dtypes and cols on every
 * rank. Strides are free. */
typedef struct ep_dispatch_inputs {
    uint32_t struct_size;
    uint32_t num_payloads;
    ep_tensor_t payloads[EP_MAX_PAYLOADS];
    ep_tensor_t topk_weights; /* [tokens, topk] EP_DTYPE_F32; absent: not carried, on any rank */
} ep_dispatch_inputs_t;

#define EP_TENSOR_NONE { NULL, 0, 0, 0, 0, 0, 0 }
#define EP_DISPATCH_INPUTS_INIT                                                                         \
    {                                                                                                   \
        sizeof(ep_dispatch_inputs_t), 0, { EP_TENSOR_NONE, EP_TENSOR_NONE, EP_TENSOR_NONE, EP_TENSOR_NONE }, \
            EP_TENSOR_NONE                                                                              \
    }

/* Where rows arrive. payloads[i].rows is the capacity. With the rows that ep_plan_counts names, all fit
 * (exact); without asking, give any capacity (static): rows whose place is at or behind the capacity are
 * dropped, the same ones every time, and counted. Rows behind the last one: ids -1, weights 0,
 * sources -1; payloads untouched. Padding rows of EP_LAYOUT_EXPERT_MAJOR: payloads and weights zero,
 * sources -1. A payload that lies in a window of the group is written by the senders directly. */
typedef struct ep_dispatch_outputs {
    uint32_t struct_size;
    uint32_t num_payloads;
    ep_tensor_t payloads[EP_MAX_PAYLOADS]; /* [capacity, cols] of the input's dtype and cols */
    /* Optional. EP_LAYOUT_FLAT only: [capacity, topk], EP_DTYPE_I32 or _I64, contiguous: the local expert
     * of each slot, -1 for slots of other ranks. */
    ep_tensor_t topk_idx;
    /* Optional, EP_DTYPE_F32, contiguous. Flat: [capacity, topk], 0 for slots of other ranks.
     * Expert-major: [capacity, 1]. */
    ep_tensor_t topk_weights;
    int32_t *src_rank;        /* optional, [capacity]: where each row came from */
    int32_t *src_token;       /* optional, [capacity] */
    int32_t *src_slot;        /* optional, [capacity], EP_LAYOUT_EXPERT_MAJOR only */
    int64_t *num_rows;        /* optional, one: rows delivered, padding included, at most the capacity */
    int64_t *num_required;    /* optional, one: the capacity that would have dropped nothing */
    int64_t *num_dropped;     /* optional, one: rows dropped, without padding */
    int64_t *rows_per_expert; /* optional, [local experts]: assignments delivered, without padding */
    int64_t *expert_offsets;  /* optional, [local experts + 1], EP_LAYOUT_EXPERT_MAJOR only */
} ep_dispatch_outputs_t;

#define EP_DISPATCH_OUTPUTS_INIT                                                                        \
    {                                                                                                   \
        sizeof(ep_dispatch_outputs_t), 0, { EP_TENSOR_NONE, EP_TENSOR_NONE, EP_TENSOR_NONE, EP_TENSOR_NONE }, \
            EP_TENSOR_NONE, EP_TENSOR_NONE, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL              \
    }

/* Sends each token's payload rows to the ranks of its experts. Bitwise: nothing is rounded. May be called
 * any number of times with one plan, also after a combine (the backward of a combine).
 * Collective in the plan's lane, stream-ordered, capturable with static capacity.
 * Errors: EP_ERR_INVALID_STATE (plan never updated), EP_ERR_INVALID_ARGUMENT, EP_ERR_MISMATCH (payload
 * cols, dtypes, or the call itself), EP_ERR_TIMEOUT, EP_ERR_PEER_LOST. */
EP_API ep_status_t ep_dispatch(ep_plan_t *plan, const ep_dispatch_inputs_t *inputs,
                               const ep_dispatch_outputs_t *outputs, const ep_options_t *options, void *stream);

/* ---- Combine -------------------------------------------------------------------------------------- */

/* The order in which a token's terms are added. All sums are fp32; each term is one fused multiply-add;
 * the result is rounded once, to nearest even, to the dtype of the output. The sum starts from
 * bias[0] + bias[1] (one fp32 addition), from the one that is given, or from +0. Dropped rows and -1
 * slots have no term.
 * A NaN result is 0x7FFFFFFF (fp32) or 0x7FFF (bf16, fp16), whatever its origin.
 * x(k) is the row of slot k, w(k) its topk_weight or 1, P(r) the partial sum of rank r:
 * expert-major: from +0, fma(w(k), x(k), .) over its slots k ascending; flat: the row itself.
 *
 *   order        result                                     rows read per token     needs
 *   TOPK_SLOT    fma(w(k), x(k), .) over k ascending        one per slot            expert-major
 *   RANK         + P(r) over ranks ascending                one per rank (flat)     -
 *   NODE_RANK    Q(n) = from +0, + P(r) over the ranks of   one per node on the     -
 *                node n ascending; rounded to wire_dtype;   wire
 *                then + Q(n) over nodes ascending
 *
 * TOPK_SLOT does not depend on where experts live. NODE_RANK's rounding applies to every node, the
 * token's own too, so that the result does not depend on where the token lives. */
enum {
    EP_REDUCE_DEFAULT = 0, /* flat: RANK, expert-major: TOPK_SLOT */
    EP_REDUCE_TOPK_SLOT = 1,
    EP_REDUCE_RANK = 2,
    EP_REDUCE_NODE_RANK = 3
};

typedef struct ep_combine_inputs {
    uint32_t struct_size;
    uint32_t reserved_flags;
    /* [rows, cols] of EP_DTYPE_BF16, _F16 or _F32, col_stride 1, in the order in which the plan's dispatch
     * delivered them; rows is at least what the last dispatch along the routing delivered here, so its
     * capacity or the exact count will do. Before a dispatch any number goes, and rows behind it count as
     * dropped. Rows that lie in a window are read there. */
    ep_tensor_t rows;
    /* Optional, EP_DTYPE_F32, contiguous: a weight per row and slot to return to the owner, such as the
     * gradient of a weight. Flat: [rows, topk]. Expert-major: [rows, 1]. On every rank or on none. */
    ep_tensor_t row_weights;
    /* Optional, EP_LAYOUT_EXPERT_MAJOR only: [tokens, topk] EP_DTYPE_F32, the factors w(k) of this rank's
     * tokens. Flat rows are already sums over a rank's experts: weigh them there. */
    ep_tensor_t topk_weights;
    ep_tensor_t bias[2]; /* optional: [tokens, cols] of the dtype of rows, col_stride 1 */
} ep_combine_inputs_t;

#define EP_COMBINE_INPUTS_INIT                                                                          \
    {                                                                                                   \
        sizeof(ep_combine_inputs_t), 0, EP_TENSOR_NONE, EP_TENSOR_NONE, EP_TENSOR_NONE,                  \
        {                                                                                               \
            EP_TENSOR_NONE, EP_TENSOR_NONE                                                              \
        }                                                                                               \
    }

typedef struct ep_combine_outputs {
    uint32_t struct_size;
    uint32_t reserved_flags;
    ep_tensor_t combined; /* [tokens, cols] of the dtype of rows, col_stride 1 */
    /* With row_weights: [tokens, topk] EP_DTYPE_F32, contiguous: what came back for each slot, bit for
     * bit; 0 for -1 slots and dropped rows. */
    ep_tensor_t combined_weights;
} ep_combine_outputs_t;

#define EP_COMBINE_OUTPUTS_INIT { sizeof(ep_combine_outputs_t), 0, EP_TENSOR_NONE, EP_TENSOR_NONE }

/* Brings the rows back to the tokens' owners and adds them. Returns on a rank, or completes on its
 * stream, only when no peer reads its rows any more.
 * Collective in the plan's lane, stream-ordered, capturable. Works with a plan any number of times.
 * Errors: as ep_dispatch. */
EP_API ep_status_t ep_combine(ep_plan_t *plan, const ep_combine_inputs_t *inputs,
                              const ep_combine_outputs_t *outputs, const ep_options_t *options, void *stream);

#ifdef __cplusplus
}
#endif

#endif /* EP_H */
