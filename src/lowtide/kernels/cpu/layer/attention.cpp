// Attention of one row over the keys and values of its sequence, in float32.
//
// A block of keys at a time: the scores of all query heads that share a key head, their weights
// beside the largest score so far, and the values under those weights. What came before is scaled
// down when a larger score comes. Blocks have a fixed length, so a row's bits depend on nothing but
// itself and what it sees.

#include <cstring>
#include <limits>

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
    const bf16* values;  // [num_tokens, dim]
    bf16* out;  // [num_heads, dim]
    long num_heads, num_tokens, dim;
    float scale;
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
INLINED void add_values(const float (*weights)[BLOCK], const bf16* values, long length, long dim,
                        float* sums) {
    long i = 0;
    for (; i + 16 <= dim; i += 16) add_lanes<heads>(weights, values + i, length, dim, sums + i);
    for (; i < dim; ++i)
        for (int h = 0; h < heads; ++h)
            for (long t = 0; t < length; ++t)
                sums[h * MAX_DIM + i] += weights[h][t] * widen(values[t * dim + i]);
}

INLINED void add_values_of_all(const float (*weights)[BLOCK], const bf16* values, long num_heads,
                               long length, long dim, float* sums) {
    long h = 0;
    for (; h + 4 <= num_heads; h += 4, sums += 4 * MAX_DIM)
        add_values<4>(weights + h, values, length, dim, sums);
    for (; h + 2 <= num_heads; h += 2, sums += 2 * MAX_DIM)
        add_values<2>(weights + h, values, length, dim, sums);
    for (; h < num_heads; ++h, sums += MAX_DIM)
        add_values<1>(weights + h, values, length, dim, sums);
}

void attend(int variant, const Heads& a) {
    State state;
    for (long h = 0; h < a.num_heads; ++h) {
        std::fill(state.sums[h], state.sums[h] + a.dim, 0.0f);
        state.largest[h] = -std::numeric_limits<float>::infinity(), state.total[h] = 0;
    }
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
                      a.dim);
            add_values_of_all(of->weights, values, a.num_heads, length, a.dim, of->sums[0]);
        });
    }
    const State* of = &state;
    vectorised(variant, [=, &a]() INLINED_LAMBDA {
        for (long h = 0; h < a.num_heads; ++h)
            for (long i = 0; i < a.dim; ++i)
                a.out[h * a.dim + i] = round_bf16(of->sums[h][i] / of->total[h]);
    });
}

}  // namespace

extern "C" {

// query, out [num_key_heads * group, dim]; keys, values: of key head h at h * head_stride
// elements, [num_tokens, dim] there. All rows are adjacent. dim is at most 1024.
void lowtide_attend(
    int variant, int num_threads, const bf16* query, const bf16* keys, const bf16* values,
    long head_stride, bf16* out, long num_key_heads, long group, long num_tokens, long dim,
    float scale
) {
    const long num_parts = (group + MAX_GROUP - 1) / MAX_GROUP;
    const long num_bytes = num_key_heads * num_tokens * dim * static_cast<long>(sizeof(bf16));
    const int num_useful = num_bytes < WORTH_KEY_BYTES ? 1 : num_threads;
    together(num_useful, num_key_heads * num_parts, [&](long number) {
        const long head = number / num_parts, first = number % num_parts * MAX_GROUP;
        const long start = (head * group + first) * dim;
        attend(variant, {
            query + start, keys + head * head_stride, values + head * head_stride, out + start,
            std::min(MAX_GROUP, group - first), num_tokens, dim, scale,
        });
    });
}

}
