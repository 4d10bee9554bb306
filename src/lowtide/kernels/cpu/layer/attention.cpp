// Attention of rows over the keys and values of their sequences, in float32.
//
// A block of keys at a time: the scores of all query heads that share a key head, their weights
// beside the largest score so far, and the values under those weights. What came before is scaled
// down when a larger score comes; a sink is a score that was there before all others. Blocks have a
// fixed length, so a row's bits depend on nothing but itself and what it sees.

#include <cstring>
#include <limits>

#include "layer/attention.hpp"
#include "operators.hpp"
#include "dense/products.hpp"
#include "team/team.hpp"

using namespace lowtide;

namespace {

constexpr long MAX_GROUP = 8, MAX_DIM = 1024, BLOCK = 128;

// Bytes of keys that are worth another thread: some ten microseconds. Fewer than of weights, since
// a key does more work.
constexpr long WORTH_KEY_BYTES = 32 << 10;

// Some query heads of one key head.
struct Heads {
    const bf16* query;  // [num_heads, dim]
    const bf16* keys;  // [num_tokens, dim]
    const bf16* values;  // [num_tokens, dim], of which the first value_dim
    bf16* out;  // [num_heads, value_dim]
    long num_heads, num_tokens, dim, value_dim;
    float scale;
    const float* sinks;  // [num_heads], or null
};

struct State {
    float weights[MAX_GROUP][BLOCK];  // first scores
    float sums[MAX_GROUP][MAX_DIM];  // of weighted values
    float largest[MAX_GROUP], total[MAX_GROUP];
};

// From scores to weights; scales down what the head has so far.
INLINED void weigh(float* weights, long length, float scale, float& largest, float& total,
                      float* sums, long dim) {
    float peak = largest;
    for (long t = 0; t < length; ++t) {
        weights[t] *= scale;
        peak = weights[t] > peak ? weights[t] : peak;
    }
    const float keep = exponential(largest - peak);
    float lanes[16] = {};
    for (long t = 0; t < BLOCK; ++t) weights[t] = t < length ? exponential(weights[t] - peak) : 0;
    for (long t = 0; t < BLOCK; t += 16)
        for (long i = 0; i < 16; ++i) lanes[i] += weights[t + i];
    float sum = 0;
    for (float lane : lanes) sum += lane;
    total = total * keep + sum;
    largest = peak;
    for (long i = 0; i < dim; ++i) sums[i] *= keep;
}

// Sixteen dimensions of some heads, whose sums stay in registers while the tokens pass, one by one:
// values are widened once for all of them. sums: of each head, MAX_DIM apart.
template <int heads>
INLINED void add_lanes(const float (*weights)[BLOCK], const bf16* values, long length, long dim,
                       float* sums) {
    using Numbers = float __attribute__((vector_size(64)));
    using Words = std::uint32_t __attribute__((vector_size(64)));
    using Halves = bf16 __attribute__((vector_size(32)));
    Numbers own[heads];
    UNROLLED for (int h = 0; h < heads; ++h) std::memcpy(&own[h], sums + h * MAX_DIM, sizeof own[h]);
    for (long t = 0; t < length; ++t) {
        Halves halves;
        std::memcpy(&halves, values + t * dim, sizeof halves);
        const Words words = __builtin_convertvector(halves, Words) << 16;
        Numbers value;
        std::memcpy(&value, &words, sizeof value);
        UNROLLED for (int h = 0; h < heads; ++h) own[h] += weights[h][t] * value;
    }
    UNROLLED for (int h = 0; h < heads; ++h) std::memcpy(sums + h * MAX_DIM, &own[h], sizeof own[h]);
}

template <int heads>
INLINED void add_values(const float (*weights)[BLOCK], const bf16* values, long length,
                        const Heads& a, float* sums) {
    long i = 0;
    for (; i + 16 <= a.value_dim; i += 16)
        add_lanes<heads>(weights, values + i, length, a.dim, sums + i);
    for (; i < a.value_dim; ++i)
        for (int h = 0; h < heads; ++h)
            for (long t = 0; t < length; ++t)
                sums[h * MAX_DIM + i] += weights[h][t] * widen(values[t * a.dim + i]);
}

INLINED void add_values_of_all(const float (*weights)[BLOCK], const bf16* values, long length,
                               const Heads& a, float* sums) {
    long h = 0;
    for (; h + 4 <= a.num_heads; h += 4, sums += 4 * MAX_DIM)
        add_values<4>(weights + h, values, length, a, sums);
    for (; h + 2 <= a.num_heads; h += 2, sums += 2 * MAX_DIM)
        add_values<2>(weights + h, values, length, a, sums);
    for (; h < a.num_heads; ++h, sums += MAX_DIM)
        add_values<1>(weights + h, values, length, a, sums);
}

void begin(State& state, const Heads& a) {
    constexpr float NOTHING = -std::numeric_limits<float>::infinity();
    for (long h = 0; h < a.num_heads; ++h) {
        std::fill(state.sums[h], state.sums[h] + a.value_dim, 0.0f);
        state.largest[h] = a.sinks == nullptr ? NOTHING : a.sinks[h];
        state.total[h] = state.largest[h] == NOTHING ? 0 : 1;
    }
}

void attend_heads(int variant, const Heads& a) {
    State state;
    begin(state, a);
    for (long start = 0; start < a.num_tokens; start += BLOCK) {
        const long length = std::min(BLOCK, a.num_tokens - start);
        const bf16 *keys = a.keys + start * a.dim, *values = a.values + start * a.dim;
        Product<float> scores = {
            a.query, a.dim, keys, nullptr, state.weights[0], BLOCK, a.num_heads, length, a.dim,
        };
        scores.next = values;
        multiply_in_float32(variant, scores);
        State* of = &state;
        vectorised(variant, [=, &a]() INLINED_LAMBDA {
            for (long h = 0; h < a.num_heads; ++h)
                weigh(of->weights[h], length, a.scale, of->largest[h], of->total[h], of->sums[h],
                      a.value_dim);
            add_values_of_all(of->weights, values, length, a, of->sums[0]);
        });
    }
    const State* of = &state;
    vectorised(variant, [=, &a]() INLINED_LAMBDA {
        for (long h = 0; h < a.num_heads; ++h)
            for (long i = 0; i < a.value_dim; ++i)
                a.out[h * a.value_dim + i] = round_bf16(of->sums[h][i] / of->total[h]);
    });
}

}  // namespace

namespace lowtide {

void attend(int variant, int num_threads, const AttendedRows& a) {
    const long num_parts = (a.group + MAX_GROUP - 1) / MAX_GROUP;
    long num_tokens = 0;
    for (long row = 0; row < a.num_rows; ++row) num_tokens += a.tokens[2 * row + 1];
    const long num_bytes = a.num_key_heads * num_tokens * a.dim * static_cast<long>(sizeof(bf16));
    const int num_useful = num_bytes < WORTH_KEY_BYTES ? 1 : num_threads;
    together(num_useful, a.num_rows * a.num_key_heads * num_parts, [&](long number) {
        const long row = number / (a.num_key_heads * num_parts);
        const long head = number / num_parts % a.num_key_heads;
        const long first_query = number % num_parts * MAX_GROUP;
        const long query = head * a.group + first_query;
        const long num_hidden =
            a.window == 0 ? 0 : std::max(0L, long(a.tokens[2 * row + 1]) - a.window);
        const long at = head * a.head_stride + (a.tokens[2 * row] + num_hidden) * a.dim;
        attend_heads(variant, {
            a.queries + row * a.query_stride + query * a.dim, a.keys + at, a.values + at,
            a.out + row * a.out_stride + query * a.value_dim,
            std::min(MAX_GROUP, a.group - first_query), a.tokens[2 * row + 1] - num_hidden, a.dim,
            a.value_dim, a.scale, a.sinks == nullptr ? nullptr : a.sinks + query,
        });
    });
}

}  // namespace lowtide

extern "C" {

// One row. query [num_key_heads * group, dim]; keys, values: of key head h at h * head_stride
// elements, [num_tokens, dim] there, of which values have the first value_dim; out
// [num_key_heads * group, value_dim]. All rows are adjacent. dim is at most 1024. sinks
// [num_key_heads * group], or null.
void lowtide_attend(
    int variant, int num_threads, const bf16* query, const bf16* keys, const bf16* values,
    long head_stride, bf16* out, long num_key_heads, long group, long num_tokens, long dim,
    long value_dim, float scale, const float* sinks
) {
    const std::int64_t tokens[2] = {0, num_tokens};
    attend(variant, num_threads, {
        query, 0, keys, values, head_stride, out, 0, tokens, 0, 1, num_key_heads, group, dim,
        value_dim, scale, sinks,
    });
}

}
