// Our own q8 and q4 (quantised.hpp).

#include "packed/packed.hpp"
#include "packed/quantised_amx.hpp"

namespace lowtide {
namespace {

// Rows from `rows` on, to rows of `out`, each weight rounded once.
template <int num_bits>
void unpack(int variant, const PackedRows& rows, bf16* out, long out_stride) {
    const QuantisedWeights weights = {rows.stored, rows.num_k, num_bits};
#ifdef HAS_PAIRS
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
    // Rows are kept in an order of their own: they are others than a product with another type has.
    constexpr std::uint64_t OWN_ORDER = static_cast<std::uint64_t>(num_bits) << 60;
    multiply_quantised<num_bits>(variant, {
        p.x, p.x_stride, {rows.stored, rows.num_k, num_bits}, p.bias, p.out, p.out_stride,
        p.num_rows, p.num_outs, p.next, p.inputs == 0 ? 0 : p.inputs | OWN_ORDER,
    });
    return true;
}

template <int... num_bits>
const BlockType& block_type_at(TypeList<Own<num_bits>...>, int place) {
    static constexpr BlockType ROWS[] = {
        {Own<num_bits>::NAME, unpack<num_bits>, multiply<num_bits>, Own<num_bits>::BYTES, GROUP}...,
    };
    return ROWS[place];
}

}  // namespace

const BlockType& own_block(int place) { return block_type_at(OwnTypes(), place); }

}  // namespace lowtide

extern "C" {

// The best variant of this processor for q8 and q4; all before it run on it, too.
int lowtide_best_own() {
    const int best = lowtide_best_variant();
#ifdef HAS_PAIRS
    const bool has_all =
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vbmi");
    if (has_all) return best;
#endif
    return std::min(best, static_cast<int>(lowtide::WITH_AVX512));
}

// With how many rows their products are called.
long lowtide_max_own_rows(int variant) { return lowtide::max_rows_of(variant); }

}
