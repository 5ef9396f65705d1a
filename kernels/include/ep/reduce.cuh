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

// Element i of a word of 16-bit or 32-bit elements.
template <typename E>
__device__ __forceinline__ float widen_word(uint32_t word, int i)
{
    if constexpr (sizeof(E) == 4) {
        return __uint_as_float(word);
    } else {
        uint16_t bits = uint16_t(i % 2 == 0 ? word : word >> 16);
        return widen(*reinterpret_cast<const E *>(&bits));
    }
}

template <>
__device__ __forceinline__ float widen_word<__nv_bfloat16>(uint32_t word, int i)
{
    return __uint_as_float(i % 2 == 0 ? word << 16 : word & 0xffff0000u);
}

// The word of one or two results.
template <typename E>
__device__ __forceinline__ uint32_t narrow_word(const float *values)
{
    if constexpr (sizeof(E) == 4) {
        return __float_as_uint(narrow<float>(values[0]));
    } else {
        E low = narrow<E>(values[0]), high = narrow<E>(values[1]);
        return *reinterpret_cast<const uint16_t *>(&low) | uint32_t(*reinterpret_cast<const uint16_t *>(&high)) << 16;
    }
}

// `kWidth` neighbouring elements, 16 bytes or one element, as they lie in memory: 16-bit elements stay two to
// a register until they are added.
template <typename E, int kWidth>
struct Pack {
    static constexpr int kWords = kWidth * int(sizeof(E)) / 4;
    uint32_t words[kWords];

    __device__ __forceinline__ static Pack load(const char *address)
    {
        static_assert(sizeof(Pack) == 16, "a pack is one vector");
        uint4 bits = ld_row(reinterpret_cast<const uint4 *>(address));
        return Pack{{bits.x, bits.y, bits.z, bits.w}};
    }

    __device__ __forceinline__ void store(char *address) const
    {
        *reinterpret_cast<uint4 *>(address) = make_uint4(words[0], words[1], words[2], words[3]);
    }

    __device__ __forceinline__ float at(int i) const { return widen_word<E>(words[i * kWords / kWidth], i); }

    __device__ __forceinline__ static Pack of(const float *values)
    {
        Pack pack;
#pragma unroll
        for (int word = 0; word < kWords; ++word) {
            pack.words[word] = narrow_word<E>(values + word * kWidth / kWords);
        }
        return pack;
    }
};

template <typename E>
struct Pack<E, 1> {
    E value;

    __device__ __forceinline__ static Pack load(const char *address)
    {
        return Pack{*reinterpret_cast<const E *>(address)};
    }

    __device__ __forceinline__ void store(char *address) const { *reinterpret_cast<E *>(address) = value; }

    __device__ __forceinline__ float at(int) const { return widen(value); }

    __device__ __forceinline__ static Pack of(const float *values) { return Pack{narrow<E>(values[0])}; }
};

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
            values[i] = __fmaf_rn(row.at(i), weight, values[i]);
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

// Adds one term, and what ends with it.
template <typename E, int kWidth, uint32_t kHow>
__device__ __forceinline__ void add_one(Sum<kWidth> &sum, Sum<kWidth> &rank, Sum<kWidth> &node,
                                        const Pack<E, kWidth> &row, const Term &term)
{
    if constexpr (kHow == kChain) {
        sum.add_term(row, term.weight);
    } else {
        rank.add_term(row, term.weight);
        if (term.close == kCloseNothing) {
            return;
        }
        if constexpr (kHow == kRanks) {
            sum.take(rank);
        } else {
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

// Adds `count` terms at byte `offset` of their rows, and kGroups - 1 times further at `stride` bytes each. The
// loads of kBatch rows are started together, before the first of them is added.
template <typename E, int kWidth, uint32_t kHow, uint32_t kBatch, int kGroups>
__device__ __forceinline__ void add_terms(Sum<kWidth> (&sums)[kGroups], const Term *terms, uint32_t count,
                                          uint64_t offset, uint64_t stride)
{
    Sum<kWidth> rank[kGroups], node[kGroups];
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
        rank[group].clear();
        node[group].clear();
    }
#pragma unroll 1
    for (uint32_t first = 0; first < count; first += kBatch) {
        Pack<E, kWidth> rows[kBatch][kGroups];
#pragma unroll
        for (uint32_t i = 0; i < kBatch; ++i) {
            if (first + i < count) {
                const char *row = terms[first + i].row + offset;
#pragma unroll
                for (int group = 0; group < kGroups; ++group) {
                    rows[i][group] = Pack<E, kWidth>::load(row + group * stride);
                }
            }
        }
#pragma unroll
        for (uint32_t i = 0; i < kBatch; ++i) {
            if (first + i < count) {
                const Term &term = terms[first + i];
#pragma unroll
                for (int group = 0; group < kGroups; ++group) {
                    add_one<E, kWidth, kHow>(sums[group], rank[group], node[group], rows[i][group], term);
                }
            }
        }
    }
}

} // namespace ep
