// Products of int8 rows by registers of 32 numbers: for processors without AVX-512, and on all for
// types with a grid. Sixteen groups of weights are unpacked once for up to `MOST_ROUNDED` rows,
// whose codes are in their own order.
//
// AVX-VNNI adds four products of bytes in one instruction, AVX2 in two or three. They are integers,
// so the bits are the same. VNNI's instruction is inline assembler: otherwise all inlined functions
// would have to be compiled for AVX-VNNI, too.

#pragma once

#include <type_traits>

#include "dense/tiles.hpp"
#include "rounded/ggml_avx2.hpp"
#include "rounded/int8_products.hpp"

#if defined(__x86_64__)

namespace lowtide {
namespace avx2 {

// Adds the products of 32 numbers to eight sums, four to each, by AVX2.
struct Pairs {
    template <Kind kind>
    AVX2_F16C static INLINED __m256i added(__m256i sums, __m256i w, __m256i x) {
        __m256i pairs;
        if constexpr (kind == WIDE) {
            pairs = _mm256_add_epi32(
                _mm256_madd_epi16(
                    _mm256_cvtepu8_epi16(_mm256_castsi256_si128(w)),
                    _mm256_cvtepi8_epi16(_mm256_castsi256_si128(x))),
                _mm256_madd_epi16(
                    _mm256_cvtepu8_epi16(_mm256_extracti128_si256(w, 1)),
                    _mm256_cvtepi8_epi16(_mm256_extracti128_si256(x, 1))));
        } else {
            const __m256i of_two = kind == SIGNED
                ? _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w))
                : _mm256_maddubs_epi16(w, x);
            pairs = _mm256_madd_epi16(of_two, _mm256_set1_epi16(1));
        }
        return _mm256_add_epi32(sums, pairs);
    }
};

#if defined(HAS_DOT_PRODUCTS)

// The same by VNNI. is_short: in AVX-VNNI's encoding, otherwise in that of AVX-512's VNNI.
template <bool is_short>
struct Fours {
    template <Kind kind>
    AVX2_F16C static INLINED __m256i added(__m256i sums, __m256i w, __m256i x) {
        if constexpr (kind == SIGNED) x = _mm256_sign_epi8(x, w), w = _mm256_abs_epi8(w);
        if constexpr (is_short) asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sums) : "x"(w), "x"(x));
        else asm("%{evex%} vpdpbusd %2, %1, %0" : "+x"(sums) : "x"(w), "x"(x));
        return sums;
    }
};

#endif

AVX2_F16C INLINED __m256i sums_of_eight(const __m256i (&of)[8]) {
    const __m256i low = _mm256_hadd_epi32(
        _mm256_hadd_epi32(of[0], of[1]), _mm256_hadd_epi32(of[2], of[3]));
    const __m256i high = _mm256_hadd_epi32(
        _mm256_hadd_epi32(of[4], of[5]), _mm256_hadd_epi32(of[6], of[7]));
    return _mm256_add_epi32(
        _mm256_permute2x128_si256(low, high, 0x20), _mm256_permute2x128_si256(low, high, 0x31));
}

// Returns the dots of eight groups from four registers with the sums of two groups each.
AVX2_F16C INLINED __m256i sums_of_four(const __m256i (&of)[4]) {
    const __m256i both = _mm256_hadd_epi32(
        _mm256_hadd_epi32(of[0], of[1]), _mm256_hadd_epi32(of[2], of[3]));
    return _mm256_permutevar8x32_epi32(both, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

// Returns the dot products of eight groups.
template <class Type, class Sums>
AVX2_F16C INLINED __m256i dots_of_eight(const __m256i* numbers, const std::int8_t* codes) {
    constexpr int OF_GROUP = Type::GROUP > 32 ? Type::GROUP / 32 : 1;  // registers of a group
    constexpr int COUNT = Type::GROUP < 32 ? 4 : 8;
    __m256i sums[COUNT];
    UNROLLED for (int i = 0; i < COUNT; ++i) {
        sums[i] = _mm256_setzero_si256();
        UNROLLED for (int j = i * OF_GROUP; j < (i + 1) * OF_GROUP; ++j)
            sums[i] = Sums::template added<Numbers<Type>::KIND>(
                sums[i], numbers[j],
                _mm256_load_si256(reinterpret_cast<const __m256i*>(codes) + j));
    }
    if constexpr (COUNT == 8) return sums_of_eight(sums);
    else return sums_of_four(sums);
}

// Sixteen groups of a row of weights. Groups beyond the row's end are 0.
template <class Type>
struct Sixteen {
    static constexpr long NUM_REGISTERS = NUMBERS<Type> / 32, NUM_BLOCKS = NUMBERS<Type> / Type::SIZE;

    __m256i numbers[NUM_REGISTERS];
    alignas(32) float scales[SUMS], offsets[SUMS];

    AVX2_F16C INLINED void load(const WeightRow<Type>& row, long first, long num_blocks) {
        if (num_blocks < NUM_BLOCKS) std::memset(this, 0, sizeof *this);
        const u8* const b = row.start + first * block_bytes();
        for (long i = 0; i < num_blocks; ++i)
            Numbers<Type>::unpack(b + i * block_bytes(), numbers + i * (Type::SIZE / 32));
        load_ends(row, first, num_blocks);
    }

   private:
    static constexpr bool IS_OWN = HAS_ZEROS<Type>;

    static constexpr long block_bytes() {
        if constexpr (IS_OWN) return Type::CODE_BYTES;
        else return Type::BYTES;
    }

    AVX2_F16C INLINED void load_ends(const WeightRow<Type>& row, long first, long num_blocks) {
        constexpr long NUM_GROUPS = Type::SIZE / Type::GROUP;
        if constexpr (IS_OWN) {
            widen_halves<2>(row.ends() + 2 * first, num_blocks, false, scales);
            widen_halves<2>(row.ends() + 2 * (row.num_groups + first), num_blocks, true, offsets);
        } else if constexpr (NUM_GROUPS == 1 && !std::is_same_v<Type, ggml::Mxfp4>) {
            const u8* const b = row.start + first * Type::BYTES;
            widen_halves<Type::BYTES>(b, num_blocks, false, scales);
            if (Type::HAS_OFFSETS) widen_halves<Type::BYTES>(b + 2, num_blocks, true, offsets);
        } else {
            for (long i = 0; i < num_blocks; ++i)
                Type::scales(
                    row.start + (first + i) * Type::BYTES, scales + i * NUM_GROUPS,
                    offsets + i * NUM_GROUPS);
        }
    }

    // Widens float16 numbers `distance` bytes apart. is_minus: negates them.
    template <long distance>
    AVX2_F16C static INLINED void widen_halves(
        const u8* from, long count, bool is_minus, float* out
    ) {
        alignas(16) std::uint16_t halves[SUMS] = {};
        for (long i = 0; i < count; ++i) std::memcpy(halves + i, from + i * distance, 2);
        const __m256 sign = _mm256_set1_ps(is_minus ? -0.0f : 0.0f);
        UNROLLED for (int half = 0; half < 2; ++half)
            _mm256_store_ps(
                out + 8 * half,
                _mm256_xor_ps(
                    sign, _mm256_cvtph_ps(_mm_load_si128(
                              reinterpret_cast<const __m128i*>(halves + 8 * half)))));
    }
};

// Adds the terms of sixteen groups of weights with a row of x to the partial sums of an output.
template <class Type, class Sums>
AVX2_F16C INLINED void add_terms(
    const Sixteen<Type>& w, const RoundedGroups<Type>& x, __m256 (&sums)[2]
) {
    constexpr int ZERO = Numbers<Type>::ZERO;
    UNROLLED for (long half = 0; half < 2; ++half) {
        const long lane = 8 * half;
        __m256i dots = dots_of_eight<Type, Sums>(
            w.numbers + half * (Sixteen<Type>::NUM_REGISTERS / 2), x.codes + lane * Type::GROUP);
        const __m256 of_codes = _mm256_load_ps(x.sums + lane);
        if (ZERO != 0)
            dots = _mm256_sub_epi32(
                dots, _mm256_mullo_epi32(_mm256_cvtps_epi32(of_codes), _mm256_set1_epi32(ZERO)));
        __m256 term = _mm256_mul_ps(_mm256_cvtepi32_ps(dots), _mm256_load_ps(w.scales + lane));
        if (Type::HAS_OFFSETS)
            term = _mm256_sub_ps(term, _mm256_mul_ps(_mm256_load_ps(w.offsets + lane), of_codes));
        sums[half] = _mm256_add_ps(
            sums[half], _mm256_mul_ps(term, _mm256_load_ps(x.steps + lane)));
    }
}

// p.num_rows: at most `MOST_ROUNDED`.
template <class Type, class Sums>
AVX2_F16C void multiply(const RoundedProduct& p) {
    const long num_blocks = (p.num_k + Type::SIZE - 1) / Type::SIZE;
    const long row_bytes = WeightRow<Type>::bytes(p.num_k);
    for (long o = 0; o < p.num_outs; ++o) {
        const WeightRow<Type> row(p.w + o * row_bytes, p.num_k);
        __m256 sums[MOST_ROUNDED][2];
        for (long r = 0; r < p.num_rows; ++r) sums[r][0] = sums[r][1] = _mm256_setzero_ps();
        for (long first = 0; first < num_blocks; first += Sixteen<Type>::NUM_BLOCKS) {
            Sixteen<Type> some;
            some.load(row, first, std::min(Sixteen<Type>::NUM_BLOCKS, num_blocks - first));
            const long number = first / Sixteen<Type>::NUM_BLOCKS;
            for (long r = 0; r < p.num_rows; ++r)
                add_terms<Type, Sums>(some, p.row<Type>(r)[number], sums[r]);
        }
        for (long r = 0; r < p.num_rows; ++r) {
            const float bias = p.bias ? widen(p.bias[o]) : 0.0f;
            const float total = sum_of(_mm256_add_ps(sums[r][0], sums[r][1]));
            p.out[r * p.out_stride + o] = round_bf16(total + bias);
        }
    }
}

}  // namespace avx2

// Multiplies with the best instructions of a variant.
template <class Type>
void multiply_by_avx2(int variant, const RoundedProduct& p) {
#if defined(HAS_DOT_PRODUCTS)
    static const bool has_avx_vnni = lowtide_has_avx_vnni() != 0;
    if (variant >= INT8_AVX_VNNI)
        return has_avx_vnni ? avx2::multiply<Type, avx2::Fours<true>>(p)
                            : avx2::multiply<Type, avx2::Fours<false>>(p);
#endif
    avx2::multiply<Type, avx2::Pairs>(p);
}

}  // namespace lowtide

#endif
