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

// Of a value head and a row, beside its vectors.
struct Strength {
    float growth, beta, key_query;  // growth: e^g
};

// What a thread computes of its rows before it comes to a head's matrix, in float32.
struct Rows {
    std::vector<float> keys, queries;  // [rows, key_width]
    std::vector<float> values;  // [rows, value_width]
    std::vector<Strength> strengths;  // [rows]

    void make_room(long num_rows, const DeltaSpec& spec) {
        const auto reserve = [](auto& vector, long length) {
            vector.resize(std::max(vector.size(), static_cast<std::size_t>(length)));
        };
        reserve(keys, num_rows * spec.key_width), reserve(queries, num_rows * spec.key_width);
        reserve(values, num_rows * spec.value_width), reserve(strengths, num_rows);
    }
};

// silu of the causal convolution of `count` channels from `first` on, for all rows.
INLINED void convolve(
    const DeltaRows& r, const DeltaWeights& w, long first, long count, float* out
) {
    const long kernel = w.spec.kernel, channels = w.spec.channels(), num_old = kernel - 1;
    for (long row = 0; row < r.num_rows; ++row, out += count) {
        for (long i = 0; i < count; ++i) out[i] = 0;
        for (long tap = 0; tap < kernel; ++tap) {
            const long from = row + tap - num_old;  // below 0: of the tail
            const bf16* const x = from < 0 ? r.tail_before + (num_old + from) * channels
                                           : r.mixed + from * r.mixed_stride;
            const float* const taps = w.conv + first * kernel + tap;
            for (long i = 0; i < count; ++i) out[i] += widen(x[first + i]) * taps[i * kernel];
        }
        for (long i = 0; i < count; ++i) out[i] = out[i] / (1.0f + exponential(-out[i]));
    }
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

void find_strengths(const DeltaRows& r, const DeltaWeights& w, long head, Rows& rows) {
    const long key_width = w.spec.key_width;
    for (long row = 0; row < r.num_rows; ++row) {
        const float beta = widen(r.beta[row * r.beta_stride + head]);
        const float time = widen(r.time[row * r.time_stride + head]) + w.time_bias[head];
        rows.strengths[row] = {
            exponential_of(w.decay[head] * softplus(time)), 1.0f / (1.0f + exponential_of(-beta)),
            dot(rows.keys.data() + row * key_width, rows.queries.data() + row * key_width,
                key_width),
        };
    }
}

// A key head with all value heads that use it.
void advance_key_head(int variant, const DeltaRows& r, const DeltaWeights& w, long key_head) {
    thread_local Rows own;
    Rows& rows = own;
    const DeltaSpec& spec = w.spec;
    const long key_width = spec.key_width, key_size = spec.key_heads * key_width;
    const long first = key_head * key_width, each = spec.value_heads / spec.key_heads;
    rows.make_room(r.num_rows, spec);
    vectorised(variant, [&]() INLINED_LAMBDA {
        convolve(r, w, first, key_width, rows.queries.data());
        convolve(r, w, key_size + first, key_width, rows.keys.data());
        const float scale = 1.0f / std::sqrt(static_cast<float>(key_width));
        for (long row = 0; row < r.num_rows; ++row) {
            normalise(rows.queries.data() + row * key_width, key_width, scale);
            normalise(rows.keys.data() + row * key_width, key_width, 1.0f);
        }
    });
    keep_tail(r, w, first, key_width);
    keep_tail(r, w, key_size + first, key_width);
    for (long i = 0; i < each; ++i) {
        const long head = spec.is_tiled ? i * spec.key_heads + key_head : key_head * each + i;
        const long of_value = 2 * key_size + head * spec.value_width;
        find_strengths(r, w, head, rows);
        vectorised(variant, [&]() INLINED_LAMBDA {
            convolve(r, w, of_value, spec.value_width, rows.values.data());
            advance_head(r, spec, rows, head);
        });
        keep_tail(r, w, of_value, spec.value_width);
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

}
