// Sixteen groups of q8 or q4 (quantised.hpp) in registers, for products of int8 rows by VNNI;
// ggml_words.hpp has those of ggml's types.
//
// A group has 16 words. Quarter q, lane i of register `number` holds
//
//     4 bits: group 8 (number / 8) + 2 i + q / 2, word 8 (number % 8 / 4) + 4 (q % 2) + number % 4
//     8 bits: group 4 (number / 4) + i,           word 4 q + number % 4

#pragma once

#include "rounded/ggml_words.hpp"
#include "packed/quantised.hpp"

namespace lowtide {

#ifdef HAS_VNNI

namespace ggml {

template <bool is_whole>
VNNI INLINED __m512i words_at(const u8* from, __mmask16 mask) {
    return is_whole ? _mm512_loadu_si512(from) : _mm512_maskz_loadu_epi32(mask, from);
}

template <>
struct Sixteen<Own<4>> {
    static constexpr int NUM_WORDS = 16, ZERO = 0;
    static constexpr int group(int lane) { return lane / 8 * 8 + lane % 4 * 2 + lane / 4 % 2; }
    static constexpr Word word(int number, int lane) {
        return {number / 8 * 8 + lane % 4 * 2 + lane / 8,
                number % 8 / 4 * 8 + lane / 4 % 2 * 4 + number % 4};
    }
    __m512i of[NUM_WORDS];
    __m512 scale, offset;

    // Loads eight groups. Groups from num_groups on are 0.
    template <int half, bool is_whole>
    VNNI INLINED void load_half(const u8* codes, long num_groups) {
        __m512i rows[4];
        UNROLLED for (int i = 0; i < 4; ++i) {
            const auto mask = static_cast<__mmask16>(
                (2 * i < num_groups ? 0xff : 0) | (2 * i + 1 < num_groups ? 0xff00 : 0));
            rows[i] = words_at<is_whole>(codes + 2 * i * 32, mask);
        }
        unpack_four(rows);
        UNROLLED for (int i = 0; i < 4; ++i) {
            of[8 * half + i] = low_halves(rows[i]);
            of[8 * half + 4 + i] = high_halves(rows[i]);
        }
    }

    VNNI INLINED __m512i dots(const i8* x, __m512i starts) const {
        __m512i sums[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
        UNROLLED for (int i = 0; i < 8; ++i)
            UNROLLED for (int half = 0; half < 2; ++half)
                sums[half] = _mm512_dpbusd_epi32(
                    sums[half], of[8 * half + i], _mm512_load_si512(x + 64 * (8 * half + i)));
        return _mm512_add_epi32(quarters_added(sums[0], sums[1]), starts);
    }
};

template <>
struct Sixteen<Own<8>> {
    static constexpr int NUM_WORDS = 16, ZERO = 0;
    static constexpr int group(int lane) { return lane; }
    static constexpr Word word(int number, int lane) {
        return {number / 4 * 4 + lane % 4, lane / 4 * 4 + number % 4};
    }
    __m512i of[NUM_WORDS];
    __m512 scale, offset;

    template <int half, bool is_whole>
    VNNI INLINED void load_half(const u8* codes, long num_groups) {
        UNROLLED for (int four = 0; four < 2; ++four) {
            __m512i rows[4];
            UNROLLED for (int i = 0; i < 4; ++i) {
                const long group = 4 * four + i;
                const auto mask = static_cast<__mmask16>(group < num_groups ? 0xffff : 0);
                rows[i] = words_at<is_whole>(codes + group * 64, mask);
            }
            unpack_four(rows);
            UNROLLED for (int i = 0; i < 4; ++i) of[8 * half + 4 * four + i] = rows[i];
        }
    }

    VNNI INLINED __m512i dots(const i8* x, __m512i starts) const {
        __m512i sums[4];
        UNROLLED for (int four = 0; four < 4; ++four) sums[four] = _mm512_setzero_si512();
        UNROLLED for (int i = 0; i < 4; ++i)
            UNROLLED for (int four = 0; four < 4; ++four)
                sums[four] = _mm512_dpbusd_epi32(
                    sums[four], of[4 * four + i], _mm512_load_si512(x + 64 * (4 * four + i)));
        return _mm512_add_epi32(
            quarters_added(quarters_added(sums[0], sums[1]), quarters_added(sums[2], sums[3])),
            starts);
    }
};

}  // namespace ggml

#endif

}  // namespace lowtide
