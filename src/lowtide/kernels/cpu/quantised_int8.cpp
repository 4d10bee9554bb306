// The products of `int8_products.hpp`, and of few rows, many and tiles of them, for Python: with one
// weight, and with many experts'.

#include "int8_few_rows.hpp"
#include "int8_many_rows.hpp"
#include "int8_tiles.hpp"
#include "weight_operators.hpp"

using namespace lowtide;

namespace {

// A matrix [.., num_k]; the types are those of packed.hpp.
struct Int8Weights : AdjacentRows<Int8Weights> {
    static constexpr int Q4 = 14;  // and 13 is q8

    long num_k;
    int num_bits;

    Int8Weights(int type, const void* stored, long, long num_k)
        : AdjacentRows{static_cast<const std::uint8_t*>(stored), 0}, num_k(num_k),
          num_bits(type == Q4 ? 4 : 8) {
        bytes_of_row = QuantisedWeights{nullptr, num_k, num_bits}.row_bytes();
    }
};

// Rows rounded to int8, each once. Memory is kept for the calls of a thread.
class RowsInInt8 {
   public:
    static constexpr long MOST_ROWS = 256;

    explicit RowsInInt8(int variant) : variant_(variant) {}

    long piece_bytes(long usual, long share, const Group* groups, long num_groups) const {
        return piece_bytes_of(variant_, usual, share, groups, num_groups);
    }

    // All weights are of as many bits.
    void take(int num_threads, const GroupRows& rows, std::initializer_list<Int8Weights> weights) {
        const int variant = variant_, num_bits = weights.begin()->num_bits;
        const long num_k = rows.num_k;
        chunks_ = 0;
        for (long g = 0; g < rows.num_groups; ++g)
            chunks_ = std::max(chunks_, num_chunks(rows.groups[g].num_rows));
        inputs_ = new_inputs(rows.num_groups * chunks_);
        rows_.take(num_threads, rows, num_blocks(num_k), [=](const bf16* x, RoundedBlock* out) {
#ifdef HAS_VNNI
            if (variant >= INT8_VNNI)
                return num_bits == 4 ? round_row<4>(x, num_k, out) : round_row<8>(x, num_k, out);
#endif
            vectorised(variant, [=]() INLINED_LAMBDA { round_row_plainly(x, num_k, out); });
        });
    }

    void multiply(const Int8Weights& w, const Product<bf16>& p, long group) const {
        for (long row = 0, num_rows; row < p.num_rows; row += num_rows) {
            num_rows = num_at_once(p.num_rows - row);
            const Int8Product some = {
                rows_.blocks(group, row), rows_.num_blocks(), num_rows,
                {w.rows, w.num_k, w.num_bits}, p.bias, p.out + row * p.out_stride, p.out_stride,
                p.num_outs, row + num_rows < p.num_rows ? w.rows : p.next,
            };
            if (w.num_bits == 4) multiply_some<4>(some, group, row / MOST_ROUNDED);
            else multiply_some<8>(some, group, row / MOST_ROUNDED);
        }
    }

   private:
    static long num_chunks(long num_rows) { return (num_rows + MOST_ROUNDED - 1) / MOST_ROUNDED; }

    // `MOST_ROUNDED` rows of a group, or what is left of them; twice as many where they are lanes.
    long num_at_once(long num_left) const {
#if defined(HAS_DOT_PRODUCTS) && defined(HAS_VNNI)
        if (variant_ == INT8_VNNI && num_left >= MOST_ROUNDED + FEWEST_MORE_COLUMNS)
            return std::min(num_left, 2 * MOST_ROUNDED);
#endif
        return std::min(num_left, MOST_ROUNDED);
    }

    // From the `chunk`-th `MOST_ROUNDED` rows of a group on.
    template <int num_bits>
    void multiply_some(const Int8Product& p, long group, long chunk) const {
#if defined(HAS_DOT_PRODUCTS) && defined(HAS_VNNI)
        const auto number = inputs_ + static_cast<std::uint64_t>(group * chunks_ + chunk);
        const Chunk of = {number, static_cast<std::size_t>(chunk)};
        if (variant_ == INT8_AMX && p.num_rows >= FEWEST_TILED)
            return Int8Amx::run<num_bits>(p, of);
        if (variant_ == INT8_VNNI && p.num_rows >= FEWEST_COLUMNS)
            return multiply_columns<num_bits>(p, of);
#endif
#ifdef HAS_VNNI
        if (variant_ >= INT8_VNNI && are_few_int8(p)) return multiply_few_int8<num_bits>(p);
#endif
        multiply_int8<num_bits>(variant_, p);
    }

    static RoundedRows<RoundedBlock>& own() {
        thread_local RoundedRows<RoundedBlock> of;
        return of;
    }

    const int variant_;
    RoundedRows<RoundedBlock>& rows_ = own();
    long chunks_ = 0;  // of a group, at most
    std::uint64_t inputs_ = 0;  // of the first group's first
};

}  // namespace

WEIGHT_OPERATORS(int8, Int8Weights, RowsInInt8)
