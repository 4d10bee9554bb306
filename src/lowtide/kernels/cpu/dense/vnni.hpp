// Dot products of int8 numbers by VNNI, shared by several kinds of weights.

#pragma once

#include "numbers.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// The compiler supports vpdpbusd.
#if defined(__x86_64__) && (defined(__clang__) ? __clang_major__ >= 7 : __GNUC__ >= 9)
#define HAS_VNNI
#define VNNI __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")))
#endif

namespace lowtide {

// Variants of products of int8 rows. The best comes last; lower ones run on the same processor,
// with the same bits. Not all kinds of weights have the last one.
enum Int8Variant { INT8_PLAIN, INT8_AVX2, INT8_AVX_VNNI, INT8_VNNI, INT8_AMX };

constexpr long MOST_ROUNDED = 16;  // rows with which weights are multiplied before others are read

#ifdef HAS_VNNI

// Transposes quarters: word w of quarter q of rows[i] becomes lane 4 q + i of rows[w].
VNNI INLINED void unpack_four(__m512i (&rows)[4]) {
    const __m512i a = _mm512_unpacklo_epi32(rows[0], rows[1]);
    const __m512i b = _mm512_unpackhi_epi32(rows[0], rows[1]);
    const __m512i c = _mm512_unpacklo_epi32(rows[2], rows[3]);
    const __m512i d = _mm512_unpackhi_epi32(rows[2], rows[3]);
    rows[0] = _mm512_unpacklo_epi64(a, c), rows[1] = _mm512_unpackhi_epi64(a, c);
    rows[2] = _mm512_unpacklo_epi64(b, d), rows[3] = _mm512_unpackhi_epi64(b, d);
}

// Adds quarters 0 and 1 of `a`, 2 and 3 of `a`, then those of `b`.
VNNI INLINED __m512i quarters_added(__m512i a, __m512i b) {
    return _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
}

#endif

}  // namespace lowtide
