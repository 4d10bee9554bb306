// Layers of a few rows in as few calls as there are places where Python must decide: up to a
// router's choice, and after its experts; or all of a layer, or of a model's layers, where nobody
// has to be asked.
//
//     x += output(attention(norm(x)))
//     x += sum of experts (norm(x)) + shared expert (norm(x))
//
// The operators are those that Python calls one by one, in the same order, over buffers whose
// lives are the same: so are the bits. What multiplies with a matrix or with experts comes with
// them, as an address: it may be another library's, whatever they are stored in.

#include <algorithm>
#include <vector>

#include "operators.hpp"

using namespace lowtide;

namespace {

// [num_outs, ..], rows adjacent, and what multiplies with it. bias may be null.
struct Matrix {
    MultiplyFunction* multiply;
    int variant, type;
    const void* weight;
    const bf16* bias;
    long num_outs;
};

// What attention is made of. Projections give queries, keys and values side by side, in one product
// or in three.
struct Attention {
    const bf16* norm;
    Matrix projections[3];
    long num_projections;
    const bf16 *query_norm, *key_norm;  // null: none
    long query_norm_length, key_norm_length;  // of a head, or of all heads together
    Matrix output;
    bf16 *keys, *values;  // the layer's cache: of key head h at h * head_stride elements
    long head_stride, num_heads, num_key_heads, head_dim;
    float scale;
};

// Experts' weights are those of slot 0, the others lie at multiples of slot_bytes. run: what
// computes with them, or null where they are elsewhere.
struct Experts {
    const void* router;  // [num_experts, hidden]; null: a layer without
    long is_float32;  // the router's weights, product and logits
    const float* bias;  // of the choice, or null
    Choice choice;
    ExpertsFunction* run;
    int variant;
    std::int32_t types[3];
    const void *gate, *up, *down;
    long slot_bytes, width;
};

// A gated MLP that all rows use; width 0: none. share: [1, hidden], its weight for each row, or null.
struct Shared {
    Matrix gate, up, down;
    const bf16* share;
};

struct Layer {
    Attention attention;
    const bf16* mlp_norm;
    Experts experts;
    Shared shared;
    long hidden;
    float eps;
};

// One pass, for all layers. Scratch has a row for each of x, or for each pair of a row and one of
// its experts.
struct Pass {
    int variant, num_threads;
    long num_rows;
    bf16* x;  // [num_rows, hidden]
    const bf16 *cos, *sin;  // [num_rows, half]
    long half;
    const std::int64_t* tokens;  // [num_rows, 2]: the first that a row sees in the cache; how many
    bf16 *normed, *qkv, *attended, *update;
    bf16* mlp_input;
    float* router_input;
    void* logits;
    bf16 *parts, *gate, *up;  // of pairs
    float* routed;
    bf16 *shared_gate, *shared_up, *shared, *share;
};

// A layer's turn in a pass, while all of its experts are resident. slot_of [num_experts]: where they
// are.
struct Turn {
    const Layer* layer;
    const Pass* pass;
    const std::int64_t* slot_of;
};

// out = x w^T + bias, rows of all adjacent but for out's stride.
void multiply(const Pass& p, const bf16* x, long num_k, const Matrix& w, bf16* out, long stride) {
    w.multiply(w.variant, p.num_threads, w.type, x, num_k, w.weight, w.bias, out, stride,
               p.num_rows, w.num_outs, num_k);
}

// The same of a matrix in bfloat16.
void multiply_plainly(const Pass& p, const bf16* x, long num_k, const void* w, long num_outs,
                      bf16* out) {
    const Matrix plain = {lowtide_plain_multiply, p.variant, 0, w, nullptr, num_outs};
    multiply(p, x, num_k, plain, out, num_outs);
}

void normalise(const Pass& p, const Layer& layer, const bf16* weight, bf16* out) {
    const long hidden = layer.hidden;
    lowtide_rms_norm(p.variant, p.num_threads, p.x, hidden, weight, layer.eps, out, hidden,
                     p.num_rows, 1, hidden);
}

// x += update
void add(const Pass& p, const bf16* update, long hidden) {
    const long length = p.num_rows * hidden;
    bf16* x = p.x;
    vectorised(p.variant, [=]() INLINED_LAMBDA {
        for (long i = 0; i < length; ++i) x[i] = round_bf16(widen(x[i]) + widen(update[i]));
    });
}

void store_rows(const Pass& p, const Attention& a, long width) {
    const long dim = a.head_dim;
    for (long row = 0; row < p.num_rows; ++row) {
        const std::int64_t* tokens = p.tokens + 2 * row;
        const long place = (tokens[0] + tokens[1] - 1) * dim;
        const bf16* key = p.qkv + row * width + a.num_heads * dim;
        const bf16* value = key + a.num_key_heads * dim;
        for (long head = 0; head < a.num_key_heads; ++head) {
            const long at = head * a.head_stride + place;
            std::copy_n(key + head * dim, dim, a.keys + at);
            std::copy_n(value + head * dim, dim, a.values + at);
        }
    }
}

// Queries and keys, in place. width: of a row of all that was projected.
void turn(const Pass& p, const Layer& layer, long width) {
    const Attention& a = layer.attention;
    const long query_size = a.num_heads * a.head_dim, key_size = a.num_key_heads * a.head_dim;
    if (a.query_norm != nullptr) {
        bf16* keys = p.qkv + query_size;
        lowtide_rms_norm(p.variant, p.num_threads, p.qkv, width, a.query_norm, layer.eps, p.qkv,
                         width, p.num_rows, query_size / a.query_norm_length, a.query_norm_length);
        lowtide_rms_norm(p.variant, p.num_threads, keys, width, a.key_norm, layer.eps, keys, width,
                         p.num_rows, key_size / a.key_norm_length, a.key_norm_length);
    }
    lowtide_rotate(p.variant, p.num_threads, p.qkv, width, p.cos, p.sin, p.num_rows,
                   a.num_heads + a.num_key_heads, a.head_dim, p.half);
}

void attend(const Pass& p, const Layer& layer) {
    const Attention& a = layer.attention;
    const long size = a.num_heads * a.head_dim, width = size + 2 * a.num_key_heads * a.head_dim;
    normalise(p, layer, a.norm, p.normed);
    bf16* out = p.qkv;
    for (long i = 0; i < a.num_projections; out += a.projections[i++].num_outs)
        multiply(p, p.normed, layer.hidden, a.projections[i], out, width);
    turn(p, layer, width);
    store_rows(p, a, width);
    for (long row = 0; row < p.num_rows; ++row) {
        const long first = p.tokens[2 * row] * a.head_dim;
        lowtide_attend(p.variant, p.num_threads, p.qkv + row * width, a.keys + first,
                       a.values + first, a.head_stride, p.attended + row * size, a.num_key_heads,
                       a.num_heads / a.num_key_heads, p.tokens[2 * row + 1], a.head_dim, a.scale);
    }
    multiply(p, p.attended, size, a.output, p.update, layer.hidden);
    add(p, p.update, layer.hidden);
}

void route(const Pass& p, const Layer& layer, std::int64_t* experts, float* weights) {
    const Experts& e = layer.experts;
    const long hidden = layer.hidden, num_experts = e.choice.num_experts;
    if (e.is_float32) {
        for (long i = 0; i < p.num_rows * hidden; ++i) p.router_input[i] = widen(p.mlp_input[i]);
        lowtide_multiply_float32(p.variant, p.num_threads, p.router_input, hidden,
                                 static_cast<const float*>(e.router), static_cast<float*>(p.logits),
                                 num_experts, p.num_rows, num_experts, hidden);
    } else {
        multiply_plainly(p, p.mlp_input, hidden, e.router, num_experts,
                         static_cast<bf16*>(p.logits));
    }
    lowtide_choose_experts(p.variant, p.logits, static_cast<int>(e.is_float32), e.bias, &e.choice,
                           experts, weights, p.num_rows);
}

// The sum of the experts in `routed`; how many different ones there were.
long run_experts(const Pass& p, const Layer& layer, const std::int64_t* slot_of,
                 const std::int64_t* experts, const float* weights) {
    const Experts& e = layer.experts;
    std::vector<std::int64_t> slots(experts, experts + p.num_rows * e.choice.num_chosen);
    std::sort(slots.begin(), slots.end());
    slots.erase(std::unique(slots.begin(), slots.end()), slots.end());
    for (std::int64_t& slot : slots) slot = slot_of[slot];
    e.run(e.variant, p.num_threads, e.types, p.mlp_input, experts, weights, slots.data(), e.gate,
          e.up, e.down, e.slot_bytes, p.parts, p.gate, p.up, p.routed, p.num_rows,
          e.choice.num_chosen, layer.hidden, e.width);
    return static_cast<long>(slots.size());
}

void run_shared(const Pass& p, const Layer& layer) {
    const Shared& shared = layer.shared;
    const long hidden = layer.hidden, width = shared.gate.num_outs;
    multiply(p, p.mlp_input, hidden, shared.gate, p.shared_gate, width);
    multiply(p, p.mlp_input, hidden, shared.up, p.shared_up, width);
    lowtide_silu_times(p.variant, p.num_threads, p.shared_gate, p.shared_up, p.num_rows * width);
    multiply(p, p.shared_gate, width, shared.down, p.shared, hidden);
    if (shared.share == nullptr) return;
    multiply_plainly(p, p.mlp_input, hidden, shared.share, 1, p.share);
    lowtide_weigh_rows(p.variant, p.shared, p.share, p.num_rows, hidden);
}

// What the experts gave is rounded before the shared one's output is added, and so is the sum.
void add_mlp(const Pass& p, const Layer& layer) {
    const bool has_shared = layer.shared.gate.num_outs > 0;
    if (has_shared) run_shared(p, layer);
    if (layer.experts.router == nullptr) return add(p, p.shared, layer.hidden);
    const long length = p.num_rows * layer.hidden;
    const float* routed = p.routed;
    const bf16* shared = p.shared;
    bf16* x = p.x;
    vectorised(p.variant, [=]() INLINED_LAMBDA {
        for (long i = 0; i < length; ++i) {
            float update = rounded(routed[i]);
            if (has_shared) update = rounded(update + widen(shared[i]));
            x[i] = round_bf16(widen(x[i]) + update);
        }
    });
}

}  // namespace

extern "C" {

// Attention, unless the rows have had it, and the router's choice for each of them: experts
// [num_rows, k], ascending, and their weights. What the experts are given is in mlp_input.
void lowtide_run_to_router(
    const Layer* layer, const Pass* pass, int attends, std::int64_t* experts, float* weights
) {
    if (attends) attend(*pass, *layer);
    normalise(*pass, *layer, layer->mlp_norm, pass->mlp_input);
    if (layer->experts.router != nullptr) route(*pass, *layer, experts, weights);
}

// The experts' sum, while all that were chosen are resident. slot_of [num_experts]: where they are.
void lowtide_run_chosen(
    const Layer* layer, const Pass* pass, const std::int64_t* slot_of, const std::int64_t* experts,
    const float* weights
) {
    run_experts(*pass, *layer, slot_of, experts, weights);
}

// The rest, once the experts' sum is in `routed`.
void lowtide_run_from_experts(const Layer* layer, const Pass* pass) { add_mlp(*pass, *layer); }

// All of it, while every expert of the layer is resident. How many of them were run.
long lowtide_run_layer(
    const Layer* layer, const Pass* pass, int attends, const std::int64_t* slot_of
) {
    const long num_pairs = pass->num_rows * layer->experts.choice.num_chosen;
    std::vector<std::int64_t> experts(num_pairs);
    std::vector<float> weights(num_pairs);
    lowtide_run_to_router(layer, pass, attends, experts.data(), weights.data());
    long num_run = 0;
    if (layer->experts.router != nullptr)
        num_run = run_experts(*pass, *layer, slot_of, experts.data(), weights.data());
    add_mlp(*pass, *layer);
    return num_run;
}

// Layers one after the other, attention included. How many experts were run.
long lowtide_run_layers(const Turn* turns, long num_turns) {
    long num_run = 0;
    for (const Turn* turn = turns; turn < turns + num_turns; ++turn)
        num_run += lowtide_run_layer(turn->layer, turn->pass, 1, turn->slot_of);
    return num_run;
}

}
