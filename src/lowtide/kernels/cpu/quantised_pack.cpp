// Rounds weights to codes of 8 or 4 bits: the same bytes as `QuantisedRows.pack` of
// formats/quantised.py makes, which says how scales and zeros are found.

#include "quantised.hpp"

using namespace lowtide;

namespace {

constexpr float SHRINKS[] = {1.0f, 0.92f, 0.84f, 0.76f};
constexpr int NUM_FITS = 2;
constexpr float LARGEST = 65504.0f;  // of float16

// To nearest, ties to even; NaN stays one.
INLINED std::uint16_t float_to_half(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const auto sign = static_cast<std::uint16_t>(bits >> 16 & 0x8000);
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return sign | 0x7e00;
    if (bits >= 0x477ff000) return sign | 0x7c00;
    if (bits < 0x38800000) {  // below the least normal: a multiple of 2^-24
        float magnitude;
        std::memcpy(&magnitude, &bits, sizeof magnitude);
        const float shifted = magnitude + 0.5f;  // whose last bit is worth 2^-24
        std::uint32_t rounded_bits;
        std::memcpy(&rounded_bits, &shifted, sizeof rounded_bits);
        return sign | static_cast<std::uint16_t>(rounded_bits - 0x3f000000);
    }
    bits += 0xfff + (bits >> 13 & 1);
    return sign | static_cast<std::uint16_t>((bits - 0x38000000) >> 13);
}

INLINED float clipped(float value) {
    return value < -LARGEST ? -LARGEST : value > LARGEST ? LARGEST : value;
}

// Adds halves to each other.
INLINED float tree_sum(float* terms) {
    for (long half = GROUP / 2; half >= 16; half /= 2)
        for (long i = 0; i < half; ++i) terms[i] += terms[half + i];
    for (long half = 8; half > 0; half /= 2)
        for (long i = 0; i < half; ++i) terms[i] += terms[half + i];
    return terms[0];
}

struct Fit {
    float error = INFINITY;
    std::uint16_t scale = 0, zero = 0;
    float codes[GROUP] = {};
};

// The nearest codes under a scale and a zero, and what they are worth.
INLINED void offer(
    const float* weights, float levels, float scale, float zero, float* codes, Fit& best
) {
    constexpr float SHIFT = 12582912.0f;  // what is added to it is rounded to integers
    const std::uint16_t scale16 = float_to_half(clipped(scale));
    const std::uint16_t zero16 = float_to_half(clipped(zero));
    const float step = half_to_float(scale16), base = half_to_float(zero16);
    const float inverse = step > 0 ? 1.0f / step : 0.0f;
    float squares[GROUP];
    for (long i = 0; i < GROUP; ++i) {
        float code = (weights[i] - base) * inverse;
        // Rounded where that can matter: what is cut off below and above needs no rounding.
        code = code > 0.0f ? code : code != code ? code : 0.0f;
        code = code < levels ? code : code != code ? code : levels;
        code = (code + SHIFT) - SHIFT;
        codes[i] = code;
        const float residual = weights[i] - (code * step + base);
        squares[i] = residual * residual;
    }
    const float error = tree_sum(squares);
    if (!(error < best.error) && !(error != error && best.error == INFINITY)) return;
    best.error = error, best.scale = scale16, best.zero = zero16;
    for (long i = 0; i < GROUP; ++i) best.codes[i] = codes[i] == codes[i] ? codes[i] : 0.0f;
}

// The scale and zero of least squares to the codes.
INLINED void fit(const float* weights, float sum_w, const float* codes, float& scale, float& zero) {
    constexpr float COUNT = GROUP;
    float terms[GROUP];
    for (long i = 0; i < GROUP; ++i) terms[i] = codes[i];
    const float sum_c = tree_sum(terms);
    for (long i = 0; i < GROUP; ++i) terms[i] = codes[i] * codes[i];
    const float sum_cc = tree_sum(terms);
    for (long i = 0; i < GROUP; ++i) terms[i] = codes[i] * weights[i];
    const float sum_cw = tree_sum(terms);
    const float spread = COUNT * sum_cc - sum_c * sum_c;
    scale = spread > 0 ? (COUNT * sum_cw - sum_c * sum_w) / spread : 0.0f;
    zero = (sum_w - scale * sum_c) / COUNT;
}

INLINED Fit best_fit(const float* weights, int num_bits) {
    const float levels = static_cast<float>((1 << num_bits) - 1);
    float low = weights[0], high = weights[0];
    bool is_finite = true;
    for (long i = 0; i < GROUP; ++i) {
        low = weights[i] < low ? weights[i] : low;
        high = weights[i] > high ? weights[i] : high;
        is_finite &= weights[i] - weights[i] == 0.0f;
    }
    if (!is_finite) low = high = NAN;
    const float middle = (low + high) * 0.5f, span = high - low;
    float copy[GROUP];
    for (long i = 0; i < GROUP; ++i) copy[i] = weights[i];
    const float sum_w = tree_sum(copy);
    Fit best;
    float codes[GROUP];
    for (int start = 0; start < (num_bits == 4 ? 4 : 1); ++start) {
        const float width = span * SHRINKS[start];
        offer(weights, levels, width / levels, middle - width * 0.5f, codes, best);
        for (int number = 0; number < NUM_FITS; ++number) {
            float scale, zero;
            fit(weights, sum_w, codes, scale, zero);
            offer(weights, levels, scale, zero, codes, best);
        }
    }
    return best;
}

}  // namespace

extern "C" {

// weights [num_rows, num_k] float32 to out [num_rows, row_bytes].
void lowtide_quantised_pack(
    int variant, int num_bits, const float* weights, std::uint8_t* out, long num_rows, long num_k
) {
    const QuantisedWeights place = {out, num_k, num_bits};
    vectorised(variant, [=]() INLINED_LAMBDA {
        for (long row = 0; row < num_rows; ++row)
            for (long group = 0; group < place.num_groups(); ++group) {
                const float* from = weights + row * num_k + group * GROUP;
                const long length = std::min(GROUP, num_k - group * GROUP);
                float own[GROUP];
                for (long i = 0; i < GROUP; ++i) own[i] = from[std::min(i, length - 1)];
                const Fit best = best_fit(own, num_bits);
                std::uint8_t* to = out + row * place.row_bytes();
                std::uint8_t* codes = to + group * place.group_bytes();
                for (long i = 0; i < place.group_bytes(); ++i) {
                    const auto code = static_cast<std::uint8_t>(best.codes[i]);
                    codes[i] = num_bits == 8 ? code : static_cast<std::uint8_t>(
                        code | static_cast<std::uint8_t>(best.codes[i + GROUP / 2]) << 4);
                }
                std::uint8_t* ends = to + place.num_groups() * place.group_bytes();
                std::memcpy(ends + 2 * group, &best.scale, 2);
                std::memcpy(ends + 2 * (place.num_groups() + group), &best.zero, 2);
            }
    });
}

}
