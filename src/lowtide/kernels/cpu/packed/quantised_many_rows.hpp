// `multiply_pairs`: the products of quantised_products.hpp by AVX-512 with bfloat16, for any number
// of rows. For many rows weights are unpacked once (many_rows.hpp); the order of sums stays.

#pragma once

#include "dense/many_rows.hpp"
#include "packed/quantised_products.hpp"

namespace lowtide {

#if defined(HAS_DOT_PRODUCTS)

// Fewest rows of x for which weights are unpacked once for all of them.
constexpr long FEWEST_UNPACKED = 2 * ROWS_OF_TILE + 1;

// Unpacks a row of weights in the order of `element`, each rounded once, padded with 0 to whole
// steps. Its registers are stored `spacing` registers apart.
template <int num_bits>
AVX512BF16 void unpack_in_order(const QuantisedWeights& w, long row, bf16* out, long spacing) {
    const std::uint8_t* const from = w.row(row);
    const long num_groups = w.num_groups();
    Ends<num_bits> ends;
    for (long group = 0; group < num_groups; group += 2, out += STEP_REGISTERS * spacing * WORDS) {
        if (group % MOST_ENDS == 0) ends.load(w, from, group);
        const std::uint8_t* const codes = from + group * (GROUP * num_bits / 8);
        const long number = group % MOST_ENDS;
        const auto weights = StepWeights<num_bits>::begin(
            group + 1 < num_groups ? StepCodes<num_bits>::template load<true>(codes)
                                   : StepCodes<num_bits>::template load<false>(codes),
            ends, number);
        _mm512_store_si512(out, weights.template at<0>(ends, number));
        _mm512_store_si512(out + spacing * WORDS, weights.template at<1>(ends, number));
        _mm512_store_si512(out + 2 * spacing * WORDS, weights.template at<2>(ends, number));
        _mm512_store_si512(out + 3 * spacing * WORDS, weights.template at<3>(ends, number));
    }
}

// Multiplies with a tile of unpacked weights `w`, in which registers of the rows alternate.
template <int rows, int outs>
AVX512BF16 NOT_INLINED void unpacked_tile(
    const QuantisedProduct& p, const OrderedRows& x, const bf16* w, long row, long first
) {
    __m512 sums[rows * outs];
    UNROLLED for (int i = 0; i < rows * outs; ++i) sums[i] = _mm512_setzero_ps();
    ManyPlace at = {x.row(row), w, x.stride(), WORDS};
    for (long k = 0; k < x.length; k += WORDS) {
        add_registers<rows, outs>(at, sums);
        at.x += WORDS, at.w += outs * WORDS;
    }
    store_tile<rows, outs>(p, row, first, sums);
}

// Returns the thread's own buffer for the weights of a tile.
inline bf16* unpacked_weights(long length) {
    thread_local std::vector<WordRegister> of;
    const auto needed = static_cast<std::size_t>(MANY_OUTS * length / WORDS);
    if (of.size() < needed) of.resize(needed);
    return of.data()->words;
}

template <int num_bits>
void multiply_unpacked(const QuantisedProduct& p, const OrderedRows& x) {
    const long num_tiles = (p.num_rows + MANY_ROWS - 1) / MANY_ROWS, row_bytes = p.w.row_bytes();
    bf16* const w = unpacked_weights(x.length);
    Ahead ahead(p.w.rows, p.num_outs * row_bytes, p.next);
    for_many_outs(p.num_outs, [&](auto outs, long first) {
        for (long o = 0; o < outs.value; ++o)
            unpack_in_order<num_bits>(p.w, first + o, w + o * WORDS, outs.value);
        for_many_rows(p.num_rows, [&](auto rows, long row) {
            unpacked_tile<rows.value, outs.value>(p, x, w, row, first);
            ahead.read_bytes(outs.value * row_bytes / num_tiles);
        });
    });
}

// Multiplies all rows of x with a few rows of weights at a time, which stay in the cache. For many
// rows of x weights are unpacked first.
template <int num_bits>
AVX512BF16 void multiply_pairs(const QuantisedProduct& p) {
    if (p.num_rows == 0) return;
    const OrderedRows& x = ordered_rows<num_bits>(p);
    if (p.num_rows >= FEWEST_UNPACKED) return multiply_unpacked<num_bits>(p, x);
    Ahead ahead(p.w.rows, p.num_outs * p.w.row_bytes(), p.next);
    for (long first = 0; first < p.num_outs; first += OUTS_OF_TILE)
        for (long row = 0; row < p.num_rows; row += ROWS_OF_TILE)
            pair_some_rows<num_bits>(
                p, x, row, std::min<long>(ROWS_OF_TILE, p.num_rows - row), first, &ahead);
}

#endif

}  // namespace lowtide
