// Unpacks the integers of packed blocks to registers of 32 bytes, in the order of the weights, for
// products of int8 rows without AVX-512 (int8_avx2.hpp). Each type has
//
//     ZERO       the integer that is stored for 0
//     KIND       the range of the stored integers
//     unpack(b)  a block's integers, 32 to a register

#pragma once

#include "packed/ggml_grid_types.hpp"
#include "rounded/own_words.hpp"

#if defined(__x86_64__)

#define AVX2_F16C __attribute__((target("avx2,fma,f16c")))

namespace lowtide {
namespace avx2 {

using ggml::u8;

// SMALL: unsigned, and so small that the sum of two products fits into 16 bits. SIGNED: signed
// bytes. WIDE: unsigned, any byte.
enum Kind { SMALL, SIGNED, WIDE };

AVX2_F16C INLINED __m256i bytes_of(int value) { return _mm256_set1_epi8(static_cast<char>(value)); }

AVX2_F16C INLINED __m256i thirty_two(const u8* from) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}

// Moves a field of each byte from bit `from` to bit `to`; `mask` covers the moved field.
AVX2_F16C INLINED __m256i field(__m256i bytes, int from, int to, int mask) {
    const __m256i moved =
        to >= from ? _mm256_slli_epi16(bytes, to - from) : _mm256_srli_epi16(bytes, from - to);
    return _mm256_and_si256(moved, bytes_of(mask));
}

AVX2_F16C INLINED __m256i low_halves(__m256i bytes) { return field(bytes, 0, 0, 15); }

AVX2_F16C INLINED __m256i high_halves(__m256i bytes) { return field(bytes, 4, 0, 15); }

// Returns the low halves of 16 bytes, then the high halves.
AVX2_F16C INLINED __m256i nibbles(const u8* q) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(q));
    return low_halves(_mm256_inserti128_si256(
        _mm256_castsi128_si256(bytes), _mm_srli_epi16(bytes, 4), 1));
}

// Unpacks 32 numbers of five bits: their fifth bits, then 16 bytes of lower halves.
AVX2_F16C INLINED __m256i five_bits(const u8* h) {
    const __m256i is_set = ggml::bytes_of_bits(ggml::number_at<std::uint32_t>(h));
    return _mm256_or_si256(nibbles(h + 4), _mm256_and_si256(is_set, bytes_of(16)));
}

// Looks up numbers of four bits in a table.
AVX2_F16C INLINED __m256i looked_up(const float (&values)[16], __m256i numbers) {
    alignas(16) std::int8_t table[16];
    for (int i = 0; i < 16; ++i) table[i] = static_cast<std::int8_t>(values[i]);
    const __m128i own = _mm_load_si128(reinterpret_cast<const __m128i*>(table));
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(own), numbers);
}

template <int zero, Kind kind>
struct NumberForm {
    static constexpr int ZERO = zero;
    static constexpr Kind KIND = kind;
};

// For types with a grid; each other type has a specialisation.
template <class Type>
struct Numbers : NumberForm<0, SIGNED> {
    static_assert(ggml::HAS_GRID<Type>);
    AVX2_F16C static INLINED void unpack(const u8* b, __m256i* out) {
        for (int g = 0; g < 8; ++g) out[g] = ggml::thirty_two_numbers<Type>(b, g);
    }
};

template <>
struct Numbers<ggml::Q4_0> : NumberForm<8, SMALL> {
    AVX2_F16C static INLINED void unpack(const u8* b, __m256i* out) { out[0] = nibbles(b + 2); }
};

template <>
struct Numbers<ggml::Q4_1> : NumberForm<0, SMALL> {
    AVX2_F16C static INLINED void unpack(const u8* b, __m256i* out) { out[0] = nibbles(b + 4); }
};

template <>
struct Numbers<ggml::Q5_0> : NumberForm<16, SMALL> {
    AVX2_F16C static INLINED void unpack(const u8* b, __m256i* out) { out[0] = five_bits(b + 2); }
};

template <>
struct Numbers<ggml::Q5_1> : NumberForm<0, SMALL> {
    AVX2_F16C static INLINED void unpack(const u8* b, __m256i* out) { out[0] = five_bits(b + 4); }
};

template <>
struct Numbers<ggml::Q8_0> : NumberForm<0, SIGNED> {
    AVX2_F16C static INLINED void unpack(const u8* b, __m256i* out) { out[0] = thirty_two(b + 2); }
};

template <>
struct Numbers<ggml::Iq4Nl> : NumberForm<0, SIGNED> {
    AVX2_F16C static INLINED void unpack(const u8* b, __m256i* out) {
        out[0] = looked_up(ggml::IQ4_VALUES, nibbles(b + 2));
    }
};

template <>
struct Numbers<ggml::Mxfp4> : NumberForm<0, SIGNED> {
    AVX2_F16C static INLINED void unpack(const u8* b, __m256i* out) {
        out[0] = looked_up(ggml::MXFP4_VALUES, nibbles(b + 1));
    }
};

template <>
struct Numbers<ggml::Iq4Xs> : NumberForm<0, SIGNED> {
    AVX2_F16C static INLINED void unpack(const u8* b, __m256i* out) {
        UNROLLED for (int g = 0; g < 8; ++g)
            out[g] = looked_up(ggml::IQ4_VALUES, nibbles(b + 8 + 16 * g));
    }
};

template <>
struct Numbers<ggml::Q2K> : NumberForm<0, SMALL> {
    AVX2_F16C static INLINED void unpack(const u8* b, __m256i* out) {
        UNROLLED for (int i = 0; i < 8; ++i)
            out[i] = field(thirty_two(b + 16 + i / 4 * 32), i % 4 * 2, 0, 3);
    }
};

template <>
struct Numbers<ggml::Q3K> : NumberForm<4, SMALL> {
    AVX2_F16C static INLINED void unpack(const u8* b, __m256i* out) {
        const __m256i third = thirty_two(b);
        UNROLLED for (int i = 0; i < 8; ++i)
            out[i] = _mm256_or_si256(
                field(thirty_two(b + 32 + i / 4 * 32), i % 4 * 2, 0, 3), field(third, i, 2, 4));
    }
};

template <>
struct Numbers<ggml::Q4K> : NumberForm<0, SMALL> {
    AVX2_F16C static INLINED void unpack(const u8* b, __m256i* out) {
        UNROLLED for (int i = 0; i < 4; ++i) {
            const __m256i two = thirty_two(b + 16 + 32 * i);
            out[2 * i] = low_halves(two), out[2 * i + 1] = high_halves(two);
        }
    }
};

template <>
struct Numbers<ggml::Q5K> : NumberForm<0, SMALL> {
    AVX2_F16C static INLINED void unpack(const u8* b, __m256i* out) {
        const __m256i fifth = thirty_two(b + 16);
        UNROLLED for (int i = 0; i < 4; ++i) {
            const __m256i two = thirty_two(b + 48 + 32 * i);
            out[2 * i] = _mm256_or_si256(low_halves(two), field(fifth, 2 * i, 4, 16));
            out[2 * i + 1] = _mm256_or_si256(high_halves(two), field(fifth, 2 * i + 1, 4, 16));
        }
    }
};

template <>
struct Numbers<ggml::Q6K> : NumberForm<32, SMALL> {
    AVX2_F16C static INLINED void unpack(const u8* b, __m256i* out) {
        UNROLLED for (int i = 0; i < 8; ++i) {
            const __m256i four = thirty_two(b + i / 4 * 64 + i % 2 * 32);
            const __m256i two = thirty_two(b + 128 + i / 4 * 32);
            out[i] = _mm256_or_si256(
                i % 4 < 2 ? low_halves(four) : high_halves(four), field(two, i % 4 * 2, 4, 0x30));
        }
    }
};

template <>
struct Numbers<Own<4>> : NumberForm<0, SMALL> {
    AVX2_F16C static INLINED void unpack(const u8* b, __m256i* out) {
        const __m256i codes = thirty_two(b);
        out[0] = low_halves(codes), out[1] = high_halves(codes);
    }
};

template <>
struct Numbers<Own<8>> : NumberForm<0, WIDE> {
    AVX2_F16C static INLINED void unpack(const u8* b, __m256i* out) {
        out[0] = thirty_two(b), out[1] = thirty_two(b + 32);
    }
};

}  // namespace avx2
}  // namespace lowtide

#endif
