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
    const bf16* gate, const bf16* up, const bf16* down, long slot_bytes, long hidden, long width
) {
    return {{gate, hidden}, {up, hidden}, {down, width}, slot_bytes, hidden, width};
}

}  // namespace

extern "C" {

// groups [num_groups, 3]: each expert's slot, first row and number of rows; no two share a row.
// gate_w, up_w, down_w: where slot 0 has them. parts [.., hidden], from inputs to outputs; scratch
// gate, up [.., width]. Rows of all are adjacent.
void lowtide_gated_mlps(
    int variant, int num_threads, const std::int64_t* groups, long num_groups, const bf16* gate_w,
    const bf16* up_w, const bf16* down_w, long slot_bytes, bf16* parts, bf16* gate, bf16* up,
    long hidden, long width
) {
    const auto slots = slots_of(gate_w, up_w, down_w, slot_bytes, hidden, width);
    ExpertLayer<PlainWeights>(variant, num_threads, slots, {parts, gate, up})
        .run(reinterpret_cast<const Group*>(groups), num_groups);
}

// See `run_experts`. gate_w, up_w, down_w: where slot 0 has them.
void lowtide_run_experts(
    int variant, int num_threads, const bf16* x, const std::int64_t* experts, const float* weights,
    const std::int64_t* slots, const bf16* gate_w, const bf16* up_w, const bf16* down_w,
    long slot_bytes, bf16* parts, bf16* gate, bf16* up, float* out, long num_tokens, long k,
    long hidden, long width
) {
    run_experts(
        variant, num_threads, x, experts, weights, slots,
        slots_of(gate_w, up_w, down_w, slot_bytes, hidden, width), {parts, gate, up}, out,
        num_tokens, k);
}

}
