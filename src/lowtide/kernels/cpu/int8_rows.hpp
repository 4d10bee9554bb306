// Rows of bfloat16 numbers rounded to int8 by groups, as `round_rows` of kernels/int8_rows.py does:
//
//     step = largest / 127        code = x * (127 / largest), to the nearest, ties to even

#pragma once

#include <algorithm>
#include <cfloat>
#include <cstdint>
#include <cstring>

#include "numbers.hpp"

namespace lowtide {

// Of a group of a row.
struct RoundedGroup {
    float step, sum;  // sum: of its codes
};

// The first `length` of a group's numbers; its other codes are 0.
template <long group>
INLINED RoundedGroup round_group(const bf16* x, long length, std::int8_t* codes) {
    constexpr bf16 INFINITE = 0x7f80;  // and from it on what is not a number
    constexpr float SHIFT = 12582912.0f;  // what is added to it is rounded to integers
    bf16 own[group] = {};
    if (length == group) std::memcpy(own, x, group * sizeof(bf16));
    else std::memcpy(own, x, length * sizeof(bf16));
    bf16 largest = 0;
    for (long i = 0; i < group; ++i) {
        const bf16 size = own[i] & 0x7fff;
        largest = size > largest ? size : largest;
    }
    const float inverse = 127.0f / widen(largest);
    if (largest >= INFINITE || inverse > FLT_MAX) {
        std::memset(codes, 0, group);
        return {largest >= INFINITE ? NAN : 0.0f, 0.0f};
    }
    std::int32_t sum = 0;
    for (long i = 0; i < group; ++i) {
        const float code = (widen(own[i]) * inverse + SHIFT) - SHIFT;
        const auto whole = static_cast<std::int32_t>(code);
        codes[i] = static_cast<std::int8_t>(whole), sum += whole;
    }
    return {widen(largest) / 127.0f, static_cast<float>(sum)};
}

}  // namespace lowtide
