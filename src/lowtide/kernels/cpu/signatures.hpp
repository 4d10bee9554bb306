// Names and types of operators over weights, the same for every kind of weights.

#pragma once

#include "numbers.hpp"

namespace lowtide {

// Where slot 0 has an expert's parts; the others have theirs at multiples of slot_bytes. Biases, of
// which all are null or none: those of an expert that is gated by `clamped_swiglu`. As Python hands
// it over.
struct ExpertPlaces {
    const void *gate, *up, *down;
    long slot_bytes;
    const void *gate_bias, *up_bias, *down_bias;  // of bfloat16
};

// out = x w^T + bias, rounded once, for as many rows as the kind takes: x [num_rows, num_k] and
// w [num_outs, num_k], stored as `type` says, a number of the kind's own. Strides are in elements. bias may be null.
using MultiplyFunction = void(
    int variant, int num_threads, int type, const bf16* x, long x_stride, const void* w,
    const bf16* bias, bf16* out, long out_stride, long num_rows, long num_outs, long num_k
);

// Gated MLPs of several experts. types [3]: of gate, up and down. groups [num_groups, 3]: each
// expert's slot, first row and number of rows; no two share a row. parts [.., hidden], from inputs
// to outputs; scratch gate, up [.., width]. Rows of all are adjacent.
using MlpsFunction = void(
    int variant, int num_threads, const std::int32_t* types, const std::int64_t* groups,
    long num_groups, const ExpertPlaces* places, bf16* parts, bf16* gate, bf16* up, long hidden,
    long width
);

// All experts of a few tokens, and their sum: x [num_tokens, hidden]; experts [num_tokens, k],
// ascending for each token, and their weights; slots: one for each distinct expert, ascending by
// expert. Scratch: a row for each pair of a token and an expert. out [num_tokens, hidden]. The rest
// as above.
using ExpertsFunction = void(
    int variant, int num_threads, const std::int32_t* types, const bf16* x,
    const std::int64_t* experts, const float* weights, const std::int64_t* slots,
    const ExpertPlaces* places, bf16* parts, bf16* gate, bf16* up, float* out, long num_tokens,
    long k, long hidden, long width
);

}  // namespace lowtide
