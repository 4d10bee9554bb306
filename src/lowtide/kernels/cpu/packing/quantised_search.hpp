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

// The groups in all lanes: weight i of each, and its importance.
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

// The float32 of a half that `to_half` made.
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

// a * b + c, where a * b is exact: fused or not makes no difference.
SEARCH INLINED Vector times_plus(const Vector& a, const Vector& b, const Vector& c) {
#if VECTOR_BYTES == 64
    return _mm512_fmadd_ps(a, b, c);
#elif VECTOR_BYTES == 32
    return _mm256_fmadd_ps(a, b, c);
#else
    return a * b + c;
#endif
}

// From 0 to `most`. A NaN passes both comparisons.
SEARCH INLINED Vector within(const Vector& value, const Vector& most) {
#if VECTOR_BYTES == 64
    return _mm512_min_ps(most, _mm512_max_ps(Vector{}, value));
#elif VECTOR_BYTES == 32
    return _mm256_min_ps(most, _mm256_max_ps(Vector{}, value));
#else
    const Vector least = value < 0.0f ? Vector{} : value;
    return least > most ? most : least;
#endif
}

// The nearest codes.
SEARCH INLINED Vector codes_of(
    const Vector& weights, const Vector& base, const Vector& inverse, const Vector& levels
) {
    constexpr float SHIFT = 12582912.0f;  // what is added to it is rounded to integers
    const Vector exact = (weights - base) * inverse;  // what is cut off needs no rounding
    return (within(exact, levels) + SHIFT) - SHIFT;
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
        const Vector residual = weight - times_plus(code, step, base);
        if constexpr (is_weighted) {
            const Vector worth = groups.importance[i], times = worth * code;
            error += worth * (residual * residual);
            sum_c += times, sum_cc += times * code, sum_cw += times * weight;
        } else {
            error += residual * residual;
            sum_c += code, sum_cc = times_plus(code, code, sum_cc), sum_cw += code * weight;
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

// The elements of two vectors by turns, from `first` of each on.
template <int first, int... number>
SEARCH INLINED Integers by_turns(
    const Integers& a, const Integers& b, std::integer_sequence<int, number...>
) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, (first + number / 2 + number % 2 * LANES)...);
#else
    return __builtin_shuffle(
        a, b, Integers{static_cast<std::uint32_t>(first + number / 2 + number % 2 * LANES)...});
#endif
}

// Rows of a square become its columns.
SEARCH INLINED void transpose(Integers* rows) {
    constexpr std::make_integer_sequence<int, LANES> all_numbers;
    Integers turned[LANES];
    for (int done = 1; done < LANES; done *= 2) {
        for (int i = 0; i < LANES / 2; ++i) {
            turned[2 * i] = by_turns<0>(rows[i], rows[i + LANES / 2], all_numbers);
            turned[2 * i + 1] = by_turns<LANES / 2>(rows[i], rows[i + LANES / 2], all_numbers);
        }
        for (int i = 0; i < LANES; ++i) rows[i] = turned[i];
    }
}

// Number i of each lane, from numbers that lie lane by lane.
SEARCH INLINED void side_by_side(const float (&own)[LANES][GROUP], Vector* out) {
    for (long first = 0; first < GROUP; first += LANES) {
        Integers square[LANES];
        for (int lane = 0; lane < LANES; ++lane)
            std::memcpy(&square[lane], own[lane] + first, sizeof square[lane]);
        transpose(square);
        for (int i = 0; i < LANES; ++i) out[first + i] = (Vector)square[i];
    }
}

// Two neighbours of 16 bits are turned as one of 32.
SEARCH INLINED void side_by_side(const bf16 (&own)[LANES][GROUP], Vector* out) {
    for (long first = 0; first < GROUP; first += 2 * LANES) {
        Integers square[LANES];
        for (int lane = 0; lane < LANES; ++lane)
            std::memcpy(&square[lane], own[lane] + first, sizeof square[lane]);
        transpose(square);
        for (int i = 0; i < LANES; ++i) {
            out[first + 2 * i] = (Vector)(square[i] << 16);
            out[first + 2 * i + 1] = (Vector)(square[i] & 0xffff0000u);
        }
    }
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
    Number own[LANES][GROUP];
    float worth[is_weighted ? LANES : 1][GROUP];
    for (int lane = 0; lane < LANES; ++lane) {
        // Where there are no more, the last again; so is a short group's last weight.
        const long number = std::min(first + lane, in_all - 1);
        const long start = number % num_groups * GROUP;
        const long length = std::min(GROUP, p.place.num_k - start);
        std::copy_n(p.weights + number / num_groups * p.place.num_k + start, length, own[lane]);
        std::fill(own[lane] + length, own[lane] + GROUP, own[lane][length - 1]);
        if constexpr (is_weighted) {
            std::copy_n(p.importance + start, length, worth[lane]);
            std::fill(worth[lane] + length, worth[lane] + GROUP, 0.0f);
        }
    }
    side_by_side(own, groups.weights);
    if constexpr (is_weighted) side_by_side(worth, groups.importance);
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
