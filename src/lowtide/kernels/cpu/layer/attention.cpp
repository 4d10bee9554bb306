// Attention of rows over the keys and values of their sequences, in float32.
//
// A block of keys at a time: the scores of all query heads that share a key head, their weights
// beside the largest score so far, and the values under those weights. What came before is scaled
// down when a larger score comes; a sink is a score that was there before all others. Blocks have a
// fixed length, so a row's bits depend only on the row and the tokens that it sees.

#include <cstring>
#include <limits>

#include "layer/attention.hpp"
#include "operators.hpp"
#include "dense/lane_sums.hpp"
#include "dense/products.hpp"
#include "dense/tiles.hpp"
#include "team/team.hpp"

using namespace lowtide;

namespace {

constexpr long MAX_GROUP = 8, MAX_DIM = 1024, BLOCK = 128;

// Floats from one head to the next; whole pages would put all heads into the same few lines of the
// first cache.
constexpr long STRIDE = MAX_DIM + 16;

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
    float sums[MAX_GROUP][STRIDE];  // of weighted values
    float largest[MAX_GROUP], total[MAX_GROUP];
};

#if defined(__x86_64__)

// Queries in float32, as the products with keys take them: of each 32 elements the even ones, then
// the odd ones, with zeros behind the last. Widened once for all keys.
struct WideQueries {
    alignas(64) float of[MAX_GROUP][STRIDE];
};

AVX512 void widen_queries(const Heads& a, WideQueries& wide) {
    for (long h = 0; h < a.num_heads; ++h)
        for (long k = 0; k < a.dim; k += LANES) {
            const __mmask32 mask = a.dim - k < LANES ? (1u << (a.dim - k)) - 1 : ~0u;
            const __m512i pairs = _mm512_maskz_loadu_epi16(mask, a.query + h * a.dim + k);
            _mm512_store_ps(&wide.of[h][k], even16(pairs));
            _mm512_store_ps(&wide.of[h][k + LANES / 2], odd16(pairs));
        }
}

// Multiplies some queries with some keys, with the sums of `Avx512`'s tiles. Asks for the keys a
// block on and for the values: without that the processor waits for most lines (docs/log).
template <int heads, int keys>
AVX512 INLINED void multiply_keys(
    const float (*queries)[STRIDE], const bf16* key, const bf16* value, long dim, float* out
) {
    __m512 even[heads][keys] = {}, odd[heads][keys] = {};
    for (long k = 0; k < dim; k += LANES) {
        const __mmask32 mask = dim - k < LANES ? (1u << (dim - k)) - 1 : ~0u;
        __m512 key_even[keys], key_odd[keys];
        UNROLLED for (int t = 0; t < keys; ++t) {
            const long at = t * dim + k;
            __builtin_prefetch(key + BLOCK * dim + at, 0, FIRST_CACHE);
            __builtin_prefetch(value + at, 0, FIRST_CACHE);
            const __m512i pairs = _mm512_maskz_loadu_epi16(mask, key + at);
            key_even[t] = even16(pairs), key_odd[t] = odd16(pairs);
        }
        UNROLLED for (int h = 0; h < heads; ++h) {
            const __m512 query_even = _mm512_load_ps(queries[h] + k);
            const __m512 query_odd = _mm512_load_ps(queries[h] + k + LANES / 2);
            UNROLLED for (int t = 0; t < keys; ++t) {
                even[h][t] = _mm512_fmadd_ps(query_even, key_even[t], even[h][t]);
                odd[h][t] = _mm512_fmadd_ps(query_odd, key_odd[t], odd[h][t]);
            }
        }
    }
    __m512 lanes[heads * keys];
    UNROLLED for (int h = 0; h < heads; ++h)
        UNROLLED for (int t = 0; t < keys; ++t)
            lanes[h * keys + t] = _mm512_add_ps(even[h][t], odd[h][t]);
    alignas(64) float sums[16];
    _mm512_store_ps(sums, sums_of_lanes(lanes));
    UNROLLED for (int h = 0; h < heads; ++h)
        std::memcpy(out + h * BLOCK, sums + h * keys, keys * sizeof(float));
}

template <int heads>
AVX512 INLINED void multiply_all_keys(
    const float (*queries)[STRIDE], const bf16* keys, const bf16* values, long length, long dim,
    float* out
) {
    constexpr int AT_ONCE = 8 / heads;  // enough sums that no addition waits for the one before
    long t = 0;
    for (; t + AT_ONCE <= length; t += AT_ONCE)
        multiply_keys<heads, AT_ONCE>(queries, keys + t * dim, values + t * dim, dim, out + t);
    for (; t < length; ++t)
        multiply_keys<heads, 1>(queries, keys + t * dim, values + t * dim, dim, out + t);
}

AVX512 NOT_INLINED void multiply_with_avx512(
    const WideQueries& queries, const bf16* keys, const bf16* values, long length, const Heads& a,
    State& state
) {
    long h = 0;
    for (; h + 4 <= a.num_heads; h += 4)
        multiply_all_keys<4>(queries.of + h, keys, values, length, a.dim, state.weights[h]);
    for (; h + 2 <= a.num_heads; h += 2)
        multiply_all_keys<2>(queries.of + h, keys, values, length, a.dim, state.weights[h]);
    for (; h < a.num_heads; ++h)
        multiply_all_keys<1>(queries.of + h, keys, values, length, a.dim, state.weights[h]);
}

#endif

// Returns the largest of `largest` and the BLOCK numbers; none that is NaN.
INLINED float largest_of(float largest, const float* numbers) {
    float lanes[16];
    std::fill(lanes, lanes + 16, largest);
    for (long t = 0; t < BLOCK; t += 16)
        for (long i = 0; i < 16; ++i)
            lanes[i] = numbers[t + i] > lanes[i] ? numbers[t + i] : lanes[i];
    for (float lane : lanes) largest = lane > largest ? lane : largest;
    return largest;
}

// From scores to weights; scales down what the head has so far.
INLINED void weigh(float* weights, long length, float scale, float& largest, float& total,
                   float* sums, long dim) {
    constexpr float NOTHING = -std::numeric_limits<float>::infinity();
    for (long t = 0; t < BLOCK; ++t) weights[t] = t < length ? weights[t] * scale : NOTHING;
    const float peak = largest_of(largest, weights);
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

using Numbers = float __attribute__((vector_size(64)));

INLINED void widen_into(Numbers& to, const bf16* from) {
    using Words = std::uint32_t __attribute__((vector_size(64)));
    using Halves = bf16 __attribute__((vector_size(32)));
    Halves halves;
    std::memcpy(&halves, from, sizeof halves);
    const Words words = __builtin_convertvector(halves, Words) << 16;
    std::memcpy(&to, &words, sizeof to);
}

// Some times sixteen dimensions of some heads, whose sums stay in registers while the tokens pass,
// one by one: values are widened once for all of them. sums: of each head, STRIDE apart.
template <int heads, int sixteens>
INLINED void add_lanes(const float (*weights)[BLOCK], const bf16* values, long length, long dim,
                       float* sums) {
    Numbers own[heads][sixteens];
    UNROLLED for (int h = 0; h < heads; ++h)
        std::memcpy(own[h], sums + h * STRIDE, sizeof own[h]);
    for (long t = 0; t < length; ++t) {
        Numbers value[sixteens];
        UNROLLED for (int i = 0; i < sixteens; ++i) widen_into(value[i], values + t * dim + 16 * i);
        UNROLLED for (int h = 0; h < heads; ++h)
            UNROLLED for (int i = 0; i < sixteens; ++i) own[h][i] += weights[h][t] * value[i];
    }
    UNROLLED for (int h = 0; h < heads; ++h)
        std::memcpy(sums + h * STRIDE, own[h], sizeof own[h]);
}

template <int heads, int sixteens>
INLINED void add_values(const float (*weights)[BLOCK], const bf16* values, long length,
                        const Heads& a, float* sums) {
    long i = 0;
    for (; i + 16 * sixteens <= a.value_dim; i += 16 * sixteens)
        add_lanes<heads, sixteens>(weights, values + i, length, a.dim, sums + i);
    for (; i + 16 <= a.value_dim; i += 16)
        add_lanes<heads, 1>(weights, values + i, length, a.dim, sums + i);
    for (; i < a.value_dim; ++i)
        for (int h = 0; h < heads; ++h)
            for (long t = 0; t < length; ++t)
                sums[h * STRIDE + i] += weights[h][t] * widen(values[t * a.dim + i]);
}

// most: how many sums of sixteen dimensions the registers hold.
template <int most>
INLINED void add_values_of_all(const float (*weights)[BLOCK], const bf16* values, long length,
                               const Heads& a, float* sums) {
    long h = 0;
    if constexpr (most >= 16)
        for (; h + 8 <= a.num_heads; h += 8, sums += 8 * STRIDE)
            add_values<8, most / 8>(weights + h, values, length, a, sums);
    for (; h + 4 <= a.num_heads; h += 4, sums += 4 * STRIDE)
        add_values<4, most / 4>(weights + h, values, length, a, sums);
    for (; h + 2 <= a.num_heads; h += 2, sums += 2 * STRIDE)
        add_values<2, most / 4>(weights + h, values, length, a, sums);
    for (; h < a.num_heads; ++h, sums += STRIDE)
        add_values<1, most / 4>(weights + h, values, length, a, sums);
}

void begin(State& state, const Heads& a) {
    constexpr float NOTHING = -std::numeric_limits<float>::infinity();
    for (long h = 0; h < a.num_heads; ++h) {
        std::fill(state.sums[h], state.sums[h] + a.value_dim, 0.0f);
        state.largest[h] = a.sinks == nullptr ? NOTHING : a.sinks[h];
        state.total[h] = state.largest[h] == NOTHING ? 0 : 1;
    }
}

// `multiply(keys, values, length, state)` stores the scores of `length` keys, whose values are read
// next. most: see `add_values_of_all`.
template <int most, class Multiply>
void attend_blocks(int variant, const Heads& a, const Multiply& multiply) {
    State state;
    State* of = &state;
    begin(state, a);
    for (long start = 0; start < a.num_tokens; start += BLOCK) {
        const long length = std::min(BLOCK, a.num_tokens - start);
        const bf16* values = a.values + start * a.dim;
        multiply(a.keys + start * a.dim, values, length, state);
        vectorised(variant, [=, &a]() INLINED_LAMBDA {
            for (long h = 0; h < a.num_heads; ++h)
                weigh(of->weights[h], length, a.scale, of->largest[h], of->total[h], of->sums[h],
                      a.value_dim);
            add_values_of_all<most>(of->weights, values, length, a, of->sums[0]);
        });
    }
    vectorised(variant, [=, &a]() INLINED_LAMBDA {
        for (long h = 0; h < a.num_heads; ++h)
            for (long i = 0; i < a.value_dim; ++i)
                a.out[h * a.value_dim + i] = round_bf16(of->sums[h][i] / of->total[h]);
    });
}

void attend_heads(int variant, const Heads& a) {
#if defined(__x86_64__)
    if (variant >= WITH_AVX512) {
        WideQueries queries;
        widen_queries(a, queries);
        return attend_blocks<16>(
            variant, a, [&](const bf16* keys, const bf16* values, long length, State& state) {
                multiply_with_avx512(queries, keys, values, length, a, state);
            });
    }
#endif
    attend_blocks<4>(
        variant, a, [&](const bf16* keys, const bf16* values, long length, State& state) {
            Product<float> scores = {
                a.query, a.dim, keys, nullptr, state.weights[0], BLOCK, a.num_heads, length, a.dim,
            };
            scores.next = values;
            multiply_in_float32(variant, scores);
        });
}

}  // namespace

namespace lowtide {

void attend(int variant, int num_threads, const AttendedRows& a) {
    long num_tokens = 0;
    for (long row = 0; row < a.num_rows; ++row) num_tokens += a.tokens[2 * row + 1];
    const long num_bytes = a.num_key_heads * num_tokens * a.dim * static_cast<long>(sizeof(bf16));
    const int num_useful = num_bytes < WORTH_KEY_BYTES ? 1 : num_threads;
    const long num_groups = a.num_rows * a.num_key_heads;
    // Fewer heads at a time where some thread would have none; a head's bits are its own.
    long most = MAX_GROUP;
    while (most > 1 && num_groups * ((a.group + most - 1) / most) < num_useful) most /= 2;
    const long num_parts = (a.group + most - 1) / most;
    together(num_useful, num_groups * num_parts, [&](long number) {
        const long row = number / (a.num_key_heads * num_parts);
        const long head = number / num_parts % a.num_key_heads;
        const long first_query = number % num_parts * most;
        const long query = head * a.group + first_query;
        const long num_hidden =
            a.window == 0 ? 0 : std::max(0L, long(a.tokens[2 * row + 1]) - a.window);
        const long at = head * a.head_stride + (a.tokens[2 * row] + num_hidden) * a.dim;
        attend_heads(variant, {
            a.queries + row * a.query_stride + query * a.dim, a.keys + at, a.values + at,
            a.out + row * a.out_stride + query * a.value_dim,
            std::min(most, a.group - first_query), a.tokens[2 * row + 1] - num_hidden, a.dim,
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
