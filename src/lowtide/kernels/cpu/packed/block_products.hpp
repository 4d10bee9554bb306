// Functions of one ggml block type for the table in packed.hpp: unpacking to bfloat16 with a
// variant's instructions, and products that never write the unpacked weights to memory.

#pragma once

#include "packed/ggml_dots.hpp"
#include "packed/ggml_tiles.hpp"

namespace lowtide {
namespace ggml {

template <class Type>
void unpack_rows(int variant, const PackedRows& rows, bf16* out, long out_stride) {
#if defined(HAS_DOT_PRODUCTS)
    if (variant >= WITH_AVX512_BF16) return vectors::unpack<Type>(rows, out, out_stride);
#endif
    vectorised(variant, [=]() INLINED_LAMBDA {
        for (long row = 0; row < rows.num_rows; ++row)
            for (long block = 0; block < rows.num_blocks; ++block)
                unpack_block<Type>(rows.stored + row * rows.row_bytes + block * Type::BYTES,
                                   out + row * out_stride + block * Type::SIZE);
    });
}

#if defined(HAS_DOT_PRODUCTS)

// Multiplies `rows` rows of x. Dots::of computes their sums with `OUTS` rows of weights.
template <class Dots, int rows>
void multiply_rows(const Product<bf16>& p, const PackedRows& packed) {
    constexpr long OUTS = vectors::OUTS;
    LinesAhead ahead(packed.stored, p.num_outs * packed.row_bytes, p.next);
    for (long first = 0; first < p.num_outs; first += OUTS) {
        const u8* weights[OUTS];
        for (long o = 0; o < OUTS; ++o)  // beyond the last row: the last row again
            weights[o] = packed.stored + std::min(first + o, p.num_outs - 1) * packed.row_bytes;
        float sums[rows][OUTS];
        Dots::template of<rows>(p.x, p.x_stride, weights, packed.num_blocks, ahead, sums);
        for (int r = 0; r < rows; ++r)
            for (long o = 0; o < OUTS && first + o < p.num_outs; ++o) {
                const float bias = p.bias ? widen(p.bias[first + o]) : 0.0f;
                p.out[r * p.out_stride + first + o] = round_bf16(sums[r][o] + bias);
            }
    }
}

// Multiplies up to four rows of x. Returns false, and does nothing, if there are more.
template <class Dots>
bool multiply_few_rows(const Product<bf16>& p, const PackedRows& packed) {
    if (p.num_rows == 1) return multiply_rows<Dots, 1>(p, packed), true;
    if (p.num_rows == 2) return multiply_rows<Dots, 2>(p, packed), true;
    if (p.num_rows == 3) return multiply_rows<Dots, 3>(p, packed), true;
    if (p.num_rows == 4) return multiply_rows<Dots, 4>(p, packed), true;
    return false;
}

#endif

template <class Type>
bool multiply_by_type(int variant, const Product<bf16>& p, const PackedRows& packed) {
#if defined(HAS_DOT_PRODUCTS)
    if (variant == WITH_AMX)
        return Amx::run(p, [&] { return PackedTiles<Type>(p, packed); }), true;
    if (variant == WITH_AVX512_BF16) return multiply_few_rows<vectors::SpanDots<Type>>(p, packed);
#endif
    return false;
}

// A `MultiplyDirectly`; a type may specialise it (four_bit_products.hpp).
template <class Type>
bool multiply_directly(int variant, const Product<bf16>& p, const PackedRows& packed) {
    return multiply_by_type<Type>(variant, p, packed);
}

}  // namespace ggml

template <class Type>
constexpr BlockType block_type_of() {
    return {ggml::unpack_rows<Type>, ggml::multiply_directly<Type>, Type::BYTES, Type::SIZE};
}

}  // namespace lowtide
