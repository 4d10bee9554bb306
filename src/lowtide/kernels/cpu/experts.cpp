// The experts of `expert_layer.hpp` for Python, their weights in bfloat16.

#include "expert_layer.hpp"
#include "operators.hpp"

using namespace lowtide;

namespace {

struct PlainWeights {
    const bf16* rows;
    long num_k;

    long row_bytes() const { return num_k * static_cast<long>(sizeof(bf16)); }
    const void* start() const { return rows; }
    PlainWeights from(long row) const { return {rows + row * num_k, num_k}; }

    PlainWeights moved(long num_bytes) const {
        return {rows + num_bytes / static_cast<long>(sizeof(bf16)), num_k};
    }

    void multiply(int variant, Product<bf16> product) const {
        product.w = rows;
        lowtide::multiply(variant, product);
    }
};

ExpertSlots<PlainWeights> slots_of(
    const void* gate, const void* up, const void* down, long slot_bytes, long hidden, long width
) {
    const auto of = [](const void* start, long num_k) {
        return PlainWeights{static_cast<const bf16*>(start), num_k};
    };
    return {of(gate, hidden), of(up, hidden), of(down, width), slot_bytes, hidden, width};
}

}  // namespace

extern "C" {

void lowtide_plain_mlps(
    int variant, int num_threads, const std::int32_t*, const std::int64_t* groups, long num_groups,
    const void* gate_w, const void* up_w, const void* down_w, long slot_bytes, bf16* parts,
    bf16* gate, bf16* up, long hidden, long width
) {
    const auto slots = slots_of(gate_w, up_w, down_w, slot_bytes, hidden, width);
    ExpertLayer<PlainWeights>(variant, num_threads, slots, {parts, gate, up})
        .run(reinterpret_cast<const Group*>(groups), num_groups);
}

void lowtide_plain_experts(
    int variant, int num_threads, const std::int32_t*, const bf16* x, const std::int64_t* experts,
    const float* weights, const std::int64_t* slots, const void* gate_w, const void* up_w,
    const void* down_w, long slot_bytes, bf16* parts, bf16* gate, bf16* up, float* out,
    long num_tokens, long k, long hidden, long width
) {
    run_experts(
        variant, num_threads, x, experts, weights, slots,
        slots_of(gate_w, up_w, down_w, slot_bytes, hidden, width), {parts, gate, up}, out,
        num_tokens, k);
}

}
