// Unpacks grouped integers and blockwise FP8 to bfloat16 by AVX-512 with bfloat16, to the bits of
// sectioned_unpack.cpp.
//
// A group of four bits has only 16 possible weights. They are computed and rounded once, as a table
// in one register in which vpermw looks up 32 codes. It takes an index's lowest five bits, so the
// table has each weight twice.
//
// vcvtne2ps2bf16 takes subnormal numbers for 0 and keeps a NaN's payload. A group whose scale could
// lead to either is left to the plain code.

#pragma once

#include <algorithm>

#include "packed/ggml_vectors.hpp"
#include "packed/packed.hpp"
#include "dense/tiles.hpp"

#if defined(HAS_DOT_PRODUCTS)

namespace lowtide {
namespace sectioned {

using ggml::vectors::counting;
using ggml::vectors::rounded;
using ggml::vectors::sixteen;
using ggml::vectors::table_of;

// Bytes as float32, to be broadcast from memory, which takes no port.
struct Bytes {
    float numbers[256];
    constexpr Bytes() : numbers() {
        for (int i = 0; i < 256; ++i) numbers[i] = static_cast<float>(i);
    }
};
inline constexpr Bytes BYTES;

// Returns a scale's bits: a float16's as they are, others as a float32's.
INLINED std::uint32_t scale_bits(ScaleType type, const std::uint8_t* from) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, from, type == ScaleType::F32 ? 4 : 2);
    return type == ScaleType::BF16 ? bits << 16 : bits;
}

// Returns true for a scale that is 0 or, in float32, a normal number.
INLINED bool is_usual(ScaleType type, std::uint32_t bits) {
    if (type == ScaleType::F16) return (bits & 0x7c00) != 0x7c00;
    return (bits & 0x7fffffff) == 0 || (bits & 0x7f800000) - 0x00800000 < 0x7f000000;
}

AVX512_BF16 INLINED __m512 everywhere(ScaleType type, std::uint32_t bits) {
    if (type == ScaleType::F16)
        return _mm512_cvtph_ps(_mm256_set1_epi16(static_cast<short>(bits)));
    return _mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(bits)));
}

// Spreads the 32 codes of 16 bytes to words in order, the low half of a byte first. Bits above a
// code are arbitrary.
AVX512_BF16 INLINED __m512i codes_of_4(const std::uint8_t* from) {
    const __m512i bytes = _mm512_cvtepu8_epi32(sixteen(from));
    return _mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 12));
}

AVX512_BF16 INLINED __m512 codes_of_8(const std::uint8_t* from) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(sixteen(from)));
}

AVX512_BF16 INLINED void unpack_group(
    Form form, const std::uint8_t* codes, long length, __m512 scale, __m512 zero, bf16* out
) {
    if (form == Form::INTS_OF_4) {
        const __m512i table = table_of(_mm512_mul_ps(_mm512_sub_ps(counting(), zero), scale));
        for (long i = 0; i < length; i += LANES)
            _mm512_storeu_si512(out + i, _mm512_permutexvar_epi16(codes_of_4(codes + i / 2), table));
    } else {
        for (long i = 0; i < length; i += LANES) {
            const __m512 lower = _mm512_sub_ps(codes_of_8(codes + i), zero);
            const __m512 upper = _mm512_sub_ps(codes_of_8(codes + i + 16), zero);
            const __m512i both = rounded(_mm512_mul_ps(lower, scale), _mm512_mul_ps(upper, scale));
            _mm512_storeu_si512(out + i, both);
        }
    }
}

// Unpacks groups of integers up to the first whose scale is not usual. Returns their number.
template <Form form>
AVX512_BF16 long unpack_ints(const PackedType& type, const Span& span, bf16* out) {
    constexpr int HALF = form == Form::INTS_OF_4 ? 8 : 128;
    const long group = type.group(), count = span.length >> type.log_group;
    for (long i = 0; i < count; ++i) {
        const std::uint32_t bits = scale_bits(type.scale, span.scales + i * type.scale_bytes());
        if (!is_usual(type.scale, bits)) return i;
        const int zero = span.zeros == nullptr ? HALF : span.zeros[i];
        unpack_group(
            form, span.codes + type.code_bytes(i * group), group, everywhere(type.scale, bits),
            _mm512_set1_ps(BYTES.numbers[zero]), out + i * group);
    }
    return count;
}

// Multiplies 32 FP8 numbers, sign-extended to words, with a scale, of which `scale` is 2^8 times as
// much: an FP8 number's bits, moved to a float16's, make 2^-8 of it.
AVX512_BF16 INLINED __m512i fp8_times(__m512i words, __m512 scale) {
    const __m512i sizes = _mm512_set1_epi16(0x3f80);
    const __m512i shifted = _mm512_slli_epi16(words, 7);
    const __m512i halves = _mm512_and_si512(shifted, _mm512_set1_epi16(static_cast<short>(0xbf80)));
    const __mmask32 is_nan = _mm512_cmpeq_epi16_mask(_mm512_and_si512(shifted, sizes), sizes);
    const __m512 lower = _mm512_cvtph_ps(_mm512_castsi512_si256(halves));
    const __m512 upper = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1));
    const __m512i both = rounded(_mm512_mul_ps(lower, scale), _mm512_mul_ps(upper, scale));
    return _mm512_mask_mov_epi16(both, is_nan, _mm512_set1_epi16(0x7fc0));
}

// Unpacks the numbers of one block. Returns false, and does nothing, if its scale needs the plain
// code.
AVX512_BF16 inline bool unpack_fp8(float scale, const std::uint8_t* codes, long length, bf16* out) {
    // No product may be subnormal (the least FP8 number is 2^-9), and 2^8 times the scale must be
    // finite.
    if (scale != 0 && !(std::abs(scale) >= 0x1p-117f && std::abs(scale) <= 0x1p100f)) return false;
    const __m512 times = _mm512_set1_ps(scale * 256);
    long i = 0;
    for (; i + LANES <= length; i += LANES) {
        const auto* from = reinterpret_cast<const __m256i*>(codes + i);
        const __m512i words = _mm512_cvtepi8_epi16(_mm256_loadu_si256(from));
        _mm512_storeu_si512(out + i, fp8_times(words, times));
    }
    if (i < length) {
        const __mmask32 rest = (1u << (length - i)) - 1;
        const __m512i bytes = _mm512_maskz_loadu_epi8(rest, codes + i);
        const __m512i words = _mm512_cvtepi8_epi16(_mm512_castsi512_si256(bytes));
        _mm512_mask_storeu_epi16(out + i, rest, fp8_times(words, times));
    }
    return true;
}

}  // namespace sectioned
}  // namespace lowtide

#endif
