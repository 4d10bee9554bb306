// A product with a matrix, whatever it is stored in, divided among threads. `Weights`: see
// expert_layer.hpp.

#pragma once

#include "products.hpp"
#include "team.hpp"

namespace lowtide {

// `p` has neither weights nor inputs of its own.
template <class Weights>
void multiply_in_pieces(
    int variant, int num_threads, const Weights& weights, Product<bf16> p
) {
    constexpr long PIECE_BYTES = WORTH_BYTES / 4;  // of a matrix, as far as tiles stay whole
    if (p.num_outs * weights.row_bytes() < WORTH_BYTES) num_threads = 1;
    p.inputs = new_inputs();
    const long length = even_pieces(p.num_outs, whole_tiles(PIECE_BYTES / weights.row_bytes()));
    together(num_threads, (p.num_outs + length - 1) / length, [&](long number) {
        const long first = number * length, next = first + num_threads * length;
        Product<bf16> some = p;
        some.out += first, some.num_outs = std::min(length, p.num_outs - first);
        if (p.bias != nullptr) some.bias += first;
        if (next < p.num_outs) some.next = weights.from(next).start();
        weights.from(first).multiply(variant, some);
    });
}

}  // namespace lowtide
