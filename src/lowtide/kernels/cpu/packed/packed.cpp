// Entry points for Python: unpacking packed weights, and products with matrices and experts of
// them. If a type has no product of its own, unpacked_rows.hpp multiplies.

#include "packed/packed.hpp"

#include "packed/unpacked_rows.hpp"
#include "experts/weight_operators.hpp"

namespace lowtide {
namespace {

// Unpacks a matrix of blocks and prefetches the blocks that follow.
class BlockRows {
   public:
    BlockRows(int variant, const PackedWeights& w, long num_rows, const void* next)
        : variant_(variant), type_(*w.type().blocks), stored_(w.start()),
          row_bytes_(w.row_bytes()), ahead_(w.start(), num_rows * w.row_bytes(), next) {
        while (1L << block_shift_ < type_.block_size) ++block_shift_;
    }

    // Unpacks `length` elements of some rows from `k` on, whole blocks. Rows of `out` are `stride`
    // elements apart.
    INLINED void unpack(long row, long num_rows, long k, long length, bf16* out, long stride) {
        const long num_blocks = length >> block_shift_;
        const std::uint8_t* from =
            stored_ + row * row_bytes_ + (k >> block_shift_) * type_.block_bytes;
        ahead_.read_bytes(num_rows * num_blocks * type_.block_bytes);
        type_.unpack(variant_, {from, row_bytes_, num_rows, num_blocks, length}, out, stride);
    }

   private:
    int variant_;
    BlockType type_;
    const std::uint8_t* stored_;
    long row_bytes_, block_shift_ = 0;
    Ahead ahead_;
};

// Unpacks a matrix of sections and prefetches the bytes that follow.
class SectionRows {
   public:
    SectionRows(int variant, const PackedWeights& w, long num_rows, const void* next)
        : variant_(variant), weights_(w), ahead_(w.start(), num_rows * w.row_bytes(), next) {}

    INLINED void unpack(long row, long num_rows, long k, long length, bf16* out, long stride) {
        const PackedType& type = weights_.type();
        const long ahead = TILE_ROWS * weights_.num_groups();
        for (long end = row + num_rows; row < end; ++row, out += stride) {
            const Span span = weights_.span(row, k, length);
            ahead_.read_bytes(type.code_bytes(length));
            // Scales and zeros are streams of their own; a row has less than a cache line of them.
            __builtin_prefetch(span.scales + ahead * type.scale_bytes(), 0, 2);
            if (span.zeros != nullptr) __builtin_prefetch(span.zeros + ahead, 0, 2);
            unpack_span(variant_, type, span, out);
        }
    }

   private:
    int variant_;
    PackedWeights weights_;
    Ahead ahead_;
};

BlockType block_types[NUM_BLOCK_TYPES];

}  // namespace

const BlockType& block_type(int number) { return block_types[number]; }

void set_block_type(int number, const BlockType& type) { block_types[number] = type; }

void PackedWeights::multiply(int variant, const Product<bf16>& p) const {
    if (type_.form == Form::PLAIN) {
        Product<bf16> plain = p;
        plain.w = reinterpret_cast<const bf16*>(start());
        return lowtide::multiply(variant, plain);
    }
    if (type_.form != Form::BLOCKS)
        return multiply_unpacked(variant, p, SectionRows(variant, *this, p.num_outs, p.next));
    const BlockType& blocks = *type_.blocks;
    const PackedRows packed = {start(), row_bytes(), p.num_outs, blocks.num_blocks(num_k_), num_k_};
    if (blocks.multiply(variant, p, packed)) return;
    multiply_rows(variant, p, BlockRows(variant, *this, p.num_outs, p.next));
}

}  // namespace lowtide

using namespace lowtide;

WEIGHT_OPERATORS(packed, PackedWeights, RowsAsTheyAre)

extern "C" {

long lowtide_section_alignment() { return SECTION_ALIGNMENT; }

// Unpacks rows of a matrix [num_of_all, num_k] at `stored` to out [num_rows, num_k]: those listed
// in `numbers`, or if it is null those from `first` on.
void lowtide_packed_unpack(
    int variant, int type, const void* stored, long num_of_all, long num_k,
    const std::int64_t* numbers, long first, long num_rows, bf16* out
) {
    const PackedWeights weights(type, stored, num_of_all, num_k);
    const BlockType* const blocks = weights.type().blocks;
    const auto unpack = [&](long number, long count, bf16* to) {
        const PackedWeights from = weights.from(number);
        if (blocks == nullptr)
            return unpack_span(variant, weights.type(), from.span(0, 0, num_k), to);
        blocks->unpack(
            variant,
            {from.start(), weights.row_bytes(), count, blocks->num_blocks(num_k), num_k}, to,
            num_k);
    };
    if (numbers == nullptr && blocks != nullptr) return unpack(first, num_rows, out);
    for (long row = 0; row < num_rows; ++row)
        unpack(numbers == nullptr ? first + row : static_cast<long>(numbers[row]), 1,
               out + row * num_k);
}

}
