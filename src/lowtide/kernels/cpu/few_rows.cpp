// The products of `products.hpp` for Python: with one weight, and with those of one expert.

#include "products.hpp"
#include "team.hpp"

using namespace lowtide;

namespace {

// Of a weight. What is left of the last piece is waited for at the end.
constexpr long LEAST_PIECE_BYTES = WORTH_BYTES / 2, MOST_PIECE_BYTES = 2 * WORTH_BYTES;

// Output features of a piece: some eight pieces for a thread, so that a slow one does little harm.
long features_of_piece(int num_threads, long num_outs, long num_k) {
    const long row_bytes = num_k * static_cast<long>(sizeof(bf16));
    const long wanted = num_outs * row_bytes / (8L * num_threads);
    return std::max(1L, std::clamp(wanted, LEAST_PIECE_BYTES, MOST_PIECE_BYTES) / row_bytes);
}

Product<bf16> some_features(const Product<bf16>& p, long first, long last) {
    const bf16* bias = p.bias ? p.bias + first : nullptr;
    return {p.x,        p.x_stride,   p.w + first * p.num_k, bias,    p.out + first,
            p.out_stride, p.num_rows, last - first,          p.num_k};
}

}  // namespace

extern "C" {

// The best variant of this CPU; all before it run on it, too.
int lowtide_best_variant() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return PORTABLE;
    const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw");
    return has_avx512 ? WITH_AVX512 : WITH_AVX2;
#else
    return PORTABLE;
#endif
}

// Strides are in elements. bias may be null.
void lowtide_multiply(
    int variant, int num_threads, const bf16* x, long x_stride, const bf16* w, const bf16* bias,
    bf16* out, long out_stride, long num_rows, long num_outs, long num_k
) {
    const Product<bf16> p = {x, x_stride, w, bias, out, out_stride, num_rows, num_outs, num_k};
    const long length = features_of_piece(num_threads, num_outs, num_k);
    together(num_threads, (num_outs + length - 1) / length, [&](long number) {
        const long first = number * length;
        multiply(variant, some_features(p, first, std::min(first + length, num_outs)));
    });
}

// out = down(silu(gate(x)) * up(x)), rounded after each product, SiLU and multiplication.
// gate, up: scratch [num_rows, width], rows adjacent. out may be x.
void lowtide_gated_mlp(
    int variant, const bf16* x, long x_stride, const bf16* gate_w, const bf16* up_w,
    const bf16* down_w, bf16* gate, bf16* up, bf16* out, long out_stride, long num_rows,
    long hidden, long width
) {
    const bf16* none = nullptr;
    multiply<bf16>(variant, {x, x_stride, gate_w, none, gate, width, num_rows, width, hidden});
    multiply<bf16>(variant, {x, x_stride, up_w, none, up, width, num_rows, width, hidden});
    silu_times(variant, gate, up, num_rows * width);
    multiply<bf16>(variant, {gate, width, down_w, none, out, out_stride, num_rows, hidden, width});
}

}
