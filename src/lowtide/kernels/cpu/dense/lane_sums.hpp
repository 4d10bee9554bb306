// Reduces many registers of 16 partial sums to outputs at once.
//
// A register's sum adds its halves, then the halves of the result, and so on: lanes i and i + 8, i
// + 4, i + 2, i + 1. Reducing all registers together takes as many instructions as two alone.

#pragma once

#include <algorithm>
#include <cstring>

#include "numbers.hpp"

#if defined(__x86_64__)
#include <immintrin.h>

namespace lowtide {

// Lanes of two registers, combined before they are added.
struct Halved {
    __m512 lower, upper;
};

// Combines `a` and `b` into `Halved` for the sums of 8, 4, 2 and 1 lanes.
template <int lanes>
AVX512 INLINED Halved halved(__m512 a, __m512 b) {
    if constexpr (lanes == 8)
        return {_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee)};
    if constexpr (lanes == 4)
        return {_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd)};
    const __m512d c = _mm512_castps_pd(a), d = _mm512_castps_pd(b);
    if constexpr (lanes == 2)
        return {_mm512_castpd_ps(_mm512_unpacklo_pd(c, d)),
                _mm512_castpd_ps(_mm512_unpackhi_pd(c, d))};
    return {_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd)};
}

// Returns the sums of up to 16 registers. With fewer than 8 `lanes`, each of `count` registers has
// 8 / lanes times two of them, already reduced so far.
template <int lanes = 8, int count>
AVX512 INLINED __m512 sums_of_lanes(const __m512 (&of)[count]) {
    constexpr int num_left = (count + 1) / 2;
    __m512 left[num_left];
    UNROLLED for (int i = 0; i < num_left; ++i) {
        const Halved both = halved<lanes>(of[2 * i], of[std::min(2 * i + 1, count - 1)]);
        left[i] = _mm512_add_ps(both.lower, both.upper);
    }
    if constexpr (lanes > 1) {
        return sums_of_lanes<lanes / 2>(left);
    } else {
        // Sum i is in lane i % 4 * 4 + i / 4.
        const __m512i in_order = _mm512_setr_epi32(
            0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        return _mm512_permutexvar_ps(in_order, left[0]);
    }
}

// Rounds as `round_bf16` does, into the lower half of each double word: the processor's own
// rounding flushes numbers below 2^-126 to 0.
AVX512 INLINED __m512i rounded_words(__m512 values) {
    const __m512i bits = _mm512_castps_si512(values);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
    return _mm512_mask_mov_epi32(_mm512_srli_epi32(up, 16), is_nan, _mm512_set1_epi32(0x7fc0));
}

// Stores the outputs of rows of x from `row` on with `outs` rows of weights each, from `first` on.
// `p`: a product with `bias`, `out` and `out_stride`. num_rows: number of existing rows.
template <int rows, int outs, class P>
AVX512 INLINED void store_outputs(
    const P& p, long row, long first, __m512 sums, long num_rows = rows
) {
    alignas(64) float bias[16] = {};
    if (p.bias)
        for (int i = 0; i < rows * outs; ++i) bias[i] = widen(p.bias[first + i % outs]);
    alignas(32) bf16 stored[16];
    _mm256_store_si256(
        reinterpret_cast<__m256i*>(stored),
        _mm512_cvtepi32_epi16(rounded_words(_mm512_add_ps(sums, _mm512_load_ps(bias)))));
    for (int r = 0; r < rows && r < num_rows; ++r)
        std::memcpy(
            p.out + (row + r) * p.out_stride + first, stored + r * outs, outs * sizeof(bf16));
}

// The same for registers of partial sums.
template <int rows, int outs, class P>
AVX512 INLINED void store_sums(
    const P& p, long row, long first, const __m512 (&sums)[rows * outs]
) {
    store_outputs<rows, outs>(p, row, first, sums_of_lanes(sums));
}

}  // namespace lowtide

#endif
