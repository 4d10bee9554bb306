// Dot products of int8 numbers by VNNI, and what several kinds of weights have of it in common.

#pragma once

#include "numbers.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// Where the compiler knows vpdpbusd.
#if defined(__x86_64__) && (defined(__clang__) ? __clang_major__ >= 7 : __GNUC__ >= 9)
#define HAS_VNNI
#define VNNI __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")))
#endif

namespace lowtide {

// Variants of products of rows in int8. The best comes last; those before it run on the same
// processor, too, with the same bits. Not all kinds of weights have the last.
enum Int8Variant { INT8_PLAIN, INT8_AVX2, INT8_AVX_VNNI, INT8_VNNI, INT8_AMX };

constexpr long MOST_ROUNDED = 16;  // rows with which weights are multiplied before others are read

#ifdef HAS_VNNI

// Quarter q of rows[i] has four words; then rows[w] has in quarter q of each row i its word w.
VNNI INLINED void unpack_four(__m512i (&rows)[4]) {
    const __m512i a = _mm512_unpacklo_epi32(rows[0], rows[1]);
    const __m512i b = _mm512_unpackhi_epi32(rows[0], rows[1]);
    const __m512i c = _mm512_unpacklo_epi32(rows[2], rows[3]);
    const __m512i d = _mm512_unpackhi_epi32(rows[2], rows[3]);
    rows[0] = _mm512_unpacklo_epi64(a, c), rows[1] = _mm512_unpackhi_epi64(a, c);
    rows[2] = _mm512_unpacklo_epi64(b, d), rows[3] = _mm512_unpackhi_epi64(b, d);
}

// Sums of quarters: 0 and 1 of a, 2 and 3 of a, then of b.
VNNI INLINED __m512i quarters_added(__m512i a, __m512i b) {
    return _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
}

// Halves are added to each other.
VNNI INLINED float sum_of_sixteen(__m512 lanes) {
    const __m512d doubles = _mm512_castps_pd(lanes);
    __m256 eight = _mm256_add_ps(
        _mm512_castps512_ps256(lanes), _mm256_castpd_ps(_mm512_extractf64x4_pd(doubles, 1)));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

// The same of two.
VNNI INLINED void sums_of_sixteen(__m512 a, __m512 b, float (&sums)[2]) {
    __m512 lanes = _mm512_add_ps(
        _mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    lanes = _mm512_add_ps(lanes, _mm512_shuffle_f32x4(lanes, lanes, 0xb1));
    lanes = _mm512_add_ps(lanes, _mm512_permute_ps(lanes, 0x4e));
    lanes = _mm512_add_ps(lanes, _mm512_movehdup_ps(lanes));
    sums[0] = _mm512_cvtss_f32(lanes);
    sums[1] = _mm_cvtss_f32(_mm512_extractf32x4_ps(lanes, 2));
}

#endif

}  // namespace lowtide
