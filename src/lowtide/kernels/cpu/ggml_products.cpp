// Products of a few rows with weights of ggml's packed types, which are read once: some are
// unpacked into a core's cache, multiplied with and forgotten. Weights are rounded once to bfloat16
// and sums are those of products.hpp, so the bits are the same as if a matrix had been unpacked.

#include "amx.hpp"
#include "ggml.hpp"

namespace lowtide {
namespace {

constexpr long TILE_ROWS = 16;  // of weights

// Unpacks rows of weights, and asks for those that come next.
class Rows {
   public:
    Rows(int variant, const PackedWeights& w, long num_rows, const void* next)
        : variant_(variant), unpack_(w.type->unpack), stored_(w.rows), row_bytes_(w.row_bytes()),
          block_bytes_(w.type->block_bytes), ahead_(w.rows, num_rows * w.row_bytes(), next) {
        while (1L << block_shift_ < w.type->block_size) ++block_shift_;
    }

    // Elements from `k` on of some rows, whole blocks; rows of `out` are `stride` numbers apart.
    INLINED void unpack(long row, long num_rows, long k, long length, bf16* out, long stride) {
        const long num_blocks = length >> block_shift_;
        const std::uint8_t* from =
            stored_ + row * row_bytes_ + (k >> block_shift_) * block_bytes_;
        ahead_.read_bytes(num_rows * num_blocks * block_bytes_);
        unpack_(variant_, {from, row_bytes_, num_rows, num_blocks}, out, stride);
    }

   private:
    int variant_;
    UnpackRows unpack_;
    const std::uint8_t* stored_;
    long row_bytes_, block_bytes_, block_shift_ = 0;
    Ahead ahead_;
};

#if defined(HAS_DOT_PRODUCTS)

// For `Amx::run`. A product of tiles takes longer to answer than to begin, so what is unpacked
// meanwhile is a part of the next chunk: of the same 16 rows, or of the next.
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
    static constexpr long CHUNK = 256;  // of 16 rows 8 KiB: two are in the first cache

    struct Place {
        long first, k;
    };

    // The chunk at `place` is read from now on, and the one after it unpacked.
    INLINED void enter(const Place& place) {
        if (place.first + place.k > 0) current_ = 1 - current_;
        const bool is_last = place.k + CHUNK >= num_k_;
        next_ = is_last ? Place{place.first + TILE_ROWS, 0} : Place{place.first, place.k + CHUNK};
        const long num_steps = (std::min(CHUNK, num_k_ - place.k) + LANES - 1) / LANES;
        rows_of_step_ = (TILE_ROWS + num_steps - 1) / num_steps, next_row_ = 0;
    }

    // Rows `row` to before row + count of the 16.
    INLINED void unpack(const Place& place, long row, long count, bf16* chunk) {
        const long num_rows = std::min(row + count, std::min(TILE_ROWS, num_outs_ - place.first)) - row;
        if (num_rows > 0)
            rows_.unpack(place.first + row, num_rows, place.k, std::min(CHUNK, num_k_ - place.k),
                         chunk + row * CHUNK, CHUNK);
    }

    Rows rows_;
    long num_outs_, num_k_, current_ = 0, rows_of_step_ = 0, next_row_ = 0;
    Place next_{};
    alignas(64) bf16 chunks_[2][TILE_ROWS * CHUNK];
};

#endif

// The tiles of products.cpp, with 16 rows of weights at a time.
void multiply_rows(int variant, const Product<bf16>& p, Rows rows) {
    thread_local std::vector<bf16> unpacked;
    unpacked.resize(std::max<std::size_t>(unpacked.size(), TILE_ROWS * p.num_k));
    Product<bf16> some = p;
    some.w = unpacked.data(), some.next = nullptr;
    for (long first = 0; first < p.num_outs; first += TILE_ROWS) {
        some.num_outs = std::min(TILE_ROWS, p.num_outs - first);
        rows.unpack(first, some.num_outs, 0, p.num_k, unpacked.data(), p.num_k);
        some.out = p.out + first;
        if (p.bias != nullptr) some.bias = p.bias + first;
        multiply(variant, some);
    }
}

}  // namespace

void PackedWeights::multiply(int variant, const Product<bf16>& product) const {
    if (type->unpack == nullptr) {
        Product<bf16> plain = product;
        plain.w = reinterpret_cast<const bf16*>(rows);
        return lowtide::multiply(variant, plain);
    }
    if (variant == WITH_AVX512_BF16 &&
        type->multiply(product, {rows, row_bytes(), product.num_outs, num_k / type->block_size}))
        return;
    const Rows of(variant, *this, product.num_outs, product.next);
#if defined(HAS_DOT_PRODUCTS)
    if (variant == WITH_AMX) return Amx::run(product, [&] { return UnpackedTiles(of, product); });
#endif
    multiply_rows(variant, product, of);
}

}  // namespace lowtide
