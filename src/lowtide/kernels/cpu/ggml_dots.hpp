// Products with the blocks of `ggml_vectors.hpp` out of the registers that they are unpacked into:
// the sums of tiles.hpp, so the same bits as those of weights that were unpacked before.

#pragma once

#include "ggml_vectors.hpp"
#include "tiles.hpp"

#if defined(HAS_DOT_PRODUCTS)

namespace lowtide {
namespace ggml {
namespace vectors {

// With `rows` rows of x.
template <int rows>
struct Dots {
    const bf16* x;
    long x_stride;
    __m512 lanes[rows];

    AVX512_BF16 INLINED void operator()(long number, __m512i weights) {
        UNROLLED for (int r = 0; r < rows; ++r)
            lanes[r] = _mm512_dpbf16_ps(
                lanes[r], (__m512bh)_mm512_loadu_si512(x + r * x_stride + 32 * number),
                (__m512bh)weights);
    }
};

// `rows` rows of x with two rows of weights, a part of each in turn, so that no sum waits for its
// last addition.
template <class Type, int rows>
AVX512_BF16 NOT_INLINED void dots(
    const bf16* x, long x_stride, const PackedRows& two, Ahead& ahead, float (&sums)[rows][2]
) {
    constexpr long PART = 256 / Type::SIZE;  // blocks
    Dots<rows> of[2];
    for (auto& each : of) {
        each.x = x, each.x_stride = x_stride;
        UNROLLED for (int r = 0; r < rows; ++r) each.lanes[r] = _mm512_setzero_ps();
    }
    for (long block = 0; block < two.num_blocks; block += PART) {
        const long length = std::min(PART, two.num_blocks - block);
        ahead.read_bytes(2 * length * Type::BYTES);
        UNROLLED for (int o = 0; o < 2; ++o) {
            unpack_blocks<Type>(
                two.stored + o * two.row_bytes + block * Type::BYTES, length, of[o]);
            of[o].x += PART * Type::SIZE;
        }
    }
    UNROLLED for (int r = 0; r < rows; ++r)
        UNROLLED for (int o = 0; o < 2; ++o) sums[r][o] = sum_of(of[o].lanes[r]);
}

}  // namespace vectors
}  // namespace ggml
}  // namespace lowtide

#endif
