// Products of a few bfloat16 rows with weights in 8 or 4 bits, which are read once.
//
//     out[r, o] = sum over k of x[r, k] * rounded(w[o, k]) (+ bias[o])
//
// Each weight is rounded once to bfloat16, as a tile of weights is that many rows are multiplied
// with. The order of a sum depends on num_k and the kind of instructions alone:
//
// - plain: element k goes to partial sum k % 32, ascending; the 32 are added in a tree. Compiled
//   for every set of instructions, with the same bits in all.
// - AVX-512 with bfloat16: pairs of neighbours go to 16 partial sums by vdpbf16ps, a group's lower
//   half before its upper half, then the tree.
// - AMX (quantised_amx.hpp): one sum, ascending.

#pragma once

#include "quantised.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// Where the compiler knows vdpbf16ps.
#if defined(__x86_64__) && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#define HAS_PAIRS
#define AVX512BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16,avx2,fma,f16c")))
#endif

namespace lowtide {

// The best comes last. What is before it runs on the same processor, too.
enum QuantisedVariant { PLAIN, PLAIN_AVX2, PLAIN_AVX512, BF16_AVX512, BF16_AMX };

struct QuantisedProduct {
    const bf16* x;
    long x_stride;
    QuantisedWeights w;
    const bf16* bias;  // or null
    bf16* out;
    long out_stride;
    long num_rows, num_outs;
    std::uint64_t inputs = 0;  // see `Product`
};

INLINED void store_sum(const QuantisedProduct& p, long row, long out, float sum) {
    p.out[row * p.out_stride + out] = round_bf16(sum + (p.bias ? widen(p.bias[out]) : 0.0f));
}

template <int num_bits>
INLINED void multiply_plainly(const QuantisedProduct& p) {
    constexpr long LANES = 32, MOST_ROWS = 16;
    const long num_groups = p.w.num_groups(), num_k = p.w.num_k;
    for (long out = 0; out < p.num_outs; ++out) {
        const std::uint8_t* row = p.w.row(out);
        for (long first = 0; first < p.num_rows; first += MOST_ROWS) {
            const long num_rows = std::min(MOST_ROWS, p.num_rows - first);
            float sums[MOST_ROWS][LANES] = {};
            for (long group = 0; group < num_groups; ++group) {
                float weights[GROUP];
                unpack_group<num_bits, true>(
                    row + group * p.w.group_bytes(), p.w.scale(row, group), p.w.zero(row, group),
                    weights);
                const long start = group * GROUP, length = std::min(GROUP, num_k - start);
                for (long r = 0; r < num_rows; ++r) {
                    const bf16* x = p.x + (first + r) * p.x_stride + start;
                    float wide[GROUP] = {};
                    if (length == GROUP)
                        for (long i = 0; i < GROUP; ++i) wide[i] = widen(x[i]);
                    else
                        for (long i = 0; i < length; ++i) wide[i] = widen(x[i]);
                    for (long half = 0; half < GROUP; half += LANES)
                        for (long i = 0; i < LANES; ++i)
                            sums[r][i] += wide[half + i] * weights[half + i];
                }
            }
            for (long r = 0; r < num_rows; ++r) {
                float* lanes = sums[r];
                for (long half = LANES / 2; half > 0; half /= 2)
                    for (long i = 0; i < half; ++i) lanes[i] += lanes[half + i];
                store_sum(p, first + r, out, lanes[0]);
            }
        }
    }
}

#ifdef HAS_PAIRS

// Weights ahead of the present ones that are asked for early, in rows of the matrix.
constexpr long ROWS_AHEAD = 8;

struct WeightPairs {
    __m512i lower, upper;  // a group's elements 0 to 31 and 32 to 63, bfloat16
};

// Which of a group's elements there are, so many being left of the row.
INLINED __mmask32 lower_mask(long left) { return left >= 32 ? ~0u : (1u << left) - 1; }

INLINED __mmask32 upper_mask(long left) {
    return left >= 64 ? ~0u : left <= 32 ? 0u : (1u << (left - 32)) - 1;
}

AVX512BF16 INLINED __m512 half_everywhere(const std::uint8_t* half) {
    std::uint16_t bits;
    std::memcpy(&bits, half, sizeof bits);
    return _mm512_cvtph_ps(_mm256_set1_epi16(static_cast<short>(bits)));
}

AVX512BF16 INLINED __m512i as_integers(__m512bh pairs) {
    __m512i bits;
    std::memcpy(&bits, &pairs, sizeof bits);
    return bits;
}

AVX512BF16 INLINED __m512bh as_pairs(__m512i bits) {
    __m512bh pairs;
    std::memcpy(&pairs, &bits, sizeof pairs);
    return pairs;
}

AVX512BF16 INLINED __m512i two_rounded(__m512 upper, __m512 lower) {
    return as_integers(_mm512_cvtne2ps_pbh(upper, lower));
}

template <int num_bits>
AVX512BF16 INLINED WeightPairs group_pairs(const std::uint8_t* codes, __m512 scale, __m512 zero) {
    if constexpr (num_bits == 4) {
        // Both halves of the table are the 16 weights that there can be, so that bit 4 of an index
        // means nothing.
        const __m512 all = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        const __m512 weights = _mm512_fmadd_ps(all, scale, zero);
        const __m512i table = two_rounded(weights, weights);
        const __m512i low = _mm512_cvtepu8_epi16(
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
        const __m512i high = _mm512_srli_epi16(low, 4);
        return {_mm512_permutexvar_epi16(low, table), _mm512_permutexvar_epi16(high, table)};
    } else {
        __m512 quarters[4];
        for (int i = 0; i < 4; ++i) {
            const __m128i some = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + 16 * i));
            const __m512 numbers = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(some));
            quarters[i] = _mm512_fmadd_ps(numbers, scale, zero);
        }
        return {two_rounded(quarters[1], quarters[0]), two_rounded(quarters[3], quarters[2])};
    }
}

AVX512BF16 INLINED float sum_of_lanes(__m512 lanes) {
    const __m512d doubles = _mm512_castps_pd(lanes);
    __m256 eight = _mm256_add_ps(
        _mm512_castps512_ps256(lanes), _mm256_castpd_ps(_mm512_extractf64x4_pd(doubles, 1)));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

// Weights [num_rows, num_k] to bfloat16, each rounded once.
template <int num_bits>
AVX512BF16 void unpack_pairs(const QuantisedWeights& w, bf16* out, long num_rows) {
    constexpr long GROUP_BYTES = GROUP * num_bits / 8;
    const long num_groups = w.num_groups();
    for (long row = 0; row < num_rows; ++row) {
        const std::uint8_t* from = w.row(row);
        const std::uint8_t* scales = from + num_groups * GROUP_BYTES;
        for (long group = 0; group < num_groups; ++group) {
            const WeightPairs pairs = group_pairs<num_bits>(
                from + group * GROUP_BYTES, half_everywhere(scales + 2 * group),
                half_everywhere(scales + 2 * (num_groups + group)));
            bf16* to = out + row * w.num_k + group * GROUP;
            const long left = w.num_k - group * GROUP;
            _mm512_mask_storeu_epi16(to, lower_mask(left), pairs.lower);
            _mm512_mask_storeu_epi16(to + 32, upper_mask(left), pairs.upper);
        }
    }
}

// `rows` rows of x from `row` on with `outs` rows of weights from `first` on.
template <int num_bits, int rows, int outs>
AVX512BF16 void pair_tile(const QuantisedProduct& p, long row, long first) {
    constexpr long GROUP_BYTES = GROUP * num_bits / 8;
    const long num_groups = p.w.num_groups(), row_bytes = p.w.row_bytes();
    const std::uint8_t* w = p.w.row(first);
    const std::uint8_t* scales = w + num_groups * GROUP_BYTES;
    const std::uint8_t* zeros = scales + 2 * num_groups;
    const bf16* x = p.x + row * p.x_stride;
    __m512 sums[rows][outs];
    for (int r = 0; r < rows; ++r)
        for (int o = 0; o < outs; ++o) sums[r][o] = _mm512_setzero_ps();
    for (long group = 0; group < num_groups; ++group) {
        const long left = p.w.num_k - group * GROUP;
        const __mmask32 lower = lower_mask(left), upper = upper_mask(left);
        WeightPairs pairs[outs];
        for (int o = 0; o < outs; ++o) {
            const std::uint8_t* from = w + o * row_bytes;
            _mm_prefetch(
                reinterpret_cast<const char*>(
                    from + ROWS_AHEAD * row_bytes + group * (GROUP_BYTES + 4)), _MM_HINT_T0);
            pairs[o] = group_pairs<num_bits>(
                from + group * GROUP_BYTES, half_everywhere(scales + o * row_bytes + 2 * group),
                half_everywhere(zeros + o * row_bytes + 2 * group));
        }
        for (int r = 0; r < rows; ++r) {
            const bf16* of_row = x + r * p.x_stride + group * GROUP;
            const __m512bh x_lower = as_pairs(_mm512_maskz_loadu_epi16(lower, of_row));
            const __m512bh x_upper = as_pairs(_mm512_maskz_loadu_epi16(upper, of_row + 32));
            for (int o = 0; o < outs; ++o) {
                sums[r][o] = _mm512_dpbf16_ps(sums[r][o], as_pairs(pairs[o].lower), x_lower);
                sums[r][o] = _mm512_dpbf16_ps(sums[r][o], as_pairs(pairs[o].upper), x_upper);
            }
        }
    }
    for (int r = 0; r < rows; ++r)
        for (int o = 0; o < outs; ++o)
            store_sum(p, row + r, first + o, sum_of_lanes(sums[r][o]));
}

template <int num_bits, int rows, int outs>
AVX512BF16 void pair_rows(const QuantisedProduct& p, long row, long first, long last) {
    for (; first + outs <= last; first += outs) pair_tile<num_bits, rows, outs>(p, row, first);
    for (; first < last; ++first) pair_tile<num_bits, rows, 1>(p, row, first);
}

// All rows of x with a few of the weights', which the first of them bring into the cache.
template <int num_bits>
AVX512BF16 void multiply_pairs(const QuantisedProduct& p) {
    constexpr long OUTS = 8;
    for (long first = 0; first < p.num_outs; first += OUTS) {
        const long last = std::min(first + OUTS, p.num_outs);
        long row = 0;
        for (; row + 16 <= p.num_rows; row += 16) pair_rows<num_bits, 16, 1>(p, row, first, last);
        for (; row + 8 <= p.num_rows; row += 8) pair_rows<num_bits, 8, 2>(p, row, first, last);
        for (; row + 4 <= p.num_rows; row += 4) pair_rows<num_bits, 4, 4>(p, row, first, last);
        for (; row + 2 <= p.num_rows; row += 2) pair_rows<num_bits, 2, 4>(p, row, first, last);
        for (; row < p.num_rows; ++row) pair_rows<num_bits, 1, 8>(p, row, first, last);
    }
}

#endif

}  // namespace lowtide
