// Rows of weights in 8 or 4 bits, laid out as in formats/quantised.py: the codes of groups of 64,
// then the groups' scales, then their zeros, both float16.
//
//     weight = scale * code + zero
//
// in float32. The product is exact, so fusing it with the addition changes no bit. In 4 bits a byte
// has elements k (low half) and k + 32 of its group.

#pragma once

#include <algorithm>

#include "packed/ggml_types.hpp"

namespace lowtide {

constexpr long GROUP = 64;

// q8 or q4 as a block type. A block is a group; its codes, scale and zero lie apart in a row.
template <int num_bits>
struct Own {
    static constexpr int NUM_BITS = num_bits;
    static constexpr long SIZE = 64, GROUP = 64, CODE_BYTES = GROUP * num_bits / 8;
    static constexpr long BYTES = CODE_BYTES + 4;  // with a scale and a zero
    static constexpr bool HAS_OFFSETS = true;  // offset = -zero; registers hold zeros
};

// A matrix [num_outs, num_k].
struct QuantisedWeights {
    const std::uint8_t* rows;
    long num_k;
    int num_bits;

    INLINED long num_groups() const { return (num_k + GROUP - 1) / GROUP; }
    INLINED long group_bytes() const { return GROUP * num_bits / 8; }
    INLINED long row_bytes() const { return num_groups() * (group_bytes() + 4); }
    INLINED const std::uint8_t* row(long out) const { return rows + out * row_bytes(); }
    INLINED QuantisedWeights from(long out) const { return {row(out), num_k, num_bits}; }

    INLINED float scale(const std::uint8_t* row, long group) const {
        return half_at(row + num_groups() * group_bytes(), group);
    }

    INLINED float zero(const std::uint8_t* row, long group) const {
        return half_at(row + num_groups() * (group_bytes() + 2), group);
    }

    INLINED static float half_at(const std::uint8_t* halves, long number) {
        return ggml::half_at(halves + 2 * number);
    }
};

// Unpacks a group to float32. rounds: to bfloat16 values.
template <int num_bits, bool rounds>
INLINED void unpack_group(const std::uint8_t* codes, float scale, float zero, float* weights) {
    constexpr long HALF = GROUP / 2;
    for (long i = 0; i < (num_bits == 4 ? HALF : GROUP); ++i) {
        if constexpr (num_bits == 4) {
            const float low = static_cast<float>(codes[i] & 15) * scale + zero;
            const float high = static_cast<float>(codes[i] >> 4) * scale + zero;
            weights[i] = rounds ? rounded(low) : low;
            weights[i + HALF] = rounds ? rounded(high) : high;
        } else {
            const float weight = static_cast<float>(codes[i]) * scale + zero;
            weights[i] = rounds ? rounded(weight) : weight;
        }
    }
}

// Unpacks a row to bfloat16; each weight is rounded once.
template <int num_bits>
INLINED void unpack_row_plainly(const QuantisedWeights& w, long row, bf16* out) {
    const std::uint8_t* from = w.row(row);
    for (long group = 0; group < w.num_groups(); ++group) {
        float numbers[GROUP];
        unpack_group<num_bits, false>(
            from + group * w.group_bytes(), w.scale(from, group), w.zero(from, group), numbers);
        bf16* to = out + group * GROUP;
        const long length = std::min(GROUP, w.num_k - group * GROUP);
        if (length == GROUP)
            for (long i = 0; i < GROUP; ++i) to[i] = round_bf16(numbers[i]);
        else
            for (long i = 0; i < length; ++i) to[i] = round_bf16(numbers[i]);
    }
}

}  // namespace lowtide
