// Turns squares of sums, with a row per output feature and a column per row of x, into outputs.

#pragma once

#include "dense/lane_sums.hpp"

namespace lowtide {

constexpr long TILE = 16;  // rows of weights, and of x, of a square

#if defined(HAS_DOT_PRODUCTS)

// Transposes; each register is a row of 16.
AVX512 INLINED void transpose(__m512i (&rows)[16]) {
    __m512i other[16];
    for (int i = 0; i < 16; i += 2) {
        other[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        other[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; ++j) {
            rows[i + 2 * j] = _mm512_unpacklo_epi64(other[i + j], other[i + j + 2]);
            rows[i + 2 * j + 1] = _mm512_unpackhi_epi64(other[i + j], other[i + j + 2]);
        }
    // rows[4 i + j]: columns j, j + 4, j + 8 and j + 12 of rows 4 i to 4 i + 3.
    for (int j = 0; j < 4; ++j) {
        const __m512i a = rows[j], b = rows[4 + j], c = rows[8 + j], d = rows[12 + j];
        const __m512i ab = _mm512_shuffle_i32x4(a, b, 0x88), cd = _mm512_shuffle_i32x4(c, d, 0x88);
        const __m512i ab2 = _mm512_shuffle_i32x4(a, b, 0xdd), cd2 = _mm512_shuffle_i32x4(c, d, 0xdd);
        other[j] = _mm512_shuffle_i32x4(ab, cd, 0x88);
        other[j + 4] = _mm512_shuffle_i32x4(ab2, cd2, 0x88);
        other[j + 8] = _mm512_shuffle_i32x4(ab, cd, 0xdd);
        other[j + 12] = _mm512_shuffle_i32x4(ab2, cd2, 0xdd);
    }
    for (int i = 0; i < 16; ++i) rows[i] = other[i];
}

// Stores sums [outs, rows] of up to 16 rows of x from `row` on with up to 16 rows of weights from
// `first` on; sums [outs] for one row. `p`: as in `store_outputs`.
template <class P>
AVX512 INLINED void store_tile_sums(
    const P& p, const float* sums, long row, long num_rows, long first, long num_outs
) {
    __m512i columns[TILE];
    if (num_rows == 1) {
        columns[0] = _mm512_load_si512(sums);
    } else {
        for (long o = 0; o < TILE; ++o) columns[o] = _mm512_load_si512(sums + o * TILE);
        transpose(columns);
    }
    const auto mask = static_cast<__mmask16>((1u << num_outs) - 1);
    __m512 bias = _mm512_setzero_ps();
    if (p.bias != nullptr) {
        const __m512i narrow = _mm512_maskz_loadu_epi16(mask, p.bias + first);
        const __m512i wide = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(narrow));
        bias = _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
    }
    for (long r = 0; r < num_rows; ++r)
        _mm512_mask_cvtepi32_storeu_epi16(
            p.out + (row + r) * p.out_stride + first, mask,
            rounded_words(_mm512_add_ps(_mm512_castsi512_ps(columns[r]), bias)));
}

#endif

}  // namespace lowtide
