// Products of a few rows with weights of ggml's packed types: see unpacked_rows.hpp.

#include "ggml.hpp"
#include "unpacked_rows.hpp"

namespace lowtide {
namespace {

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

}  // namespace

void PackedWeights::multiply(int variant, const Product<bf16>& product) const {
    if (type->unpack == nullptr) {
        Product<bf16> plain = product;
        plain.w = reinterpret_cast<const bf16*>(rows);
        return lowtide::multiply(variant, plain);
    }
    const PackedRows packed = {rows, row_bytes(), product.num_outs, num_k / type->block_size};
    if (type->multiply(variant, product, packed)) return;
    multiply_rows(variant, product, Rows(variant, *this, product.num_outs, product.next));
}

}  // namespace lowtide
