// The kinds of mixers: what each is made of, as Python hands it over.

#pragma once

#include "layer/layer.hpp"

namespace lowtide {

// Attention of query heads that share key heads. Projections give queries, keys and values side by
// side, in one product or in three. With gates the first of three gives a head's query, then its
// gate, whose sigmoid weighs what the head attended to.
struct GroupedAttention {
    Norm norm;
    Matrix projections[3];
    long num_projections, has_gates;
    Norm query_norm, key_norm;  // of a head, or of all heads together
    Matrix output;
    bf16 *keys, *values;  // the layer's cache: of key head h at h * head_stride elements
    long head_stride, num_heads, num_key_heads, head_dim;
    long angles;  // which of the pass's
    long window;  // tokens that a row sees, its own included; 0: all
    const float* sinks;  // [num_heads], or null
    float scale;
    long group;  // of layers, whose places of tokens are this one's
};

// Attention over latents, with a rotating key for all heads beside each, in the first group of
// layers. A head's queries are [fixed | rotating]; the cache has [latent | rotating key].
struct LatentAttention {
    Norm norm;
    Matrix query_down;  // num_outs 0: queries are projected at once
    Norm query_norm;
    Matrix query;
    Matrix latent_down;
    Norm latent_norm;
    const bf16* expansion;  // [num_heads, fixed_dim + value_dim, rank]: a head's keys, its values
    Matrix output;
    bf16* cache;
    long num_heads, fixed_dim, rotary_dim, rank, value_dim;
    long angles;
    float scale;
};

// A gated causal convolution of each channel by itself. Hidden states are projected to [gate | output
// gate | input], and gates times inputs are convolved; those of the last positions are the state.
struct ShortConvolution {
    Norm norm;
    Matrix inward;
    const bf16* kernel;  // [hidden, num_taps], a row's own position last
    const bf16* bias;  // [hidden], or null
    long num_taps;
    Matrix outward;
    long state;  // where in a sequence's states the layer's begins, in bytes: [num_taps - 1, hidden]
};

// A gated delta-net (delta.cpp), with an RMS norm of each value head after it, weighed by silu of
// its gates. Where one product makes two things, it does so key head by key head.
struct DeltaNet {
    Norm norm;
    Matrix mixed;  // queries, keys and values, of all heads each
    Matrix gates;  // num_outs 0: mixed gives [query | key | values | gates]
    Matrix beta;
    Matrix time;  // num_outs 0: beta gives [betas | times]
    DeltaWeights weights;
    Norm head_norm;
    Matrix outward;
    long tail, matrices;  // where in a sequence's states the layer's begin, in bytes
};

}  // namespace lowtide

extern "C" {

lowtide::MixFunction lowtide_mix_grouped;
lowtide::MixFunction lowtide_mix_latent;
lowtide::MixFunction lowtide_mix_convolution;
lowtide::MixFunction lowtide_mix_delta;

}
