// SPDX-License-Identifier: Apache-2.0
#include "ep/plan.cuh"

extern __shared__ uint32_t ep_plan_shared[];

extern "C" __global__ void __launch_bounds__(EP_PLAN_THREADS)
ep_plan_count(const __grid_constant__ ep_cuda_plan_args_t args)
{
    ep::count_chunks(args, ep_plan_shared);
}

extern "C" __global__ void __launch_bounds__(EP_PLAN_THREADS)
ep_plan_place(const __grid_constant__ ep_cuda_plan_args_t args)
{
    ep::place_and_exchange(args, ep_plan_shared);
}
