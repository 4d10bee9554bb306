// ggml's types with blocks of 256 weights.

#include "packed/block_products.hpp"

namespace lowtide {

const BlockType& k_block(int number) {
    using namespace ggml;
    static constexpr BlockType TYPES[] = {
        block_type_of<Q2K>(), block_type_of<Q3K>(), block_type_of<Q4K>(),
        block_type_of<Q5K>(), block_type_of<Q6K>(), block_type_of<Iq4Xs>(),
    };
    return TYPES[number];
}

}  // namespace lowtide
