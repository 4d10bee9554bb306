// The rows that the products of a call are of, and what becomes of them before: nothing, unless a
// kind of weights is multiplied with rows that are rounded (int8_rows.hpp). What both have:
//
//     MOST_ROWS                        that are taken at a time
//     piece_bytes(usual, share, groups, count) of a matrix, that a thread multiplies groups with at
//                                      a time; share: what it has of all of them
//     take(num_threads, rows, weights) rows that products with these matrices follow of
//     multiply(weights, product, group) some of them, which are that group's

#pragma once

#include <algorithm>
#include <initializer_list>
#include <limits>

#include "experts/pairs.hpp"
#include "dense/products.hpp"

namespace lowtide {

// The rows of x [.., num_k] that groups have.
struct GroupRows {
    const bf16* x;
    long stride, num_k;
    const Group* groups;
    long num_groups;
};

// Rows as they are. Products that have the same are told so by a number.
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

// Rows of a matrix that lie one after the other: what kinds of weights (`Own`) have in common.
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
