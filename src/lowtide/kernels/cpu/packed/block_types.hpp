// Types of blocks: a format's name, and a block's weights and bytes. A type's number is its
// position here. Products with each type are compiled in files of their own, `types/NAME.cpp` here
// and in rounded/, which are loaded when a model has such weights.

#pragma once

#define BLOCK_TYPES(TYPE)                                                                          \
    TYPE(Q4_0, 32, 18) TYPE(Q4_1, 32, 20) TYPE(Q5_0, 32, 22) TYPE(Q5_1, 32, 24) TYPE(Q8_0, 32, 34) \
    TYPE(IQ4_NL, 32, 18) TYPE(MXFP4, 32, 17)                                                       \
    TYPE(Q2_K, 256, 84) TYPE(Q3_K, 256, 110) TYPE(Q4_K, 256, 144) TYPE(Q5_K, 256, 176)             \
    TYPE(Q6_K, 256, 210) TYPE(IQ4_XS, 256, 136)                                                    \
    TYPE(IQ2_XXS, 256, 66) TYPE(IQ2_XS, 256, 74) TYPE(IQ2_S, 256, 82) TYPE(IQ3_XXS, 256, 98)       \
    TYPE(IQ3_S, 256, 110)                                                                          \
    TYPE(q8, 64, 68) TYPE(q4, 64, 36)

namespace lowtide {

#define NUMBER_OF(name, size, num_bytes) BLOCK_##name,
enum BlockNumber { BLOCK_TYPES(NUMBER_OF) NUM_BLOCK_TYPES };
#undef NUMBER_OF

struct BlockShape {
    const char* name;
    long size, num_bytes;  // weights of a block, and their stored bytes
};

#define SHAPE_OF(name, size, num_bytes) {#name, size, num_bytes},
constexpr BlockShape BLOCK_SHAPES[] = {BLOCK_TYPES(SHAPE_OF)};
#undef SHAPE_OF

// Registers a type's functions in a table when their library is loaded.
template <class Row, void (*set_row)(int number, const Row& row)>
struct Registered {
    Registered(int number, const Row& row) { set_row(number, row); }
};

}  // namespace lowtide
