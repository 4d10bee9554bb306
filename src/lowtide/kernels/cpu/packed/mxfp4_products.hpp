// Products of a few rows with MXFP4 by AVX-512 with VBMI. Sums have the order of tiles.hpp, so
// their bits are those of products with unpacked weights. The processor's shuffle units bind
// (docs/log):
//
// - A block's scale is broadcast from a table that its byte indexes. Multiplied with the sixteen
//   values it gives sixteen float32, exactly, whose upper words are the possible weights.
// - Both halves of a block's sixteen bytes are broadcast and blended, without a shuffle unit. Each
//   word takes one nibble of them, at any bit (vpmultishiftqb), into its bits 1 to 4: an index of
//   words. Bit 0 is set, so the index is of an upper word; vpermw, the only shuffle, ignores bits
//   above 4.

#pragma once

#include "packed/block_products.hpp"

extern "C" int lowtide_has_vbmi();  // of processor.cpp

#if defined(HAS_DOT_PRODUCTS)

#define AVX512_VBMI \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512vbmi,avx512bf16,avx2,fma")))

namespace lowtide {
namespace ggml {
namespace mxfp4 {

using vectors::OUTS;

struct Scales {
    std::uint32_t bits[256];

    constexpr Scales() : bits() {
        for (std::uint32_t e = 0; e < 256; ++e) bits[e] = mxfp4_scale_bits(e);
    }
};
inline constexpr Scales SCALES;

// For each byte of a register, the first bit that it takes from its eight bytes: the block's first
// eight in even quarters, the others in odd ones. Lower nibbles come first. Only a word's lower
// byte counts.
struct alignas(64) Shifts {
    u8 of[64];

    constexpr Shifts() : of() {
        for (int byte = 0; byte < 64; ++byte) {
            const int number = byte % 16 / 2, is_upper = byte / 32;
            of[byte] = static_cast<u8>((8 * number + 4 * is_upper + 63) % 64);
        }
    }
};
inline constexpr Shifts SHIFTS;

AVX512_VBMI INLINED __m512i weights_of(const u8* b) {
    constexpr __mmask8 ODD_QUARTERS = 0xcc;
    const __m512i scale = _mm512_set1_epi32(static_cast<int>(SCALES.bits[b[0]]));
    const __m512 weights =
        _mm512_mul_ps(_mm512_castsi512_ps(scale), _mm512_loadu_ps(MXFP4_VALUES));
    // Set the bit below each nibble: it becomes bit 0 of the index, which has to be set.
    const __m512i ones = _mm512_inserti64x4(_mm512_set1_epi8(8), _mm256_set1_epi8(-128), 0);
    const auto first = number_at<long long>(b + 1), second = number_at<long long>(b + 9);
    const __m512i twice_first = _mm512_or_si512(ones, _mm512_set1_epi64(first));
    const __m512i bytes =
        _mm512_mask_or_epi64(twice_first, ODD_QUARTERS, ones, _mm512_set1_epi64(second));
    const __m512i numbers = _mm512_multishift_epi64_epi8(_mm512_load_si512(SHIFTS.of), bytes);
    return _mm512_permutexvar_epi16(numbers, _mm512_castps_si512(weights));
}

// Has the interface of vectors::SpanDots.
struct Dots {
    template <int rows>
    AVX512_VBMI NOT_INLINED static void of(
        const bf16* x, long x_stride, const u8* const (&weights)[OUTS], long num_blocks,
        LinesAhead& ahead, float (&sums)[rows][OUTS]
    ) {
        constexpr long AT_ONCE = 8;  // blocks of each row in one request to `Ahead`
        const u8* b[OUTS];
        UNROLLED for (int o = 0; o < OUTS; ++o) b[o] = weights[o];
        __m512 lanes[rows][OUTS] = {};
        for (long first = 0; first < num_blocks; first += AT_ONCE) {
            const long count = std::min(num_blocks - first, AT_ONCE);
            ahead.read_bytes(OUTS * count * Mxfp4::BYTES);
            for (long i = 0; i < count; ++i, x += LANES) {
                __m512i own[OUTS];
                UNROLLED for (int o = 0; o < OUTS; ++o) {
                    own[o] = weights_of(b[o]);
                    b[o] += Mxfp4::BYTES;
                }
                vectors::add_products<rows>(x, x_stride, own, lanes);
            }
        }
        UNROLLED for (int r = 0; r < rows; ++r)
            UNROLLED for (int o = 0; o < OUTS; ++o) sums[r][o] = sum_of(lanes[r][o]);
    }
};

}  // namespace mxfp4

template <>
inline bool multiply_directly<Mxfp4>(
    int variant, const Product<bf16>& p, const PackedRows& packed
) {
    static const bool has_vbmi = lowtide_has_vbmi() != 0;
    if (variant == WITH_AVX512_BF16 && has_vbmi) return multiply_few_rows<mxfp4::Dots>(p, packed);
    return multiply_by_type<Mxfp4>(variant, p, packed);
}

}  // namespace ggml
}  // namespace lowtide

#endif
