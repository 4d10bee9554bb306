// Rows of x for the products of a call, and their preparation: none, unless a kind of weights is
// multiplied with rounded rows (int8_rows.hpp). Both kinds of rows have:
//
//   MOST_ROWS                                  most rows at a time
//   piece_bytes(usual, share, groups, count)   bytes of a matrix that a thread multiplies with
//                                              `groups` at a time; share: its part of all of them
//   take(num_threads, rows, weights)           prepares rows for products with these matrices
//   multiply(weights, product, group)          multiplies some of them, those of the group

#pragma once

#include <algorithm>
#include <initializer_list>
#include <limits>

#include "experts/pairs.hpp"
#include "dense/products.hpp"

namespace lowtide {

// Rows of x [.., num_k] of all groups.
struct GroupRows {
    const bf16* x;
    long stride, num_k;
    const Group* groups;
    long num_groups;
};

// Unrounded rows. A number tells products that have the same rows.
class RowsAsTheyAre {
   public:
    static constexpr long MOST_ROWS = std::numeric_limits<long>::max();

    explicit RowsAsTheyAre(int variant) : variant_(variant) {}

    static long piece_bytes(long usual, long, const Group*, long) { return usual; }

    template <class Weights>
    void take(int, const GroupRows& rows, std::initializer_list<Weights>) {
        inputs_ = new_inputs(rows.num_groups);
    }

    template <class Weights>
    void multiply(const Weights& weights, Product<bf16> product, long group) const {
        product.inputs = inputs_ + static_cast<std::uint64_t>(group);
        weights.multiply(variant_, product);
    }

   private:
    const int variant_;
    std::uint64_t inputs_ = 0;
};

// Adjacent rows of a matrix: common part of the kinds of weights (`Own`).
template <class Own>
struct AdjacentRows {
    const std::uint8_t* rows;
    long bytes_of_row;

    long row_bytes() const { return bytes_of_row; }
    const void* start() const { return rows; }
    Own from(long row) const { return moved(row * bytes_of_row); }

    Own moved(long num_bytes) const {
        Own other = static_cast<const Own&>(*this);
        other.rows += num_bytes;
        return other;
    }
};

}  // namespace lowtide
