// Products of a few rows with MXFP4 and Q4_0 by AVX-512 with VBMI. Sums have the order of tiles.hpp,
// so their bits are those of products with unpacked weights. The processor's shuffle units bind
// (docs/log):
//
// - A block's sixteen possible weights are a table. MXFP4's scale is broadcast from a table that its
//   byte indexes. Multiplied with the sixteen values it gives sixteen float32, exactly, whose upper
//   words are the weights. Q4_0's weights are rounded, and stand in the register twice.
// - Both halves of a block's sixteen bytes are broadcast and blended, without a shuffle unit. Each
//   word takes one nibble of them, at any bit (vpmultishiftqb): an index of words. vpermw, the only
//   shuffle, ignores bits above 4. MXFP4's index is in bits 1 to 4; bit 0 is set, so it is of an
//   upper word.
// - A row may have any number of blocks. They are multiplied one at a time, and up to AT_ONCE of
//   them share a request for lines ahead.

#pragma once

#include "packed/block_products.hpp"

extern "C" int lowtide_has_vbmi();  // of processor.cpp

#if defined(HAS_DOT_PRODUCTS)

#define AVX512_VBMI \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512vbmi,avx512bf16,avx2,fma")))

namespace lowtide {
namespace ggml {
namespace four_bits {

using vectors::OUTS;

constexpr long AT_ONCE = 8;  // blocks of each row in one request to `LinesAhead`

struct Scales {
    std::uint32_t bits[256];

    constexpr Scales() : bits() {
        for (std::uint32_t e = 0; e < 256; ++e) bits[e] = mxfp4_scale_bits(e);
    }
};
inline constexpr Scales SCALES;

// For each byte of a register, the first bit that it takes from its eight bytes: the block's first
// eight in even quarters, the others in odd ones. Lower nibbles come first. Only a word's lower
// byte counts. A nibble is to be in its bits from `bit` on.
template <int bit>
struct alignas(64) Shifts {
    u8 of[64];

    constexpr Shifts() : of() {
        for (int byte = 0; byte < 64; ++byte) {
            const int number = byte % 16 / 2, is_upper = byte / 32;
            of[byte] = static_cast<u8>((8 * number + 4 * is_upper + 64 - bit) % 64);
        }
    }
};

// Takes nibbles of the sixteen bytes at `b`, in which the bits of `ones` are set first.
template <int bit>
AVX512_VBMI INLINED __m512i nibbles(const u8* b, __m512i ones) {
    static constexpr Shifts<bit> SHIFTS;
    constexpr __mmask8 ODD_QUARTERS = 0xcc;
    const auto first = number_at<long long>(b), second = number_at<long long>(b + 8);
    const __m512i of_first = _mm512_or_si512(ones, _mm512_set1_epi64(first));
    const __m512i bytes =
        _mm512_mask_or_epi64(of_first, ODD_QUARTERS, ones, _mm512_set1_epi64(second));
    return _mm512_multishift_epi64_epi8(_mm512_load_si512(SHIFTS.of), bytes);
}

// Up to AT_ONCE blocks of a row: `begin` gets all, `weights` the number and start of one.
template <class Type>
struct Blocks;

template <>
struct Blocks<Mxfp4> {
    AVX512_VBMI INLINED void begin(const u8*, long) {}

    AVX512_VBMI INLINED __m512i weights(long, const u8* b) const {
        const __m512i scale = _mm512_set1_epi32(static_cast<int>(SCALES.bits[b[0]]));
        const __m512 table =
            _mm512_mul_ps(_mm512_castsi512_ps(scale), _mm512_loadu_ps(MXFP4_VALUES));
        // Set the bit below each nibble: it becomes bit 0 of the index, which has to be set.
        const __m512i ones = _mm512_inserti64x4(_mm512_set1_epi8(8), _mm256_set1_epi8(-128), 0);
        return vectors::look_up(nibbles<1>(b + 1, ones), _mm512_castps_si512(table));
    }
};

template <>
struct Blocks<Q4_0> {
    float d[16];

    AVX512_VBMI INLINED void begin(const u8* b, long num_blocks) {
        vectors::scales_of_blocks<Q4_0>(b, num_blocks, d, nullptr);
        vectors::stays_in_memory(this);
    }

    AVX512_VBMI INLINED __m512i weights(long i, const u8* b) const {
        const __m512 scale = vectors::everywhere(d[i]);
        const __m512i table = vectors::table_of(vectors::Block<Q4_0>::sixteen(scale, scale));
        return vectors::look_up(nibbles<0>(b + 2, _mm512_setzero_si512()), table);
    }
};

// Has the interface of vectors::SpanDots.
template <class Type>
struct Dots {
    template <int rows>
    AVX512_VBMI NOT_INLINED static void of(
        const bf16* x, long x_stride, const u8* const (&weights)[OUTS], long num_blocks,
        LinesAhead& ahead, float (&sums)[rows][OUTS]
    ) {
        const u8* b[OUTS];
        UNROLLED for (int o = 0; o < OUTS; ++o) b[o] = weights[o];
        Blocks<Type> blocks[OUTS];
        __m512 lanes[rows][OUTS] = {};
        for (long first = 0; first < num_blocks; first += AT_ONCE) {
            const long count = std::min(num_blocks - first, AT_ONCE);
            ahead.read_bytes(OUTS * count * Type::BYTES);
            UNROLLED for (int o = 0; o < OUTS; ++o) blocks[o].begin(b[o], count);
            for (long i = 0; i < count; ++i, x += LANES) {
                __m512i own[OUTS];
                UNROLLED for (int o = 0; o < OUTS; ++o) {
                    own[o] = blocks[o].weights(i, b[o]);
                    b[o] += Type::BYTES;
                }
                vectors::add_products<rows>(x, x_stride, own, lanes);
            }
        }
        UNROLLED for (int r = 0; r < rows; ++r)
            UNROLLED for (int o = 0; o < OUTS; ++o) sums[r][o] = sum_of(lanes[r][o]);
    }
};

template <class Type>
bool multiply(int variant, const Product<bf16>& p, const PackedRows& packed) {
    static const bool has_vbmi = lowtide_has_vbmi() != 0;
    if (variant == WITH_AVX512_BF16 && has_vbmi) return multiply_few_rows<Dots<Type>>(p, packed);
    return multiply_by_type<Type>(variant, p, packed);
}

}  // namespace four_bits

template <>
inline bool multiply_directly<Mxfp4>(
    int variant, const Product<bf16>& p, const PackedRows& packed
) {
    return four_bits::multiply<Mxfp4>(variant, p, packed);
}

template <>
inline bool multiply_directly<Q4_0>(
    int variant, const Product<bf16>& p, const PackedRows& packed
) {
    return four_bits::multiply<Q4_0>(variant, p, packed);
}

}  // namespace ggml
}  // namespace lowtide

#endif
