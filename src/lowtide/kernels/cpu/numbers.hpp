// bfloat16 and float32 numbers, and the instructions that a function may use.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
// Includes all of AVX2's instructions; otherwise functions that use those would not be inlined
// here, at three times the cost.
#define AVX512 __attribute__((target("avx512f,avx512bw,avx2,fma")))
#define AVX2 __attribute__((target("avx2,fma")))

// bfloat16 dot products, if the compiler supports them.
#if (defined(__clang__) && __clang_major__ >= 12) || (!defined(__clang__) && __GNUC__ >= 11)
#define HAS_DOT_PRODUCTS
#define AVX512_BF16 __attribute__((target("avx512bf16,avx512f,avx512bw,avx2,fma")))
#define AMX __attribute__((target("amx-tile,amx-bf16,avx512bf16,avx512f,avx512bw,avx2,fma")))
#endif
#endif

// Always inlined: it uses the instructions of the surrounding function, also for loops that the
// compiler vectorises.
#define INLINED_LAMBDA __attribute__((always_inline))
#define INLINED inline INLINED_LAMBDA

// A loop over an array that should stay in registers.
#define UNROLLED _Pragma("GCC unroll 16")

// Compiled once for all callers.
#define NOT_INLINED __attribute__((noinline))

extern "C" int lowtide_best_variant();  // of processor.cpp

namespace lowtide {

using bf16 = std::uint16_t;

// The first three compute in float32 and give the same bits; each of the others has its own bits.
enum Variant { PORTABLE, WITH_AVX2, WITH_AVX512, WITH_AVX512_BF16, WITH_AMX };

INLINED float widen(bf16 value) {
    const std::uint32_t bits = static_cast<std::uint32_t>(value) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

// To nearest, ties to even.
INLINED bf16 round_bf16(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const auto rounded = static_cast<bf16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    return value != value ? 0x7fc0 : rounded;
}

// e^x, to the last bit or two, without a call or a branch, so that loops over it vectorise. x = n
// ln 2 + r; 2^n by the exponent's bits, e^r by a polynomial (Cephes, expf). Values outside
// float32's range are clamped.
INLINED float exponential(float x) {
    constexpr float SHIFT = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded to integers
    x = x < -87.3f ? -87.3f : x > 88.0f ? 88.0f : x;
    const float shifted = x * 1.44269504f + SHIFT;
    const float n = shifted - SHIFT;
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float y = 1.9875691500e-4f;
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * (r * r) + r + 1.0f;
    std::uint32_t bits;  // NaN's run over, to any power: the product is NaN whatever it is
    std::memcpy(&bits, &shifted, sizeof bits);
    bits = (bits - 0x4b400000u + 127u) << 23;
    float power;
    std::memcpy(&power, &bits, sizeof power);
    return y * power;
}

// Rounds a result before it is used again, as the reference does between two operators.
INLINED float rounded(float value) { return widen(round_bf16(value)); }

#if defined(__x86_64__)
template <class Body>
AVX512 void with_avx512(const Body& body) { body(); }

template <class Body>
AVX2 void with_avx2(const Body& body) { body(); }
#endif

// Runs `body`, an INLINED function object, with the variant's vectors. Nothing is fused (see
// library.py), so all variants give the same bits.
template <class Body>
void vectorised(int variant, const Body& body) {
#if defined(__x86_64__)
    if (variant >= WITH_AVX512) return with_avx512(body);
    if (variant == WITH_AVX2) return with_avx2(body);
#endif
    body();
}

// The variant for loops other than products; products of int8 rows have their own variants.
inline int vectors_of(int variant) {
    static const int best = lowtide_best_variant();
    return variant < best ? variant : best;
}

// gate = silu(gate) * up, rounded after each of the two.
inline void silu_times(int variant, bf16* gate, const bf16* up, long length) {
    vectorised(variant, [=]() INLINED_LAMBDA {
        for (long i = 0; i < length; ++i) {
            const float value = widen(gate[i]);
            // Beyond `exponential`'s range the quotient is 0, as in the limit.
            const float e = value < -88.0f ? INFINITY : exponential(-value);
            const float silu = rounded(value / (1.0f + e));
            gate[i] = round_bf16(silu * widen(up[i]));
        }
    });
}

// x += bias, rounded once.
inline void add_bias(int variant, bf16* x, const bf16* bias, long length) {
    vectorised(variant, [=]() INLINED_LAMBDA {
        for (long i = 0; i < length; ++i) x[i] = round_bf16(widen(x[i]) + widen(bias[i]));
    });
}

// `clamped_swiglu` of kernels/reference.py, after adding the biases; rounded after each operator,
// with torch's bits.
inline void clamped_swiglu(
    int variant, bf16* gate, const bf16* up, const bf16* gate_bias, const bf16* up_bias, long length
) {
    constexpr float LIMIT = 7.0f, SLOPE = 1.702f, AT_THE_BORDER = 2.723088e38f;  // e^88.5
    vectorised(variant, [=]() INLINED_LAMBDA {
        for (long i = 0; i < length; ++i) {
            float value = rounded(widen(gate[i]) + widen(gate_bias[i]));
            float other = rounded(widen(up[i]) + widen(up_bias[i]));
            value = rounded((value > LIMIT ? LIMIT : value) * SLOPE);
            // Beyond `exponential`'s range only -88.5 has a quotient other than 0.
            float e = exponential(-value);
            if (value < -88.0f) e = value == -88.5f ? AT_THE_BORDER : INFINITY;
            const float silu = rounded(value / (1.0f + e));
            other = other > LIMIT ? LIMIT : other < -LIMIT ? -LIMIT : other;
            gate[i] = round_bf16(rounded(silu * rounded(other + 1.0f)) / SLOPE);
        }
    });
}

}  // namespace lowtide
