// What happens to rows between products: normalised, turned by their position, gated. Few or many:
// a row's bits are its own.

#include <algorithm>

#include "operators.hpp"
#include "team/team.hpp"

using namespace lowtide;

namespace {

// What x is multiplied by, so that its mean square is 1.
INLINED float rms_factor(const bf16* x, float eps, long length) {
    float lanes[16] = {};
    long i = 0;
    for (; i + 16 <= length; i += 16)
        for (long lane = 0; lane < 16; ++lane)
            lanes[lane] += widen(x[i + lane]) * widen(x[i + lane]);
    for (long lane = 0; i + lane < length; ++lane)
        lanes[lane] += widen(x[i + lane]) * widen(x[i + lane]);
    float sum = 0;
    for (float lane : lanes) sum += lane;
    return 1.0f / std::sqrt(sum / static_cast<float>(length) + eps);
}

// out = weight * rounded(x / rms(x))
INLINED void normalise(const bf16* x, const bf16* weight, float eps, bf16* out, long length) {
    const float factor = rms_factor(x, eps, length);
    for (long i = 0; i < length; ++i)
        out[i] = round_bf16(rounded(widen(x[i]) * factor) * widen(weight[i]));
}

// out = weight * x / rms(x), rounded once. weight: null for ones.
INLINED void normalise(const bf16* x, const float* weight, float eps, bf16* out, long length) {
    const float factor = rms_factor(x, eps, length);
    if (weight == nullptr)
        for (long i = 0; i < length; ++i) out[i] = round_bf16(widen(x[i]) * factor);
    else
        for (long i = 0; i < length; ++i) out[i] = round_bf16(widen(x[i]) * factor * weight[i]);
}

// Two dimensions of a row, rounded after each operator.
INLINED void turn(bf16& first, bf16& second, bf16 cos, bf16 sin) {
    const float a = widen(first), b = widen(second), c = widen(cos), s = widen(sin);
    first = round_bf16(rounded(a * c) - rounded(b * s));
    second = round_bf16(rounded(b * c) + rounded(a * s));
}

// The same in float32, each rounded once.
INLINED void turn(bf16& first, bf16& second, float cos, float sin) {
    const float a = widen(first), b = widen(second);
    first = round_bf16(a * cos - b * sin);
    second = round_bf16(b * cos + a * sin);
}

// With torch's bits, once it is rounded, for every number in bfloat16.
INLINED float sigmoid(float x) {
    constexpr float AT_THE_BORDER = 2.723088e38f;  // e^88.5
    // Beyond `exponential`'s range only -88.5 has a quotient other than 0.
    float e = exponential(-x);
    if (x < -88.0f) e = x == -88.5f ? AT_THE_BORDER : INFINITY;
    return 1.0f / (1.0f + e);
}

// run(first, number of rows), for pieces of all rows: some threads' where there is work for them.
template <class Run>
void by_rows(int num_threads, long num_rows, long row_bytes, const Run& run) {
    if (num_rows * row_bytes < 2 * WORTH_BYTES) return run(0, num_rows);
    const long length = std::max(1L, WORTH_BYTES / 2 / row_bytes);
    together(num_threads, (num_rows + length - 1) / length, [&](long piece) {
        const long first = piece * length;
        run(first, std::min(length, num_rows - first));
    });
}

long bytes_of(long num_numbers) { return num_numbers * static_cast<long>(sizeof(bf16)); }

template <class Number>
void rms_norm(
    int variant, int num_threads, const bf16* x, long x_stride, const Number* weight, float eps,
    bf16* out, long out_stride, long num_rows, long num_heads, long length
) {
    by_rows(num_threads, num_rows, bytes_of(num_heads * length), [=](long first, long number) {
        vectorised(variant, [=]() INLINED_LAMBDA {
            for (long row = first; row < first + number; ++row)
                for (long head = 0; head < num_heads; ++head) {
                    const long start = head * length;
                    normalise(x + row * x_stride + start, weight, eps,
                              out + row * out_stride + start, length);
                }
        });
    });
}

template <class Number>
void rotate(
    int variant, int num_threads, bf16* x, long x_stride, const Number* cos, const Number* sin,
    long num_rows, long num_heads, long length, long half
) {
    by_rows(num_threads, num_rows, bytes_of(num_heads * length), [=](long from, long number) {
        vectorised(variant, [=]() INLINED_LAMBDA {
            for (long row = from; row < from + number; ++row)
                for (long head = 0; head < num_heads; ++head) {
                    bf16* first = x + row * x_stride + head * length;
                    for (long i = 0; i < half; ++i)
                        turn(first[i], first[half + i], cos[row * half + i], sin[row * half + i]);
                }
        });
    });
}

}  // namespace

extern "C" {

// x, out [num_rows, num_heads, length], weight [length]; a row's stride in elements is given, its
// heads are adjacent. out may be x.
void lowtide_rms_norm(
    int variant, int num_threads, const bf16* x, long x_stride, const bf16* weight, float eps,
    bf16* out, long out_stride, long num_rows, long num_heads, long length
) {
    rms_norm(variant, num_threads, x, x_stride, weight, eps, out, out_stride, num_rows, num_heads,
             length);
}

// The same with a weight in float32, or none where it is null; rounded once.
void lowtide_rms_norm_in_float32(
    int variant, int num_threads, const bf16* x, long x_stride, const float* weight, float eps,
    bf16* out, long out_stride, long num_rows, long num_heads, long length
) {
    rms_norm(variant, num_threads, x, x_stride, weight, eps, out, out_stride, num_rows, num_heads,
             length);
}

// x [num_rows, num_heads, length], in place: dimension i with dimension i + half, rounded after
// each operator. cos, sin [num_rows, half]. A row's stride in elements is given.
void lowtide_rotate(
    int variant, int num_threads, bf16* x, long x_stride, const bf16* cos, const bf16* sin,
    long num_rows, long num_heads, long length, long half
) {
    rotate(variant, num_threads, x, x_stride, cos, sin, num_rows, num_heads, length, half);
}

// The same in float32, cos and sin, too, and rounded once.
void lowtide_rotate_in_float32(
    int variant, int num_threads, bf16* x, long x_stride, const float* cos, const float* sin,
    long num_rows, long num_heads, long length, long half
) {
    rotate(variant, num_threads, x, x_stride, cos, sin, num_rows, num_heads, length, half);
}

// x [num_rows, num_heads, 2 * half], in place: dimension 2 i with 2 i + 1, in float32, and rounded
// once. The elements of a head are adjacent.
void lowtide_rotate_pairs(
    int variant, int num_threads, bf16* x, long x_stride, long head_stride, const float* cos,
    const float* sin, long num_rows, long num_heads, long half
) {
    by_rows(num_threads, num_rows, bytes_of(num_heads * 2 * half), [=](long from, long number) {
        vectorised(variant, [=]() INLINED_LAMBDA {
            for (long row = from; row < from + number; ++row)
                for (long head = 0; head < num_heads; ++head) {
                    bf16* pair = x + row * x_stride + head * head_stride;
                    for (long i = row * half; i < (row + 1) * half; ++i, pair += 2)
                        turn(pair[0], pair[1], cos[i], sin[i]);
                }
        });
    });
}

// gate = silu(gate) * up, in place, rounded after each of the two.
void lowtide_silu_times(int variant, int num_threads, bf16* gate, const bf16* up, long length) {
    by_rows(num_threads, length, bytes_of(1), [=](long first, long number) {
        silu_times(variant, gate + first, up + first, number);
    });
}

// x = x * silu(gates), in place, in float32 and rounded once: [num_rows, length], of which rows'
// strides are given.
void lowtide_silu_weigh(
    int variant, int num_threads, bf16* x, long x_stride, const bf16* gates, long gates_stride,
    long num_rows, long length
) {
    by_rows(num_threads, num_rows, bytes_of(length), [=](long first, long number) {
        vectorised(variant, [=]() INLINED_LAMBDA {
            for (long row = first; row < first + number; ++row) {
                bf16* const to = x + row * x_stride;
                const bf16* const from = gates + row * gates_stride;
                for (long i = 0; i < length; ++i) {
                    const float gate = widen(from[i]);
                    to[i] = round_bf16(widen(to[i]) * (gate / (1.0f + exponential(-gate))));
                }
            }
        });
    });
}

// x = x * sigmoid(gates), in place, rounded after each of the two: [num_rows, num_heads, length]. A
// row's strides are given, and those of a head of the gates; the heads of x are adjacent.
void lowtide_sigmoid_weigh(
    int variant, int num_threads, bf16* x, long x_stride, const bf16* gates, long gates_row,
    long gates_head, long num_rows, long num_heads, long length
) {
    by_rows(num_threads, num_rows, bytes_of(num_heads * length), [=](long first, long number) {
        vectorised(variant, [=]() INLINED_LAMBDA {
            for (long row = first; row < first + number; ++row)
                for (long head = 0; head < num_heads; ++head) {
                    bf16* const to = x + row * x_stride + head * length;
                    const bf16* const from = gates + row * gates_row + head * gates_head;
                    for (long i = 0; i < length; ++i)
                        to[i] = round_bf16(widen(to[i]) * rounded(sigmoid(widen(from[i]))));
                }
        });
    });
}

// x [num_rows, length], each row multiplied by the sigmoid of its gate [num_rows], rounded after
// each of the two. Rows are adjacent.
void lowtide_weigh_rows(int variant, bf16* x, const bf16* gates, long num_rows, long length) {
    vectorised(variant, [=]() INLINED_LAMBDA {
        for (long row = 0; row < num_rows; ++row) {
            const float weight = rounded(1.0f / (1.0f + exponential(-widen(gates[row]))));
            for (long i = row * length; i < (row + 1) * length; ++i)
                x[i] = round_bf16(widen(x[i]) * weight);
        }
    });
}

}
