// Which types of blocks there are. A type's number is its place in these lists, one after the other:
// all tables are made of them, and Python asks for the types' names and numbers (layouts.cpp).

#pragma once

namespace lowtide {

template <class... Types>
struct TypeList {
    static constexpr int SIZE = sizeof...(Types);
};

namespace ggml {

using SmallTypes = TypeList<  // blocks of 32 weights
    struct Q4_0, struct Q4_1, struct Q5_0, struct Q5_1, struct Q8_0, struct Iq4Nl, struct Mxfp4>;
using KTypes = TypeList<  // of 256 weights
    struct Q2K, struct Q3K, struct Q4K, struct Q5K, struct Q6K, struct Iq4Xs>;
using GridTypes = TypeList<  // of 256 weights, with a grid
    struct Iq2Xxs, struct Iq2Xs, struct Iq2S, struct Iq3Xxs, struct Iq3S>;

}  // namespace ggml

template <int num_bits>
struct Own;
using OwnTypes = TypeList<Own<8>, Own<4>>;

constexpr int NUM_BLOCK_TYPES =
    ggml::SmallTypes::SIZE + ggml::KTypes::SIZE + ggml::GridTypes::SIZE + OwnTypes::SIZE;

// A list's rows of a table, each by its type's place in the list.
template <class Row>
using RowsOfList = const Row&(int place);

// The row of a type by its number. Each list's rows are compiled in a file of their own.
template <class Row>
const Row& row_of(
    int number, RowsOfList<Row>& small, RowsOfList<Row>& k, RowsOfList<Row>& grid,
    RowsOfList<Row>& own
) {
    if (number < ggml::SmallTypes::SIZE) return small(number);
    if ((number -= ggml::SmallTypes::SIZE) < ggml::KTypes::SIZE) return k(number);
    if ((number -= ggml::KTypes::SIZE) < ggml::GridTypes::SIZE) return grid(number);
    return own(number - ggml::GridTypes::SIZE);
}

}  // namespace lowtide
