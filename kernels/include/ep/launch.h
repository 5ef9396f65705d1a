/* SPDX-License-Identifier: Apache-2.0
 *
 * launch.h: block sizes and shared memory of the kernels, once, for the host and for the kernels.
 */
#ifndef EP_LAUNCH_H
#define EP_LAUNCH_H

#include "ep/args.h"

enum {
    EP_PLAN_THREADS = 256,
    EP_DISPATCH_WARPS = 14,
    EP_DISPATCH_THREADS = 32 * EP_DISPATCH_WARPS,
    EP_DISPATCH_MAX_STAGES = 3, /* rows that a warp has in shared memory at a time */
    EP_COMBINE_THREADS = 512,
    /* The most dynamic shared memory; a device with less gives what it has. The plan's depends on its bins. */
    EP_DISPATCH_SHARED_BYTES = 215 * 1024, /* 15 rows of 7168 bf16 */
    EP_COMBINE_SERVERS = 5,       /* warps of a block that put this rank's rows into rings, if they must */
    EP_COMBINE_STAGES = 2,        /* rows that each of them has in shared memory */
    EP_COMBINE_SHARED_BYTES = 140 * 1024, /* of a block with servers: ten rows of 7168 bf16 */
    EP_PLAN_MAX_BINS = 7000 /* num_experts + num_ranks */
};

#define EP_PLAN_SHARED_BYTES(bins) ((EP_PLAN_THREADS / 32) * (bins) * 4)

EP_WIRE_ASSERT(EP_PLAN_SHARED_BYTES(EP_PLAN_MAX_BINS) <= 227 * 1024);

#endif /* EP_LAUNCH_H */
