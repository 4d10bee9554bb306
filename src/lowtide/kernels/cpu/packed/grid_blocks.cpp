// ggml's types with a grid.

#include "packed/block_products.hpp"

const lowtide::BlockType& lowtide::grid_block(int place) {
    return ggml::block_type_at(ggml::GridTypes(), place);
}
