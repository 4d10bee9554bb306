// Blocks of 32 weights of `ggml_types.hpp` to bfloat16 by AVX-512 with bfloat16: the same bits.
//
// A number of four or five bits has but few weights in its group. They are made and rounded once, a
// table in one register that vpermw looks 32 numbers up in. It goes by an index's lowest five bits:
// where a group has 16 weights, a table is of two groups, or they are in it twice and the fifth bit
// means nothing.
//
// vcvtne2ps2bf16 takes numbers below 2^-126 for 0. Only MXFP4 has such, and its are exact.
//
// Ports that move and convert are what these wait for, and broadcasts from memory go by none: the
// scales of blocks of 32 weights are made ready for eight of them at once.
//
// 32 weights after the other are handed to a `take(number, weights)`, which stores them or
// multiplies with them.

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

// Lanes 0 to 7 of one float16, the others of the next.
AVX512_BF16 INLINED __m512 two_halves(const u8* halves) {
    return _mm512_cvtph_ps(
        _mm256_set_m128i(
            _mm_set1_epi16(number_at<short>(halves + 2)),
            _mm_set1_epi16(number_at<short>(halves))));
}

// One float32 of memory in all lanes, as an integer: compilers make that vpbroadcastd, for which no
// unit is needed, where vbroadcastss goes by one that shuffles (docs/log).
AVX512_BF16 INLINED __m512 everywhere(const float& value) {
    std::int32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return _mm512_castsi512_ps(_mm512_set1_epi32(bits));
}

// What was written is broadcast from there: compilers would rather shuffle it out of a register.
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

// The bits of `mask` of one, the others of the other.
AVX512_BF16 INLINED __m512i chosen(__m512i mask, __m512i one, __m512i other) {
    return _mm512_ternarylogic_epi32(mask, one, other, 0xca);
}

AVX512_BF16 INLINED __m512i words(int number) {
    return _mm512_set1_epi16(static_cast<short>(number));
}

constexpr int AND_OR = 0xea;  // for vpternlogd: the first two, or the third

// Numbers' lowest four bits, looked up in the first half of a table, and in the second.
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

// Numbers of 16 bytes: the low halves, then the high ones. Above each there may be other bits.
AVX512_BF16 INLINED __m512i nibbles(const u8* q) {
    const __m512i twice = _mm512_cvtepu8_epi16(_mm256_broadcastsi128_si256(sixteen(q)));
    const __m512i shifts = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(4), 1);
    return _mm512_srlv_epi16(twice, shifts);
}

// Numbers of 32 fifth bits, then 16 bytes of the others.
AVX512_BF16 INLINED __m512i five_bits(const u8* h) {
    const __m512i low = _mm512_and_si512(nibbles(h + 4), words(15));
    return _mm512_mask_add_epi16(low, number_at<std::uint32_t>(h), low, words(16));
}

// 32 signed bytes with a scale for each 16.
AVX512_BF16 INLINED __m512i scaled(__m128i low, __m128i high, __m512 lower, __m512 upper) {
    return rounded(
        _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(low)), lower),
        _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(high)), upper));
}

template <class Type>
struct Block;

// Blocks of types that have 32 weights in each: `weights` is given a block's scale and, if it has
// one, its offset, which is the second float16.

// Where a block has numbers of four bits, its weights are looked up.

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

// Two bits each, which the upper half of a float32 has: these are looked up.
template <>
struct Block<Mxfp4> {
    AVX512_BF16 static INLINED __m512i weights(const u8* b, __m512 d, __m512) {
        const __m512 weights = _mm512_mul_ps(d, _mm512_loadu_ps(MXFP4_VALUES));
        const __m512i twice = _mm512_slli_epi16(nibbles(b + 1), 1);
        return look_up(_mm512_or_si512(twice, words(1)), _mm512_castps_si512(weights));
    }
};

// The scales of up to eight blocks, and their offsets.
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

// 256 weights that lie one after the other in a row. What they are made with is brought to memory
// first (`begin`), of some rows of weights at a time, so that no product waits for it; then they are
// made in `STEPS` steps, 32 in each register. Here: eight blocks of 32.
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

    // Blocks `i` and i + 1, which begin at `b` and so many bytes behind it.
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

    // Fewer blocks than eight; where there is no second one, the first is read twice.
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
