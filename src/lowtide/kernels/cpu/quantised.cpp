// The products of `quantised_products.hpp` for Python: with one weight, and with many experts'.

#include "quantised_amx.hpp"
#include "weight_operators.hpp"

using namespace lowtide;

namespace {

int plain_variant(int variant) { return std::min(variant, static_cast<int>(WITH_AVX512)); }

// A matrix [.., num_k], whose type is the number of its bits.
struct ExactWeights : AdjacentRows<ExactWeights> {
    long num_k;
    int num_bits;

    ExactWeights(int num_bits, const void* stored, long, long num_k)
        : AdjacentRows{static_cast<const std::uint8_t*>(stored),
                       QuantisedWeights{nullptr, num_k, num_bits}.row_bytes()},
          num_k(num_k), num_bits(num_bits) {}

    void multiply(int variant, const Product<bf16>& p) const {
        multiply_quantised(variant, {
            p.x, p.x_stride, {rows, num_k, num_bits}, p.bias, p.out, p.out_stride, p.num_rows,
            p.num_outs, p.next, p.inputs,
        });
    }
};

}  // namespace

WEIGHT_OPERATORS(quantised, ExactWeights, RowsAsTheyAre)

extern "C" {

int lowtide_best_variant();  // of processor.cpp

// The best variant of this CPU; all before it run on it, too.
int lowtide_best_quantised() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return PLAIN;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw")) return PLAIN_AVX2;
#ifdef HAS_PAIRS
    if (__builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vbmi") &&
        __builtin_cpu_supports("avx512bf16"))
        return lowtide_best_variant() == WITH_AMX ? BF16_AMX : BF16_AVX512;
#endif
    return PLAIN_AVX512;
#else
    return PLAIN;
#endif
}

// With how many rows its products are called.
long lowtide_max_quantised_rows(int variant) { return max_rows_of(variant); }

// w [num_rows, row_bytes] to out [num_rows, num_k] bfloat16, each weight rounded once.
void lowtide_quantised_unpack(
    int variant, int num_bits, const std::uint8_t* w, bf16* out, long num_rows, long num_k
) {
    const QuantisedWeights weights = {w, num_k, num_bits};
#ifdef HAS_PAIRS
    if (variant >= BF16_AVX512)
        return num_bits == 4 ? unpack_rows<4>(weights, out, num_rows)
                             : unpack_rows<8>(weights, out, num_rows);
#endif
    vectorised(plain_variant(variant), [=]() INLINED_LAMBDA {
        for (long row = 0; row < num_rows; ++row)
            for (long group = 0; group < weights.num_groups(); ++group) {
                const std::uint8_t* from = weights.row(row);
                const std::uint8_t* codes = from + group * weights.group_bytes();
                const float scale = weights.scale(from, group), zero = weights.zero(from, group);
                float numbers[GROUP];
                if (num_bits == 4)
                    unpack_group<4, false>(codes, scale, zero, numbers);
                else
                    unpack_group<8, false>(codes, scale, zero, numbers);
                bf16* to = out + row * num_k + group * GROUP;
                const long length = std::min(GROUP, num_k - group * GROUP);
                if (length == GROUP)
                    for (long i = 0; i < GROUP; ++i) to[i] = round_bf16(numbers[i]);
                else
                    for (long i = 0; i < length; ++i) to[i] = round_bf16(numbers[i]);
            }
    });
}

}
