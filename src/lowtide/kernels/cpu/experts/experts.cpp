// The experts of `expert_layer.hpp` for Python, their weights in bfloat16.

#include "operators.hpp"
#include "experts/weight_operators.hpp"

using namespace lowtide;

namespace {

struct PlainWeights : AdjacentRows<PlainWeights> {
    // bfloat16 weights have no types.
    PlainWeights(int, const void* stored, long, long num_k)
        : AdjacentRows{static_cast<const std::uint8_t*>(stored),
                       num_k * static_cast<long>(sizeof(bf16))} {}

    void multiply(int variant, Product<bf16> product) const {
        product.w = reinterpret_cast<const bf16*>(rows);
        lowtide::multiply(variant, product);
    }
};

}  // namespace

EXPERT_OPERATORS(plain, PlainWeights, RowsAsTheyAre)
