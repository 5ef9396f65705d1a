// SPDX-License-Identifier: Apache-2.0
//
// rows.cuh: rows that a warp copies itself.
#pragma once

#include "ep/ptx.cuh"

namespace ep {

// A warp copies one row element by element, or 16 bytes at a time where both sides allow it.
__device__ inline void copy_row(char *to, uint64_t to_pitch, const char *from, uint64_t from_pitch, uint32_t cols,
                                uint32_t element)
{
    uint32_t lane = threadIdx.x % 32, bytes = cols * element;
    bool contiguous = to_pitch == element && from_pitch == element;
    uint64_t aligned = (reinterpret_cast<uint64_t>(to) | reinterpret_cast<uint64_t>(from)) % 16;
    if (contiguous && aligned == 0) {
        for (uint32_t i = lane; i < bytes / 16; i += 32) {
            st_row(reinterpret_cast<uint4 *>(to) + i, ld_row(reinterpret_cast<const uint4 *>(from) + i));
        }
        for (uint32_t i = bytes / 16 * 16 + lane; i < bytes; i += 32) {
            to[i] = from[i];
        }
        return;
    }
    for (uint32_t col = lane; col < cols; col += 32) {
        for (uint32_t byte = 0; byte < element; ++byte) {
            to[col * to_pitch + byte] = from[col * from_pitch + byte];
        }
    }
}

} // namespace ep
