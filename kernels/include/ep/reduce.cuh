// SPDX-License-Identifier: Apache-2.0
//
// reduce.cuh: the sum of a combine, bit for bit as ep-core/src/host/reduce.rs: fp32, one fused multiply-add a
// term, one rounding to nearest even, one NaN.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "ep/ptx.cuh"

namespace ep {

// What ends with a term.
enum : uint32_t { kCloseNothing = 0, kCloseRank = 1, kCloseNode = 2 };

// How terms add up.
enum : uint32_t { kChain = 0, kRanks = 1, kNodes = 2, kNodesBf16 = 3 };

// One term of a token's sum.
struct Term {
    const char *row;
    float weight;
    uint32_t close;
};

__device__ __forceinline__ float widen(__nv_bfloat16 value)
{
    return __bfloat162float(value);
}

__device__ __forceinline__ float widen(__half value)
{
    return __half2float(value);
}

__device__ __forceinline__ float widen(float value)
{
    return value;
}

// The conversions give NaN as 0x7FFF; fp32 has no conversion, so its pattern is chosen here.
template <typename E>
__device__ __forceinline__ E narrow(float value);

template <>
__device__ __forceinline__ __nv_bfloat16 narrow(float value)
{
    return __float2bfloat16_rn(value);
}

template <>
__device__ __forceinline__ __half narrow(float value)
{
    return __float2half_rn(value);
}

template <>
__device__ __forceinline__ float narrow(float value)
{
    return value != value ? __uint_as_float(0x7fffffffu) : value;
}

// `kWidth` neighbouring elements, 16 bytes or one element.
template <typename E, int kWidth>
struct Pack {
    E values[kWidth];
};

template <typename E, int kWidth>
__device__ __forceinline__ Pack<E, kWidth> load_pack(const char *address)
{
    if constexpr (sizeof(Pack<E, kWidth>) == 16) {
        uint4 bits = ld_row(reinterpret_cast<const uint4 *>(address));
        return *reinterpret_cast<Pack<E, kWidth> *>(&bits);
    } else {
        return *reinterpret_cast<const Pack<E, kWidth> *>(address);
    }
}

template <int kWidth>
struct Sum {
    float values[kWidth];

    __device__ __forceinline__ void clear()
    {
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
            values[i] = 0.0f;
        }
    }

    template <typename E>
    __device__ __forceinline__ void add_term(const Pack<E, kWidth> &row, float weight)
    {
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
            values[i] = __fmaf_rn(widen(row.values[i]), weight, values[i]);
        }
    }

    // Adds a partial sum and clears it.
    __device__ __forceinline__ void take(Sum &part)
    {
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
            values[i] = __fadd_rn(values[i], part.values[i]);
        }
        part.clear();
    }

    __device__ __forceinline__ void round_to_bf16()
    {
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
            values[i] = __bfloat162float(__float2bfloat16_rn(values[i]));
        }
    }
};

// Rows whose loads are started together, before the first of them is added.
constexpr int kBatch = 4;

// Adds `count` terms at byte `offset` of their rows.
template <typename E, int kWidth, uint32_t kHow>
__device__ __forceinline__ void add_terms(Sum<kWidth> &sum, const Term *terms, uint32_t count, uint64_t offset)
{
    Sum<kWidth> rank, node;
    rank.clear();
    node.clear();
    for (uint32_t first = 0; first < count; first += kBatch) {
        Pack<E, kWidth> rows[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            if (first + i < count) {
                rows[i] = load_pack<E, kWidth>(terms[first + i].row + offset);
            }
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            if (first + i >= count) {
                break;
            }
            const Term &term = terms[first + i];
            if constexpr (kHow == kChain) {
                sum.add_term(rows[i], term.weight);
            } else {
                rank.add_term(rows[i], term.weight);
                if (kHow == kRanks && term.close != kCloseNothing) {
                    sum.take(rank);
                } else if (term.close != kCloseNothing) {
                    node.take(rank);
                    if (term.close == kCloseNode) {
                        if constexpr (kHow == kNodesBf16) {
                            node.round_to_bf16();
                        }
                        sum.take(node);
                    }
                }
            }
        }
    }
}

} // namespace ep
