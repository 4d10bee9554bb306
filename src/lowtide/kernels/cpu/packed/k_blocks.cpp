// ggml's types with blocks of 256 weights.

#include "packed/block_products.hpp"

const lowtide::BlockType& lowtide::k_block(int place) {
    return ggml::block_type_at(ggml::KTypes(), place);
}
