// Entry points for Python: products of rows rounded to int8 with packed matrices and experts.

#include "rounded/rounded.hpp"
#include "experts/weight_operators.hpp"

using namespace lowtide;

namespace {

RoundedType rounded_types[NUM_BLOCK_TYPES];  // without functions before a type's file is loaded

// A matrix [.., num_k].
struct RoundingWeights : AdjacentRows<RoundingWeights> {
    const RoundedType* type;
    long num_k;

    RoundingWeights(int number, const void* stored, long, long num_k)
        : AdjacentRows{static_cast<const std::uint8_t*>(stored), 0},
          type(&rounded_types[number]), num_k(num_k) {
        bytes_of_row = type->row_bytes(num_k);
    }
};

// A call's rows rounded to int8, once for each of its weights' types. Their memory is the thread's
// and is reused by its next call.
class RowsInInt8 {
   public:
    static constexpr long MOST_ROWS = 256;

    explicit RowsInInt8(int variant) : variant_(variant) {}

    long piece_bytes(long usual, long share, const Group* groups, long num_groups) const {
        return piece_bytes_of(variant_, usual, share, groups, num_groups);
    }

    // weights: of at most two types.
    void take(
        int num_threads, const GroupRows& rows, std::initializer_list<RoundingWeights> weights
    ) {
        const int variant = variant_;
        const long num_k = rows.num_k;
        chunks_ = 0;
        for (long g = 0; g < rows.num_groups; ++g)
            chunks_ = std::max(chunks_, rows.groups[g].num_rows / MOST_ROUNDED + 1);
        OfType* next = of_types_;
        for (const RoundingWeights& each : weights) {
            const RoundedType* const type = each.type;
            if (next > of_types_ && of_types_->type == type) continue;
            next->type = type, next->inputs = new_inputs(rows.num_groups * chunks_);
            next->rows.take(num_threads, rows, type->row_lines(num_k),
                            [=](const bf16* x, Line* out) {
                                type->round_row(variant, x, num_k, out);
                            });
            ++next;
        }
    }

    void multiply(const RoundingWeights& w, const Product<bf16>& p, long group) const {
        const OfType& own = of_types_[w.type == of_types_->type ? 0 : 1];
        const RoundedProduct all = {
            own.rows.lines(group, 0), own.rows.num_lines(), p.num_rows, w.rows, p.bias, p.out,
            p.out_stride, p.num_outs, w.num_k, p.next,
        };
        // Columns of the two types have places of their own.
        const auto first = static_cast<std::size_t>((&own - of_types_) * MOST_ROWS / MOST_ROUNDED);
        w.type->multiply(
            variant_, all, {own.inputs + static_cast<std::uint64_t>(group * chunks_), first});
    }

   private:
    struct OfType {
        const RoundedType* type;
        RoundedRows rows;
        std::uint64_t inputs;  // number of the first group's first 16 rows
    };

    static OfType* own() {
        thread_local OfType of[2];
        return of;
    }

    const int variant_;
    OfType* const of_types_ = own();
    long chunks_ = 0;  // most chunks of a group
};

}  // namespace

void lowtide::set_rounded_type(int number, const RoundedType& type) {
    rounded_types[number] = type;
}

WEIGHT_OPERATORS(rounded, RoundingWeights, RowsInInt8)
