// Products of rows in int8 with weights in 8 or 4 bits by AMX: 16 rows of weights with 16 rows of x.
//
// A tile of weights is a group of 64 of 16 of their rows, in 8 bits as they are stored; with the same
// group of 16 rows of x it makes their dots, so that only scales, zeros and steps are left to do for
// each of them, 16 rows of x in a register. Sums are those of int8_products.hpp, in their order.
//
// A tile takes as long however few rows it is of: with fewer than `FEWEST_TILED` VNNI is as fast or
// faster, from there on it depends on the weights' shape, and from 16 tiles are (docs/log).

#pragma once

#include "amx.hpp"
#include "int8_columns.hpp"

namespace lowtide {

constexpr long FEWEST_TILED = 8;

#if defined(HAS_DOT_PRODUCTS) && defined(HAS_VNNI)

#define INT8_TILES __attribute__((target( \
    "amx-tile,amx-int8,avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")))

class Int8Amx : Amx {
   public:
    // p.num_rows: at least 2.
    template <int num_bits>
    INT8_TILES static void run(const Int8Product& p, const Chunk& chunk) {
        const ColumnBlock* x = columns_of<num_bits>(p.x, p.num_blocks, p.num_rows, chunk);
        Shapes shapes;
        for (int tile = 0; tile < 3; ++tile)
            shapes.rows[tile] = TILE, shapes.row_bytes[tile] = TILE_BYTES;
        written(x), written(&shapes);
        _tile_loadconfig(&shapes);
        Outs<num_bits>(p, x).run();
        _tile_release();
    }

   private:
    // All rows of weights, 16 at a time.
    template <int num_bits>
    class Outs {
       public:
        Outs(const Int8Product& p, const ColumnBlock* x)
            : p_(p), x_(x), num_groups_(p.w.num_groups()), row_bytes_(p.w.row_bytes()),
              ahead_(p.w.rows, p.num_outs * p.w.row_bytes(), p.next) {}

        INT8_TILES INLINED void run() {
            const Product<bf16> places = {
                nullptr, 0, nullptr, p_.bias, p_.out, p_.out_stride, p_.num_rows, p_.num_outs, 0,
            };
            for (long first = 0; first < p_.num_outs; first += TILE) {
                const long num_outs = std::min(p_.num_outs - first, TILE);
                std::memset(sums_, 0, sizeof sums_);
                for (long group = 0; group < num_groups_; group += SUMS)
                    add_block(p_.w.row(first), num_outs, group);
                for (long half = SUMS / 2; half > 0; half /= 2)
                    for (long lane = 0; lane < half; ++lane) add_lane(lane, half + lane);
                store_tile_sums(places, sums_[0][0], 0, p_.num_rows, first, num_outs);
            }
        }

       private:
        static constexpr long GROUP_BYTES = GROUP * num_bits / 8;

        // Up to 16 groups from `first` on. One is multiplied with while the one before is added.
        INT8_TILES INLINED void add_block(const std::uint8_t* rows, long num_outs, long first) {
            const long count = std::min(num_groups_ - first, SUMS);
            load_ends(rows, num_outs, first, count);
            const ColumnBlock& x = x_[first / SUMS];
            for (long lane = 0; lane < count; ++lane) {
                multiply(rows + (first + lane) * GROUP_BYTES, num_outs, x, lane);
                if (lane > 0) add(x, lane - 1);
                ahead_.read_bytes(num_outs * (GROUP_BYTES + 4));
            }
            add(x, count - 1);
        }

        INT8_TILES INLINED void load_ends(
            const std::uint8_t* rows, long num_outs, long first, long count
        ) {
            const auto mask = static_cast<__mmask16>((1u << count) - 1);
            for (long o = 0; o < num_outs; ++o) {
                const std::uint8_t* scales = rows + o * row_bytes_ + num_groups_ * GROUP_BYTES;
                _mm512_store_ps(scales_[o], halves_at(scales + 2 * first, mask));
                _mm512_store_ps(zeros_[o], halves_at(scales + 2 * (num_groups_ + first), mask));
            }
        }

        // The dots of a group.
        INT8_TILES INLINED void multiply(
            const std::uint8_t* codes, long num_outs, const ColumnBlock& x, long lane
        ) {
            if (num_bits == 8 && num_outs == TILE) {
                _tile_loadd(1, codes, row_bytes_);
            } else {
                auto* const out = codes_[lane % 2];
                for (long o = 0; o < num_outs; ++o)
                    _mm512_store_si512(out[o], unpacked(codes + o * row_bytes_));
                written(out);
                _tile_loadd(1, out, TILE_BYTES);
            }
            _tile_loadd(2, x.words[lane], TILE_BYTES);
            _tile_zero(0);
            _tile_dpbusd(0, 1, 2);
            _tile_stored(0, dots_[lane % 2], TILE_BYTES);
            written(dots_);
        }

        // A group's codes in their own order.
        INT8_TILES INLINED static __m512i unpacked(const std::uint8_t* codes) {
            if constexpr (num_bits == 8) {
                return _mm512_loadu_si512(codes);
            } else {
                const __m512i twice = _mm512_broadcast_i64x4(
                    _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
                const __m512i bits = _mm512_inserti64x4(
                    _mm512_setzero_si512(), _mm256_set1_epi16(4), 1);
                return _mm512_and_si512(_mm512_srlv_epi16(twice, bits), _mm512_set1_epi8(15));
            }
        }

        INT8_TILES INLINED void add(const ColumnBlock& x, long lane) {
            const __m512 step = _mm512_load_ps(x.steps[lane]), sum = _mm512_load_ps(x.sums[lane]);
            UNROLLED for (long o = 0; o < TILE; ++o) {
                const __m512 dots = _mm512_cvtepi32_ps(_mm512_load_si512(dots_[lane % 2][o]));
                const __m512 shift = _mm512_mul_ps(_mm512_set1_ps(zeros_[o][lane]), sum);
                const __m512 scaled = _mm512_mul_ps(dots, _mm512_set1_ps(scales_[o][lane]));
                const __m512 term = _mm512_mul_ps(_mm512_add_ps(scaled, shift), step);
                float* const to = sums_[lane][o];
                _mm512_store_ps(to, _mm512_add_ps(_mm512_load_ps(to), term));
            }
        }

        INT8_TILES INLINED void add_lane(long to, long from) {
            for (long o = 0; o < TILE; ++o)
                _mm512_store_ps(
                    sums_[to][o], _mm512_add_ps(_mm512_load_ps(sums_[to][o]),
                                                _mm512_load_ps(sums_[from][o])));
        }

        const Int8Product& p_;
        const ColumnBlock* x_;
        const long num_groups_, row_bytes_;
        Ahead ahead_;
        alignas(64) float sums_[SUMS][TILE][TILE];  // partial sums of rows of weights and of x
        alignas(64) std::int32_t dots_[2][TILE][TILE];
        alignas(64) float scales_[TILE][SUMS] = {}, zeros_[TILE][SUMS] = {};
        alignas(64) std::uint8_t codes_[2][TILE][GROUP] = {};
    };
};

#endif

}  // namespace lowtide
