// Functions of lowtide's own q8 and q4 (quantised.hpp) for the table in packed.hpp.

#pragma once

#include "packed/packed.hpp"
#include "packed/quantised_amx.hpp"

namespace lowtide {
namespace own {

// Rows from `rows` on, to rows of `out`, each weight rounded once.
template <int num_bits>
void unpack(int variant, const PackedRows& rows, bf16* out, long out_stride) {
    const QuantisedWeights weights = {rows.stored, rows.num_k, num_bits};
#if defined(HAS_DOT_PRODUCTS)
    if (variant >= WITH_AVX512_BF16)
        return unpack_rows<num_bits>(weights, out, out_stride, rows.num_rows);
#endif
    vectorised(variant, [=]() INLINED_LAMBDA {
        for (long row = 0; row < rows.num_rows; ++row)
            unpack_row_plainly<num_bits>(weights, row, out + row * out_stride);
    });
}

template <int num_bits>
bool multiply(int variant, const Product<bf16>& p, const PackedRows& rows) {
    // Rows of x are cached in an order of their own, which a product with another type must not
    // find.
    constexpr std::uint64_t OWN_ORDER = static_cast<std::uint64_t>(num_bits) << 60;
    multiply_quantised<num_bits>(variant, {
        p.x, p.x_stride, {rows.stored, rows.num_k, num_bits}, p.bias, p.out, p.out_stride,
        p.num_rows, p.num_outs, p.next, p.inputs == 0 ? 0 : p.inputs | OWN_ORDER,
    });
    return true;
}

}  // namespace own

template <class Type>
constexpr BlockType block_type_of() {
    constexpr int num_bits = Type::NUM_BITS;
    return {own::unpack<num_bits>, own::multiply<num_bits>, Type::BYTES, Type::SIZE};
}

}  // namespace lowtide
