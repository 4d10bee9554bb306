// Products of rows rounded to int8 with weights of ggml's packed types: with one matrix, and with
// many experts'.

#include "ggml_int8.hpp"
#include "weight_operators.hpp"

using namespace lowtide;
using namespace lowtide::ggml;

namespace {

struct RoundedType {
    long block_bytes, block_size;
    void (*multiply)(int variant, const RoundedProduct& p);
    long (*num_blocks)(long num_k);
    void (*round_row)(int variant, const bf16* x, long num_k, RoundedGroups* out);
};

template <class Type>
void multiply_with(int variant, const RoundedProduct& p) {
#ifdef HAS_VNNI
    if (reads_in_order(variant, p.num_rows)) return multiply_in_order<Type>(p);
    if (variant == INT8_VNNI) return multiply_dots<Type>(p);
#endif
    vectorised(variant, [&p]() INLINED_LAMBDA { multiply_plainly<Type>(p); });
}

template <class Type>
void round_for(int variant, const bf16* x, long num_k, RoundedGroups* out) {
#ifdef HAS_VNNI
    if (variant == INT8_VNNI) return round_row<Type>(x, num_k, out);
#endif
    vectorised(variant, [=]() INLINED_LAMBDA { round_row_plainly<Type>(x, num_k, out); });
}

template <class Type>
constexpr RoundedType of() {
    return {Type::BYTES, Type::SIZE, multiply_with<Type>, num_blocks<Type>, round_for<Type>};
}

// In the order of `BLOCK_NAMES` in packed.py.
constexpr RoundedType TYPES[] = {
    of<Q4_0>(),  of<Q4_1>(), of<Q5_0>(), of<Q5_1>(), of<Q8_0>(), of<Iq4Nl>(), of<Mxfp4>(),
    of<Q2K>(),   of<Q3K>(),  of<Q4K>(),  of<Q5K>(),  of<Q6K>(),  of<Iq4Xs>(),
};

// A matrix [.., num_k].
struct RoundingWeights : AdjacentRows<RoundingWeights> {
    const RoundedType* type;
    long num_k;

    RoundingWeights(int number, const void* stored, long, long num_k)
        : AdjacentRows{static_cast<const u8*>(stored),
                       num_k / TYPES[number].block_size * TYPES[number].block_bytes},
          type(&TYPES[number]), num_k(num_k) {}
};

// Rows rounded to int8, each once for a type that it meets. Memory is kept for the calls of a
// thread.
class RowsInInt8 {
   public:
    static constexpr long MOST_ROWS = 256;

    explicit RowsInInt8(int variant) : variant_(variant) {}

    long piece_bytes(long usual, long share, const Group* groups, long num_groups) const {
        return piece_bytes_of(variant_, usual, share, groups, num_groups);
    }

    // weights: at most two.
    void take(
        int num_threads, const GroupRows& rows, std::initializer_list<RoundingWeights> weights
    ) {
        const int variant = variant_;
        const long num_k = rows.num_k;
        OfType* next = of_types_;
        for (const RoundingWeights& each : weights) {
            const RoundedType* const type = each.type;
            if (next > of_types_ && of_types_->type == type) continue;
            next->type = type;
            next->rows.take(num_threads, rows, type->num_blocks(num_k),
                            [=](const bf16* x, RoundedGroups* out) {
                                type->round_row(variant, x, num_k, out);
                            });
            ++next;
        }
    }

    void multiply(const RoundingWeights& w, const Product<bf16>& p, long group) const {
        const auto& rows = of_types_[w.type == of_types_->type ? 0 : 1].rows;
        for (long row = 0; row < p.num_rows; row += MOST_ROUNDED) {
            const long num_rows = std::min(MOST_ROUNDED, p.num_rows - row);
            w.type->multiply(variant_, {
                rows.blocks(group, row), rows.num_blocks(), num_rows, w.rows, p.bias,
                p.out + row * p.out_stride, p.out_stride, p.num_outs, w.num_k,
                row + num_rows < p.num_rows ? w.rows : p.next,
            });
        }
    }

   private:
    struct OfType {
        const RoundedType* type;
        RoundedRows<RoundedGroups> rows;
    };

    static OfType* own() {
        thread_local OfType of[2];
        return of;
    }

    const int variant_;
    OfType* const of_types_ = own();
};

}  // namespace

WEIGHT_OPERATORS(ggml_int8, RoundingWeights, RowsInInt8)
