// Integers in groups and FP8 by blocks for Python: unpacked, multiplied with, and as experts.

#include "expert_layer.hpp"
#include "sectioned.hpp"
#include "signatures.hpp"
#include "weight_pieces.hpp"

using namespace lowtide;

namespace {

// types: of gate, up and down.
ExpertSlots<SectionedWeights> slots_of(
    const std::int32_t* types, const void* gate, const void* up, const void* down, long slot_bytes,
    long hidden, long width
) {
    return {{types[0], gate, width, hidden}, {types[1], up, width, hidden},
            {types[2], down, hidden, width}, slot_bytes, hidden, width};
}

}  // namespace

extern "C" {

MultiplyFunction lowtide_sectioned_multiply;
MlpsFunction lowtide_sectioned_mlps;
ExpertsFunction lowtide_sectioned_experts;

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

void lowtide_sectioned_multiply(
    int variant, int num_threads, int type, const bf16* x, long x_stride, const void* w,
    const bf16* bias, bf16* out, long out_stride, long num_rows, long num_outs, long num_k
) {
    multiply_in_pieces(
        variant, num_threads, SectionedWeights(type, w, num_outs, num_k),
        {x, x_stride, nullptr, bias, out, out_stride, num_rows, num_outs, num_k});
}

void lowtide_sectioned_mlps(
    int variant, int num_threads, const std::int32_t* types, const std::int64_t* groups,
    long num_groups, const void* gate_w, const void* up_w, const void* down_w, long slot_bytes,
    bf16* parts, bf16* gate, bf16* up, long hidden, long width
) {
    const auto slots = slots_of(types, gate_w, up_w, down_w, slot_bytes, hidden, width);
    ExpertLayer<SectionedWeights>(variant, num_threads, slots, {parts, gate, up})
        .run(reinterpret_cast<const Group*>(groups), num_groups);
}

void lowtide_sectioned_experts(
    int variant, int num_threads, const std::int32_t* types, const bf16* x,
    const std::int64_t* experts, const float* weights, const std::int64_t* slots,
    const void* gate_w, const void* up_w, const void* down_w, long slot_bytes, bf16* parts,
    bf16* gate, bf16* up, float* out, long num_tokens, long k, long hidden, long width
) {
    run_experts(
        variant, num_threads, x, experts, weights, slots,
        slots_of(types, gate_w, up_w, down_w, slot_bytes, hidden, width), {parts, gate, up}, out,
        num_tokens, k);
}

}
