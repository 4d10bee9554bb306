// Building blocks of `multiply`: sums of a few rows of x with a few of w, for each kind of
// processor.
//
// The order of a sum depends only on num_k, so a row's bits do not depend on other rows. In
// float32 element k goes to partial sum k % 32, ascending. The 32 sums are added in a tree: odd to
// even, then upper to lower half until one is left. A product of two bfloat16 numbers is exact in
// float32, so fusing makes no difference, and the portable variant, AVX2 and AVX-512 give the same
// bits (unless a product is below 2^-126, where fusing is more exact).
//
// The processor's own dot products add and round two elements at a time, and flush numbers below
// 2^-126 to 0, so their bits differ. With AVX512-BF16 elements 2 i and 2 i + 1 of each 32 go to
// partial sum i, and the 16 sums are added in the same tree. With AMX (amx.hpp) there is one sum,
// ascending.

#pragma once

#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "dense/ahead.hpp"
#include "numbers.hpp"

namespace lowtide {

constexpr long LANES = 32;

// A tile is the sums of some rows of x with some rows of w: sums[row * outs + out]. It takes up to
// `ROWS` rows of x and has `SUMS` sums: enough that no addition waits for the previous one.
// Variants whose weights come from memory have an `ahead` to prefetch others.

struct Portable {
    static constexpr int ROWS = 1, SUMS = 1;
    static constexpr bool READS_IN_ORDER = false;

    template <int, int>
    static void tile(const bf16* x, long, const bf16* w, long num_k, float* sums, Ahead* ahead) {
        float lanes[LANES] = {};
        long k = 0;
        for (; k + LANES <= num_k; k += LANES) {
            if (ahead) ahead->read<1>();
            for (long i = 0; i < LANES; ++i) lanes[i] += widen(x[k + i]) * widen(w[k + i]);
        }
        for (long i = 0; k + i < num_k; ++i) lanes[i] += widen(x[k + i]) * widen(w[k + i]);
        for (long i = 0; i < 16; ++i) lanes[i] = lanes[2 * i] + lanes[2 * i + 1];
        for (long half = 8; half > 0; half /= 2)
            for (long i = 0; i < half; ++i) lanes[i] += lanes[half + i];
        sums[0] = lanes[0];
    }
};

#if defined(__x86_64__)

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
    static constexpr bool READS_IN_ORDER = false;

    template <int, int outs>
    AVX2 NOT_INLINED static void tile(
        const bf16* x, long, const bf16* w, long num_k, float* sums, Ahead* ahead
    ) {
        __m256 even[outs][2] = {}, odd[outs][2] = {};
        long k = 0;
        for (; k + LANES <= num_k; k += LANES) {
            if (ahead) ahead->read<outs>();
            add<outs>(x + k, w + k, num_k, even, odd);
        }
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

AVX512 INLINED float sum_of(__m512 lanes) {
    const __m512d upper = _mm512_castps_pd(lanes);
    return sum_of(_mm256_add_ps(
        _mm512_castps512_ps256(lanes), _mm256_castpd_ps(_mm512_extractf64x4_pd(upper, 1))));
}

struct Avx512 {
    static constexpr int ROWS = 4, SUMS = 8;
    static constexpr bool READS_IN_ORDER = false;

    template <int rows, int outs>
    AVX512 NOT_INLINED static void tile(
        const bf16* x, long x_stride, const bf16* w, long num_k, float* sums, Ahead* ahead
    ) {
        __m512 even[rows][outs] = {}, odd[rows][outs] = {};
        long k = 0;
        for (; k + LANES <= num_k; k += LANES) {
            if (ahead) ahead->read<outs>();
            add<rows, outs>(~0u, x + k, x_stride, w + k, num_k, even, odd);
        }
        if (k < num_k) {
            const __mmask32 rest = (1u << (num_k - k)) - 1;
            add<rows, outs>(rest, x + k, x_stride, w + k, num_k, even, odd);
        }
        UNROLLED for (int r = 0; r < rows; ++r)
            UNROLLED for (int o = 0; o < outs; ++o)
                sums[r * outs + o] = sum_of(_mm512_add_ps(even[r][o], odd[r][o]));
    }

    template <int rows, int outs>
    AVX512 static INLINED void add(
        __mmask32 mask, const bf16* x, long x_stride, const bf16* w, long num_k,
        __m512 (&even)[rows][outs], __m512 (&odd)[rows][outs]
    ) {
        __m512 x_even[rows], x_odd[rows];
        UNROLLED for (int r = 0; r < rows; ++r) {
            const __m512i pairs = _mm512_maskz_loadu_epi16(mask, x + r * x_stride);
            x_even[r] = even16(pairs), x_odd[r] = odd16(pairs);
        }
        UNROLLED for (int o = 0; o < outs; ++o) {
            const __m512i pairs = _mm512_maskz_loadu_epi16(mask, w + o * num_k);
            const __m512 w_even = even16(pairs), w_odd = odd16(pairs);
            UNROLLED for (int r = 0; r < rows; ++r) {
                even[r][o] = _mm512_fmadd_ps(x_even[r], w_even, even[r][o]);
                odd[r][o] = _mm512_fmadd_ps(x_odd[r], w_odd, odd[r][o]);
            }
        }
    }
};

#if defined(HAS_DOT_PRODUCTS)

struct Avx512Bf16 {
    static constexpr int ROWS = 8, SUMS = 16;
    // With one or two rows of x memory is the only limit, and the processors that use this (AMD's
    // from Zen 4 on; nearly all of Intel's have AMX) read fastest in order (docs/log).
    static constexpr bool READS_IN_ORDER = true;

    template <int rows, int outs>
    AVX512_BF16 NOT_INLINED static void tile(
        const bf16* x, long x_stride, const bf16* w, long num_k, float* sums, Ahead* ahead
    ) {
        __m512 lanes[rows][outs] = {};
        long k = 0;
        for (; k + LANES <= num_k; k += LANES) {
            if (ahead) ahead->read<outs>();
            add<rows, outs>(~0u, x + k, x_stride, w + k, num_k, lanes);
        }
        if (k < num_k) {
            const __mmask32 rest = (1u << (num_k - k)) - 1;
            add<rows, outs>(rest, x + k, x_stride, w + k, num_k, lanes);
        }
        UNROLLED for (int r = 0; r < rows; ++r)
            UNROLLED for (int o = 0; o < outs; ++o) sums[r * outs + o] = sum_of(lanes[r][o]);
    }

    template <int rows, int outs>
    AVX512_BF16 static INLINED void add(
        __mmask32 mask, const bf16* x, long x_stride, const bf16* w, long num_k,
        __m512 (&lanes)[rows][outs]
    ) {
        __m512bh w_pairs[outs];
        UNROLLED for (int o = 0; o < outs; ++o)
            w_pairs[o] = (__m512bh)_mm512_maskz_loadu_epi16(mask, w + o * num_k);
        UNROLLED for (int r = 0; r < rows; ++r) {
            const auto x_pairs = (__m512bh)_mm512_maskz_loadu_epi16(mask, x + r * x_stride);
            UNROLLED for (int o = 0; o < outs; ++o)
                lanes[r][o] = _mm512_dpbf16_ps(lanes[r][o], x_pairs, w_pairs[o]);
        }
    }
};

#endif
#endif

}  // namespace lowtide
