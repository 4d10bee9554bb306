// Products with a matrix of each head's own.

#include <algorithm>

#include "operators.hpp"
#include "dense/products.hpp"
#include "team/team.hpp"

using namespace lowtide;

namespace {

// Output features whose sums stay in registers, and those of a piece.
constexpr long LANES = 64, PIECE_OUTS = 2 * LANES;

// out[o] = sum over k, ascending, of x[k] * w[k, o], for `length` features: in float32, rounded once.
template <long length>
INLINED void add_inputs(const bf16* x, const bf16* w, long w_stride, bf16* out, long num_k) {
    float sums[length] = {};
    for (long k = 0; k < num_k; ++k, w += w_stride) {
        const float input = widen(x[k]);
        for (long o = 0; o < length; ++o) sums[o] += input * widen(w[o]);
    }
    for (long o = 0; o < length; ++o) out[o] = round_bf16(sums[o]);
}

}  // namespace

extern "C" {

// out[r, h] = x[r, h] w[h], where w[h] is [num_k, num_outs] or, with `by_outs`, [num_outs, num_k];
// rows w_row elements apart and there num_k. x [num_rows, num_heads, num_k], out [num_rows, num_heads,
// num_outs], of both of which only the elements of a head have to be adjacent. A row's bits depend
// on nothing but the row and the weights; those of `by_outs` on the variant.
void lowtide_multiply_heads(
    int variant, int num_threads, const bf16* x, long x_row, long x_head, const bf16* w,
    long w_head, long w_row, int by_outs, bf16* out, long out_row, long out_head, long num_rows,
    long num_heads, long num_outs, long num_k
) {
    const long num_bytes = num_heads * num_outs * num_k * static_cast<long>(sizeof(bf16));
    const int num_useful = num_bytes < WORTH_BYTES ? 1 : num_threads;
    const long num_parts = (num_outs + PIECE_OUTS - 1) / PIECE_OUTS;
    together(num_useful, num_heads * num_parts, [&](long number) {
        const long head = number / num_parts, first = number % num_parts * PIECE_OUTS;
        const long last = std::min(first + PIECE_OUTS, num_outs);
        const bf16 *own_x = x + head * x_head, *own_w = w + head * w_head;
        bf16* own_out = out + head * out_head;
        if (by_outs) {
            multiply(variant, Product<bf16>{own_x, x_row, own_w + first * w_row, nullptr,
                                            own_out + first, out_row, num_rows, last - first,
                                            num_k});
            return;
        }
        vectorised(vectors_of(variant), [=]() INLINED_LAMBDA {
            long o = first;
            for (; o + LANES <= last; o += LANES)
                for (long row = 0; row < num_rows; ++row)
                    add_inputs<LANES>(own_x + row * x_row, own_w + o, w_row,
                                      own_out + row * out_row + o, num_k);
            for (; o < last; ++o)
                for (long row = 0; row < num_rows; ++row)
                    add_inputs<1>(own_x + row * x_row, own_w + o, w_row,
                                  own_out + row * out_row + o, num_k);
        });
    });
}

}
