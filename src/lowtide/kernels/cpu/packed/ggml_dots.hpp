// Dot products of rows of x with GGML's blocks, which are multiplied in the registers that they are
// unpacked into. They add up in the order of dense/tiles.hpp, so they have the same bits as products
// with weights that were unpacked to memory first.

#pragma once

#include "packed/ggml_vectors.hpp"
#include "dense/tiles.hpp"

#if defined(HAS_DOT_PRODUCTS)

namespace lowtide {
namespace ggml {
namespace vectors {

// Rows of weights multiplied at a time. Each has its own sums: with four of them an addition need not
// wait for the one before it.
constexpr int OUTS = 4;

// Adds to `lanes` the products of 32 elements of each row of x and of each row of weights.
template <int rows>
AVX512_BF16 INLINED void add_products(
    const bf16* x, long x_stride, const __m512i (&weights)[OUTS], __m512 (&lanes)[rows][OUTS]
) {
    UNROLLED for (int r = 0; r < rows; ++r) {
        const auto of_x = (__m512bh)_mm512_loadu_si512(x + r * x_stride);
        UNROLLED for (int o = 0; o < OUTS; ++o)
            lanes[r][o] = _mm512_dpbf16_ps(lanes[r][o], of_x, (__m512bh)weights[o]);
    }
}

// Adds the products of the blocks that are left at the rows' ends, fewer than a span has. These are
// unpacked to memory first.
template <class Type, int rows>
AVX512_BF16 INLINED void add_rest(
    const bf16* x, long x_stride, const u8* const (&b)[OUTS], long num_blocks,
    __m512 (&lanes)[rows][OUTS]
) {
    alignas(64) bf16 rest[OUTS][SPAN];
    for (int o = 0; o < OUTS; ++o) {
        Store store = {rest[o]};
        unpack_blocks<Type>(b[o], num_blocks, store);
    }
    for (long k = 0; k < num_blocks * Type::SIZE; k += LANES) {
        __m512i weights[OUTS];
        UNROLLED for (int o = 0; o < OUTS; ++o) weights[o] = _mm512_load_si512(rest[o] + k);
        add_products<rows>(x + k, x_stride, weights, lanes);
    }
}

// Adds the products of one span, 256 weights of each row from `b` on. A step unpacks its part of all
// rows before it multiplies, so weights stay in registers.
template <class Type, int rows>
AVX512_BF16 INLINED void add_span(
    const bf16* x, long x_stride, const u8* const (&b)[OUTS], Span<Type> (&spans)[OUTS],
    __m512 (&lanes)[rows][OUTS]
) {
    constexpr int NUM_PARTS = PARTS<Type>;
    UNROLLED for (int o = 0; o < OUTS; ++o) spans[o].begin(b[o]);
    UNROLLED for (int step = 0; step < Span<Type>::STEPS; ++step) {
        __m512i made[OUTS][NUM_PARTS];
        UNROLLED for (int o = 0; o < OUTS; ++o) spans[o].step(b[o], step, made[o]);
        UNROLLED for (int part = 0; part < NUM_PARTS; ++part, x += LANES) {
            __m512i weights[OUTS];
            UNROLLED for (int o = 0; o < OUTS; ++o) weights[o] = made[o][part];
            add_products<rows>(x, x_stride, weights, lanes);
        }
    }
}

// Dot products of `rows` rows of x with OUTS rows of weights, which have `num_blocks` blocks each.
template <class Type>
struct SpanDots {
    template <int rows>
    AVX512_BF16 NOT_INLINED static void of(
        const bf16* x, long x_stride, const u8* const (&weights)[OUTS], long num_blocks,
        LinesAhead& ahead, float (&sums)[rows][OUTS]
    ) {
        constexpr long BLOCKS = BLOCKS_OF_SPAN<Type>;
        const u8* b[OUTS];
        UNROLLED for (int o = 0; o < OUTS; ++o) b[o] = weights[o];
        Span<Type> spans[OUTS];
        __m512 lanes[rows][OUTS] = {};
        for (; num_blocks >= BLOCKS; num_blocks -= BLOCKS, x += SPAN) {
            ahead.read_bytes(OUTS * BLOCKS * Type::BYTES);
            add_span<Type, rows>(x, x_stride, b, spans, lanes);
            UNROLLED for (int o = 0; o < OUTS; ++o) b[o] += BLOCKS * Type::BYTES;
        }
        if constexpr (BLOCKS > 1) {
            ahead.read_bytes(OUTS * num_blocks * Type::BYTES);
            if (num_blocks > 0) add_rest<Type, rows>(x, x_stride, b, num_blocks, lanes);
        }
        UNROLLED for (int r = 0; r < rows; ++r)
            UNROLLED for (int o = 0; o < OUTS; ++o) sums[r][o] = sum_of(lanes[r][o]);
    }
};

}  // namespace vectors
}  // namespace ggml
}  // namespace lowtide

#endif
