// `Sixteen` of the types with blocks of 256 weights: two blocks of eight groups, or one of sixteen.

#pragma once

#include "rounded/ggml_words.hpp"

#ifdef HAS_VNNI

namespace lowtide {
namespace ggml {

// Q4_K and Q5_K, whose blocks have eight groups. Two groups share 32 bytes: the even one has the low
// nibbles, the odd one the high ones.
template <class Type>
struct PairedGroups : HalvedGroups {
    static constexpr int ZERO = 0;
    static constexpr int group(int lane) { return lane % 4 * 4 + lane / 4 % 2 * 2 + lane / 8; }
    static constexpr Word word(int number, int lane) {
        return {lane % 4 * 4 + lane / 8 * 2 + number / 4, lane / 4 % 2 * 4 + number % 4};
    }

    VNNI INLINED void load_scales(const Halves& b) {
        const __m128i first = six_bits_of_eight(b.first), second = six_bits_of_eight(b.second);
        const __m128i in_order =
            _mm_setr_epi8(0, 4, 8, 12, 2, 6, 10, 14, 1, 5, 9, 13, 3, 7, 11, 15);
        const __m128i scales = _mm_shuffle_epi8(_mm_unpacklo_epi64(first, second), in_order);
        const __m128i offsets = _mm_shuffle_epi8(_mm_unpackhi_epi64(first, second), in_order);
        scale = _mm512_mul_ps(halves_of_two(b.first, b.second), unsigned_floats(scales));
        offset = _mm512_mul_ps(halves_of_two(b.first + 2, b.second + 2), unsigned_floats(offsets));
    }

    // A block's eight scales, then its eight offsets.
    VNNI static INLINED __m128i six_bits_of_eight(const u8* b) {
        constexpr std::uint32_t SIX = 0x3f3f3f3f, FOUR = 0x0f0f0f0f, TWO = 0x03030303;
        const auto low = number_at<std::uint32_t>(b + 4), middle = number_at<std::uint32_t>(b + 8);
        const auto high = number_at<std::uint32_t>(b + 12);
        const std::uint64_t scales = (high & FOUR) | (low >> 6 & TWO) << 4;
        const std::uint64_t offsets = (high >> 4 & FOUR) | (middle >> 6 & TWO) << 4;
        return _mm_set_epi64x(static_cast<long long>(offsets << 32 | (middle & SIX)),
                              static_cast<long long>(scales << 32 | (low & SIX)));
    }

    // Loads the nibbles of both blocks, which a block has at `at`.
    VNNI static INLINED void load_pairs(const Halves& b, int at, __m512i (&rows)[4]) {
        UNROLLED for (int i = 0; i < 4; ++i)
            rows[i] = _mm512_loadu_si512((i < 2 ? b.first : b.second) + at + i % 2 * 64);
        unpack_four(rows);
    }
};

template <>
struct Sixteen<Q4K> : PairedGroups<Q4K> {
    VNNI INLINED void load(const Halves& b) {
        load_scales(b);
        __m512i rows[4];
        load_pairs(b, 16, rows);
        UNROLLED for (int i = 0; i < 4; ++i) {
            of[i] = low_halves(rows[i]);
            of[4 + i] = high_halves(rows[i]);
        }
    }
};

template <>
struct Sixteen<Q5K> : PairedGroups<Q5K> {
    VNNI INLINED void load(const Halves& b) {
        load_scales(b);
        __m512i rows[4];
        load_pairs(b, 48, rows);
        const __m512i first = twice(b.first + 16), second = twice(b.second + 16);
        __m512i fifth[4] = {first, first, second, second};
        unpack_four(fifth);
        // Rotations that bring a group's bit to bit 4: bits 0, 2, 4 and 6 of a byte belong to even
        // groups, the others to odd ones.
        const __m512i turns = _mm512_setr_epi32(
            4, 0, 4, 0, 4, 0, 4, 0, 2, -2, 2, -2, 2, -2, 2, -2);
        const __m512i one_less = _mm512_sub_epi32(turns, _mm512_set1_epi32(1));
        UNROLLED for (int i = 0; i < 4; ++i) {
            of[i] = masked_or(
                _mm512_rolv_epi32(fifth[i], turns), bytes_of(16), low_halves(rows[i]));
            of[4 + i] = masked_or(
                _mm512_rolv_epi32(fifth[i], one_less), bytes_of(16), high_halves(rows[i]));
        }
    }
};

template <>
struct Sixteen<Iq4Xs> : Nibbles<Iq4Xs> {
    static constexpr int ZERO = IQ4_ZERO;
    static constexpr int group(int lane) { return lane % 4 * 4 + lane / 4; }
    static constexpr Word word(int number, int lane) { return {group(lane), number}; }

    VNNI INLINED void load(const Halves& b) {
        i8 numbers[16];
        UNROLLED for (int g = 0; g < 16; ++g)
            numbers[g] = static_cast<i8>(iq4_xs_scale(g < 8 ? b.first : b.second, g % 8));
        const __m128i in_order = turned(sixteen_bytes(reinterpret_cast<const u8*>(numbers)));
        scale = _mm512_mul_ps(halves_of_two(b.first, b.second), signed_floats(in_order));
        UNROLLED for (int i = 0; i < 4; ++i)
            of[i] = _mm512_loadu_si512((i < 2 ? b.first : b.second) + 8 + i % 2 * 64);
        split();
        look_up(IQ4_TABLE);
    }
};

template <>
struct Sixteen<Q6K> : SmallGroups {
    static constexpr int ZERO = 32;
    static constexpr int group(int lane) { return lane % 4 * 4 + lane / 4; }
    static constexpr Word word(int number, int lane) { return {group(lane), number}; }

    VNNI INLINED void load(const Halves& of_block) {
        const u8* const b = of_block.first;
        scale = _mm512_mul_ps(
            half_everywhere(b + 208), signed_floats(turned(sixteen_bytes(b + 192))));
        // Rotations that bring a group's two bits to bits 4 and 5: a byte has those of four groups.
        const __m512i turns = _mm512_inserti64x4(_mm512_set1_epi32(4), _mm256_set1_epi32(2), 1);
        const __m512i two = bytes_of(0x30);
        UNROLLED for (int half = 0; half < 2; ++half) {
            const __m512i q = _mm512_loadu_si512(b + 64 * half), h = twice(b + 128 + 32 * half);
            of[2 * half] = masked_or(_mm512_rolv_epi32(h, turns), two, low_halves(q));
            of[2 * half + 1] = masked_or(
                _mm512_rolv_epi32(h, _mm512_sub_epi32(turns, _mm512_set1_epi32(4))), two,
                high_halves(q));
        }
        unpack_four(of);
    }
};

// Types whose bytes have two bits of each of four groups.
struct TwoBits : SmallGroups {
    static constexpr int group(int lane) {
        return lane / 8 * 8 + lane % 4 * 2 + lane / 4 % 2;
    }
    static constexpr Word word(int number, int lane) { return {group(lane), number}; }

    // Moves sixteen groups' numbers from their order to lanes.
    VNNI static INLINED __m128i in_lanes(__m128i bytes) {
        return _mm_shuffle_epi8(
            bytes, _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
    }

    VNNI INLINED void load_two(const u8* q) {
        const __m512i bytes = _mm512_loadu_si512(q), two = bytes_of(3);
        of[0] = _mm512_and_si512(bytes, two);
        of[1] = _mm512_and_si512(_mm512_srli_epi16(bytes, 2), two);
        of[2] = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), two);
        of[3] = _mm512_and_si512(_mm512_srli_epi16(bytes, 6), two);
    }
};

template <>
struct Sixteen<Q2K> : TwoBits {
    static constexpr int ZERO = 0;

    VNNI INLINED void load(const Halves& of_block) {
        const u8* const b = of_block.first;
        const __m512i both = _mm512_cvtepu8_epi32(in_lanes(sixteen_bytes(b)));
        scale = _mm512_mul_ps(
            half_everywhere(b + 80),
            _mm512_cvtepi32_ps(_mm512_and_si512(both, _mm512_set1_epi32(15))));
        offset = _mm512_mul_ps(
            half_everywhere(b + 82), _mm512_cvtepi32_ps(_mm512_srli_epi32(both, 4)));
        load_two(b + 16);
        unpack_four(of);
    }
};

template <>
struct Sixteen<Q3K> : TwoBits {
    static constexpr int ZERO = 4;

    VNNI INLINED void load(const Halves& of_block) {
        const u8* const b = of_block.first;
        constexpr std::uint64_t FOUR = 0x0f0f0f0f0f0f0f0f, TWO = 0x0303030303030303;
        const auto low = number_at<std::uint64_t>(b + 96);
        const std::uint64_t high = number_at<std::uint32_t>(b + 104);
        const std::uint64_t first = (low & FOUR) | ((high | high >> 2 << 32) & TWO) << 4;
        const std::uint64_t second = (low >> 4 & FOUR) | ((high >> 4 | high >> 6 << 32) & TWO) << 4;
        const __m128i numbers = in_lanes(
            _mm_set_epi64x(static_cast<long long>(second), static_cast<long long>(first)));
        const __m512i of_groups =
            _mm512_sub_epi32(_mm512_cvtepu8_epi32(numbers), _mm512_set1_epi32(32));
        scale = _mm512_mul_ps(half_everywhere(b + 108), _mm512_cvtepi32_ps(of_groups));
        load_two(b + 32);
        // Rotations that bring a group's bit to bit 2: bits 0 to 3 of a byte belong to the first eight
        // groups, the others to the others.
        const __m512i third = twice(b);
        __m512i turns = _mm512_inserti64x4(_mm512_set1_epi32(2), _mm256_set1_epi32(-2), 1);
        UNROLLED for (int i = 0; i < 4; ++i) {
            of[i] = masked_or(_mm512_rolv_epi32(third, turns), bytes_of(4), of[i]);
            turns = _mm512_sub_epi32(turns, _mm512_set1_epi32(1));
        }
        unpack_four(of);
    }
};

}  // namespace ggml
}  // namespace lowtide

#endif
