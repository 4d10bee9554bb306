// The blocks of `ggml_types.hpp` to bfloat16 by AVX-512 with bfloat16: the same bits.
//
// A number of four or five bits has but few weights in its group. They are made and rounded once, a
// table in one register that vpermw looks 32 numbers up in. It goes by an index's lowest five bits:
// where a table has 16 weights they are in it twice, and the fifth bit means nothing.
//
// vcvtne2ps2bf16 takes numbers below 2^-126 for 0. Only MXFP4 has such, and its are exact.
//
// Ports that move and convert are what these wait for, and broadcasts from memory go by none: the
// scales of blocks of 32 weights are made ready for 16 of them at once.
//
// 32 weights after the other are handed to a `take(number, weights)`, which stores them or
// multiplies with them.

#pragma once

#include <algorithm>
#include <type_traits>

#include "ggml.hpp"

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

template <class Number>
AVX512_BF16 INLINED Number at(const u8* from) {
    Number number;
    std::memcpy(&number, from, sizeof number);
    return number;
}

AVX512_BF16 INLINED __m512 half_everywhere(const u8* half) {
    return _mm512_cvtph_ps(_mm256_set1_epi16(at<short>(half)));
}

// Lanes 0 to 7 of one float16, the others of the next.
AVX512_BF16 INLINED __m512 two_halves(const u8* halves) {
    return _mm512_cvtph_ps(
        _mm256_set_m128i(_mm_set1_epi16(at<short>(halves + 2)), _mm_set1_epi16(at<short>(halves))));
}

// What was written is broadcast from there: compilers would rather shuffle it out of a register.
INLINED void stays_in_memory(const float* numbers) {
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

// 32 signed bytes with a scale for each 16.
AVX512_BF16 INLINED __m512i scaled(__m128i low, __m128i high, __m512 lower, __m512 upper) {
    return rounded(
        _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(low)), lower),
        _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(high)), upper));
}

template <class Type>
struct Block;

// Of types whose blocks have 32 weights: `weights` is given a block's scale and, if it has one, its
// offset, which is the second float16.

template <>
struct Block<Q4_0> {
    AVX512_BF16 static INLINED __m512i weights(const u8* b, __m512 d, __m512) {
        const __m512 values = _mm512_sub_ps(counting(), _mm512_set1_ps(8));
        return look_up(nibbles(b + 2), table_of(_mm512_mul_ps(d, values)));
    }
};

template <>
struct Block<Q4_1> {
    AVX512_BF16 static INLINED __m512i weights(const u8* b, __m512 d, __m512 m) {
        return look_up(nibbles(b + 4), table_of(_mm512_fmadd_ps(d, counting(), m)));
    }
};

template <>
struct Block<Q5_0> {
    AVX512_BF16 static INLINED __m512i weights(const u8* b, __m512 d, __m512) {
        const __m512 lower = _mm512_sub_ps(counting(), _mm512_set1_ps(16));
        const __m512i table = rounded(_mm512_mul_ps(d, lower), _mm512_mul_ps(d, counting()));
        const __m512i low = _mm512_and_si512(nibbles(b + 6), words(15));
        return look_up(_mm512_mask_add_epi16(low, at<std::uint32_t>(b + 2), low, words(16)), table);
    }
};

template <>
struct Block<Q8_0> {
    AVX512_BF16 static INLINED __m512i weights(const u8* b, __m512 d, __m512) {
        return scaled(sixteen(b + 2), sixteen(b + 18), d, d);
    }
};

template <>
struct Block<Iq4Nl> {
    AVX512_BF16 static INLINED __m512i weights(const u8* b, __m512 d, __m512) {
        return look_up(nibbles(b + 2), table_of(_mm512_mul_ps(d, _mm512_loadu_ps(IQ4_VALUES))));
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

// The scales of up to 16 blocks, and their offsets.
template <class Type>
AVX512_BF16 INLINED void scales_of_blocks(const u8* b, long num_blocks, float* d, float* m) {
    if constexpr (std::is_same_v<Type, Mxfp4>) {
        for (long i = 0; i < num_blocks; ++i) d[i] = mxfp4_scale(b[i * Type::BYTES]);
    } else {
        const auto mask = static_cast<__mmask16>((1u << num_blocks) - 1);
        const __m512i starts = _mm512_mullo_epi32(counting16(), _mm512_set1_epi32(Type::BYTES));
        const __m512i words = _mm512_mask_i32gather_epi32(
            _mm512_setzero_si512(), mask, starts, b, 1);
        _mm512_storeu_ps(d, _mm512_cvtph_ps(_mm512_cvtepi32_epi16(words)));
        if (std::is_same_v<Type, Q4_1>)
            _mm512_storeu_ps(
                m, _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(words, 16))));
    }
}

// Eight groups' scales, then their offsets: six bits each, times the block's two factors.
AVX512_BF16 INLINED void scales_and_offsets(const u8* b, float* out) {
    const auto low = at<std::uint32_t>(b + 4), middle = at<std::uint32_t>(b + 8);
    const auto high = at<std::uint32_t>(b + 12);
    constexpr std::uint32_t SIX = 0x3f3f3f3f, FOUR = 0x0f0f0f0f, TWO = 0x03030303;
    const std::uint32_t of_scales = (high & FOUR) | (low >> 6 & TWO) << 4;
    const std::uint32_t of_offsets = (high >> 4 & FOUR) | (middle >> 6 & TWO) << 4;
    const __m128i bytes = _mm_setr_epi32(
        static_cast<int>(low & SIX), static_cast<int>(of_scales), static_cast<int>(middle & SIX),
        static_cast<int>(of_offsets));
    const __m512 numbers = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes));
    _mm512_storeu_ps(out, _mm512_mul_ps(numbers, two_halves(b)));
    stays_in_memory(out);
}

template <>
struct Block<Q4K> {
    template <class Take>
    AVX512_BF16 static INLINED void unpack(const u8* b, long start, Take& take) {
        float scales[16];
        scales_and_offsets(b, scales);
        UNROLLED for (int pair = 0; pair < 4; ++pair) {
            const __m512i both = _mm512_cvtepu8_epi16(thirty_two(b + 16 + 32 * pair));
            UNROLLED for (int high = 0; high < 2; ++high) {
                const int group = 2 * pair + high;
                const __m512i table = table_of(_mm512_fmsub_ps(
                    _mm512_set1_ps(scales[group]), counting(), _mm512_set1_ps(scales[8 + group])));
                take(start + group, look_up(high ? _mm512_srli_epi16(both, 4) : both, table));
            }
        }
    }
};

template <>
struct Block<Q5K> {
    template <class Take>
    AVX512_BF16 static INLINED void unpack(const u8* b, long start, Take& take) {
        float scales[16];
        scales_and_offsets(b, scales);
        const __m512 upper = _mm512_add_ps(counting(), _mm512_set1_ps(16));
        const __m512i fifth = _mm512_cvtepu8_epi16(thirty_two(b + 16));
        UNROLLED for (int group = 0; group < 8; ++group) {
            const __m512i both = _mm512_cvtepu8_epi16(thirty_two(b + 48 + group / 2 * 32));
            const __m512 scale = _mm512_set1_ps(scales[group]);
            const __m512 offset = _mm512_set1_ps(scales[8 + group]);
            const __m512i table = rounded(
                _mm512_fmsub_ps(scale, counting(), offset), _mm512_fmsub_ps(scale, upper, offset));
            const __m512i bit = group < 4 ? left(fifth, 4 - group) : right(fifth, group - 4);
            take(start + group,
                 look_up(chosen(words(15), right(both, group % 2 * 4), bit), table));
        }
    }
};

template <>
struct Block<Q6K> {
    template <class Take>
    AVX512_BF16 static INLINED void unpack(const u8* b, long start, Take& take) {
        float scales[16];
        _mm512_storeu_ps(
            scales, _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(sixteen(b + 192))),
                                  half_everywhere(b + 208)));
        stays_in_memory(scales);
        const __m256i low = _mm256_set1_epi8(15), high = _mm256_set1_epi8(0x30);
        UNROLLED for (int part = 0; part < 8; ++part) {  // 32 weights
            const int half = part / 4, layer = part % 4;
            const __m256i q = thirty_two(b + 64 * half + layer % 2 * 32);
            const __m256i h = thirty_two(b + 128 + 32 * half);
            const __m256i four = layer < 2 ? q : _mm256_srli_epi16(q, 4);
            const __m256i two = layer == 0   ? _mm256_slli_epi16(h, 4)
                                : layer == 1 ? _mm256_slli_epi16(h, 2)
                                : layer == 2 ? h
                                             : _mm256_srli_epi16(h, 2);
            const __m256i six =
                _mm256_or_si256(_mm256_and_si256(four, low), _mm256_and_si256(two, high));
            const __m256i numbers = _mm256_sub_epi8(six, _mm256_set1_epi8(32));
            take(start + part,
                 scaled(_mm256_castsi256_si128(numbers), _mm256_extracti128_si256(numbers, 1),
                        _mm512_set1_ps(scales[2 * part]), _mm512_set1_ps(scales[2 * part + 1])));
        }
    }
};

// A table has eight groups of four weights.
template <>
struct Block<Q2K> {
    template <class Take>
    AVX512_BF16 static INLINED void unpack(const u8* b, long start, Take& take) {
        const __m512i both = _mm512_cvtepu8_epi32(sixteen(b)), four = _mm512_set1_epi32(15);
        const __m512 scales = _mm512_mul_ps(
            _mm512_cvtepi32_ps(_mm512_and_si512(both, four)), half_everywhere(b + 80));
        const __m512 offsets = _mm512_mul_ps(
            _mm512_cvtepi32_ps(_mm512_srli_epi32(both, 4)), half_everywhere(b + 82));
        const __m512i two = _mm512_set1_epi32(3);
        const __m512 numbers = _mm512_cvtepi32_ps(_mm512_and_si512(counting16(), two));
        UNROLLED for (int half = 0; half < 2; ++half) {
            __m512 weights[2];
            UNROLLED for (int i = 0; i < 2; ++i) {
                const __m512i group = _mm512_add_epi32(
                    _mm512_srli_epi32(counting16(), 2), _mm512_set1_epi32(8 * half + 4 * i));
                weights[i] = _mm512_fmsub_ps(_mm512_permutexvar_ps(group, scales), numbers,
                                             _mm512_permutexvar_ps(group, offsets));
            }
            const __m512i table = rounded(weights[0], weights[1]);
            const __m512i q = _mm512_cvtepu8_epi16(thirty_two(b + 16 + 32 * half));
            UNROLLED for (int part = 0; part < 4; ++part) {
                const __m512i groups = _mm512_inserti64x4(
                    words(8 * part), _mm256_set1_epi16(static_cast<short>(8 * part + 4)), 1);
                take(start + 4 * half + part,
                     look_up(chosen(words(3), right(q, 2 * part), groups), table));
            }
        }
    }
};

// A table has four groups of eight weights.
template <>
struct Block<Q3K> {
    template <class Take>
    AVX512_BF16 static INLINED void unpack(const u8* b, long start, Take& take) {
        const auto low = at<std::uint64_t>(b + 96);
        const std::uint64_t high = at<std::uint32_t>(b + 104);
        constexpr std::uint64_t FOUR = 0x0f0f0f0f0f0f0f0f, TWO = 0x0303030303030303;
        const std::uint64_t lower = (low & FOUR) | ((high | high >> 2 << 32) & TWO) << 4;
        const std::uint64_t upper = (low >> 4 & FOUR) | ((high >> 4 | high >> 6 << 32) & TWO) << 4;
        const __m128i bytes = _mm_set_epi64x(
            static_cast<long long>(upper), static_cast<long long>(lower));
        const __m512i signed_six =
            _mm512_sub_epi32(_mm512_cvtepu8_epi32(bytes), _mm512_set1_epi32(32));
        const __m512 scales =
            _mm512_mul_ps(_mm512_cvtepi32_ps(signed_six), half_everywhere(b + 108));
        const __m512i three = _mm512_set1_epi32(7);
        const __m512 numbers = _mm512_sub_ps(
            _mm512_cvtepi32_ps(_mm512_and_si512(counting16(), three)), _mm512_set1_ps(4));
        const __m512i third = _mm512_cvtepu8_epi16(thirty_two(b));
        UNROLLED for (int pair = 0; pair < 4; ++pair) {
            __m512 weights[2];
            UNROLLED for (int i = 0; i < 2; ++i) {
                const __m512i group = _mm512_add_epi32(
                    _mm512_srli_epi32(counting16(), 3), _mm512_set1_epi32(4 * pair + 2 * i));
                weights[i] = _mm512_mul_ps(_mm512_permutexvar_ps(group, scales), numbers);
            }
            const __m512i table = rounded(weights[0], weights[1]);
            const __m512i q = _mm512_cvtepu8_epi16(thirty_two(b + 32 + pair / 2 * 32));
            UNROLLED for (int i = 0; i < 2; ++i) {
                const int part = 2 * pair + i;  // 32 weights
                const __m512i groups = _mm512_inserti64x4(
                    words(16 * i), _mm256_set1_epi16(static_cast<short>(16 * i + 8)), 1);
                const __m512i bit = part < 2 ? left(third, 2 - part) : right(third, part - 2);
                const __m512i third_bit = chosen(words(4), bit, groups);
                take(start + part,
                     look_up(chosen(words(3), right(q, part % 4 * 2), third_bit), table));
            }
        }
    }
};

template <>
struct Block<Iq4Xs> {
    template <class Take>
    AVX512_BF16 static INLINED void unpack(const u8* b, long start, Take& take) {
        const __m512 d = half_everywhere(b), values = _mm512_loadu_ps(IQ4_VALUES);
        UNROLLED for (int group = 0; group < 8; ++group) {
            const __m512 number = _mm512_set1_ps(static_cast<float>(iq4_xs_scale(b, group)));
            const __m512i table = table_of(_mm512_mul_ps(_mm512_mul_ps(d, number), values));
            take(start + group, look_up(nibbles(b + 8 + 16 * group), table));
        }
    }
};

// Blocks, of which those of 32 weights are 16 at most.
template <class Type, class Take>
AVX512_BF16 INLINED void unpack_blocks(const u8* stored, long num_blocks, Take& take) {
    if constexpr (Type::SIZE > 32) {
        for (long block = 0; block < num_blocks; ++block)
            Block<Type>::unpack(stored + block * Type::BYTES, block * (Type::SIZE / 32), take);
    } else {
        float d[16], m[16] = {};
        scales_of_blocks<Type>(stored, num_blocks, d, m);
        stays_in_memory(d), stays_in_memory(m);
        for (long i = 0; i < num_blocks; ++i)
            take(i, Block<Type>::weights(
                        stored + i * Type::BYTES, _mm512_set1_ps(d[i]), _mm512_set1_ps(m[i])));
    }
}

struct Store {
    bf16* out;

    AVX512_BF16 INLINED void operator()(long number, __m512i weights) const {
        _mm512_storeu_si512(out + 32 * number, weights);
    }
};

template <class Type>
AVX512_BF16 void unpack(const PackedRows& rows, bf16* out, long out_stride) {
    constexpr long MOST = 16;
    for (long row = 0; row < rows.num_rows; ++row)
        for (long first = 0; first < rows.num_blocks; first += MOST) {
            Store store = {out + row * out_stride + first * Type::SIZE};
            unpack_blocks<Type>(
                rows.stored + row * rows.row_bytes + first * Type::BYTES,
                std::min(rows.num_blocks - first, MOST), store);
        }
}

}  // namespace vectors
}  // namespace ggml
}  // namespace lowtide

#endif
