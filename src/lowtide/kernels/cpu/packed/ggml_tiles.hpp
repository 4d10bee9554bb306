// Products by AMX with ggml's blocks. Weights are unpacked one chunk ahead; a chunk is 256 weights
// of each of 16 rows.
//
// A tile product has a latency far above its throughput, and loading a tile whose bytes have just
// been written waits until they reach the cache. So while a tile of one chunk is multiplied, some
// rows of the next chunk are unpacked by inlined code, into tiles whose rows are contiguous.
// Products and their loads are then nearly hidden behind unpacking (docs/log).

#pragma once

#include "dense/amx.hpp"
#include "packed/ggml_vectors.hpp"

#if defined(HAS_DOT_PRODUCTS)

namespace lowtide {
namespace ggml {

// The weights of `Amx::run`.
template <class Type>
class PackedTiles {
   public:
    PackedTiles(const Product<bf16>& p, const PackedRows& packed)
        : packed_(packed), num_outs_(p.num_outs),
          ahead_(packed.stored, p.num_outs * packed.row_bytes, p.next) {
        if (num_outs_ % TILE_ROWS) std::memset(chunks_, 0, sizeof chunks_);
        begin({0, 0});
        unpack(TILE_ROWS);
    }

    AMX INLINED WeightTile at(long first, long, long k) {
        if (k % CHUNK == 0) enter({first, k / Type::SIZE});
        if (is_usual_) unpack_usual();
        else unpack(rows_of_step_);
        return {chunks_[current_][k % CHUNK / LANES][0], LANES * static_cast<long>(sizeof(bf16))};
    }

   private:
    static constexpr long TILE_ROWS = 16, CHUNK = 256, MOST_BLOCKS = CHUNK / Type::SIZE;
    static constexpr long NUM_TILES = CHUNK / LANES;  // 8 KiB: two chunks fit in the first cache
    static constexpr long USUAL_ROWS = TILE_ROWS / NUM_TILES;

    struct Place {
        long first, block;
    };

    // Stores a row's weights, 32 to each tile.
    struct Store {
        bf16* row;

        AVX512_BF16 INLINED void operator()(long number, __m512i weights) const {
            _mm512_store_si512(row + number * TILE_ROWS * LANES, weights);
        }
    };

    // Makes the chunk at `place` the one that is read, and begins to unpack the chunk after it.
    AMX INLINED void enter(const Place& place) {
        current_ = 1 - current_;
        const long num_left = packed_.num_blocks - place.block;
        begin(num_left > MOST_BLOCKS ? Place{place.first, place.block + MOST_BLOCKS}
                                     : Place{place.first + TILE_ROWS, 0});
        const long num_steps = std::min(num_left, MOST_BLOCKS) * (Type::SIZE / LANES);
        rows_of_step_ = (TILE_ROWS + num_steps - 1) / num_steps;
        is_usual_ = rows_of_step_ == USUAL_ROWS && num_rows_ == TILE_ROWS &&
                    num_blocks_ == MOST_BLOCKS;
    }

    void begin(const Place& place) {
        row_ = 0, num_rows_ = std::min(TILE_ROWS, num_outs_ - place.first);
        from_ = packed_.stored + place.first * packed_.row_bytes + place.block * Type::BYTES;
        to_ = chunks_[1 - current_][0][0];
        num_blocks_ = std::min(MOST_BLOCKS, packed_.num_blocks - place.block);
    }

    // Unpacks the next rows of a whole chunk while a whole chunk is multiplied.
    AMX INLINED void unpack_usual() {
        const u8* const from = from_;
        bf16* const to = to_;
        UNROLLED for (long i = 0; i < USUAL_ROWS; ++i) {
            Store store = {to + i * LANES};
            vectors::unpack_blocks<Type>(from + i * packed_.row_bytes, MOST_BLOCKS, store);
        }
        unpacked(USUAL_ROWS);
    }

    // Unpacks up to `count` more rows of the begun chunk.
    AVX512_BF16 NOT_INLINED void unpack(long count) {
        for (; count > 0 && row_ < num_rows_; --count) {
            Store store = {to_};
            vectors::unpack_blocks<Type>(from_, num_blocks_, store);
            unpacked(1);
        }
    }

    INLINED void unpacked(long num_rows) {
        row_ += num_rows, from_ += num_rows * packed_.row_bytes, to_ += num_rows * LANES;
        ahead_.read_bytes(num_rows * num_blocks_ * Type::BYTES);
    }

    const PackedRows packed_;
    const long num_outs_;
    Ahead ahead_;
    const u8* from_;
    bf16* to_;
    long row_, num_rows_, num_blocks_;  // of the chunk that is being unpacked
    long rows_of_step_ = 0, current_ = 1;
    bool is_usual_ = false;  // both chunks, read and unpacked, are whole
    alignas(64) bf16 chunks_[2][NUM_TILES][TILE_ROWS][LANES];
};

}  // namespace ggml
}  // namespace lowtide

#endif
