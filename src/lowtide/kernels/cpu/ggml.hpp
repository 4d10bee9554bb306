// Matrices in ggml's packed types, as products take them.

#pragma once

#include "call_rows.hpp"
#include "ggml_types.hpp"

namespace lowtide {

// Some blocks, one after the other, of some rows.
struct PackedRows {
    const std::uint8_t* stored;
    long row_bytes, num_rows, num_blocks;
};

// To bfloat16; rows of `out` are `out_stride` numbers apart.
using UnpackRows = void (*)(int variant, const PackedRows& rows, bf16* out, long out_stride);

// The product by a type's own instructions, if the variant has some for so many rows: answers whether
// it has. With AVX512-BF16 few rows are multiplied with out of the registers that weights are
// unpacked into.
using MultiplyDirectly = bool (*)(int variant, const Product<bf16>& product, const PackedRows& rows);

struct PackedType {
    UnpackRows unpack;  // null of what is bfloat16 already
    MultiplyDirectly multiply;
    long block_bytes, block_size;
};

// In the order of `NAMES` in ggml.py.
const PackedType& packed_type(int number);

// A matrix [.., num_k].
struct PackedWeights : AdjacentRows<PackedWeights> {
    const PackedType* type;
    long num_k;

    PackedWeights(int number, const void* stored, long, long num_k)
        : AdjacentRows{static_cast<const std::uint8_t*>(stored), 0}, type(&packed_type(number)),
          num_k(num_k) {
        bytes_of_row = num_k / type->block_size * type->block_bytes;
    }

    // See `multiply` of products.hpp: with the bits of these weights rounded to bfloat16.
    void multiply(int variant, const Product<bf16>& product) const;
};

}  // namespace lowtide
