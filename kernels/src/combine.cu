// SPDX-License-Identifier: Apache-2.0
#include "ep/combine.cuh"

extern "C" __global__ void __launch_bounds__(EP_COMBINE_THREADS, 1)
ep_combine(const __grid_constant__ ep_cuda_combine_args_t args)
{
    __shared__ ep::CombineShared shared;
    ep::combine(args, shared);
}
