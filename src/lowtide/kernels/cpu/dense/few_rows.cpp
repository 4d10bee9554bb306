// The products of `products.hpp` for Python.

#include "operators.hpp"
#include "dense/products.hpp"
#include "team/team.hpp"

using namespace lowtide;

namespace {

// Bytes of a weight in a piece: the threads wait for the rest of the last piece at the end.
constexpr long LEAST_PIECE_BYTES = WORTH_BYTES / 2, MOST_PIECE_BYTES = 2 * WORTH_BYTES;

// Output features of a piece: about eight pieces per thread, so that a slow thread does little
// harm.
long features_of_piece(int num_threads, long num_outs, long num_k) {
    const long row_bytes = num_k * static_cast<long>(sizeof(bf16));
    const long wanted = num_outs * row_bytes / (8L * num_threads);
    return whole_tiles(std::clamp(wanted, LEAST_PIECE_BYTES, MOST_PIECE_BYTES) / row_bytes);
}

// next: first feature of the piece that this thread probably takes next.
Product<bf16> some_features(const Product<bf16>& p, long first, long last, long next) {
    Product<bf16> some = p;
    some.w += first * p.num_k, some.out += first, some.num_outs = last - first;
    if (p.bias != nullptr) some.bias += first;
    if (next < p.num_outs) some.next = p.w + next * p.num_k;
    return some;
}

}  // namespace

extern "C" {

void lowtide_plain_multiply(
    int variant, int num_threads, int, const bf16* x, long x_stride, const void* w,
    const bf16* bias, bf16* out, long out_stride, long num_rows, long num_outs, long num_k
) {
    const bf16* weights = static_cast<const bf16*>(w);
    Product<bf16> p = {x, x_stride, weights, bias, out, out_stride, num_rows, num_outs, num_k};
    p.inputs = new_inputs();
    const long length = features_of_piece(num_threads, num_outs, num_k);
    together(num_threads, (num_outs + length - 1) / length, [&](long number) {
        const long first = number * length, next = first + num_threads * length;
        multiply(variant, some_features(p, first, std::min(first + length, num_outs), next));
    });
}

}
