// Products of a few rows with weights that are unpacked on the way: a part is unpacked into a
// core's cache, multiplied and discarded. Weights are rounded once to bfloat16 and sums are those
// of products.hpp, so the bits are those of a matrix that was unpacked before.
//
// `Rows` are a matrix's rows: `unpack(row, num_rows, k, length, out, stride)` writes `length`
// elements from `k` on, a multiple of 256, of `num_rows` rows to rows `stride` elements apart.

#pragma once

#include "dense/amx.hpp"
#include "dense/products.hpp"

namespace lowtide {

constexpr long TILE_ROWS = 16;  // rows of weights

#if defined(HAS_DOT_PRODUCTS)

// The weights of `Amx::run`. A tile product has a latency far above its throughput, so meanwhile a
// part of the next chunk is unpacked, of the same 16 rows or of the next 16.
template <class Rows>
class UnpackedTiles {
   public:
    UnpackedTiles(const Rows& rows, const Product<bf16>& p)
        : rows_(rows), num_outs_(p.num_outs), num_k_(p.num_k) {
        if (num_outs_ < TILE_ROWS) std::memset(chunks_, 0, sizeof chunks_);
        unpack({0, 0}, 0, TILE_ROWS, chunks_[0]);
    }

    INLINED WeightTile at(long first, long, long k) {
        if (k % CHUNK == 0) enter({first, k});
        unpack(next_, next_row_, rows_of_step_, chunks_[1 - current_]);
        next_row_ += rows_of_step_;
        return {chunks_[current_] + k % CHUNK, CHUNK * static_cast<long>(sizeof(bf16))};
    }

   private:
    static constexpr long CHUNK = 256;  // of 16 rows 8 KiB: two fit in the first cache

    struct Place {
        long first, k;
    };

    // Makes the chunk at `place` the one that is read, and begins to unpack the chunk after it.
    INLINED void enter(const Place& place) {
        if (place.first + place.k > 0) current_ = 1 - current_;
        const bool is_last = place.k + CHUNK >= num_k_;
        next_ = is_last ? Place{place.first + TILE_ROWS, 0} : Place{place.first, place.k + CHUNK};
        const long num_steps = (std::min(CHUNK, num_k_ - place.k) + LANES - 1) / LANES;
        rows_of_step_ = (TILE_ROWS + num_steps - 1) / num_steps, next_row_ = 0;
    }

    // Unpacks rows [row, row + count) of the 16, each padded with 0 to whole tiles.
    INLINED void unpack(const Place& place, long row, long count, bf16* chunk) {
        const long end = std::min({row + count, TILE_ROWS, num_outs_ - place.first});
        if (end <= row) return;
        const long length = std::min(CHUNK, num_k_ - place.k);
        bf16* const out = chunk + row * CHUNK;
        rows_.unpack(place.first + row, end - row, place.k, length, out, CHUNK);
        if (length % LANES == 0) return;
        for (long i = 0; i < end - row; ++i)
            std::fill_n(out + i * CHUNK + length, LANES - length % LANES, bf16{0});
    }

    Rows rows_;
    long num_outs_, num_k_, current_ = 0, rows_of_step_ = 0, next_row_ = 0;
    Place next_{};
    alignas(64) bf16 chunks_[2][TILE_ROWS * CHUNK];
};

#endif

// Unpacks and multiplies 16 rows of weights at a time, by `multiply` of products.cpp.
template <class Rows>
void multiply_rows(int variant, const Product<bf16>& p, Rows rows) {
    thread_local std::vector<bf16> unpacked;
    unpacked.resize(std::max<std::size_t>(unpacked.size(), TILE_ROWS * p.num_k));
    Product<bf16> some = p;
    some.w = unpacked.data(), some.next = nullptr, some.is_cached = true;
    for (long first = 0; first < p.num_outs; first += TILE_ROWS) {
        some.num_outs = std::min(TILE_ROWS, p.num_outs - first);
        rows.unpack(first, some.num_outs, 0, p.num_k, unpacked.data(), p.num_k);
        some.out = p.out + first;
        if (p.bias != nullptr) some.bias = p.bias + first;
        multiply(variant, some);
    }
}

// Multiplies with `rows`, each weight rounded to bfloat16.
template <class Rows>
void multiply_unpacked(int variant, const Product<bf16>& p, const Rows& rows) {
#if defined(HAS_DOT_PRODUCTS)
    if (variant == WITH_AMX) return Amx::run(p, [&] { return UnpackedTiles<Rows>(rows, p); });
#endif
    multiply_rows(variant, p, rows);
}

}  // namespace lowtide
