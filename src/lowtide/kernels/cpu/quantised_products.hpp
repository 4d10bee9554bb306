// Products of a few bfloat16 rows with weights in 8 or 4 bits, which are read once.
//
//     out[r, o] = sum over k of x[r, k] * rounded(w[o, k]) (+ bias[o])
//
// Each weight is rounded once to bfloat16, as a tile of weights is that many rows are multiplied
// with. The order of a sum depends on num_k, the number of bits and the kind of instructions alone:
//
// - plain: element k goes to partial sum k % 32, ascending; the 32 are added in a tree. Compiled
//   for every set of instructions, with the same bits in all.
// - AVX-512 with bfloat16: 128 elements at a time are four registers of pairs, in the order of
//   `element` (quantised_vectors.hpp). Pair i of each goes to partial sum i of 16 by vdpbf16ps,
//   registers ascending; then the tree.
// - AMX (quantised_amx.hpp): the same registers go to two sums by turns, ascending, which are added.

#pragma once

#include <type_traits>
#include <vector>

#include "ahead.hpp"
#include "products.hpp"
#include "quantised_vectors.hpp"

namespace lowtide {

// The best comes last. What is before it runs on the same processor, too.
enum QuantisedVariant { PLAIN, PLAIN_AVX2, PLAIN_AVX512, BF16_AVX512, BF16_AMX };

// That products take: with dot products of bfloat16 as many as those with bfloat16 weights do, so
// that a pass of so many rows is one call whatever its weights are stored in.
constexpr long MOST_PLAIN_ROWS = 16, MOST_QUANTISED_ROWS = MOST_ROWS_OF_DOTS;

INLINED long max_rows_of(int variant) {
    return variant >= BF16_AVX512 ? MOST_QUANTISED_ROWS : MOST_PLAIN_ROWS;
}

struct QuantisedProduct {
    const bf16* x;
    long x_stride;
    QuantisedWeights w;
    const bf16* bias;  // or null
    bf16* out;
    long out_stride;
    long num_rows, num_outs;
    const void* next = nullptr;  // see `Ahead`
    std::uint64_t inputs = 0;  // see `Product`
};

INLINED void store_sum(const QuantisedProduct& p, long row, long out, float sum) {
    p.out[row * p.out_stride + out] = round_bf16(sum + (p.bias ? widen(p.bias[out]) : 0.0f));
}

template <int num_bits>
INLINED void multiply_plainly(const QuantisedProduct& p) {
    constexpr long LANES = 32;
    const long num_groups = p.w.num_groups(), num_k = p.w.num_k;
    for (long out = 0; out < p.num_outs; ++out) {
        const std::uint8_t* row = p.w.row(out);
        for (long first = 0; first < p.num_rows; first += MOST_PLAIN_ROWS) {
            const long num_rows = std::min(MOST_PLAIN_ROWS, p.num_rows - first);
            float sums[MOST_PLAIN_ROWS][LANES] = {};
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

// Rows in the order of `element`, 0 up to whole steps; of x those that a thread has at present.
struct OrderedRows {
    struct alignas(64) Register {
        bf16 words[WORDS];
    };

    std::vector<Register> registers;
    long length;  // of a row, in numbers
    std::uint64_t number = 0;

    // From row to row a register more: 16 rows of 4,096 bytes one behind the other would have the
    // same places in the first cache, which has eight of each.
    long stride() const { return length + WORDS; }
    const bf16* row(long row) const { return registers.data()->words + row * stride(); }
    bf16* row(long row) { return registers.data()->words + row * stride(); }

    void make_room(long num_rows, long new_length) {
        length = new_length;
        const auto needed = static_cast<std::size_t>(num_rows * stride() / WORDS);
        if (registers.size() < needed) registers.resize(needed);
    }
};

template <int num_bits>
AVX512BF16 const OrderedRows& ordered_rows(const QuantisedProduct& p) {
    thread_local OrderedRows of;
    if (p.inputs != 0 && p.inputs == of.number) return of;
    of.make_room(p.num_rows, num_steps(p.w.num_k) * STEP);
    for (long row = 0; row < p.num_rows; ++row)
        order_row<num_bits>(p.x + row * p.x_stride, p.w.num_k, of.row(row));
    of.number = p.inputs;
    return of;
}

AVX512BF16 INLINED float sum_of_lanes(__m512 lanes) {
    const __m512d doubles = _mm512_castps_pd(lanes);
    __m256 eight = _mm256_add_ps(
        _mm512_castps512_ps256(lanes), _mm256_castpd_ps(_mm512_extractf64x4_pd(doubles, 1)));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

// One register's lanes and another's, which are brought together before they are added.
struct Halved {
    __m512 lower, upper;
};

// What `Halved` is made of `a` and `b` for the sums of 8, 4, 2 and of one lane.
template <int lanes>
AVX512BF16 INLINED Halved halved(__m512 a, __m512 b) {
    if constexpr (lanes == 8)
        return {_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee)};
    if constexpr (lanes == 4)
        return {_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd)};
    const __m512d c = _mm512_castps_pd(a), d = _mm512_castps_pd(b);
    if constexpr (lanes == 2)
        return {_mm512_castpd_ps(_mm512_unpacklo_pd(c, d)),
                _mm512_castpd_ps(_mm512_unpackhi_pd(c, d))};
    return {_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd)};
}

// Up to 16 registers' sums in the order of `sum_of_lanes`, all in as many instructions as two by
// themselves take; `count` registers have such of 2 * lanes lanes.
template <int lanes = 8, int count>
AVX512BF16 INLINED __m512 sums_of_lanes(const __m512 (&of)[count]) {
    constexpr int num_left = (count + 1) / 2;
    __m512 left[num_left];
    UNROLLED for (int i = 0; i < num_left; ++i) {
        const Halved both = halved<lanes>(of[2 * i], of[std::min(2 * i + 1, count - 1)]);
        left[i] = _mm512_add_ps(both.lower, both.upper);
    }
    if constexpr (lanes > 1) {
        return sums_of_lanes<lanes / 2>(left);
    } else {
        // Sum i is in lane i % 4 * 4 + i / 4.
        const __m512i in_order = _mm512_setr_epi32(
            0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        return _mm512_permutexvar_ps(in_order, left[0]);
    }
}

// As `round_bf16`; the processor's own rounding takes numbers below 2^-126 for 0.
AVX512BF16 INLINED __m256i rounded_each(__m512 values) {
    const __m512i bits = _mm512_castps_si512(values);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(
        _mm512_srli_epi32(up, 16), is_nan, _mm512_set1_epi32(0x7fc0)));
}

// Of rows of x from `row` on with `outs` rows of weights each, from `first` on.
template <int rows, int outs>
AVX512BF16 INLINED void store_sums(
    const QuantisedProduct& p, long row, long first, const __m512 (&sums)[rows * outs]
) {
    alignas(64) float bias[16] = {};
    if (p.bias)
        for (int i = 0; i < rows * outs; ++i) bias[i] = widen(p.bias[first + i % outs]);
    alignas(32) bf16 stored[16];
    _mm256_store_si256(
        reinterpret_cast<__m256i*>(stored),
        rounded_each(_mm512_add_ps(sums_of_lanes(sums), _mm512_load_ps(bias))));
    for (int r = 0; r < rows; ++r)
        std::memcpy(
            p.out + (row + r) * p.out_stride + first, stored + r * outs, outs * sizeof(bf16));
}

// Where a tile is: the codes of some rows of weights, and rows of x; both go on step by step.
struct TilePlace {
    const std::uint8_t* codes;
    const bf16* x;
    long row_bytes, x_stride;
};

// Register `number` of a step.
template <int number, int num_bits, int rows, int outs>
AVX512BF16 INLINED void add_register(
    const TilePlace& at, const StepWeights<num_bits> (&weights)[outs], const Ends<num_bits>* ends,
    long group, __m512 (&sums)[rows * outs]
) {
    __m512bh some[outs];
    UNROLLED for (int o = 0; o < outs; ++o)
        some[o] = as_pairs(weights[o].template at<number>(ends[o], group));
    UNROLLED for (int r = 0; r < rows; ++r) {
        const __m512bh x = as_pairs(_mm512_load_si512(at.x + r * at.x_stride + number * WORDS));
        UNROLLED for (int o = 0; o < outs; ++o)
            sums[r * outs + o] = _mm512_dpbf16_ps(sums[r * outs + o], some[o], x);
    }
}

// group: of those that `ends` are of. has_both: see `StepCodes`.
template <int num_bits, int rows, int outs, bool has_both>
AVX512BF16 INLINED void add_step(
    TilePlace& at, const Ends<num_bits>* ends, long group, __m512 (&sums)[rows * outs]
) {
    StepWeights<num_bits> weights[outs];
    UNROLLED for (int o = 0; o < outs; ++o)
        weights[o] = StepWeights<num_bits>::begin(
            StepCodes<num_bits>::template load<has_both>(at.codes + o * at.row_bytes), ends[o],
            group);
    add_register<0, num_bits, rows>(at, weights, ends, group, sums);
    add_register<1, num_bits, rows>(at, weights, ends, group, sums);
    add_register<2, num_bits, rows>(at, weights, ends, group, sums);
    add_register<3, num_bits, rows>(at, weights, ends, group, sums);
    at.codes += STEP * num_bits / 8, at.x += STEP;
}

// `rows` rows of x from `row` on with `outs` rows of weights from `first` on. Each row of x that is
// loaded serves all of these.
template <int num_bits, int rows, int outs>
AVX512BF16 void pair_tile(
    const QuantisedProduct& p, const OrderedRows& inputs, long row, long first, Ahead* ahead
) {
    constexpr long GROUP_BYTES = GROUP * num_bits / 8;
    const long num_groups = p.w.num_groups();
    TilePlace at = {
        p.w.row(first), inputs.row(row), num_groups * (GROUP_BYTES + 4), inputs.stride()};
    const std::uint8_t* halves = at.codes + num_groups * GROUP_BYTES;
    Ends<num_bits> ends[outs];
    __m512 sums[rows * outs];
    // Unrolled, or they would lie in memory.
    UNROLLED for (int i = 0; i < rows * outs; ++i) sums[i] = _mm512_setzero_ps();
    for (long block = 0; block < num_groups; block += MOST_ENDS, halves += 2 * MOST_ENDS) {
        const long count = std::min(MOST_ENDS, num_groups - block);
        const __mmask16 mask = groups_left(count);
        UNROLLED for (int o = 0; o < outs; ++o)
            ends[o].load(halves + o * at.row_bytes, 2 * num_groups, mask);
        long group = 0;
        for (; group + 1 < count; group += 2) {
            if (ahead) ahead->read_bytes<FIRST_CACHE>(outs * 2 * (GROUP_BYTES + 4));
            add_step<num_bits, rows, outs, true>(at, ends, group, sums);
        }
        if (group < count) add_step<num_bits, rows, outs, false>(at, ends, group, sums);
    }
    store_sums<rows, outs>(p, row, first, sums);
}

// `rows` rows of x from `row` on with those of the weights from `first` to before `last`.
template <int num_bits, int rows>
AVX512BF16 void pair_rows(
    const QuantisedProduct& p, const OrderedRows& inputs, long row, long first, long last,
    Ahead* ahead
) {
    constexpr int outs = rows == 1 ? 8 : rows <= 4 ? 4 : 2;  // what registers there are for
    if (row > 0) ahead = nullptr;  // the first rows have asked
    for (; first + outs <= last; first += outs)
        pair_tile<num_bits, rows, outs>(p, inputs, row, first, ahead);
    for (; first < last; ++first)
        for (long each = row; each < row + rows; ++each)
            pair_tile<num_bits, 1, 1>(p, inputs, each, first, each == 0 ? ahead : nullptr);
}

constexpr int ROWS_OF_TILE = 8, OUTS_OF_TILE = 8;  // at most

// The same of so many rows of x, `rows` at most.
template <int num_bits, int rows = ROWS_OF_TILE>
AVX512BF16 void pair_some_rows(
    const QuantisedProduct& p, const OrderedRows& inputs, long row, long num_rows, long first,
    Ahead* ahead
) {
    if constexpr (rows > 1)
        if (num_rows < rows)
            return pair_some_rows<num_bits, rows - 1>(p, inputs, row, num_rows, first, ahead);
    const long last = std::min<long>(first + OUTS_OF_TILE, p.num_outs);
    pair_rows<num_bits, rows>(p, inputs, row, first, last, ahead);
}

// Rows of weights in the order of `element`, each weight rounded once, as `Ends` and `StepCodes` have
// them: 0 up to whole steps.
template <int num_bits>
AVX512BF16 void unpack_in_order(const QuantisedWeights& w, long row, bf16* out) {
    constexpr long GROUP_BYTES = GROUP * num_bits / 8;
    const std::uint8_t* const from = w.row(row);
    const long num_groups = w.num_groups();
    Ends<num_bits> ends;
    for (long group = 0; group < num_groups; group += 2, out += STEP) {
        if (group % MOST_ENDS == 0) ends.load(w, from, group);
        const std::uint8_t* const codes = from + group * GROUP_BYTES;
        __m512i weights[STEP_REGISTERS];
        unpack_step(
            group + 1 < num_groups ? StepCodes<num_bits>::template load<true>(codes)
                                   : StepCodes<num_bits>::template load<false>(codes),
            ends, group % MOST_ENDS, weights);
        UNROLLED for (int i = 0; i < STEP_REGISTERS; ++i)
            _mm512_store_si512(out + i * WORDS, weights[i]);
    }
}

// `pair_tile` with weights that are unpacked already, its sums in the same order.
template <int rows, int outs>
AVX512BF16 void unpacked_tile(
    const QuantisedProduct& p, const OrderedRows& inputs, const OrderedRows& weights, long row,
    long first
) {
    const bf16 *x = inputs.row(row), *w = weights.row(0);
    __m512 sums[rows][outs] = {};
    for (long k = 0; k < inputs.length; k += WORDS) {
        __m512bh of[outs];
        UNROLLED for (int o = 0; o < outs; ++o)
            of[o] = as_pairs(_mm512_load_si512(w + o * weights.stride() + k));
        UNROLLED for (int r = 0; r < rows; ++r) {
            const __m512bh pairs = as_pairs(_mm512_load_si512(x + r * inputs.stride() + k));
            UNROLLED for (int o = 0; o < outs; ++o)
                sums[r][o] = _mm512_dpbf16_ps(sums[r][o], of[o], pairs);
        }
    }
    for (int r = 0; r < rows; ++r)
        for (int o = 0; o < outs; ++o)
            store_sum(p, row + r, first + o, sum_of_lanes(sums[r][o]));
}

template <int outs>
AVX512BF16 void unpacked_rows(
    const QuantisedProduct& p, const OrderedRows& inputs, const OrderedRows& weights, long first
) {
    long row = 0;
    for (; row + 8 <= p.num_rows; row += 8) unpacked_tile<8, outs>(p, inputs, weights, row, first);
    for (; row + 4 <= p.num_rows; row += 4) unpacked_tile<4, outs>(p, inputs, weights, row, first);
    for (; row < p.num_rows; ++row) unpacked_tile<1, outs>(p, inputs, weights, row, first);
}

// Two rows of weights at a time are unpacked once for all of x.
template <int num_bits>
AVX512BF16 void multiply_unpacked(const QuantisedProduct& p, const OrderedRows& x) {
    thread_local OrderedRows weights;
    weights.make_room(2, x.length);
    Ahead ahead(p.w.rows, p.num_outs * p.w.row_bytes(), p.next);
    for (long first = 0; first < p.num_outs; first += 2) {
        const long outs = std::min(2L, p.num_outs - first);
        for (long o = 0; o < outs; ++o)
            unpack_in_order<num_bits>(p.w, first + o, weights.row(o));
        ahead.read_bytes(outs * p.w.row_bytes());
        if (outs == 2) unpacked_rows<2>(p, x, weights, first);
        else unpacked_rows<1>(p, x, weights, first);
    }
}

// All rows of x with a few of the weights', which the first of them bring into the cache. Very many
// rows have them unpacked first.
template <int num_bits>
AVX512BF16 void multiply_pairs(const QuantisedProduct& p) {
    if (p.num_rows == 0) return;
    const OrderedRows& x = ordered_rows<num_bits>(p);
    if (p.num_rows > 2 * ROWS_OF_TILE) return multiply_unpacked<num_bits>(p, x);
    Ahead ahead(p.w.rows, p.num_outs * p.w.row_bytes(), p.next);
    for (long first = 0; first < p.num_outs; first += OUTS_OF_TILE)
        for (long row = 0; row < p.num_rows; row += ROWS_OF_TILE)
            pair_some_rows<num_bits>(
                p, x, row, std::min<long>(ROWS_OF_TILE, p.num_rows - row), first, &ahead);
}

#endif

}  // namespace lowtide
