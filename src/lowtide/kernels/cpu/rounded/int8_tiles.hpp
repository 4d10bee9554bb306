// Products of int8 rows by AMX: 16 unpacked rows of weights with 16 rows of x.
//
// A tile of weights is one group of 16 rows. With the same group of 16 rows of x it gives their
// dots; scales, offsets and steps are then applied to 16 rows of x in a register. Sums are those of
// int8_products.hpp, in their order.
//
// A tile's time does not depend on its number of rows: below `FEWEST_TILED` rows VNNI is as fast or
// faster, from 16 on tiles are faster, and between the two it depends on the weights' shape
// (docs/log).

#pragma once

#include "dense/amx.hpp"
#include "rounded/int8_many_rows.hpp"

namespace lowtide {

#if defined(HAS_DOT_PRODUCTS) && defined(HAS_VNNI)

#define INT8_TILES __attribute__((target( \
    "amx-tile,amx-int8,avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")))

template <long group_size, bool has_offsets>
class Int8Amx : Amx {
   public:
    INT8_TILES static void run(const UnpackedRows& w, const ManyRows& p) {
        Shapes shapes;
        for (int tile = 0; tile < 3; ++tile) {
            shapes.rows[tile] = tile == 2 ? WORDS : TILE;
            shapes.row_bytes[tile] = tile == 1 ? group_size : TILE_BYTES;
        }
        written(p.x[0]), written(w.codes), written(&shapes);
        _tile_loadconfig(&shapes);
        Int8Amx(w, p).run();
        _tile_release();
    }

   private:
    static constexpr int WORDS = static_cast<int>(group_size / 4);
    using Block = ColumnBlock<WORDS>;

    Int8Amx(const UnpackedRows& w, const ManyRows& p)
        : w_(w), p_(p), x_(static_cast<const Block*>(p.x[0])) {}

    // Each group is multiplied while the terms of the group before are added.
    INT8_TILES INLINED void run() {
        for (long group = 0; group < w_.num_groups; ++group) {
            multiply(group);
            if (group > 0) add(group - 1);
            ask_for_rows(p_.next, TILE, p_.next_bytes, group, w_.num_groups);
        }
        add(w_.num_groups - 1);
        for (long half = SUMS / 2; half > 0; half /= 2)
            for (long lane = 0; lane < half; ++lane) add_lane(lane, half + lane);
        store_tile_sums(p_, sums_[0][0], 0, p_.num_rows, 0, p_.num_outs);
    }

    // Computes the dots of a group.
    INT8_TILES INLINED void multiply(long group) {
        const Block& x = x_[group / SUMS];
        const long lane = group % SUMS;
        _tile_loadd(0, x.starts[lane], 0);  // the same for all rows of weights
        _tile_loadd(1, w_.codes + group * TILE * group_size, group_size);
        _tile_loadd(2, x.codes[lane], TILE_BYTES);
        _tile_dpbusd(0, 1, 2);
        _tile_stored(0, dots_[group % 2], TILE_BYTES);
        written(dots_);
    }

    INT8_TILES INLINED void add(long group) {
        const Block& x = x_[group / SUMS];
        const long lane = group % SUMS, num_lanes = w_.num_lanes();
        const __m512 step = _mm512_load_ps(x.steps[lane]), sum = _mm512_load_ps(x.sums[lane]);
        UNROLLED for (long o = 0; o < TILE; ++o) {
            const long end = o * num_lanes + group;
            const __m512 dots = _mm512_cvtepi32_ps(_mm512_load_si512(dots_[group % 2][o]));
            __m512 term = _mm512_mul_ps(dots, _mm512_set1_ps(w_.scales[end]));
            if (has_offsets)
                term = _mm512_sub_ps(term, _mm512_mul_ps(_mm512_set1_ps(w_.offsets[end]), sum));
            float* const to = sums_[lane][o];
            _mm512_store_ps(
                to, _mm512_add_ps(_mm512_load_ps(to), _mm512_mul_ps(term, step)));
        }
    }

    INT8_TILES INLINED void add_lane(long to, long from) {
        for (long o = 0; o < TILE; ++o)
            _mm512_store_ps(
                sums_[to][o],
                _mm512_add_ps(_mm512_load_ps(sums_[to][o]), _mm512_load_ps(sums_[from][o])));
    }

    const UnpackedRows& w_;
    const ManyRows& p_;
    const Block* const x_;
    alignas(64) float sums_[SUMS][TILE][TILE] = {};  // partial sums
    alignas(64) std::int32_t dots_[2][TILE][TILE];
};

template <long group, bool has_offsets>
void multiply_tiles(const UnpackedRows& w, const ManyRows& p) {
    Int8Amx<group, has_offsets>::run(w, p);
}

#endif

}  // namespace lowtide
