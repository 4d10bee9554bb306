// Products of a few bfloat16 rows with weights in 8 or 4 bits, which are read once.
//
//     out[r, o] = sum over k of x[r, k] * rounded(w[o, k]) (+ bias[o])
//
// Each weight is rounded once to bfloat16, as it is for products of many rows. The order of a sum
// depends only on num_k, the number of bits and the kind of instructions:
//
// - plain: element k goes to partial sum k % 32, ascending; the 32 are added in a tree. Compiled
//   for every set of instructions, with the same bits in all.
// - AVX-512 with bfloat16: 128 elements at a time are four registers of pairs, in the order of
//   `element` (quantised_vectors.hpp). Pair i of each goes to partial sum i of 16 by vdpbf16ps,
//   registers ascending; then the tree.
// - AMX (quantised_amx.hpp): the same registers go to two sums by turns, ascending, which are
//   added.

#pragma once

#include <type_traits>

#include "dense/ahead.hpp"
#include "dense/many_rows.hpp"
#include "dense/products.hpp"
#include "packed/quantised_vectors.hpp"

namespace lowtide {

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
        for (long first = 0; first < p.num_rows; first += MOST_OWN_ROWS) {
            const long num_rows = std::min(MOST_OWN_ROWS, p.num_rows - first);
            float sums[MOST_OWN_ROWS][LANES] = {};
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

#if defined(HAS_DOT_PRODUCTS)

// Rows of x in the order of `element`, padded with 0 to whole steps.
using OrderedRows = PaddedRows;

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

// A tile's place, which advances step by step: the codes of some rows of weights, and rows of x.
struct TilePlace {
    const std::uint8_t* codes;
    const bf16* x;
    long row_bytes, x_stride;
};

// Adds the products of register `number` of a step.
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

// Adds the products of a step. group: its first group's index in `ends`. has_both: see `StepCodes`.
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

// Multiplies `rows` rows of x from `row` on with `outs` rows of weights from `first` on. Each load
// of x serves all rows of weights.
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
    // Unrolled, so that the sums stay in registers.
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

// Multiplies `rows` rows of x from `row` on with rows [first, last) of the weights.
template <int num_bits, int rows>
AVX512BF16 void pair_rows(
    const QuantisedProduct& p, const OrderedRows& inputs, long row, long first, long last,
    Ahead* ahead
) {
    constexpr int outs = rows == 1 ? 8 : rows <= 4 ? 4 : 2;  // as many as registers hold
    if (row > 0) ahead = nullptr;  // the first rows of x have prefetched
    for (; first + outs <= last; first += outs)
        pair_tile<num_bits, rows, outs>(p, inputs, row, first, ahead);
    for (; first < last; ++first)
        for (long each = row; each < row + rows; ++each)
            pair_tile<num_bits, 1, 1>(p, inputs, each, first, each == 0 ? ahead : nullptr);
}

constexpr int ROWS_OF_TILE = 8, OUTS_OF_TILE = 8;  // at most

// Multiplies `num_rows` rows of x, at most `rows`, with up to OUTS_OF_TILE rows of weights.
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

#endif

}  // namespace lowtide
