// Gated delta-nets between their projections: a value head has a matrix S [key_width, value_width],
// which each row of a sequence decays, corrects and reads, all in float32:
//
//     S = e^g S;  d = beta (v - S^T k);  S += k d^T;  out = S^T q
//
// S is read from memory once and written once, however many rows there are. With u = S^T k and
// w = S^T q of the matrix as it was
//
//     d = beta (v - e^g u),  out = e^g w + (k q) d,  S = e^g S + k d^T
//
// and no column of S needs another: some columns at a time stay in the first cache from one row to
// the next. Rows of the matrix are taken in ascending order, so a row's bits depend neither on how
// many follow it in the call nor on threads or the variant.

#include <algorithm>
#include <cmath>
#include <vector>

#include "operators.hpp"
#include "team/team.hpp"

using namespace lowtide;

namespace {

// Columns of S at a time: their sums are in registers, 128 rows of them in half of the first cache.
constexpr long COLUMNS = 32;

// Of queries and keys, in every published model; as in reference_delta.py.
constexpr float NORM_EPS = 1e-6f;

// Scalars of one row of a value head.
struct Strength {
    float growth, beta, key_query;  // growth: e^g
};

// Values in float32 that a thread computes for its rows before it reads a head's matrix.
struct Rows {
    std::vector<float> keys, queries;  // [rows, key_width]
    std::vector<float> values;  // [rows, value_width]
    std::vector<float> taps;  // of a head's channels
    std::vector<Strength> strengths;  // [rows]

    void make_room(long num_rows, const DeltaSpec& spec) {
        const auto reserve = [](auto& vector, long length) {
            vector.resize(std::max(vector.size(), static_cast<std::size_t>(length)));
        };
        reserve(keys, num_rows * spec.key_width), reserve(queries, num_rows * spec.key_width);
        reserve(values, num_rows * spec.value_width), reserve(strengths, num_rows);
        reserve(taps, std::max(spec.key_width, spec.value_width));
    }
};

// silu of the causal convolution of `count` channels from `first` on, for all rows. taps: scratch.
INLINED void convolve(
    const DeltaRows& r, const DeltaWeights& w, long first, long count, float* taps, float* out
) {
    const long kernel = w.spec.kernel, channels = w.spec.channels(), num_old = kernel - 1;
    const long length = r.num_rows * count;
    for (long i = 0; i < length; ++i) out[i] = 0;
    for (long tap = 0; tap < kernel; ++tap) {
        for (long i = 0; i < count; ++i) taps[i] = w.conv[(first + i) * kernel + tap];
        for (long row = 0; row < r.num_rows; ++row) {
            const long from = row + tap - num_old;  // below 0: of the tail
            const bf16* const x = from < 0 ? r.tail_before + (num_old + from) * channels
                                           : r.mixed + from * r.mixed_stride;
            float* const sums = out + row * count;
            for (long i = 0; i < count; ++i) sums[i] += widen(x[first + i]) * taps[i];
        }
    }
    for (long i = 0; i < length; ++i) out[i] = out[i] / (1.0f + exponential(-out[i]));
}

// What the next rows' convolution sees of `count` channels; the tails may be the same memory.
void keep_tail(const DeltaRows& r, const DeltaWeights& w, long first, long count) {
    const long num_old = w.spec.kernel - 1, channels = w.spec.channels();
    for (long i = 0; i < num_old; ++i) {
        const long from = r.num_rows + i - num_old;
        const bf16* const x = from < 0 ? r.tail_before + (num_old + from) * channels
                                       : r.mixed + from * r.mixed_stride;
        bf16* const to = r.tail_after + i * channels;
        if (to != x) std::copy_n(x + first, count, to + first);
    }
}

INLINED float dot(const float* x, const float* y, long length) {
    float lanes[16] = {};
    long i = 0;
    for (; i + 16 <= length; i += 16)
        for (long lane = 0; lane < 16; ++lane) lanes[lane] += x[i + lane] * y[i + lane];
    for (long lane = 0; i + lane < length; ++lane) lanes[lane] += x[i + lane] * y[i + lane];
    for (long half = 8; half > 0; half /= 2)
        for (long lane = 0; lane < half; ++lane) lanes[lane] += lanes[half + lane];
    return lanes[0];
}

// To length `scale`.
INLINED void normalise(float* x, long length, float scale) {
    const float factor = 1.0f / std::sqrt(dot(x, x, length) + NORM_EPS);
    for (long i = 0; i < length; ++i) x[i] = x[i] * factor * scale;
}

// One row's share in some columns: `count` of them, at most COLUMNS, of S at `before`, which begins
// a row, and `after`.
template <bool are_all>
INLINED void advance_columns(
    const float* key, const float* query, const Strength& s, const float* value, long key_width,
    long stride, long count, const float* before, float* after, bf16* out
) {
    const long length = are_all ? COLUMNS : count;
    float seen[COLUMNS] = {}, read[COLUMNS] = {}, change[COLUMNS];
    for (long i = 0; i < key_width; ++i) {
        const float* const row = before + i * stride;
        const float of_key = key[i], of_query = query[i];
        for (long j = 0; j < length; ++j) {
            seen[j] += row[j] * of_key;
            read[j] += row[j] * of_query;
        }
    }
    for (long j = 0; j < length; ++j) {
        change[j] = s.beta * (value[j] - s.growth * seen[j]);
        out[j] = round_bf16(s.growth * read[j] + s.key_query * change[j]);
    }
    for (long i = 0; i < key_width; ++i) {
        const float of_key = key[i];
        for (long j = 0; j < length; ++j)
            after[i * stride + j] = s.growth * before[i * stride + j] + of_key * change[j];
    }
}

// All rows through a value head's matrix.
INLINED void advance_head(const DeltaRows& r, const DeltaSpec& spec, const Rows& rows, long head) {
    const long width = spec.value_width, size = spec.key_width * width;
    const float* const before = r.before + head * size;
    float* const after = r.after + head * size;
    for (long column = 0; column < width; column += COLUMNS)
        for (long row = 0; row < r.num_rows; ++row) {
            const long count = std::min(COLUMNS, width - column);
            const float* const from = (row == 0 ? before : after) + column;
            const float *const key = rows.keys.data() + row * spec.key_width;
            const float *const query = rows.queries.data() + row * spec.key_width;
            const float* const value = rows.values.data() + row * width + column;
            bf16* const out = r.out + row * r.out_stride + head * width + column;
            if (count == COLUMNS)
                advance_columns<true>(key, query, rows.strengths[row], value, spec.key_width, width,
                                      count, from, after + column, out);
            else
                advance_columns<false>(key, query, rows.strengths[row], value, spec.key_width,
                                       width, count, from, after + column, out);
        }
}

// e^x and ln(1 + e^x), in double precision, since the library rounds a float32 by the processor.
float exponential_of(float x) { return static_cast<float>(std::exp(static_cast<double>(x))); }

float softplus(float x) {
    const double wide = x;
    return static_cast<float>(std::max(wide, 0.0) + std::log1p(std::exp(-std::abs(wide))));
}

// What a row's matrix grows by, as a logarithm.
float log_growth(const DeltaRows& r, const DeltaWeights& w, long head, long row) {
    return w.decay[head] * softplus(widen(r.time[row * r.time_stride + head]) + w.time_bias[head]);
}

float beta_of(const DeltaRows& r, long head, long row) {
    return 1.0f / (1.0f + exponential_of(-widen(r.beta[row * r.beta_stride + head])));
}

void find_strengths(const DeltaRows& r, const DeltaWeights& w, long head, Rows& rows) {
    const long key_width = w.spec.key_width;
    for (long row = 0; row < r.num_rows; ++row)
        rows.strengths[row] = {
            exponential_of(log_growth(r, w, head, row)), beta_of(r, head, row),
            dot(rows.keys.data() + row * key_width, rows.queries.data() + row * key_width,
                key_width),
        };
}

// The value head of that number among those that use a key head.
long value_head(const DeltaSpec& spec, long key_head, long number) {
    if (spec.is_tiled) return number * spec.key_heads + key_head;
    return key_head * (spec.value_heads / spec.key_heads) + number;
}

// The first channel of a value head.
long first_value(const DeltaSpec& spec, long head) {
    return 2 * spec.key_heads * spec.key_width + head * spec.value_width;
}

// Queries and keys of a key head, and the tails of their channels.
void make_keys(int variant, const DeltaRows& r, const DeltaWeights& w, long key_head, Rows& rows) {
    const DeltaSpec& spec = w.spec;
    const long key_width = spec.key_width, key_size = spec.key_heads * key_width;
    const long first = key_head * key_width;
    rows.make_room(r.num_rows, spec);
    vectorised(variant, [&]() INLINED_LAMBDA {
        convolve(r, w, first, key_width, rows.taps.data(), rows.queries.data());
        convolve(r, w, key_size + first, key_width, rows.taps.data(), rows.keys.data());
        const float scale = 1.0f / std::sqrt(static_cast<float>(key_width));
        for (long row = 0; row < r.num_rows; ++row) {
            normalise(rows.queries.data() + row * key_width, key_width, scale);
            normalise(rows.keys.data() + row * key_width, key_width, 1.0f);
        }
    });
    keep_tail(r, w, first, key_width);
    keep_tail(r, w, key_size + first, key_width);
}

// A key head with all value heads that use it.
void advance_key_head(int variant, const DeltaRows& r, const DeltaWeights& w, long key_head) {
    thread_local Rows rows;
    const DeltaSpec& spec = w.spec;
    make_keys(variant, r, w, key_head, rows);
    for (long i = 0; i < spec.value_heads / spec.key_heads; ++i) {
        const long head = value_head(spec, key_head, i), of_value = first_value(spec, head);
        find_strengths(r, w, head, rows);
        Rows& own = rows;
        vectorised(variant, [&]() INLINED_LAMBDA {
            convolve(r, w, of_value, spec.value_width, own.taps.data(), own.values.data());
            advance_head(r, spec, own, head);
        });
        keep_tail(r, w, of_value, spec.value_width);
    }
}

// The same for products of all rows together.
void prepare_key_head(int variant, const DeltaRows& r, const DeltaWeights& w, long key_head,
                      const DeltaChunk& to) {
    thread_local Rows rows;
    const DeltaSpec& spec = w.spec;
    const long num_rows = r.num_rows, size = num_rows * spec.key_width;
    make_keys(variant, r, w, key_head, rows);
    for (long i = 0; i < spec.value_heads / spec.key_heads; ++i) {
        const long head = value_head(spec, key_head, i), of_value = first_value(spec, head);
        std::copy_n(rows.keys.data(), size, to.keys_queries + 2 * head * size);
        std::copy_n(rows.queries.data(), size, to.keys_queries + (2 * head + 1) * size);
        float* const values = to.values + head * num_rows * spec.value_width;
        float* const taps = rows.taps.data();
        vectorised(variant, [&]() INLINED_LAMBDA {
            convolve(r, w, of_value, spec.value_width, taps, values);
        });
        keep_tail(r, w, of_value, spec.value_width);
        float sum = 0;
        for (long row = 0; row < num_rows; ++row) {
            to.beta[head * num_rows + row] = beta_of(r, head, row);
            to.log_decay[head * num_rows + row] = sum += log_growth(r, w, head, row);
        }
    }
}

}  // namespace

extern "C" {

// Consecutive rows of one sequence, one step after the other. `after` may be `before`.
void lowtide_delta_steps(
    int variant, int num_threads, const DeltaRows* rows, const DeltaWeights* weights
) {
    const DeltaSpec& spec = weights->spec;
    const long size = spec.value_heads * spec.key_width * spec.value_width;
    if (size * static_cast<long>(sizeof(float)) < WORTH_BYTES) num_threads = 1;
    together(num_threads, spec.key_heads, [=](long key_head) {
        advance_key_head(variant, *rows, *weights, key_head);
    });
}

// What products advance a state by, of consecutive rows of one sequence; their tail goes on, the
// matrices and `out` are not touched.
void lowtide_delta_prepare(
    int variant, int num_threads, const DeltaRows* rows, const DeltaWeights* weights,
    const DeltaChunk* chunk
) {
    const DeltaSpec& spec = weights->spec;
    const long size = rows->num_rows * spec.channels();
    if (size * static_cast<long>(sizeof(float)) < WORTH_BYTES) num_threads = 1;
    together(num_threads, spec.key_heads, [=](long key_head) {
        prepare_key_head(variant, *rows, *weights, key_head, *chunk);
    });
}

}
