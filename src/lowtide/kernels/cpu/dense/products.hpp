// Products of a few bfloat16 rows with weights that are read once, at the speed of memory.
//
//   out[r, o] = sum over k of x[r, k] * w[o, k] (+ bias[o])     x, w, bias: bfloat16
//
// w is [num_outs, num_k] with adjacent rows. Rows of x and out may have any stride; their elements
// are adjacent. Nothing needs an alignment. out is bfloat16, or float32 without a bias.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>

#include "numbers.hpp"

namespace lowtide {

// Most rows for which these products are faster than torch's.
constexpr long MOST_ROWS = 8, MOST_ROWS_OF_DOTS = 32;

// Most rows of products with q8 and q4. With bfloat16 dot products it equals that of bfloat16
// weights, so that a pass of this many rows is one call for any weights.
constexpr long MOST_OWN_ROWS = 16;

template <class Number>
struct Product {
    const bf16* x;
    long x_stride;
    const bf16* w;
    const bf16* bias;  // or null
    Number* out;
    long out_stride;
    long num_rows, num_outs, num_k;
    const void* next = nullptr;  // weights that this thread reads after these, if that is known
    std::uint64_t inputs = 0;  // which x it is, if other products have the same (`new_inputs`), or 0
    bool is_cached = false;  // whether the weights have just been written, not read from memory
};

// Returns the first of `count` numbers that identify new inputs.
inline std::uint64_t new_inputs(long count = 1) {
    static std::atomic<std::uint64_t> next{1};
    return next.fetch_add(static_cast<std::uint64_t>(count));
}

// Least output features of a piece that cuts no tile.
inline long whole_tiles(long num_outs) {
    constexpr long LONGEST = 16;
    return std::max(LONGEST, num_outs / LONGEST * LONGEST);
}

// The same for pieces of up to `most` features, whole tiles, of about equal length.
inline long even_pieces(long num_outs, long most) {
    const long count = std::max(1L, (num_outs + most - 1) / most);
    return std::min(most, whole_tiles((num_outs + count - 1) / count + 15));
}

// With the variant's arithmetic: see tiles.hpp.
void multiply(int variant, const Product<bf16>& p);

// With the same bits in every variant.
void multiply_in_float32(int variant, const Product<float>& p);

}  // namespace lowtide
