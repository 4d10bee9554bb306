// The products of `quantised_products.hpp` for Python: with one weight, and with many experts'.

#include "quantised_experts.hpp"
#include "quantised_amx.hpp"

using namespace lowtide;

namespace {

int plain_variant(int variant) { return std::min(variant, static_cast<int>(WITH_AVX512)); }

// Of rows as they are.
struct Exact {
    int variant, plain = plain_variant(variant);

    std::uint64_t inputs = 0;
    long num_inputs = 0;

    // Rows that begin at different places, or are prepared anew, are other inputs.
    void prepare(const bf16*, long, long first, long num_rows, long, int) {
        num_inputs = std::max(num_inputs, first + num_rows);
        inputs = new_inputs(num_inputs);
    }

    void multiply(const RowsTimes& p) const {
        multiply_quantised(variant, {
            p.x + p.row * p.x_stride, p.x_stride, p.w, p.bias, p.out, p.out_stride, p.num_rows,
            p.num_outs, p.next, inputs + p.row,
        });
    }
};

}  // namespace

extern "C" {

MultiplyFunction lowtide_quantised_multiply;
MlpsFunction lowtide_quantised_mlps;
ExpertsFunction lowtide_quantised_experts;

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

void lowtide_quantised_multiply(
    int variant, int num_threads, int num_bits, const bf16* x, long x_stride, const void* w,
    const bf16* bias, bf16* out, long out_stride, long num_rows, long num_outs, long num_k
) {
    Exact products = {variant};
    const QuantisedWeights weights = {static_cast<const std::uint8_t*>(w), num_k, num_bits};
    multiply_in_pieces(
        products, {x, x_stride, 0, num_rows, weights, num_outs, bias, out, out_stride, nullptr},
        num_threads);
}

// types: three times the number of bits.
void lowtide_quantised_mlps(
    int variant, int num_threads, const std::int32_t* types, const std::int64_t* groups,
    long num_groups, const void* gate_w, const void* up_w, const void* down_w, long slot_bytes,
    bf16* parts, bf16* gate, bf16* up, long hidden, long width
) {
    Exact products = {variant};
    const QuantisedSlots slots = {gate_w, up_w, down_w, slot_bytes, hidden, width, types[0]};
    run_groups(products, num_threads, reinterpret_cast<const Group*>(groups), num_groups, slots,
               {parts, gate, up});
}

// types: three times the number of bits.
void lowtide_quantised_experts(
    int variant, int num_threads, const std::int32_t* types, const bf16* x,
    const std::int64_t* experts, const float* weights, const std::int64_t* slots,
    const void* gate_w, const void* up_w, const void* down_w, long slot_bytes, bf16* parts,
    bf16* gate, bf16* up, float* out, long num_tokens, long k, long hidden, long width
) {
    Exact products = {variant};
    const QuantisedSlots places = {gate_w, up_w, down_w, slot_bytes, hidden, width, types[0]};
    run_tokens(products, num_threads, x, experts, weights, slots, places, {parts, gate, up}, out,
               num_tokens, k);
}

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
