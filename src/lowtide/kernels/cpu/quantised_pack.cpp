// Rounds weights to codes of 8 or 4 bits: the same bytes as `QuantisedRows.pack` of
// formats/quantised.py makes, which says how scales and zeros are found.

#include "quantised.hpp"

using namespace lowtide;

namespace {

constexpr float SHRINKS[] = {1.0f, 0.92f, 0.84f, 0.76f};
constexpr int NUM_FITS = 2;
constexpr float LARGEST = 65504.0f;  // of float16

// So many groups are worked on side by side: a number of each is a vector.
constexpr int LANES = 32;
using Lanes = float[LANES];
using Block = float[GROUP][LANES];
using Halves = std::uint16_t[LANES];

INLINED float as_float(std::uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

INLINED std::uint32_t as_bits(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

// To nearest, ties to even, of what is not beyond `LARGEST`; NaN stays one. Without a branch.
INLINED std::uint16_t float_to_half(float value) {
    const std::uint32_t bits = as_bits(value), size = bits & 0x7fffffff;
    const std::uint32_t sign = bits >> 16 & 0x8000;
    // Below the least normal a multiple of 2^-24, which is what the last bit of 0.5 + size is worth.
    const std::uint32_t tiny = as_bits(as_float(size) + 0.5f) - 0x3f000000;
    const std::uint32_t normal = (size + 0xfff + (size >> 13 & 1) - 0x38000000) >> 13;
    const std::uint32_t number = size < 0x38800000 ? tiny : normal;
    return static_cast<std::uint16_t>(sign | (size > 0x7f800000 ? 0x7e00 : number));
}

// Of what `float_to_half` makes. Without a branch.
INLINED float half_back(std::uint16_t half) {
    const std::uint32_t size = half & 0x7fff, sign = static_cast<std::uint32_t>(half & 0x8000) << 16;
    const float tiny = static_cast<float>(static_cast<std::int32_t>(size)) * 0x1p-24f;
    const std::uint32_t normal = (size << 13) + 0x38000000;
    const std::uint32_t number = size < 0x0400 ? as_bits(tiny) : size > 0x7c00 ? 0x7fc00000 : normal;
    return as_float(sign | number);
}

INLINED float clipped(float value) {
    return value < -LARGEST ? -LARGEST : value > LARGEST ? LARGEST : value;
}

// Of each group: adds halves to each other, in place.
INLINED void sum(Block& terms, Lanes& out) {
    for (long half = GROUP / 2; half > 0; half /= 2)
        for (long i = 0; i < half; ++i)
            for (int lane = 0; lane < LANES; ++lane) terms[i][lane] += terms[half + i][lane];
    for (int lane = 0; lane < LANES; ++lane) out[lane] = terms[0][lane];
}

// What rounds each group best so far.
struct Best {
    Lanes error;
    Halves scale, zero;
    Block codes;
};

// The nearest codes under scales and zeros, and what they are worth.
INLINED void offer(
    const Block& weights, float levels, const Lanes& scale, const Lanes& zero, Block& codes,
    Block& scratch, Best& best
) {
    constexpr float SHIFT = 12582912.0f;  // what is added to it is rounded to integers
    Halves scale16, zero16;
    Lanes step, base, inverse, error;
    for (int lane = 0; lane < LANES; ++lane) {
        scale16[lane] = float_to_half(clipped(scale[lane]));
        zero16[lane] = float_to_half(clipped(zero[lane]));
        step[lane] = half_back(scale16[lane]), base[lane] = half_back(zero16[lane]);
        const float quotient = 1.0f / step[lane];
        inverse[lane] = step[lane] > 0 ? quotient : 0.0f;
    }
    for (long i = 0; i < GROUP; ++i)
        for (int lane = 0; lane < LANES; ++lane) {
            const float exact = (weights[i][lane] - base[lane]) * inverse[lane];
            // What is cut off needs no rounding. A NaN passes both comparisons.
            const float least = exact < 0.0f ? 0.0f : exact;
            const float most = least > levels ? levels : least;
            const float code = (most + SHIFT) - SHIFT;
            const float residual = weights[i][lane] - (code * step[lane] + base[lane]);
            codes[i][lane] = code, scratch[i][lane] = residual * residual;
        }
    sum(scratch, error);
    std::int32_t is_better[LANES];
    for (int lane = 0; lane < LANES; ++lane) {
        const bool is_first_nan = error[lane] != error[lane] && best.error[lane] == INFINITY;
        is_better[lane] = error[lane] < best.error[lane] || is_first_nan;
        best.error[lane] = is_better[lane] ? error[lane] : best.error[lane];
        best.scale[lane] = is_better[lane] ? scale16[lane] : best.scale[lane];
        best.zero[lane] = is_better[lane] ? zero16[lane] : best.zero[lane];
    }
    for (long i = 0; i < GROUP; ++i)
        for (int lane = 0; lane < LANES; ++lane)
            best.codes[i][lane] = is_better[lane] ? codes[i][lane] : best.codes[i][lane];
}

// The scales and zeros of least squares to the codes.
INLINED void fit(
    const Block& weights, const Lanes& sum_w, const Block& codes, Block& scratch, Lanes& scale,
    Lanes& zero
) {
    constexpr float COUNT = GROUP;
    Lanes sum_c, sum_cc, sum_cw;
    for (long i = 0; i < GROUP; ++i)
        for (int lane = 0; lane < LANES; ++lane) scratch[i][lane] = codes[i][lane];
    sum(scratch, sum_c);
    for (long i = 0; i < GROUP; ++i)
        for (int lane = 0; lane < LANES; ++lane) scratch[i][lane] = codes[i][lane] * codes[i][lane];
    sum(scratch, sum_cc);
    for (long i = 0; i < GROUP; ++i)
        for (int lane = 0; lane < LANES; ++lane)
            scratch[i][lane] = codes[i][lane] * weights[i][lane];
    sum(scratch, sum_cw);
    for (int lane = 0; lane < LANES; ++lane) {
        const float spread = COUNT * sum_cc[lane] - sum_c[lane] * sum_c[lane];
        const float quotient = (COUNT * sum_cw[lane] - sum_c[lane] * sum_w[lane]) / spread;
        scale[lane] = spread > 0 ? quotient : 0.0f;
        zero[lane] = (sum_w[lane] - scale[lane] * sum_c[lane]) / COUNT;
    }
}

INLINED void find_best(const Block& weights, int num_bits, Best& best) {
    const float levels = static_cast<float>((1 << num_bits) - 1);
    Lanes middle, span, sum_w, low, high, scale, zero;
    Block codes, scratch;
    for (int lane = 0; lane < LANES; ++lane) low[lane] = high[lane] = weights[0][lane];
    for (long i = 0; i < GROUP; ++i)
        for (int lane = 0; lane < LANES; ++lane) {
            const float weight = scratch[i][lane] = weights[i][lane];
            low[lane] = weight < low[lane] ? weight : low[lane];
            high[lane] = weight > high[lane] ? weight : high[lane];
        }
    sum(scratch, sum_w);
    for (int lane = 0; lane < LANES; ++lane) {
        // A sum with an infinity or NaN in it is not finite, nor is what it is taken from.
        const float border = sum_w[lane] - sum_w[lane] + (low[lane] - low[lane]);
        const bool is_finite = border + (high[lane] - high[lane]) == 0.0f;
        const float sure_low = is_finite ? low[lane] : NAN, sure_high = is_finite ? high[lane] : NAN;
        middle[lane] = (sure_low + sure_high) * 0.5f, span[lane] = sure_high - sure_low;
        best.error[lane] = INFINITY, best.scale[lane] = best.zero[lane] = 0;
    }
    std::memset(best.codes, 0, sizeof best.codes);
    for (int start = 0; start < (num_bits == 4 ? 4 : 1); ++start) {
        for (int lane = 0; lane < LANES; ++lane) {
            const float width = span[lane] * SHRINKS[start];
            scale[lane] = width / levels, zero[lane] = middle[lane] - width * 0.5f;
        }
        offer(weights, levels, scale, zero, codes, scratch, best);
        for (int number = 0; number < NUM_FITS; ++number) {
            fit(weights, sum_w, codes, scratch, scale, zero);
            offer(weights, levels, scale, zero, codes, scratch, best);
        }
    }
}

INLINED std::uint8_t code_of(const Best& best, long i, int lane) {
    const float code = best.codes[i][lane];
    return static_cast<std::uint8_t>(static_cast<std::int32_t>(code == code ? code : 0.0f));
}

INLINED void write(const Best& best, int lane, const QuantisedWeights& place, long row, long group) {
    std::uint8_t* to = const_cast<std::uint8_t*>(place.row(row));
    std::uint8_t* codes = to + group * place.group_bytes();
    for (long i = 0; i < place.group_bytes(); ++i)
        codes[i] = place.num_bits == 8
            ? code_of(best, i, lane)
            : static_cast<std::uint8_t>(
                  code_of(best, i, lane) | code_of(best, i + GROUP / 2, lane) << 4);
    std::uint8_t* ends = to + place.num_groups() * place.group_bytes();
    std::memcpy(ends + 2 * group, &best.scale[lane], 2);
    std::memcpy(ends + 2 * (place.num_groups() + group), &best.zero[lane], 2);
}

}  // namespace

extern "C" {

// weights [num_rows, num_k] float32 to out [num_rows, row_bytes].
void lowtide_quantised_pack(
    int variant, int num_bits, const float* weights, std::uint8_t* out, long num_rows, long num_k
) {
    const QuantisedWeights place = {out, num_k, num_bits};
    const long num_groups = place.num_groups(), in_all = num_rows * num_groups;
    vectorised(variant, [=]() INLINED_LAMBDA {
        Block own;
        Best best;
        for (long first = 0; first < in_all; first += LANES) {
            for (int lane = 0; lane < LANES; ++lane) {
                // Where there are no more, the last again; so is a short group's last weight.
                const long number = std::min(first + lane, in_all - 1);
                const long row = number / num_groups, start = number % num_groups * GROUP;
                const float* from = weights + row * num_k + start;
                const long length = std::min(GROUP, num_k - start);
                for (long i = 0; i < GROUP; ++i) own[i][lane] = from[std::min(i, length - 1)];
            }
            find_best(own, num_bits, best);
            for (int lane = 0; lane < LANES && first + lane < in_all; ++lane)
                write(best, lane, place, (first + lane) / num_groups, (first + lane) % num_groups);
        }
    });
}

}
