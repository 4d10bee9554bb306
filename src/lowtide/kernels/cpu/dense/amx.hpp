// Products by AMX: tiles of 16 output features with up to 16 rows of x.
//
// A tile of weights is 32 elements of 16 rows, as they are stored. It is the left operand. The
// right operand needs its elements in pairs, one pair of every row after the other; only x, which
// is small, is rearranged into that order. So 1 KiB of weights takes 16 cycles for up to 16 rows,
// half of the time in which memory delivers it.
//
// A sum runs over ascending k in one accumulator, whatever is computed with it. Elements beyond
// num_k or num_outs are 0, which changes no sum.

#pragma once

#include <vector>

#include "dense/ahead.hpp"
#include "dense/products.hpp"
#include "dense/tile_sums.hpp"
#include "dense/tiles.hpp"

namespace lowtide {

#if defined(HAS_DOT_PRODUCTS)

// Address of 32 elements of each of 16 adjacent rows of weights.
struct WeightTile {
    const bf16* from;
    long stride_bytes;
};

// Tiles of weights as they are stored; elements beyond the matrix are 0 in a copy.
class StoredTiles {
   public:
    explicit StoredTiles(const Product<bf16>& p)
        : w_(p.w), num_k_(p.num_k), ahead_(p.w, p.num_outs * p.num_k * ITEM_BYTES, p.next) {}

    INLINED WeightTile at(long first, long num_outs, long k) {
        constexpr long WHOLE = 16;
        ahead_.read<16>();
        const bf16* from = w_ + first * num_k_ + k;
        const long rest = std::min(num_k_ - k, LANES);
        if (num_outs == WHOLE && rest == LANES) return {from, num_k_ * ITEM_BYTES};
        std::memset(edge_, 0, sizeof edge_);
        for (long o = 0; o < num_outs; ++o)
            std::memcpy(edge_ + o * LANES, from + o * num_k_, rest * sizeof(bf16));
        return {edge_, LANES * ITEM_BYTES};
    }

   private:
    static constexpr long ITEM_BYTES = sizeof(bf16);
    const bf16* w_;
    long num_k_;
    Ahead ahead_;
    alignas(64) bf16 edge_[16 * LANES];
};

class Amx {
   public:
    // make_tiles: returns an object with `at(first, num_outs, k)`, a `WeightTile` that is valid
    // until the next call; called by features, then by k.
    template <class MakeTiles>
    static void run(const Product<bf16>& p, const MakeTiles& make_tiles) {
        const Inputs& x = packed(p.x, p.x_stride, p.num_rows, p.num_k, p.inputs);
        for (long row = 0; row < p.num_rows; row += 2 * TILE) {
            const long num_rows = std::min(p.num_rows - row, 2 * TILE);
            const bf16* at = x.pairs() + row * x.length;
            if (num_rows <= TILE) run_rows<1>(p, make_tiles, at, x.length, row, num_rows);
            else run_rows<2>(p, make_tiles, at, x.length, row, num_rows);
        }
    }

   protected:  // what products with other weights are made of, too
    static constexpr long TILE_BYTES = 64;

    // Rows of x by 16: pair k / 2 of each row, then the next pair; 0 up to `length`.
    struct Inputs {
        struct alignas(64) Line {
            bf16 numbers[LANES];
        };
        std::vector<Line> lines;
        long length;  // num_k, rounded up to whole tiles
        std::uint64_t number = 0;

        const bf16* pairs() const { return lines.data()->numbers; }
    };

    static const Inputs& packed(
        const bf16* x, long stride, long num_rows, long num_k, std::uint64_t number
    ) {
        thread_local Inputs of;
        if (number != 0 && number == of.number) return of;
        of.length = (num_k + LANES - 1) / LANES * LANES;
        const auto needed = static_cast<std::size_t>(num_rows * of.length / LANES);
        if (of.lines.size() < needed) of.lines.resize(needed);
        for (long row = 0; row < num_rows; row += TILE)
            pack(x + row * stride, stride, std::min(num_rows - row, TILE), num_k,
                 of.lines.data()->numbers + row * of.length);
        of.number = number;
        return of;
    }

    AVX512 static void pack(const bf16* x, long stride, long num_rows, long num_k, bf16* out) {
        const auto columns = static_cast<__mmask16>((1u << num_rows) - 1);
        for (long k = 0; k < num_k; k += LANES) {
            const long rest = std::min(num_k - k, LANES);
            const __mmask32 mask = rest == LANES ? ~0u : (1u << rest) - 1;
            if (num_rows == 1) {  // is its own pairs
                _mm512_storeu_si512(out + k, _mm512_maskz_loadu_epi16(mask, x + k));
                continue;
            }
            __m512i rows[16];
            for (long r = 0; r < TILE; ++r)
                rows[r] = r < num_rows ? _mm512_maskz_loadu_epi16(mask, x + r * stride + k)
                                       : _mm512_setzero_si512();
            transpose(rows);
            for (long pair = 0; pair < TILE; ++pair)
                _mm512_mask_storeu_epi32(out + (k / 2 + pair) * 2 * num_rows, columns, rows[pair]);
        }
    }

    // Tells the compiler, which cannot see it, that loading a tile reads memory.
    static INLINED void written(const void* memory) { asm volatile("" : : "r"(memory) : "memory"); }

    // Tiles 0 and 1 are sums, 2 is of weights, 3 and 4 are of x.
    struct alignas(64) Shapes {
        std::uint8_t palette = 1, start = 0, reserved[14] = {};
        std::uint16_t row_bytes[16] = {};
        std::uint8_t rows[16] = {};
    };

    // `halves`: groups of up to 16 rows of x.
    template <int halves, class MakeTiles>
    AMX static void run_rows(
        const Product<bf16>& p, const MakeTiles& make_tiles, const bf16* x, long length, long row,
        long num_rows
    ) {
        const long of_first = std::min(num_rows, TILE), of_second = num_rows - of_first;
        Shapes shapes;
        for (int tile = 0; tile < 5; ++tile) {
            const long of_rows = 4 * (tile == 0 || tile == 3 ? of_first : of_second);
            shapes.rows[tile] = TILE;
            shapes.row_bytes[tile] = static_cast<std::uint16_t>(tile == 2 ? TILE_BYTES : of_rows);
            if (shapes.row_bytes[tile] == 0) shapes.rows[tile] = 0;
        }
        written(x), written(&shapes);
        _tile_loadconfig(&shapes);
        auto tiles = make_tiles();
        for (long first = 0; first < p.num_outs; first += TILE) {
            const long num_outs = std::min(p.num_outs - first, TILE);
            sum_tiles<halves>(tiles, first, num_outs, p.num_k, x, length, num_rows);
            store_tile<0>(p, row, of_first, first, num_outs);
            if constexpr (halves == 2) store_tile<1>(p, row + TILE, of_second, first, num_outs);
        }
        _tile_release();
    }

    template <int halves, class Tiles>
    AMX static INLINED void sum_tiles(
        Tiles& tiles, long first, long num_outs, long num_k, const bf16* x, long length, long num_rows
    ) {
        const long first_rows = std::min(num_rows, TILE), second_rows = num_rows - first_rows;
        const bf16* second = x + TILE * length;
        _tile_zero(0);
        if constexpr (halves == 2) _tile_zero(1);
        for (long k = 0; k < num_k; k += LANES) {
            const WeightTile tile = tiles.at(first, num_outs, k);
            written(tile.from);
            _tile_loadd(2, tile.from, tile.stride_bytes);
            _tile_loadd(3, x + k * first_rows, first_rows * 4);
            _tile_dpbf16ps(0, 2, 3);
            if constexpr (halves == 2) {
                _tile_loadd(4, second + k * second_rows, second_rows * 4);
                _tile_dpbf16ps(1, 2, 4);
            }
        }
    }

    template <int tile>
    AMX static INLINED void store_tile(
        const Product<bf16>& p, long row, long num_rows, long first, long num_outs
    ) {
        alignas(64) float sums[TILE * TILE];  // [outs, rows]
        if constexpr (tile == 0) _tile_stored(0, sums, stored_bytes(num_rows));
        else _tile_stored(1, sums, stored_bytes(num_rows));
        store_tile_sums(p, sums, row, num_rows, first, num_outs);
    }

    // Bytes between the stored sums of two output features; sums of one row are adjacent.
    static INLINED long stored_bytes(long num_rows) {
        return num_rows == 1 ? static_cast<long>(sizeof(float)) : TILE_BYTES;
    }
};

#endif

}  // namespace lowtide
