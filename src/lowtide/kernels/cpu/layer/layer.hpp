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

// An RMS norm over `length` numbers; 0: none. weight: bfloat16 or float32, or null for all ones.
struct Norm {
    const void* weight;
    long is_float32, length;
    float eps;
};

// Angles of all rows, bfloat16 or float32. cos, sin [num_rows, half].
struct Angles {
    const void *cos, *sin;
    long half, is_float32;
};

// run: what computes with the experts, or null where they are elsewhere.
struct Experts {
    const void* router;  // [num_experts, hidden]; null: a layer without
    long is_float32;  // the router's weights, product and logits
    const void* logit_bias;  // as the router's weights, or null
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

struct Pass;

// What every kind of mixer is called as: x += what it makes of norm(x), for all rows of the pass.
// `parts`: the kind's own struct. Each kind is a source file of its own.
using MixFunction = void(const Pass* pass, const void* parts, long hidden);

// mix: null where a layer has no mixer in the call.
struct Layer {
    MixFunction* mix;
    const void* mixer;
    Norm mlp_norm;
    Experts experts;
    Shared shared;
    long hidden;
};

// One pass, for all layers. Scratch has a row for each of x, or for each pair of a row and one of
// its experts.
struct Pass {
    int variant, num_threads;
    long num_rows;
    bf16* x;  // [num_rows, hidden]
    const Angles* angles;  // of each rotation that layers have
    const std::int64_t* tokens;  // [groups of layers, num_rows, 2]: where the first token of the
                                 // row's sequence is in the group's cache, or would be if it were
                                 // still there; how many the row sees, its own the last
    const std::int64_t* sequences;  // [num_sequences, 4]: the first of a sequence's rows, their end,
                                    // and the addresses of its states before and after them
    long num_sequences;
    bf16 *normed, *projected, *attended, *update;
    bf16 *query_latent, *latent, *latent_query, *value;
    bf16 *product, *gates, *strengths;
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
