// Integers in groups and FP8 by blocks for Python: unpacked, multiplied with, and as experts.

#include "sectioned.hpp"
#include "weight_operators.hpp"

using namespace lowtide;

WEIGHT_OPERATORS(sectioned, SectionedWeights, RowsAsTheyAre)

extern "C" {

long lowtide_section_alignment() { return SECTION_ALIGNMENT; }

// Rows of a matrix [num_of_all, num_k] at `stored`, whose numbers are given, or from `first` on, to
// out [num_rows, num_k].
void lowtide_sectioned_unpack(
    int variant, int type, const void* stored, long num_of_all, long num_k,
    const std::int64_t* numbers, long first, long num_rows, bf16* out
) {
    const SectionedWeights weights(type, stored, num_of_all, num_k);
    for (long row = 0; row < num_rows; ++row) {
        const long number = numbers == nullptr ? first + row : static_cast<long>(numbers[row]);
        unpack_span(variant, weights.type(), weights.span(number, 0, num_k), out + row * num_k);
    }
}

}
