// Unpacks GGML's types with blocks of 32 weights to bfloat16, by AVX-512 with bfloat16, to the same
// bits as ggml_types.hpp.
//
// A group of numbers of four or five bits has at most 16 or 32 different weights. These are computed
// and rounded once, as a table in one register, in which vpermw looks up 32 numbers. It goes by the
// lowest five bits of an index: a table of 16 weights shares the register with that of another group,
// or stands there twice, so that the fifth bit does not matter.
//
// vcvtne2ps2bf16 takes numbers below 2^-126 for 0. Only MXFP4 has such weights, and they are never
// rounded: bfloat16 has them exactly.
//
// Shuffles and conversions share the busiest ports. A broadcast from memory uses none of these, so the
// scales of eight blocks are converted and stored together, and broadcast from there.
//
// 32 weights at a time are handed to a `take(number, weights)`, which stores or multiplies them.

#pragma once

#include <algorithm>
#include <type_traits>

#include "packed/packed.hpp"
#include "packed/ggml_block_words.hpp"

#if defined(HAS_DOT_PRODUCTS)

#include <immintrin.h>

namespace lowtide {
namespace ggml {
namespace vectors {

AVX512_BF16 INLINED __m512 counting() {
    return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}

AVX512_BF16 INLINED __m512i counting16() {
    return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}

AVX512_BF16 INLINED __m128i sixteen(const u8* from) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
}

AVX512_BF16 INLINED __m256i thirty_two(const u8* from) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}

AVX512_BF16 INLINED __m512 half_everywhere(const u8* half) {
    return _mm512_cvtph_ps(_mm256_set1_epi16(number_at<short>(half)));
}

// Lanes 0 to 7 have the first float16, the others have the second.
AVX512_BF16 INLINED __m512 two_halves(const u8* halves) {
    return _mm512_cvtph_ps(
        _mm256_set_m128i(
            _mm_set1_epi16(number_at<short>(halves + 2)),
            _mm_set1_epi16(number_at<short>(halves))));
}

// Broadcasts a float32 from memory. It is broadcast as an integer, since compilers make vpbroadcastd
// of that, which is a load alone; of a float they make a vbroadcastss that uses the shuffle port
// (docs/log).
AVX512_BF16 INLINED __m512 everywhere(const float& value) {
    std::int32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return _mm512_castsi512_ps(_mm512_set1_epi32(bits));
}

// Keeps the compiler from holding these numbers in registers, out of which it would shuffle them. They
// are broadcast from memory.
INLINED void stays_in_memory(const void* numbers) {
    asm volatile("" : : "r"(numbers) : "memory");
}

AVX512_BF16 INLINED __m512i rounded(__m512 lower, __m512 upper) {
    return (__m512i)_mm512_cvtne2ps_pbh(upper, lower);
}

AVX512_BF16 INLINED __m512i table_of(__m512 weights) { return rounded(weights, weights); }

AVX512_BF16 INLINED __m512i look_up(__m512i numbers, __m512i table) {
    return _mm512_permutexvar_epi16(numbers, table);
}

// Takes the bits of `one` where `mask` has ones, those of `other` elsewhere.
AVX512_BF16 INLINED __m512i chosen(__m512i mask, __m512i one, __m512i other) {
    return _mm512_ternarylogic_epi32(mask, one, other, 0xca);
}

AVX512_BF16 INLINED __m512i words(int number) {
    return _mm512_set1_epi16(static_cast<short>(number));
}

constexpr int AND_OR = 0xea;  // for vpternlogd: (a & b) | c

// Look the lowest four bits of numbers up in the first half of a table, or in the second.
AVX512_BF16 INLINED __m512i look_up_first(__m512i numbers, __m512i table) {
    return look_up(_mm512_and_si512(numbers, words(15)), table);
}

AVX512_BF16 INLINED __m512i look_up_second(__m512i numbers, __m512i table) {
    return look_up(_mm512_ternarylogic_epi32(numbers, words(15), words(16), AND_OR), table);
}

AVX512_BF16 INLINED __m512i right(__m512i numbers, int count) {
    return _mm512_srl_epi16(numbers, _mm_cvtsi32_si128(count));
}

AVX512_BF16 INLINED __m512i left(__m512i numbers, int count) {
    return _mm512_sll_epi16(numbers, _mm_cvtsi32_si128(count));
}

// The low nibbles of 16 bytes, then the high ones, each in 16 bits. Only the lowest four are those of
// the nibble.
AVX512_BF16 INLINED __m512i nibbles(const u8* q) {
    const __m512i twice = _mm512_cvtepu8_epi16(_mm256_broadcastsi128_si256(sixteen(q)));
    const __m512i shifts = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(4), 1);
    return _mm512_srlv_epi16(twice, shifts);
}

// Numbers of five bits: 32 fifth bits are at `h`, then 16 bytes of nibbles.
AVX512_BF16 INLINED __m512i five_bits(const u8* h) {
    const __m512i low = _mm512_and_si512(nibbles(h + 4), words(15));
    return _mm512_mask_add_epi16(low, number_at<std::uint32_t>(h), low, words(16));
}

// Multiplies 32 signed bytes: the first 16 by `lower`, the others by `upper`.
AVX512_BF16 INLINED __m512i scaled(__m128i low, __m128i high, __m512 lower, __m512 upper) {
    return rounded(
        _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(low)), lower),
        _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(high)), upper));
}

// A type with blocks of 32 weights. `weights(b, d, m)` unpacks the block at `b`, whose scale is `d` and
// whose offset, if the type has one, is `m`.
//
// A type of four bits has `sixteen(d, m)` instead, the weights that its numbers stand for, and
// NUMBERS, where a block has the numbers: two blocks share a table.
template <class Type>
struct Block;

template <>
struct Block<Q4_0> {
    static constexpr long NUMBERS = 2;

    AVX512_BF16 static INLINED __m512 sixteen(__m512 d, __m512) {
        return _mm512_mul_ps(d, _mm512_sub_ps(counting(), _mm512_set1_ps(8)));
    }
};

template <>
struct Block<Q4_1> {
    static constexpr long NUMBERS = 4;

    AVX512_BF16 static INLINED __m512 sixteen(__m512 d, __m512 m) {
        return _mm512_fmadd_ps(d, counting(), m);
    }
};

template <>
struct Block<Iq4Nl> {
    static constexpr long NUMBERS = 2;

    AVX512_BF16 static INLINED __m512 sixteen(__m512 d, __m512) {
        return _mm512_mul_ps(d, _mm512_loadu_ps(IQ4_VALUES));
    }
};

template <class Type>
constexpr bool HAS_SIXTEEN =
    std::is_same_v<Type, Q4_0> || std::is_same_v<Type, Q4_1> || std::is_same_v<Type, Iq4Nl>;

template <>
struct Block<Q5_0> {
    AVX512_BF16 static INLINED __m512i weights(const u8* b, __m512 d, __m512) {
        const __m512 lower = _mm512_sub_ps(counting(), _mm512_set1_ps(16));
        const __m512i table = rounded(_mm512_mul_ps(d, lower), _mm512_mul_ps(d, counting()));
        return look_up(five_bits(b + 2), table);
    }
};

template <>
struct Block<Q5_1> {
    AVX512_BF16 static INLINED __m512i weights(const u8* b, __m512 d, __m512 m) {
        const __m512 upper = _mm512_add_ps(counting(), _mm512_set1_ps(16));
        const __m512i table =
            rounded(_mm512_fmadd_ps(d, counting(), m), _mm512_fmadd_ps(d, upper, m));
        return look_up(five_bits(b + 4), table);
    }
};

template <>
struct Block<Q8_0> {
    AVX512_BF16 static INLINED __m512i weights(const u8* b, __m512 d, __m512) {
        return scaled(sixteen(b + 2), sixteen(b + 18), d, d);
    }
};

// A weight has two significant bits, so the upper half of its float32 is the bfloat16. The table is of
// float32s, and an index 2 n + 1 finds the upper half of the one at n.
template <>
struct Block<Mxfp4> {
    AVX512_BF16 static INLINED __m512i weights(const u8* b, __m512 d, __m512) {
        const __m512 weights = _mm512_mul_ps(d, _mm512_loadu_ps(MXFP4_VALUES));
        const __m512i twice = _mm512_slli_epi16(nibbles(b + 1), 1);
        return look_up(_mm512_or_si512(twice, words(1)), _mm512_castps_si512(weights));
    }
};

// Writes the scales of up to eight blocks to `d`, and their offsets to `m`.
template <class Type>
AVX512_BF16 INLINED void scales_of_blocks(const u8* b, long num_blocks, float* d, float* m) {
    if constexpr (std::is_same_v<Type, Mxfp4>) {
        for (long i = 0; i < num_blocks; ++i) d[i] = mxfp4_scale(b[i * Type::BYTES]);
    } else if (num_blocks == 8) {
        _mm512_storeu_ps(d, _mm512_cvtph_ps(words_of_eight<Type, 0>(b)));
        if constexpr (Type::HAS_OFFSETS)
            _mm512_storeu_ps(m, _mm512_cvtph_ps(words_of_eight<Type, 2>(b)));
    } else {
        const auto mask = static_cast<__mmask16>((1u << num_blocks) - 1);
        const __m512i starts = _mm512_mullo_epi32(counting16(), _mm512_set1_epi32(Type::BYTES));
        const __m512i words = _mm512_mask_i32gather_epi32(
            _mm512_setzero_si512(), mask, starts, b, 1);
        _mm512_storeu_ps(d, _mm512_cvtph_ps(_mm512_cvtepi32_epi16(words)));
        if constexpr (Type::HAS_OFFSETS)
            _mm512_storeu_ps(
                m, _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(words, 16))));
    }
}

// 256 consecutive weights of a row: here eight blocks of 32, in specialisations a block of 256.
//
// `begin` stores their scales and offsets. A caller begins the spans of several rows together, so that
// no product waits for these. Each of `STEPS` steps then makes weights, 32 in a register.
template <class Type>
struct Span {
    static constexpr int STEPS = 4;

    float d[16] = {}, m[16] = {};

    AVX512_BF16 INLINED void begin(const u8* b, long num_blocks = 8) {
        scales_of_blocks<Type>(b, num_blocks, d, m);
        stays_in_memory(this);
    }

    AVX512_BF16 INLINED void step(const u8* b, int number, __m512i (&out)[2]) const {
        two(b + 2 * number * Type::BYTES, 2 * number, Type::BYTES, out);
    }

    // Unpacks block `i`, which begins at `b`, and block i + 1, which begins `distance` bytes after it.
    AVX512_BF16 INLINED void two(const u8* b, long i, long distance, __m512i (&out)[2]) const {
        using Of = Block<Type>;
        const u8* const second = b + distance;
        const __m512 d_i = everywhere(d[i]), m_i = everywhere(m[i]);
        const __m512 d_j = everywhere(d[i + 1]), m_j = everywhere(m[i + 1]);
        if constexpr (HAS_SIXTEEN<Type>) {
            const __m512i table = rounded(Of::sixteen(d_i, m_i), Of::sixteen(d_j, m_j));
            out[0] = look_up_first(nibbles(b + Of::NUMBERS), table);
            out[1] = look_up_second(nibbles(second + Of::NUMBERS), table);
        } else {
            out[0] = Of::weights(b, d_i, m_i), out[1] = Of::weights(second, d_j, m_j);
        }
    }

    // Unpacks fewer than eight blocks, by twos. The last one, if it is alone, is read twice.
    template <class Take>
    AVX512_BF16 INLINED void some(const u8* b, long num_blocks, long start, Take& take) {
        begin(b, num_blocks);
        for (long i = 0; i < num_blocks; i += 2) {
            const bool is_last = i + 1 == num_blocks;
            __m512i weights[2];
            two(b + i * Type::BYTES, i, is_last ? 0 : Type::BYTES, weights);
            take(start + i, weights[0]);
            if (!is_last) take(start + i + 1, weights[1]);
        }
    }
};

}  // namespace vectors
}  // namespace ggml
}  // namespace lowtide

#endif
