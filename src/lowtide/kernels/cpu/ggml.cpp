// Weights of ggml's packed types for Python: unpacked, multiplied with, and as experts.

#include "ggml.hpp"
#include "weight_operators.hpp"

using namespace lowtide;

WEIGHT_OPERATORS(ggml, PackedWeights, RowsAsTheyAre)

extern "C" {

void lowtide_ggml_unpack(
    int variant, int type, const std::uint8_t* stored, long num_blocks, bf16* out
) {
    packed_type(type).unpack(variant, {stored, 0, 1, num_blocks}, out, 0);
}

}
