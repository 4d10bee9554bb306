// Weights of ggml's packed types for Python: unpacked, multiplied with, and as experts.

#include "expert_layer.hpp"
#include "ggml.hpp"
#include "signatures.hpp"
#include "weight_pieces.hpp"

using namespace lowtide;

namespace {

PackedWeights weights_of(int type, const void* stored, long num_k) {
    return {&packed_type(type), static_cast<const std::uint8_t*>(stored), num_k};
}

// types: of gate, up and down.
ExpertSlots<PackedWeights> slots_of(
    const std::int32_t* types, const void* gate, const void* up, const void* down, long slot_bytes,
    long hidden, long width
) {
    return {weights_of(types[0], gate, hidden), weights_of(types[1], up, hidden),
            weights_of(types[2], down, width),  slot_bytes, hidden, width};
}

}  // namespace

extern "C" {

MultiplyFunction lowtide_ggml_multiply;
MlpsFunction lowtide_ggml_mlps;
ExpertsFunction lowtide_ggml_experts;

void lowtide_ggml_unpack(
    int variant, int type, const std::uint8_t* stored, long num_blocks, bf16* out
) {
    packed_type(type).unpack(variant, {stored, 0, 1, num_blocks}, out, 0);
}

void lowtide_ggml_multiply(
    int variant, int num_threads, int type, const bf16* x, long x_stride, const void* w,
    const bf16* bias, bf16* out, long out_stride, long num_rows, long num_outs, long num_k
) {
    const PackedWeights weights = weights_of(type, w, num_k);
    multiply_in_pieces(
        variant, num_threads, weights,
        {x, x_stride, nullptr, bias, out, out_stride, num_rows, num_outs, num_k});
}

void lowtide_ggml_mlps(
    int variant, int num_threads, const std::int32_t* types, const std::int64_t* groups,
    long num_groups, const void* gate_w, const void* up_w, const void* down_w, long slot_bytes,
    bf16* parts, bf16* gate, bf16* up, long hidden, long width
) {
    const auto slots = slots_of(types, gate_w, up_w, down_w, slot_bytes, hidden, width);
    ExpertLayer<PackedWeights>(variant, num_threads, slots, {parts, gate, up})
        .run(reinterpret_cast<const Group*>(groups), num_groups);
}

void lowtide_ggml_experts(
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
