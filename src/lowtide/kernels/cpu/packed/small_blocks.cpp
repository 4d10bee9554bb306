// ggml's types with blocks of 32 weights.

#include "packed/block_products.hpp"

const lowtide::BlockType& lowtide::small_block(int place) {
    return ggml::block_type_at(ggml::SmallTypes(), place);
}
