// Rows of x in int8 side by side, 16 at a time: for products whose lanes are rows of x.

#pragma once

#include "int8_products.hpp"

namespace lowtide {

#ifdef HAS_VNNI

constexpr long COLUMNS = 16, GROUP_WORDS = GROUP / 4;  // words: of four codes

// Sixteen groups of sixteen rows; rows that there are not are 0.
struct alignas(64) ColumnBlock {
    std::int32_t words[SUMS][GROUP_WORDS][COLUMNS];
    float steps[SUMS][COLUMNS], sums[SUMS][COLUMNS];
};

// Which rows of x a product is of: the `chunk`-th 16 that the present inputs have, by a number.
struct Chunk {
    std::uint64_t number;
    std::size_t chunk;
};

// A row's block, whose codes are in the order of `Words`, to column `row`.
template <int num_bits>
void put_column(const RoundedBlock& from, long row, ColumnBlock& to) {
    static constexpr HalfOrder<num_bits> ORDER;
    constexpr long HALF_WORDS = BLOCK / 8, HALF_GROUPS = SUMS / 2;
    for (long half = 0; half < 2; ++half)
        for (long place = 0; place < HALF_WORDS; ++place) {
            const long word = ORDER.words[place];
            const long group = half * HALF_GROUPS + word / GROUP_WORDS;
            std::memcpy(
                &to.words[group][word % GROUP_WORDS][row],
                from.codes + 4 * (half * HALF_WORDS + place), 4);
        }
    for (long lane = 0; lane < SUMS; ++lane)
        to.steps[lane][row] = from.steps[lane], to.sums[lane][row] = from.sums[lane];
}

// Up to 16 rows as columns, made once by each thread for all of its products with the same: up to
// 256 rows of a call's, which stay with the thread.
template <int num_bits>
const ColumnBlock* columns_of(
    const RoundedBlock* x, long num_blocks, long num_rows, const Chunk& chunk
) {
    struct Columns {
        std::vector<ColumnBlock> blocks;
        std::uint64_t number = 0;
    };
    thread_local std::vector<Columns> kept;
    if (kept.size() <= chunk.chunk) kept.resize(chunk.chunk + 1);
    Columns& of = kept[chunk.chunk];
    if (of.number == chunk.number) return of.blocks.data();
    of.blocks.assign(static_cast<std::size_t>(num_blocks), ColumnBlock{});
    for (long row = 0; row < num_rows; ++row)
        for (long block = 0; block < num_blocks; ++block)
            put_column<num_bits>(
                x[row * num_blocks + block], row, of.blocks[static_cast<std::size_t>(block)]);
    of.number = chunk.number;
    return of.blocks.data();
}

#endif

}  // namespace lowtide
