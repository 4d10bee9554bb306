// Sums of many rows of x with some rows of weights, by bfloat16 dot products in registers.
//
// Four rows of x with six of weights need ten loads for 24 products, so neither loads nor the
// second cache, which has x, limit the speed.

#pragma once

#include <type_traits>
#include <vector>

#include "dense/lane_sums.hpp"

#if defined(HAS_DOT_PRODUCTS)

namespace lowtide {

constexpr long REGISTER_WORDS = 32;  // numbers of bfloat16
constexpr int MANY_ROWS = 4, MANY_OUTS = 6;  // of a tile

struct alignas(64) WordRegister {
    bf16 words[REGISTER_WORDS];
};

// Rows of x in whole registers, with a register of padding between rows: 16 rows of 4,096 bytes
// one after another would map to the same lines of the first cache, which has eight of each.
struct PaddedRows {
    std::vector<WordRegister> registers;
    long length;  // of a row, in numbers
    std::uint64_t number = 0;  // of x, those that a thread has at present

    long stride() const { return length + REGISTER_WORDS; }
    const bf16* row(long row) const { return registers.data()->words + row * stride(); }
    bf16* row(long row) { return registers.data()->words + row * stride(); }

    void make_room(long num_rows, long new_length) {
        length = new_length;
        const auto needed = static_cast<std::size_t>(num_rows * stride() / REGISTER_WORDS);
        if (registers.size() < needed) registers.resize(needed);
    }
};

// A tile's place: row of x, row of weights, and the strides of both.
struct ManyPlace {
    const bf16 *x, *w;
    long x_stride, w_stride;
};

// Multiplies a register of each of `rows` rows of x with one of each of `outs` rows of weights.
template <int rows, int outs>
AVX512_BF16 INLINED void add_registers(const ManyPlace& at, __m512 (&sums)[rows * outs]) {
    __m512bh some[outs];
    UNROLLED for (int o = 0; o < outs; ++o)
        some[o] = (__m512bh)_mm512_loadu_si512(at.w + o * at.w_stride);
    UNROLLED for (int r = 0; r < rows; ++r) {
        const auto pairs = (__m512bh)_mm512_load_si512(at.x + r * at.x_stride);
        UNROLLED for (int o = 0; o < outs; ++o)
            sums[r * outs + o] = _mm512_dpbf16_ps(sums[r * outs + o], some[o], pairs);
    }
}

// The outputs of `rows` rows of x from `row` on with `outs` rows of weights from `first` on.
template <int rows, int outs, class P>
AVX512_BF16 INLINED void store_tile(
    const P& p, long row, long first, const __m512 (&sums)[rows * outs]
) {
    constexpr int together = rows * outs <= 16 ? rows : rows % 2 == 0 ? 2 : 1;
    UNROLLED for (int r = 0; r < rows; r += together) {
        __m512 some[together * outs];
        UNROLLED for (int i = 0; i < together * outs; ++i) some[i] = sums[r * outs + i];
        store_sums<together, outs>(p, row + r, first, some);
    }
}

// Calls tile(rows, row) with as many rows of x at once as possible; the last call has fewer.
template <class Tile>
INLINED void for_many_rows(long num_rows, const Tile& tile) {
    long row = 0;
    for (; row + MANY_ROWS <= num_rows; row += MANY_ROWS)
        tile(std::integral_constant<int, MANY_ROWS>(), row);
    if (num_rows - row == 3) tile(std::integral_constant<int, 3>(), row);
    if (num_rows - row == 2) tile(std::integral_constant<int, 2>(), row);
    if (num_rows - row == 1) tile(std::integral_constant<int, 1>(), row);
}

// Calls tile(outs, first) with as many rows of weights at once as possible.
template <class Tile>
INLINED void for_many_outs(long num_outs, const Tile& tile) {
    long first = 0;
    for (; first + MANY_OUTS <= num_outs; first += MANY_OUTS)
        tile(std::integral_constant<int, MANY_OUTS>(), first);
    if (first + 4 <= num_outs) tile(std::integral_constant<int, 4>(), first), first += 4;
    if (first + 2 <= num_outs) tile(std::integral_constant<int, 2>(), first), first += 2;
    if (first < num_outs) tile(std::integral_constant<int, 1>(), first);
}

}  // namespace lowtide

#endif
