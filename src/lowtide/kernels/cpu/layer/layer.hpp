// What a layer of a few rows is made of, and a pass through it; as Python hands them over.

#pragma once

#include "operators.hpp"
#include "experts/residency.hpp"

namespace lowtide {

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

// run: what computes with the experts, or null where they are elsewhere.
struct Experts {
    const void* router;  // [num_experts, hidden]; null: a layer without
    long is_float32;  // the router's weights, product and logits
    const float* bias;  // of the choice, or null
    Choice choice;
    ExpertsFunction* run;
    MlpsFunction* mlps;
    int variant;
    std::int32_t types[3];
    ExpertPlaces places;
    long width;
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

// A layer's turn in a pass. number: which of those that have experts it is.
struct Turn {
    const Layer* layer;
    const Pass* pass;
    long number;
};

}  // namespace lowtide
