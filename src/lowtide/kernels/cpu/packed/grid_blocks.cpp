// ggml's types with a grid.

#include "packed/block_products.hpp"

namespace lowtide {

const BlockType& grid_block(int number) {
    using namespace ggml;
    static constexpr BlockType TYPES[] = {
        block_type_of<Iq2Xxs>(), block_type_of<Iq2Xs>(), block_type_of<Iq2S>(),
        block_type_of<Iq3Xxs>(), block_type_of<Iq3S>(),
    };
    return TYPES[number];
}

}  // namespace lowtide
