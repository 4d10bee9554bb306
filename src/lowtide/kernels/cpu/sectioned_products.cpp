// Products of a few rows with integers in groups and FP8 by blocks: see unpacked_rows.hpp.

#include "sectioned.hpp"
#include "unpacked_rows.hpp"

namespace lowtide {
namespace {

// Unpacks rows of weights, and asks for those that come next.
class Rows {
   public:
    Rows(int variant, const SectionedWeights& w, long num_rows, const void* next)
        : variant_(variant), weights_(w), ahead_(w.start(), num_rows * w.row_bytes(), next) {}

    INLINED void unpack(long row, long num_rows, long k, long length, bf16* out, long stride) {
        const SectionedType& type = weights_.type();
        const long ahead = TILE_ROWS * weights_.num_groups();
        for (long end = row + num_rows; row < end; ++row, out += stride) {
            const Span span = weights_.span(row, k, length);
            ahead_.read_bytes(type.code_bytes(length));
            // Scales and zeros are streams of their own, a part of a line for each row.
            __builtin_prefetch(span.scales + ahead * type.scale_bytes(), 0, 2);
            if (span.zeros != nullptr) __builtin_prefetch(span.zeros + ahead, 0, 2);
            unpack_span(variant_, type, span, out);
        }
    }

   private:
    int variant_;
    SectionedWeights weights_;
    Ahead ahead_;
};

}  // namespace

void SectionedWeights::multiply(int variant, const Product<bf16>& product) const {
    if (type_.form == Form::PLAIN) {
        Product<bf16> plain = product;
        plain.w = reinterpret_cast<const bf16*>(start());
        return lowtide::multiply(variant, plain);
    }
    multiply_unpacked(variant, product, Rows(variant, *this, product.num_outs, product.next));
}

}  // namespace lowtide
