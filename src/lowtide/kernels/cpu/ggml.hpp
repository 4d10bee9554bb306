// Matrices in ggml's packed types, as products take them.

#pragma once

#include "ggml_types.hpp"
#include "products.hpp"

namespace lowtide {

// `num_blocks` blocks, one after the other, to bfloat16.
using UnpackBlocks = void (*)(int variant, const std::uint8_t* stored, long num_blocks, bf16* out);

struct PackedType {
    UnpackBlocks unpack;  // null of what is bfloat16 already
    long block_bytes, block_size;
};

// In the order of `NAMES` in ggml.py.
const PackedType& packed_type(int number);

// A matrix [.., num_k].
struct PackedWeights {
    const PackedType* type;
    const std::uint8_t* rows;
    long num_k;

    long row_bytes() const { return num_k / type->block_size * type->block_bytes; }
    const void* start() const { return rows; }
    PackedWeights from(long row) const { return {type, rows + row * row_bytes(), num_k}; }
    PackedWeights moved(long num_bytes) const { return {type, rows + num_bytes, num_k}; }

    // See `multiply` of products.hpp: with the bits of these weights rounded to bfloat16.
    void multiply(int variant, const Product<bf16>& product) const;
};

}  // namespace lowtide
