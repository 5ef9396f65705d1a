/* SPDX-License-Identifier: Apache-2.0
 *
 * launch.h: block sizes and shared memory of the kernels, once, for the host and for the kernels.
 */
#ifndef EP_LAUNCH_H
#define EP_LAUNCH_H

#include "ep/args.h"

enum {
    EP_PLAN_THREADS = 256,
    EP_DISPATCH_WARPS = 12,
    EP_DISPATCH_THREADS = 32 * EP_DISPATCH_WARPS,
    EP_DISPATCH_STAGE_BYTES = 16 * 1024, /* of shared memory a warp: one row, or several */
    EP_COMBINE_THREADS = 512,
    /* Dynamic shared memory. The plan's depends on its bins, one per expert and rank. */
    EP_DISPATCH_SHARED_BYTES = EP_DISPATCH_WARPS * EP_DISPATCH_STAGE_BYTES,
    EP_COMBINE_SHARED_BYTES = 0,
    EP_PLAN_MAX_BINS = 7000 /* num_experts + num_ranks */
};

#define EP_PLAN_SHARED_BYTES(bins) ((EP_PLAN_THREADS / 32) * (bins) * 4)

EP_WIRE_ASSERT(EP_PLAN_SHARED_BYTES(EP_PLAN_MAX_BINS) <= 227 * 1024);

#endif /* EP_LAUNCH_H */
