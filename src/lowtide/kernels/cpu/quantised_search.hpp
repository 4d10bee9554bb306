// The scales, zeros and codes of some groups side by side, one in each lane of a vector. Included
// once for every set of instructions, with these defined and in a namespace of its own:
//
//     SEARCH         the functions' target
//     VECTOR_BYTES   of its vectors
//
// Each lane does what `fitted` of formats/quantised.py does, in the same order and with the same
// bits: nothing is fused, sums are from the first weight to the last.

using Vector = float __attribute__((vector_size(VECTOR_BYTES)));
using Integers = std::uint32_t __attribute__((vector_size(VECTOR_BYTES)));
using Signed = std::int32_t __attribute__((vector_size(VECTOR_BYTES)));

constexpr int LANES = VECTOR_BYTES / sizeof(float);

// Of groups in all lanes: weight i of each, its importance.
struct Groups {
    Vector weights[GROUP], importance[GROUP];
};

// What rounds each group best so far, and sums of its codes: of themselves, of their squares and of
// their products with the weights, each times the weights' importance.
struct Offer {
    Vector error, scale, zero, sum_c, sum_cc, sum_cw;
};

SEARCH INLINED Vector all(float value) { return Vector{} + value; }

// To float16, nearest, ties to even, of what is not beyond the largest; NaN stays one.
SEARCH INLINED Integers to_half(const Vector& value) {
    const Integers bits = (Integers)value, size = bits & 0x7fffffffu;
    const Integers sign = bits >> 16 & 0x8000u;
    // Below the least normal a multiple of 2^-24: what the last bit of 0.5 + size is worth.
    const Integers tiny = (Integers)((Vector)size + 0.5f) - 0x3f000000u;
    const Integers normal = (size + 0xfffu + (size >> 13 & 1u) - 0x38000000u) >> 13;
    const Integers number = size < 0x38800000u ? tiny : normal;
    return sign | (size > 0x7f800000u ? Integers{} + 0x7e00u : number);
}

// Of what `to_half` makes.
SEARCH INLINED Vector half_back(const Integers& half) {
    const Integers size = half & 0x7fffu, sign = (half & 0x8000u) << 16;
    const Vector tiny = __builtin_convertvector((Signed)size, Vector) * 0x1p-24f;
    const Integers normal = (size << 13) + 0x38000000u;
    const Integers number = size < 0x0400u ? (Integers)tiny
                            : size > 0x7c00u ? Integers{} + 0x7fc00000u : normal;
    return (Vector)(sign | number);
}

SEARCH INLINED Vector rounded_to_half(const Vector& value) {
    const Vector least = value < -LARGEST ? all(-LARGEST) : value;
    return half_back(to_half(least > LARGEST ? all(LARGEST) : least));
}

SEARCH INLINED Vector inverse_of(const Vector& step) {
    return step > 0.0f ? 1.0f / step : Vector{};
}

// The nearest codes. A NaN passes both comparisons.
SEARCH INLINED Vector codes_of(
    const Vector& weights, const Vector& base, const Vector& inverse, const Vector& levels
) {
    constexpr float SHIFT = 12582912.0f;  // what is added to it is rounded to integers
    const Vector exact = (weights - base) * inverse;
    const Vector least = exact < 0.0f ? Vector{} : exact;  // what is cut off needs no rounding
    const Vector most = least > levels ? levels : least;
    return (most + SHIFT) - SHIFT;
}

// The codes under scales and zeros, rounded to float16.
template <bool is_weighted>
SEARCH INLINED Offer offered(
    const Groups& groups, const Vector& levels, const Vector& scale, const Vector& zero
) {
    Offer out{};
    out.scale = rounded_to_half(scale), out.zero = rounded_to_half(zero);
    const Vector step = out.scale, base = out.zero, inverse = inverse_of(step);
    Vector error{}, sum_c{}, sum_cc{}, sum_cw{};
    for (long i = 0; i < GROUP; ++i) {
        const Vector weight = groups.weights[i], code = codes_of(weight, base, inverse, levels);
        const Vector residual = weight - (code * step + base);
        if constexpr (is_weighted) {
            const Vector worth = groups.importance[i], times = worth * code;
            error += worth * (residual * residual);
            sum_c += times, sum_cc += times * code, sum_cw += times * weight;
        } else {
            error += residual * residual;
            sum_c += code, sum_cc += code * code, sum_cw += code * weight;
        }
    }
    out.error = error, out.sum_c = sum_c, out.sum_cc = sum_cc, out.sum_cw = sum_cw;
    return out;
}

SEARCH INLINED void keep_better(const Offer& other, Offer& best) {
    const auto is_better = other.error < best.error;
    best.error = is_better ? other.error : best.error;
    best.scale = is_better ? other.scale : best.scale;
    best.zero = is_better ? other.zero : best.zero;
    best.sum_c = is_better ? other.sum_c : best.sum_c;
    best.sum_cc = is_better ? other.sum_cc : best.sum_cc;
    best.sum_cw = is_better ? other.sum_cw : best.sum_cw;
}

// Codes are written over the groups' weights. A group that is not finite has no scale or zero.
template <int num_bits, bool is_weighted>
SEARCH INLINED void search(Groups& groups, Integers& scale16, Integers& zero16) {
    const Vector levels = all(static_cast<float>((1 << num_bits) - 1));
    Vector low = groups.weights[0], high = low, sum_w{}, sum_one{}, border{};
    for (long i = 0; i < GROUP; ++i) {
        const Vector weight = groups.weights[i];
        low = weight < low ? weight : low, high = weight > high ? weight : high;
        border += weight - weight;  // NaN where a weight is not finite
        if constexpr (is_weighted) {
            sum_w += groups.importance[i] * weight, sum_one += groups.importance[i];
        } else {
            sum_w += weight;
        }
    }
    if constexpr (!is_weighted) sum_one = all(static_cast<float>(GROUP));
    const Vector middle = (low + high) * 0.5f + 0.0f, span = high - low;  // + 0: never -0
    Offer best{};
    best.error = all(INFINITY);
    for (int number = 0; number < (num_bits == 4 ? 4 : 1); ++number) {
        const Vector width = span * SHRINKS[number];
        keep_better(
            offered<is_weighted>(groups, levels, width / levels, middle - width * 0.5f), best);
    }
    Offer last = best;
    for (int number = 0; number < NUM_FITS; ++number) {
        const Vector spread = sum_one * last.sum_cc - last.sum_c * last.sum_c;
        const Vector quotient = (sum_one * last.sum_cw - last.sum_c * sum_w) / spread;
        const Vector scale = spread > 0.0f ? quotient : Vector{};
        last = offered<is_weighted>(groups, levels, scale, (sum_w - scale * last.sum_c) / sum_one);
        keep_better(last, best);
    }
    const Vector inverse = inverse_of(best.scale);
    const auto is_finite = border == 0.0f;
    for (long i = 0; i < GROUP; ++i) {
        const Vector codes = codes_of(groups.weights[i], best.zero, inverse, levels);
        groups.weights[i] = is_finite ? codes : Vector{};
    }
    scale16 = is_finite ? to_half(best.scale) : Integers{} + 0x7e00u;
    zero16 = is_finite ? to_half(best.zero) : Integers{} + 0x7e00u;
}

// A byte of the groups' codes.
template <int num_bits>
SEARCH INLINED Integers byte_of(const Groups& groups, long number) {
    const auto code = [&](long i) SEARCH INLINED_LAMBDA {
        return (Integers)__builtin_convertvector(groups.weights[i], Signed);
    };
    return num_bits == 8 ? code(number) : code(number) | code(number + GROUP / 2) << 4;
}

// Groups `first` to `first + LANES - 1` of all, or as many as there are.
template <int num_bits, bool is_weighted, class Number>
SEARCH INLINED void pack_some(const Packing<Number>& p, long first) {
    const long num_groups = p.place.num_groups(), in_all = p.num_rows * num_groups;
    Groups groups;
    float own[LANES][GROUP];
    for (int lane = 0; lane < LANES; ++lane) {
        // Where there are no more, the last again; so is a short group's last weight.
        const long number = std::min(first + lane, in_all - 1);
        const long start = number % num_groups * GROUP;
        const long length = std::min(GROUP, p.place.num_k - start);
        const long from = number / num_groups * p.place.num_k + start;
        for (long i = 0; i < length; ++i) own[lane][i] = as_float(p.weights[from + i]);
        for (long i = length; i < GROUP; ++i) own[lane][i] = own[lane][length - 1];
        if constexpr (is_weighted)
            for (long i = 0; i < GROUP; ++i)
                groups.importance[i][lane] = i < length ? p.importance[start + i] : 0.0f;
    }
    for (long i = 0; i < GROUP; ++i)
        for (int lane = 0; lane < LANES; ++lane) groups.weights[i][lane] = own[lane][i];
    Integers scale16, zero16, words[GROUP * num_bits / 32];
    search<num_bits, is_weighted>(groups, scale16, zero16);
    for (long number = 0; number < GROUP * num_bits / 32; ++number) {
        words[number] = byte_of<num_bits>(groups, 4 * number);
        for (int i = 1; i < 4; ++i)
            words[number] |= byte_of<num_bits>(groups, 4 * number + i) << 8 * i;
    }
    for (int lane = 0; lane < LANES && first + lane < in_all; ++lane) {
        std::uint32_t codes[GROUP * num_bits / 32];
        for (long i = 0; i < GROUP * num_bits / 32; ++i) codes[i] = words[i][lane];
        write_group(p.place, first + lane, codes, static_cast<std::uint16_t>(scale16[lane]),
                    static_cast<std::uint16_t>(zero16[lane]));
    }
}

template <int num_bits, bool is_weighted, class Number>
SEARCH void pack(const Packing<Number>& p) {
    const long in_all = p.num_rows * p.place.num_groups();
    for (long first = 0; first < in_all; first += LANES) pack_some<num_bits, is_weighted>(p, first);
}
