// ggml's types with blocks of 32 weights.

#include "packed/block_products.hpp"

namespace lowtide {

const BlockType& small_block(int number) {
    using namespace ggml;
    static constexpr BlockType TYPES[] = {
        block_type_of<Q4_0>(), block_type_of<Q4_1>(),  block_type_of<Q5_0>(),
        block_type_of<Q5_1>(), block_type_of<Q8_0>(), block_type_of<Iq4Nl>(),
        block_type_of<Mxfp4>(),
    };
    return TYPES[number];
}

}  // namespace lowtide
