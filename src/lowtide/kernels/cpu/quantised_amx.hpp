// Products with weights in 8 or 4 bits by AMX: 16 of their rows with up to 16 rows of x.
//
// A group of 16 rows of weights is rounded to bfloat16 into the first cache, and is then two tiles:
// so weights are unpacked once for all rows of x, and what more rows cost is hardly seen. Otherwise
// as amx.hpp.

#pragma once

#include "amx.hpp"
#include "quantised_products.hpp"

namespace lowtide {

#if defined(HAS_DOT_PRODUCTS) && defined(HAS_PAIRS)

#define UNPACKED_AMX __attribute__((target( \
    "amx-tile,amx-bf16,avx512f,avx512bw,avx512vl,avx512bf16,avx2,fma,f16c")))

class QuantisedAmx : Amx {
   public:
    // p.num_rows: 16 at most. There are no tiles of no rows.
    template <int num_bits>
    UNPACKED_AMX static void run(const QuantisedProduct& p) {
        if (p.num_rows == 0) return;
        const Inputs& x = packed(p.x, p.x_stride, p.num_rows, p.w.num_k, p.inputs);
        const Product<bf16> places = {
            p.x, p.x_stride, nullptr, p.bias, p.out, p.out_stride, p.num_rows, p.num_outs, p.w.num_k,
        };
        Shapes shapes;
        for (int tile : {0, 2, 3}) {
            shapes.rows[tile] = TILE;
            shapes.row_bytes[tile] = static_cast<std::uint16_t>(tile == 2 ? 64 : 4 * p.num_rows);
        }
        written(x.pairs.data()), written(&shapes);
        _tile_loadconfig(&shapes);
        Unpacked ring;
        for (long first = 0; first < p.num_outs; first += TILE) {
            const long num_outs = std::min(p.num_outs - first, TILE);
            _tile_zero(0);
            for (long group = 0; group < p.w.num_groups(); group += TILE)
                add_groups<num_bits>(p, first, num_outs, group, x, ring);
            store_tile<0>(places, 0, p.num_rows, first, num_outs);
        }
        _tile_release();
    }

   private:
    // So many groups are in turn, the product so many behind: a tile that is loaded before what was
    // written last has reached the cache waits for all of it.
    static constexpr long NUM_TURNS = 4, BEHIND = 2;

    // Some groups of 16 rows: one is written while others are read.
    struct alignas(64) Unpacked {
        bf16 halves[NUM_TURNS][2][TILE][GROUP / 2] = {};
        float ends[2][TILE][TILE] = {};  // scales and zeros of each row's next groups
    };

    // Up to 16 groups, from `start` on.
    template <int num_bits>
    UNPACKED_AMX static INLINED void add_groups(
        const QuantisedProduct& p, long first, long num_outs, long start, const Inputs& x,
        Unpacked& ring
    ) {
        constexpr long GROUP_BYTES = GROUP * num_bits / 8;
        const long num_groups = p.w.num_groups(), row_bytes = p.w.row_bytes();
        const long count = std::min(num_groups - start, TILE);
        const std::uint8_t* codes = p.w.row(first) + start * GROUP_BYTES;
        const std::uint8_t* scales = p.w.row(first) + num_groups * GROUP_BYTES + 2 * start;
        const auto mask = static_cast<__mmask16>((1u << count) - 1);
        for (long o = 0; o < num_outs; ++o)
            for (long end = 0; end < 2; ++end) {
                const std::uint8_t* from = scales + o * row_bytes + 2 * end * num_groups;
                _mm512_store_ps(
                    ring.ends[end][o], _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, from)));
            }
        for (long group = 0; group < count + BEHIND; ++group) {
            if (group >= BEHIND) multiply_group(p, start, group - BEHIND, x, ring);
            if (group >= count) continue;
            auto& halves = ring.halves[group % NUM_TURNS];
            for (long o = 0; o < num_outs; ++o) {
                const std::uint8_t* from = codes + o * row_bytes + group * GROUP_BYTES;
                for (long line = 0; line < GROUP_BYTES; line += 64)
                    _mm_prefetch(
                        reinterpret_cast<const char*>(
                            from + TILE * row_bytes + 4 * (start + group) + line), _MM_HINT_T0);
                const WeightPairs pairs = group_pairs<num_bits>(
                    from, _mm512_set1_ps(ring.ends[0][o][group]),
                    _mm512_set1_ps(ring.ends[1][o][group]));
                _mm512_store_si512(halves[0][o], pairs.lower);
                _mm512_store_si512(halves[1][o], pairs.upper);
            }
        }
    }

    UNPACKED_AMX static INLINED void multiply_group(
        const QuantisedProduct& p, long start, long group, const Inputs& x, const Unpacked& ring
    ) {
        const auto& halves = ring.halves[group % NUM_TURNS];
        written(&halves);
        for (long half = 0; half < 2; ++half) {
            const long k = (start + group) * GROUP + half * GROUP / 2;
            if (k >= x.length) break;
            _tile_loadd(2, halves[half], TILE_BYTES);
            _tile_loadd(3, x.pairs.data() + k * p.num_rows, p.num_rows * 4);
            _tile_dpbf16ps(0, 2, 3);
        }
    }
};

#endif

template <int num_bits>
void multiply_quantised(int variant, const QuantisedProduct& p) {
#ifdef HAS_PAIRS
#ifdef HAS_DOT_PRODUCTS
    if (variant == BF16_AMX) return QuantisedAmx::run<num_bits>(p);
#endif
    if (variant == BF16_AVX512) return multiply_pairs<num_bits>(p);
#endif
    vectorised(variant, [&p]() INLINED_LAMBDA { multiply_plainly<num_bits>(p); });
}

inline void multiply_quantised(int variant, const QuantisedProduct& p) {
    return p.w.num_bits == 4 ? multiply_quantised<4>(variant, p)
                             : multiply_quantised<8>(variant, p);
}

}  // namespace lowtide
