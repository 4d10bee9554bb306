// ggml's types IQ2 and IQ3: the sizes of eight or four weights are one point of a grid, and each
// sign is a bit. Beside the members of all types (ggml_types.hpp) each has:
//
//     eight(b, i)  the sizes of weights 8 i to 8 i + 7, a byte each, none of them 0
//     signs(b, g)  the signs of weights 32 g to 32 g + 31, a bit each, set for a negative weight

#pragma once

#include <type_traits>

#include "packed/ggml_grids.hpp"
#include "packed/ggml_types.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace lowtide {
namespace ggml {

constexpr unsigned from_hexadecimal(char digit) {
    return static_cast<unsigned>(digit <= '9' ? digit - '0' : digit - 'a' + 10);
}

// The grid's points as integers whose bytes are the sizes, the first in the lowest byte.
template <class Point, int count>
struct Grid {
    Point points[count];

    template <int num_chars>
    constexpr Grid(const char (&digits)[num_chars], const u8* sizes) : points() {
        static_assert(num_chars == 4 * count + 1, "four digits to a point, and the string's end");
        constexpr unsigned BITS = 16 / sizeof(Point), MASK = (1u << BITS) - 1;
        for (int i = 0; i < count; ++i) {
            unsigned number = 0;
            for (int j = 0; j < 4; ++j) number = number << 4 | from_hexadecimal(digits[4 * i + j]);
            for (unsigned j = 0; j < sizeof(Point); ++j)
                points[i] |= static_cast<Point>(sizes[number >> BITS * j & MASK]) << 8 * j;
        }
    }
};

constexpr u8 IQ2_SIZES[] = {8, 25, 43};
constexpr u8 IQ3_XXS_SIZES[] = {4, 12, 20, 28, 36, 44, 52, 62};
constexpr u8 IQ3_S_SIZES[] = {1, 3, 5, 7, 9, 11, 13, 15};

inline constexpr Grid<std::uint64_t, 256> IQ2_XXS_GRID(IQ2_XXS_POINTS, IQ2_SIZES);
inline constexpr Grid<std::uint64_t, 512> IQ2_XS_GRID(IQ2_XS_POINTS, IQ2_SIZES);
inline constexpr Grid<std::uint64_t, 1024> IQ2_S_GRID(IQ2_S_POINTS, IQ2_SIZES);
inline constexpr Grid<std::uint32_t, 256> IQ3_XXS_GRID(IQ3_XXS_POINTS, IQ3_XXS_SIZES);
inline constexpr Grid<std::uint32_t, 512> IQ3_S_GRID(IQ3_S_POINTS, IQ3_S_SIZES);

// Applies signs to eight sizes: a byte is negated where its bit is set.
INLINED std::uint64_t with_signs(std::uint64_t sizes, std::uint64_t bits) {
    constexpr std::uint64_t EVERY = 0x0101010101010101;
    const std::uint64_t own = bits * EVERY & 0x8040201008040201;  // each byte's own bit
    const std::uint64_t minus = (own + 0x7f * EVERY) >> 7 & EVERY;
    return (sizes ^ minus * 0xff) + minus;  // no byte overflows: no size is 0
}

template <class Type>
struct GridType {
    static constexpr long SIZE = 256;
    static constexpr bool HAS_OFFSETS = false;

    static INLINED void numbers(const u8* b, i8* out) {
        for (int g = 0; g < 8; ++g) {
            const std::uint64_t signs = Type::signs(b, g);
            for (int i = 0; i < 4; ++i, out += 8) {
                const auto eight = with_signs(Type::eight(b, 4 * g + i), signs >> 8 * i & 255);
                std::memcpy(out, &eight, sizeof eight);
            }
        }
    }
};

template <class Type>
constexpr bool HAS_GRID = std::is_base_of_v<GridType<Type>, Type>;

// Returns the signs of 32 weights from seven stored bits for each eight. The eighth is such that an
// even number of the eight are negative.
INLINED std::uint32_t even_signs(std::uint32_t sevens) {
    std::uint32_t sum = sevens ^ sevens >> 4;
    sum ^= sum >> 2, sum ^= sum >> 1;
    return sevens | (sum & 0x01010101) << 7;
}

// Returns the signs of 32 weights from the lowest 28 bits of a word, seven for each eight.
INLINED std::uint32_t even_signs_at(const u8* b) {
    const auto bits = number_at<std::uint32_t>(b);
    return even_signs((bits & 0x7f) | (bits & 0x3f80) << 1 | (bits & 0x1fc000) << 2 |
                      (bits & 0xfe00000) << 3);
}

INLINED float grid_scale(float d, int number, float factor) {
    return d * (0.5f + static_cast<float>(number)) * factor;
}

// Unpacks the scales of `count` groups, four bits each.
template <int count>
INLINED void scales_of_four_bits(float d, const u8* s, float factor, float* scales) {
    for (int g = 0; g < count; ++g)
        scales[g] = grid_scale(d, s[g / 2] >> g % 2 * 4 & 15, factor);
}

struct Iq2Xxs : GridType<Iq2Xxs> {
    static constexpr long BYTES = 66, GROUP = 32;

    static INLINED std::uint64_t eight(const u8* b, int i) {
        return IQ2_XXS_GRID.points[b[2 + i / 4 * 8 + i % 4]];
    }

    static INLINED std::uint32_t signs(const u8* b, int g) { return even_signs_at(b + 6 + 8 * g); }

    static INLINED void scales(const u8* b, float* scales, float*) {
        const float d = half_at(b);
        for (int g = 0; g < 8; ++g) scales[g] = grid_scale(d, b[9 + 8 * g] >> 4, 0.25f);
    }
};

struct Iq2Xs : GridType<Iq2Xs> {
    static constexpr long BYTES = 74, GROUP = 16;

    static INLINED std::uint64_t eight(const u8* b, int i) {
        return IQ2_XS_GRID.points[number_at<std::uint16_t>(b + 2 + 2 * i) & 511];
    }

    // The upper seven bits of each of four words.
    static INLINED std::uint32_t signs(const u8* b, int g) {
        auto four = number_at<std::uint64_t>(b + 2 + 8 * g) >> 9 & 0x007f007f007f007f;
        four = (four | four >> 8) & 0x0000ffff0000ffff;
        return even_signs(static_cast<std::uint32_t>(four | four >> 16));
    }

    static INLINED void scales(const u8* b, float* scales, float*) {
        scales_of_four_bits<16>(half_at(b), b + 66, 0.25f, scales);
    }
};

struct Iq2S : GridType<Iq2S> {
    static constexpr long BYTES = 82, GROUP = 16;

    static INLINED std::uint64_t eight(const u8* b, int i) {
        return IQ2_S_GRID.points[b[2 + i] | (b[66 + i / 4] >> i % 4 * 2 & 3) << 8];
    }

    static INLINED std::uint32_t signs(const u8* b, int g) {
        return number_at<std::uint32_t>(b + 34 + 4 * g);
    }

    static INLINED void scales(const u8* b, float* scales, float*) {
        scales_of_four_bits<16>(half_at(b), b + 74, 0.25f, scales);
    }
};

struct Iq3Xxs : GridType<Iq3Xxs> {
    static constexpr long BYTES = 98, GROUP = 32;

    static INLINED std::uint64_t eight(const u8* b, int i) {
        const std::uint64_t second = IQ3_XXS_GRID.points[b[3 + 2 * i]];
        return IQ3_XXS_GRID.points[b[2 + 2 * i]] | second << 32;
    }

    static INLINED std::uint32_t signs(const u8* b, int g) { return even_signs_at(b + 66 + 4 * g); }

    static INLINED void scales(const u8* b, float* scales, float*) {
        const float d = half_at(b);
        for (int g = 0; g < 8; ++g) scales[g] = grid_scale(d, b[69 + 4 * g] >> 4, 0.5f);
    }
};

struct Iq3S : GridType<Iq3S> {
    static constexpr long BYTES = 110, GROUP = 32;

    static INLINED std::uint64_t eight(const u8* b, int i) {
        return four(b, 2 * i) | static_cast<std::uint64_t>(four(b, 2 * i + 1)) << 32;
    }

    static INLINED std::uint32_t signs(const u8* b, int g) {
        return number_at<std::uint32_t>(b + 74 + 4 * g);
    }

    static INLINED void scales(const u8* b, float* scales, float*) {
        scales_of_four_bits<8>(half_at(b), b + 106, 2.0f, scales);
    }

   private:
    static INLINED std::uint32_t four(const u8* b, int i) {
        return IQ3_S_GRID.points[b[2 + i] | (b[66 + i / 8] >> i % 8 & 1) << 8];
    }
};

#if defined(__x86_64__)

// Expands 32 bits to bytes, all ones for a set bit.
AVX2 INLINED __m256i bytes_of_bits(std::uint32_t bits) {
    const __m256i places = _mm256_setr_epi64x(
        0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i each = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201));
    const __m256i own =
        _mm256_shuffle_epi8(_mm256_set1_epi32(static_cast<int>(bits)), places);
    return _mm256_cmpeq_epi8(_mm256_and_si256(own, each), each);
}

// Returns weights 32 g to 32 g + 31 of a block as signed integers.
template <class Type>
AVX2 INLINED __m256i thirty_two_numbers(const u8* b, int g) {
    const auto eight = [=](int i) INLINED_LAMBDA {
        return static_cast<long long>(Type::eight(b, 4 * g + i));
    };
    const __m256i sizes = _mm256_setr_epi64x(eight(0), eight(1), eight(2), eight(3));
    const __m256i minus = bytes_of_bits(Type::signs(b, g));
    return _mm256_sub_epi8(_mm256_xor_si256(sizes, minus), minus);
}

#endif

}  // namespace ggml
}  // namespace lowtide
