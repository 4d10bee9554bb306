// Unpacks GGML's types with blocks of 256 weights to bfloat16. ggml_short_vectors.hpp says how, and
// does so for blocks of 32.

#pragma once

#include "packed/ggml_grid_types.hpp"
#include "packed/ggml_short_vectors.hpp"

#if defined(HAS_DOT_PRODUCTS)

namespace lowtide {
namespace ggml {
namespace vectors {

// Writes the eight scales of a Q4_K or Q5_K block, then its eight offsets: numbers of six bits, times
// the block's `d` and `dmin`.
AVX512_BF16 INLINED void scales_and_offsets(const u8* b, float* out) {
    const auto low = number_at<std::uint32_t>(b + 4), middle = number_at<std::uint32_t>(b + 8);
    const auto high = number_at<std::uint32_t>(b + 12);
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

// What Q4_K and Q5_K have in common: their blocks begin alike.
struct SixBits {
    static constexpr int STEPS = 4;

    float scales[16];

    AVX512_BF16 INLINED void begin(const u8* b) { scales_and_offsets(b, scales); }

    AVX512_BF16 INLINED __m512 scale(int group) const { return everywhere(scales[group]); }
    AVX512_BF16 INLINED __m512 offset(int group) const { return everywhere(scales[8 + group]); }
};

template <>
struct Span<Q4K> : SixBits {
    AVX512_BF16 INLINED void step(const u8* b, int pair, __m512i (&out)[2]) const {
        const __m512i both = _mm512_cvtepu8_epi16(thirty_two(b + 16 + 32 * pair));
        __m512 weights[2];
        UNROLLED for (int i = 0; i < 2; ++i)
            weights[i] =
                _mm512_fmsub_ps(scale(2 * pair + i), counting(), offset(2 * pair + i));
        const __m512i table = rounded(weights[0], weights[1]);
        out[0] = look_up_first(both, table);
        out[1] = look_up_second(_mm512_srli_epi16(both, 4), table);
    }
};

template <>
struct Span<Q5K> : SixBits {
    AVX512_BF16 INLINED void step(const u8* b, int pair, __m512i (&out)[2]) const {
        const __m512 upper = _mm512_add_ps(counting(), _mm512_set1_ps(16));
        const __m512i fifth = _mm512_cvtepu8_epi16(thirty_two(b + 16));
        const __m512i both = _mm512_cvtepu8_epi16(thirty_two(b + 48 + 32 * pair));
        UNROLLED for (int i = 0; i < 2; ++i) {
            const int group = 2 * pair + i;
            const __m512i table = rounded(
                _mm512_fmsub_ps(scale(group), counting(), offset(group)),
                _mm512_fmsub_ps(scale(group), upper, offset(group)));
            const __m512i bit = group < 4 ? left(fifth, 4 - group) : right(fifth, group - 4);
            out[i] = look_up(chosen(words(15), right(both, 4 * i), bit), table);
        }
    }
};

// Numbers of six bits are assembled 64 at a time, stored, and widened by loads: that uses the shuffle
// port once, where taking a part out of a register first would use it twice.
template <>
struct Span<Q6K> {
    static constexpr int STEPS = 4;

    float scales[16];
    alignas(64) u8 numbers[256];

    AVX512_BF16 INLINED void begin(const u8* b) {
        _mm512_storeu_ps(
            scales, _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(sixteen(b + 192))),
                                  half_everywhere(b + 208)));
        UNROLLED for (int half = 0; half < 2; ++half) numbers_of_half(b, half, numbers + 128 * half);
        stays_in_memory(this);
    }

    AVX512_BF16 INLINED void step(const u8*, int number, __m512i (&out)[2]) const {
        UNROLLED for (int i = 0; i < 2; ++i) {
            const int part = 2 * number + i;  // 32 weights
            const u8* const of_part = numbers + 32 * part;
            out[i] = scaled(
                sixteen(of_part), sixteen(of_part + 16), everywhere(scales[2 * part]),
                everywhere(scales[2 * part + 1]));
        }
    }

    // Makes 128 numbers of the low nibbles of 64 bytes, then of the high ones. Their two upper bits are
    // in 32 other bytes, each of which has those of four numbers.
    AVX512_BF16 static INLINED void numbers_of_half(const u8* b, int half, u8* out) {
        const __m512i q = _mm512_loadu_si512(b + 64 * half);
        const __m512i h = _mm512_broadcast_i64x4(thirty_two(b + 128 + 32 * half));
        // Rotations that bring two bits of a byte to bits 4 and 5: bits 0 and 1 for the first 32
        // numbers, 2 and 3 for the next, then (`later`) 4 to 7.
        const __m512i turns = _mm512_inserti64x4(_mm512_set1_epi32(4), _mm256_set1_epi32(2), 1);
        const __m512i later = _mm512_sub_epi32(turns, _mm512_set1_epi32(4));
        _mm512_store_si512(out, six_bits(q, _mm512_rolv_epi32(h, turns)));
        _mm512_store_si512(
            out + 64, six_bits(_mm512_srli_epi16(q, 4), _mm512_rolv_epi32(h, later)));
    }

    // Joins numbers' lower four bits and upper two, and subtracts 32 as Q6_K does: signed bytes.
    AVX512_BF16 static INLINED __m512i six_bits(__m512i four, __m512i two) {
        const __m512i low = _mm512_and_si512(four, _mm512_set1_epi8(15));
        const __m512i six = _mm512_ternarylogic_epi32(two, _mm512_set1_epi8(0x30), low, 0xea);
        return _mm512_sub_epi8(six, _mm512_set1_epi8(32));
    }
};

// A group has four different weights, so a table of 32 serves eight groups.
template <>
struct Span<Q2K> {
    static constexpr int STEPS = 2;

    float scales[16], offsets[16];

    AVX512_BF16 INLINED void begin(const u8* b) {
        const __m512i both = _mm512_cvtepu8_epi32(sixteen(b)), four = _mm512_set1_epi32(15);
        _mm512_storeu_ps(scales, _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_and_si512(both, four)),
                                               half_everywhere(b + 80)));
        _mm512_storeu_ps(offsets, _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_srli_epi32(both, 4)),
                                                half_everywhere(b + 82)));
        stays_in_memory(this);
    }

    AVX512_BF16 INLINED void step(const u8* b, int half, __m512i (&out)[4]) const {
        const __m512 numbers =
            _mm512_cvtepi32_ps(_mm512_and_si512(counting16(), _mm512_set1_epi32(3)));
        const __m512 of_scales = _mm512_loadu_ps(scales), of_offsets = _mm512_loadu_ps(offsets);
        __m512 weights[2];
        UNROLLED for (int i = 0; i < 2; ++i) {
            const __m512i group = _mm512_add_epi32(
                _mm512_srli_epi32(counting16(), 2), _mm512_set1_epi32(8 * half + 4 * i));
            weights[i] = _mm512_fmsub_ps(_mm512_permutexvar_ps(group, of_scales), numbers,
                                         _mm512_permutexvar_ps(group, of_offsets));
        }
        const __m512i table = rounded(weights[0], weights[1]);
        const __m512i q = _mm512_cvtepu8_epi16(thirty_two(b + 16 + 32 * half));
        UNROLLED for (int part = 0; part < 4; ++part) {
            const __m512i groups = _mm512_inserti64x4(
                words(8 * part), _mm256_set1_epi16(static_cast<short>(8 * part + 4)), 1);
            out[part] = look_up(chosen(words(3), right(q, 2 * part), groups), table);
        }
    }
};

// A group has eight different weights, so a table of 32 serves four groups.
template <>
struct Span<Q3K> {
    static constexpr int STEPS = 4;

    float scales[16];

    AVX512_BF16 INLINED void begin(const u8* b) {
        const auto low = number_at<std::uint64_t>(b + 96);
        const std::uint64_t high = number_at<std::uint32_t>(b + 104);
        constexpr std::uint64_t FOUR = 0x0f0f0f0f0f0f0f0f, TWO = 0x0303030303030303;
        const std::uint64_t lower = (low & FOUR) | ((high | high >> 2 << 32) & TWO) << 4;
        const std::uint64_t upper = (low >> 4 & FOUR) | ((high >> 4 | high >> 6 << 32) & TWO) << 4;
        const __m128i bytes = _mm_set_epi64x(
            static_cast<long long>(upper), static_cast<long long>(lower));
        const __m512i signed_six =
            _mm512_sub_epi32(_mm512_cvtepu8_epi32(bytes), _mm512_set1_epi32(32));
        _mm512_storeu_ps(
            scales, _mm512_mul_ps(_mm512_cvtepi32_ps(signed_six), half_everywhere(b + 108)));
        stays_in_memory(this);
    }

    AVX512_BF16 INLINED void step(const u8* b, int pair, __m512i (&out)[2]) const {
        const __m512i three = _mm512_set1_epi32(7);
        const __m512 numbers = _mm512_sub_ps(
            _mm512_cvtepi32_ps(_mm512_and_si512(counting16(), three)), _mm512_set1_ps(4));
        const __m512 of_groups = _mm512_loadu_ps(scales);
        const __m512i third = _mm512_cvtepu8_epi16(thirty_two(b));
        __m512 weights[2];
        UNROLLED for (int i = 0; i < 2; ++i) {
            const __m512i group = _mm512_add_epi32(
                _mm512_srli_epi32(counting16(), 3), _mm512_set1_epi32(4 * pair + 2 * i));
            weights[i] = _mm512_mul_ps(_mm512_permutexvar_ps(group, of_groups), numbers);
        }
        const __m512i table = rounded(weights[0], weights[1]);
        const __m512i q = _mm512_cvtepu8_epi16(thirty_two(b + 32 + pair / 2 * 32));
        UNROLLED for (int i = 0; i < 2; ++i) {
            const int part = 2 * pair + i;  // 32 weights
            const __m512i groups = _mm512_inserti64x4(
                words(16 * i), _mm256_set1_epi16(static_cast<short>(16 * i + 8)), 1);
            const __m512i bit = part < 2 ? left(third, 2 - part) : right(third, part - 2);
            const __m512i third_bit = chosen(words(4), bit, groups);
            out[i] = look_up(chosen(words(3), right(q, part % 4 * 2), third_bit), table);
        }
    }
};

template <>
struct Span<Iq4Xs> {
    static constexpr int STEPS = 4;

    float scales[8];

    AVX512_BF16 INLINED void begin(const u8* b) {
        const float d = half_at(b);
        for (int g = 0; g < 8; ++g) scales[g] = d * static_cast<float>(iq4_xs_scale(b, g));
        stays_in_memory(this);
    }

    AVX512_BF16 INLINED void step(const u8* b, int pair, __m512i (&out)[2]) const {
        const __m512 values = _mm512_loadu_ps(IQ4_VALUES);
        const __m512i table = rounded(
            _mm512_mul_ps(everywhere(scales[2 * pair]), values),
            _mm512_mul_ps(everywhere(scales[2 * pair + 1]), values));
        const u8* const q = b + 8 + 32 * pair;
        out[0] = look_up_first(nibbles(q), table);
        out[1] = look_up_second(nibbles(q + 16), table);
    }
};

// Types whose numbers are looked up in a grid: 32 signed numbers at a time, which are then scaled.
template <class Type>
struct GridSpan {
    static constexpr int STEPS = 4;

    float scales[Type::SIZE / Type::GROUP];

    AVX512_BF16 INLINED void begin(const u8* b) {
        Type::scales(b, scales, nullptr);
        stays_in_memory(this);
    }

    AVX512_BF16 INLINED void step(const u8* b, int pair, __m512i (&out)[2]) const {
        UNROLLED for (int i = 0; i < 2; ++i) {
            const int part = 2 * pair + i;  // 32 weights
            const __m256i numbers = thirty_two_numbers<Type>(b, part);
            out[i] = scaled(
                _mm256_castsi256_si128(numbers), _mm256_extracti128_si256(numbers, 1),
                everywhere(scales[32 * part / Type::GROUP]),
                everywhere(scales[(32 * part + 16) / Type::GROUP]));
        }
    }
};

template <> struct Span<Iq2Xxs> : GridSpan<Iq2Xxs> {};
template <> struct Span<Iq2Xs> : GridSpan<Iq2Xs> {};
template <> struct Span<Iq2S> : GridSpan<Iq2S> {};
template <> struct Span<Iq3Xxs> : GridSpan<Iq3Xxs> {};
template <> struct Span<Iq3S> : GridSpan<Iq3S> {};

constexpr long SPAN = 256;

template <class Type>
constexpr long BLOCKS_OF_SPAN = SPAN / Type::SIZE;

// Number of registers that a step unpacks, of 32 weights each.
template <class Type>
constexpr int PARTS = 8 / Span<Type>::STEPS;

// Unpacks consecutive blocks and hands them to `take`, 32 weights at a time.
template <class Type, class Take>
AVX512_BF16 INLINED void unpack_blocks(const u8* stored, long num_blocks, Take& take) {
    Span<Type> span;
    long block = 0;
    for (; block + BLOCKS_OF_SPAN<Type> <= num_blocks; block += BLOCKS_OF_SPAN<Type>) {
        const u8* const b = stored + block * Type::BYTES;
        span.begin(b);
        UNROLLED for (int step = 0; step < Span<Type>::STEPS; ++step) {
            __m512i weights[PARTS<Type>];
            span.step(b, step, weights);
            UNROLLED for (int part = 0; part < PARTS<Type>; ++part)
                take(block * Type::SIZE / 32 + step * PARTS<Type> + part, weights[part]);
        }
    }
    if constexpr (BLOCKS_OF_SPAN<Type> > 1)
        if (block < num_blocks)
            span.some(stored + block * Type::BYTES, num_blocks - block, block, take);
}

struct Store {
    bf16* out;

    AVX512_BF16 INLINED void operator()(long number, __m512i weights) const {
        _mm512_storeu_si512(out + 32 * number, weights);
    }
};

template <class Type>
AVX512_BF16 void unpack(const PackedRows& rows, bf16* out, long out_stride) {
    for (long row = 0; row < rows.num_rows; ++row) {
        Store store = {out + row * out_stride};
        unpack_blocks<Type>(rows.stored + row * rows.row_bytes, rows.num_blocks, store);
    }
}

}  // namespace vectors
}  // namespace ggml
}  // namespace lowtide

#endif
