// SPDX-License-Identifier: Apache-2.0
#include "ep/dispatch.cuh"

extern __shared__ __align__(128) char ep_dispatch_stages[];

extern "C" __global__ void __launch_bounds__(EP_DISPATCH_THREADS, 1)
ep_dispatch(const __grid_constant__ ep_cuda_dispatch_args_t args)
{
    __shared__ ep::DispatchShared shared;
    ep::dispatch(args, shared, ep_dispatch_stages);
}
