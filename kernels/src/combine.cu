// SPDX-License-Identifier: Apache-2.0
//
// ep_combine_<dtype>_<how>: chain for EP_REDUCE_TOPK_SLOT, and for EP_REDUCE_RANK over flat rows; ranks for
// EP_REDUCE_RANK over expert-major rows; nodes and nodes_bf16 for EP_REDUCE_NODE_RANK by wire_dtype.
#include "ep/combine.cuh"

extern __shared__ __align__(128) char ep_combine_stages[];

#define EP_COMBINE(name, element, how)                                                                           \
    extern "C" __global__ void __launch_bounds__(EP_COMBINE_THREADS, 1)                                          \
        ep_combine_##name(const __grid_constant__ ep_cuda_combine_args_t args)                                   \
    {                                                                                                            \
        __shared__ ep::CombineShared shared;                                                                     \
        ep::combine<element, how>(args, shared, ep_combine_stages);                                         \
    }

EP_COMBINE(bf16_chain, __nv_bfloat16, ep::kChain)
EP_COMBINE(bf16_ranks, __nv_bfloat16, ep::kRanks)
EP_COMBINE(bf16_nodes, __nv_bfloat16, ep::kNodes)
EP_COMBINE(bf16_nodes_bf16, __nv_bfloat16, ep::kNodesBf16)
EP_COMBINE(f16_chain, __half, ep::kChain)
EP_COMBINE(f16_ranks, __half, ep::kRanks)
EP_COMBINE(f16_nodes, __half, ep::kNodes)
EP_COMBINE(f16_nodes_bf16, __half, ep::kNodesBf16)
EP_COMBINE(f32_chain, float, ep::kChain)
EP_COMBINE(f32_ranks, float, ep::kRanks)
EP_COMBINE(f32_nodes, float, ep::kNodes)
EP_COMBINE(f32_nodes_bf16, float, ep::kNodesBf16)
