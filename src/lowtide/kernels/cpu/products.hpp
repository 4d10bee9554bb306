// Products of a few bfloat16 rows with weights that are read once: as fast as memory delivers them.
//
//     out[r, o] = sum over k of x[r, k] * w[o, k] (+ bias[o])             x, w, bias: bfloat16
//
// w is [num_outs, num_k], rows adjacent; rows of x and out may have any stride, their elements are
// adjacent. Nothing needs an alignment. out is bfloat16, or float32 without a bias.
//
// The order of a sum depends on num_k alone. Element k goes to partial sum k % 32, ascending; the
// 32 are added in a tree: odd to even, then upper to lower half until one is left. A product of two
// bfloat16 is exact in float32, so fused or not makes no difference, and every variant below gives
// the same bits (unless a product is below 2^-126, where fused is finer). vdpbf16ps is left alone:
// it rounds and flushes in its own way, and memory is the limit without it.

#pragma once

#include <algorithm>
#include <cstring>

#include "numbers.hpp"

namespace lowtide {

constexpr long LANES = 32;

// Rows of w after the present one that are asked for early: a row is too short for the CPU to
// notice that it is a stream (docs/log.md).
constexpr long AHEAD = 8;

// A tile is the sums of some rows of x with some rows of w: sums[row * outs + out]. Rows of x are
// taken by up to `ROWS` and tiles have `SUMS` sums: so many that no addition waits for the last.

struct Portable {
    static constexpr int ROWS = 1, SUMS = 1;

    template <int, int>
    static void tile(const bf16* x, long, const bf16* w, long num_k, float* sums) {
        float lanes[LANES] = {};
        long k = 0;
        for (; k + LANES <= num_k; k += LANES)
            for (long i = 0; i < LANES; ++i) lanes[i] += widen(x[k + i]) * widen(w[k + i]);
        for (long i = 0; k + i < num_k; ++i) lanes[i] += widen(x[k + i]) * widen(w[k + i]);
        for (long i = 0; i < 16; ++i) lanes[i] = lanes[2 * i] + lanes[2 * i + 1];
        for (long half = 8; half > 0; half /= 2)
            for (long i = 0; i < half; ++i) lanes[i] += lanes[half + i];
        sums[0] = lanes[0];
    }
};

#if defined(__x86_64__)

inline void ahead(const bf16* from, long stride) {
    _mm_prefetch(reinterpret_cast<const char*>(from + AHEAD * stride), _MM_HINT_T0);
}

AVX2 INLINED float sum_of(__m256 lanes) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps(lanes, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

AVX2 INLINED __m256 even8(__m256i pairs) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
}

AVX2 INLINED __m256 odd8(__m256i pairs) {
    const __m256i mask = _mm256_set1_epi32(static_cast<int>(0xffff0000));
    return _mm256_castsi256_ps(_mm256_and_si256(pairs, mask));
}

AVX2 INLINED __m256i load16(const bf16* from) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}

struct Avx2 {
    static constexpr int ROWS = 1, SUMS = 2;

    template <int, int outs>
    AVX2 static void tile(const bf16* x, long, const bf16* w, long num_k, float* sums) {
        __m256 even[outs][2] = {}, odd[outs][2] = {};
        long k = 0;
        for (; k + LANES <= num_k; k += LANES) add<outs>(x + k, w + k, num_k, even, odd);
        if (k < num_k) {
            bf16 x_rest[LANES] = {}, w_rest[outs][LANES] = {};
            const auto num_bytes = static_cast<std::size_t>(num_k - k) * sizeof(bf16);
            std::memcpy(x_rest, x + k, num_bytes);
            for (int o = 0; o < outs; ++o) std::memcpy(w_rest[o], w + o * num_k + k, num_bytes);
            add<outs>(x_rest, w_rest[0], LANES, even, odd);
        }
        for (int o = 0; o < outs; ++o) {
            const __m256 lower = _mm256_add_ps(even[o][0], odd[o][0]);
            const __m256 upper = _mm256_add_ps(even[o][1], odd[o][1]);
            sums[o] = sum_of(_mm256_add_ps(lower, upper));
        }
    }

    template <int outs>
    AVX2 static INLINED void add(
        const bf16* x, const bf16* w, long w_stride, __m256 (&even)[outs][2], __m256 (&odd)[outs][2]
    ) {
        for (int half = 0; half < 2; ++half) {
            const __m256i x_pairs = load16(x + 16 * half);
            for (int o = 0; o < outs; ++o) {
                const bf16* from = w + o * w_stride + 16 * half;
                if (half == 0) ahead(from, w_stride);
                const __m256i w_pairs = load16(from);
                even[o][half] = _mm256_fmadd_ps(even8(x_pairs), even8(w_pairs), even[o][half]);
                odd[o][half] = _mm256_fmadd_ps(odd8(x_pairs), odd8(w_pairs), odd[o][half]);
            }
        }
    }
};

AVX512 INLINED __m512 even16(__m512i pairs) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
}

AVX512 INLINED __m512 odd16(__m512i pairs) {
    const __m512i mask = _mm512_set1_epi32(static_cast<int>(0xffff0000));
    return _mm512_castsi512_ps(_mm512_and_si512(pairs, mask));
}

struct Avx512 {
    static constexpr int ROWS = 4, SUMS = 8;

    template <int rows, int outs>
    AVX512 static void tile(const bf16* x, long x_stride, const bf16* w, long num_k, float* sums) {
        __m512 even[rows][outs] = {}, odd[rows][outs] = {};
        long k = 0;
        for (; k + LANES <= num_k; k += LANES)
            add<rows, outs>(~0u, x + k, x_stride, w + k, num_k, even, odd);
        if (k < num_k) {
            const __mmask32 rest = (1u << (num_k - k)) - 1;
            add<rows, outs>(rest, x + k, x_stride, w + k, num_k, even, odd);
        }
        for (int r = 0; r < rows; ++r)
            for (int o = 0; o < outs; ++o) {
                const __m512 lanes = _mm512_add_ps(even[r][o], odd[r][o]);
                const __m512d upper = _mm512_castps_pd(lanes);
                sums[r * outs + o] = sum_of(_mm256_add_ps(
                    _mm512_castps512_ps256(lanes),
                    _mm256_castpd_ps(_mm512_extractf64x4_pd(upper, 1))));
            }
    }

    template <int rows, int outs>
    AVX512 static INLINED void add(
        __mmask32 mask, const bf16* x, long x_stride, const bf16* w, long num_k,
        __m512 (&even)[rows][outs], __m512 (&odd)[rows][outs]
    ) {
        __m512 x_even[rows], x_odd[rows];
        for (int r = 0; r < rows; ++r) {
            const __m512i pairs = _mm512_maskz_loadu_epi16(mask, x + r * x_stride);
            x_even[r] = even16(pairs), x_odd[r] = odd16(pairs);
        }
        for (int o = 0; o < outs; ++o) {
            const bf16* from = w + o * num_k;
            ahead(from, num_k);
            const __m512i pairs = _mm512_maskz_loadu_epi16(mask, from);
            const __m512 w_even = even16(pairs), w_odd = odd16(pairs);
            for (int r = 0; r < rows; ++r) {
                even[r][o] = _mm512_fmadd_ps(x_even[r], w_even, even[r][o]);
                odd[r][o] = _mm512_fmadd_ps(x_odd[r], w_odd, odd[r][o]);
            }
        }
    }
};

#endif

template <class Number>
struct Product {
    const bf16* x;
    long x_stride;
    const bf16* w;
    const bf16* bias;  // or null
    Number* out;
    long out_stride;
    long num_rows, num_outs, num_k;
};

inline void store(bf16& out, float sum) { out = round_bf16(sum); }
inline void store(float& out, float sum) { out = sum; }

template <class Isa, int rows, int outs, class Number>
void run_tile(const Product<Number>& p, long row, long first) {
    float sums[rows * outs];
    const bf16* x = p.x + row * p.x_stride;
    Isa::template tile<rows, outs>(x, p.x_stride, p.w + first * p.num_k, p.num_k, sums);
    for (int r = 0; r < rows; ++r)
        for (int o = 0; o < outs; ++o) {
            const float bias = p.bias ? widen(p.bias[first + o]) : 0.0f;
            store(p.out[(row + r) * p.out_stride + first + o], sums[r * outs + o] + bias);
        }
}

// `rows` rows of x, from `row` on, with the rows of w from `first` to before `last`.
template <class Isa, int rows, class Number>
void run_rows(const Product<Number>& p, long row, long first, long last) {
    constexpr int outs = Isa::SUMS / rows;
    for (; first + outs <= last; first += outs) run_tile<Isa, rows, outs>(p, row, first);
    for (; first < last; ++first) run_tile<Isa, rows, 1>(p, row, first);
}

// All rows of x with a few of w, which the first of them bring into the cache for the others.
template <class Isa, class Number>
void run(const Product<Number>& p) {
    for (long first = 0; first < p.num_outs; first += Isa::SUMS) {
        const long last = std::min<long>(first + Isa::SUMS, p.num_outs);
        long row = 0;
        if constexpr (Isa::ROWS == 4) {
            for (; row + 4 <= p.num_rows; row += 4) run_rows<Isa, 4>(p, row, first, last);
            for (; row + 2 <= p.num_rows; row += 2) run_rows<Isa, 2>(p, row, first, last);
        }
        for (; row < p.num_rows; ++row) run_rows<Isa, 1>(p, row, first, last);
    }
}

template <class Number>
void multiply(int variant, const Product<Number>& p) {
#if defined(__x86_64__)
    if (variant == WITH_AVX512) return run<Avx512>(p);
    if (variant == WITH_AVX2) return run<Avx2>(p);
#endif
    run<Portable>(p);
}

}  // namespace lowtide
