// Operators that Python calls one by one, declared for code that calls several at once; a row's
// bits are the same either way. Their definitions say what each does.

#pragma once

#include "signatures.hpp"

namespace lowtide {

// Of a gated delta-net. is_tiled: value head h uses key head h % key_heads, not that of its group.
// Shared with Python.
struct DeltaSpec {
    long key_heads, value_heads, key_width, value_width, kernel;
    int is_tiled;

    constexpr long channels() const { return 2 * key_heads * key_width + value_heads * value_width; }
};

// conv [channels, kernel], the oldest row first; decay, time_bias [value_heads].
struct DeltaWeights {
    DeltaSpec spec;
    const float *conv, *decay, *time_bias;
};

// Consecutive rows of a sequence, as a gated delta-net projects them, and its state before and after
// them: mixed [num_rows, channels], all queries, keys and values; beta, time [num_rows, value_heads];
// tails [kernel - 1, channels]; matrices [value_heads, key_width, value_width]; out [num_rows,
// value_heads, value_width]. Strides between rows are given, tails have none.
struct DeltaRows {
    const bf16* mixed;
    long mixed_stride;
    const bf16* beta;
    long beta_stride;
    const bf16* time;
    long time_stride;
    const bf16* tail_before;
    bf16* tail_after;
    const float* before;
    float* after;
    bf16* out;
    long out_stride, num_rows;
};

// What a chunk's products are made of, by value head: keys_queries [value_heads, 2 * num_rows,
// key_width], keys first; values [value_heads, num_rows, value_width]; beta [value_heads, num_rows],
// and log_decay, the sum up to a row.
struct DeltaChunk {
    float *keys_queries, *values, *beta, *log_decay;
};

// How experts are chosen by their logits, and weighted. Shared with Python.
struct Choice {
    long num_experts, num_chosen, num_groups, num_groups_kept, num_group_best;
    int is_sigmoid, normalise, rounds_weights;
    float scaling_factor, sum_epsilon;
    int of_chosen;  // whether logits rank, and weights are a softmax of the chosen ones alone
};

}  // namespace lowtide

extern "C" {

using lowtide::bf16;

// For bfloat16 weights, which have no types.
lowtide::MultiplyFunction lowtide_plain_multiply;
lowtide::MlpsFunction lowtide_plain_mlps;
lowtide::ExpertsFunction lowtide_plain_experts;

void lowtide_multiply_float32(
    int variant, int num_threads, const float* x, long x_stride, const float* w, float* out,
    long out_stride, long num_rows, long num_outs, long num_k
);

void lowtide_choose_experts(
    int variant, const void* logits, int is_float32, const float* bias,
    const lowtide::Choice* choice, std::int64_t* experts, float* weights, long num_rows
);

void lowtide_attend(
    int variant, int num_threads, const bf16* query, const bf16* keys, const bf16* values,
    long head_stride, bf16* out, long num_key_heads, long group, long num_tokens, long dim,
    long value_dim, float scale, const float* sinks
);

void lowtide_multiply_heads(
    int variant, int num_threads, const bf16* x, long x_row, long x_head, const bf16* w,
    long w_head, long w_row, int by_outs, bf16* out, long out_row, long out_head, long num_rows,
    long num_heads, long num_outs, long num_k
);

void lowtide_rms_norm(
    int variant, int num_threads, const bf16* x, long x_stride, const bf16* weight, float eps,
    bf16* out, long out_stride, long num_rows, long num_heads, long length
);

void lowtide_rms_norm_in_float32(
    int variant, int num_threads, const bf16* x, long x_stride, const float* weight, float eps,
    bf16* out, long out_stride, long num_rows, long num_heads, long length
);

void lowtide_rotate(
    int variant, int num_threads, bf16* x, long x_stride, const bf16* cos, const bf16* sin,
    long num_rows, long num_heads, long length, long half
);

void lowtide_rotate_in_float32(
    int variant, int num_threads, bf16* x, long x_stride, const float* cos, const float* sin,
    long num_rows, long num_heads, long length, long half
);

void lowtide_rotate_pairs(
    int variant, int num_threads, bf16* x, long x_stride, long head_stride, const float* cos,
    const float* sin, long num_rows, long num_heads, long half
);

void lowtide_silu_times(int variant, int num_threads, bf16* gate, const bf16* up, long length);

void lowtide_delta_steps(
    int variant, int num_threads, const lowtide::DeltaRows* rows,
    const lowtide::DeltaWeights* weights
);

void lowtide_delta_prepare(
    int variant, int num_threads, const lowtide::DeltaRows* rows,
    const lowtide::DeltaWeights* weights, const lowtide::DeltaChunk* chunk
);

void lowtide_silu_weigh(
    int variant, int num_threads, bf16* x, long x_stride, const bf16* gates, long gates_stride,
    long num_rows, long length
);

void lowtide_sigmoid_weigh(
    int variant, int num_threads, bf16* x, long x_stride, const bf16* gates, long gates_row,
    long gates_head, long num_rows, long num_heads, long length
);

void lowtide_weigh_rows(int variant, bf16* x, const bf16* gates, long num_rows, long length);

}
