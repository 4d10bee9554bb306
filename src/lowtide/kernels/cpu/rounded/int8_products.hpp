// Products of rows rounded to int8 with packed weights. kernels/int8_rows.py defines the formula
// and the order of its sums:
//
//     out[r, o] = sum over groups of step * (scale * dot - offset * sum) (+ bias[o])
//
// dot is an integer, so every way to compute it gives the same bits:
//
// - plain C++: block by block, here.
// - AVX2, AVX-VNNI: sixteen groups at a time, 32 numbers to a register (int8_avx2.hpp).
// - VNNI: sixteen groups at a time, each in a lane of its own (ggml_words.hpp), unpacked once for a
//   few rows of x, whose codes are brought into that order as they are rounded (int8_few_rows.hpp).
// - many rows: weights of any type are unpacked once for all of them; rows of x lie side by side
//   (int8_many_rows.hpp) or in tiles of AMX (int8_tiles.hpp).

#pragma once

#include "dense/ahead.hpp"
#include "rounded/int8_rows.hpp"
#include "rounded/int8_weights.hpp"

namespace lowtide {

// Sixteen groups of a rounded row, in the order of the code that multiplies them.
template <class Type>
struct alignas(64) RoundedGroups {
    std::int8_t codes[NUMBERS<Type>];
    std::int32_t starts[SUMS];  // minus the stored zero times the sum of a group's codes
    float sums[SUMS], steps[SUMS];  // sums: of a group's codes
};

template <class Type>
constexpr long row_lines(long num_k) {
    return num_sixteens<Type>(num_k) * static_cast<long>(sizeof(RoundedGroups<Type>) / sizeof(Line));
}

struct RoundedProduct {
    const Line* x;
    long row_lines;
    long num_rows;
    const std::uint8_t* w;
    const bf16* bias;  // or null
    bf16* out;
    long out_stride, num_outs, num_k;
    const void* next;  // see `Ahead`

    template <class Type>
    INLINED const RoundedGroups<Type>* row(long r) const {
        return reinterpret_cast<const RoundedGroups<Type>*>(x + r * row_lines);
    }

    // Returns the product of `count` rows of x from `first` on.
    RoundedProduct rows(long first, long count) const {
        RoundedProduct some = *this;
        some.x += first * row_lines, some.num_rows = count, some.out += first * out_stride;
        return some;
    }
};

// Rounds a row; its codes stay in their own order.
template <class Type>
INLINED void round_row_plainly(const bf16* x, long num_k, Line* out) {
    constexpr long SIZE = Type::GROUP, OF_ROW = ROW_GROUP<Type>;
    auto* const sixteens = reinterpret_cast<RoundedGroups<Type>*>(out);
    for (long first = 0; first < num_sixteens<Type>(num_k) * NUMBERS<Type>; first += OF_ROW) {
        RoundedGroups<Type>& block = sixteens[first / NUMBERS<Type>];
        const long start = first % NUMBERS<Type>, length = std::clamp(num_k - first, 0L, OF_ROW);
        const float step =
            round_group<OF_ROW>(x + (length ? first : 0), length, block.codes + start);
        for (long begin = start; begin < start + OF_ROW; begin += SIZE) {
            std::int32_t sum = 0;
            for (long i = 0; i < SIZE; ++i) sum += block.codes[begin + i];
            block.sums[begin / SIZE] = static_cast<float>(sum);
            block.steps[begin / SIZE] = step;
        }
    }
}

// p.num_rows: at most `MOST_ROUNDED`.
template <class Type>
INLINED void multiply_plainly(const RoundedProduct& p) {
    constexpr long NUM_GROUPS = Type::SIZE / Type::GROUP;
    const long num_blocks = (p.num_k + Type::SIZE - 1) / Type::SIZE;
    const long row_bytes = WeightRow<Type>::bytes(p.num_k);
    for (long o = 0; o < p.num_outs; ++o) {
        const WeightRow<Type> row(p.w + o * row_bytes, p.num_k);
        float sums[MOST_ROUNDED][SUMS] = {};
        for (long block = 0; block < num_blocks; ++block) {
            typename WeightRow<Type>::Number numbers[Type::SIZE];
            float scales[NUM_GROUPS], offsets[NUM_GROUPS];
            row.block(block, numbers, scales, offsets);
            for (long r = 0; r < p.num_rows; ++r)
                for (long g = 0; g < NUM_GROUPS; ++g) {
                    const long group = block * NUM_GROUPS + g, lane = group % SUMS;
                    const RoundedGroups<Type>& x = p.row<Type>(r)[group / SUMS];
                    std::int32_t dot = 0;
                    for (long i = 0; i < Type::GROUP; ++i)
                        dot += static_cast<std::int32_t>(x.codes[lane * Type::GROUP + i]) *
                               static_cast<std::int32_t>(numbers[g * Type::GROUP + i]);
                    float term = static_cast<float>(dot) * scales[g];
                    if (Type::HAS_OFFSETS) term -= offsets[g] * x.sums[lane];
                    sums[r][lane] += term * x.steps[lane];
                }
        }
        for (long r = 0; r < p.num_rows; ++r) {
            float* lanes = sums[r];
            for (long half = SUMS / 2; half > 0; half /= 2)
                for (long i = 0; i < half; ++i) lanes[i] += lanes[half + i];
            const float bias = p.bias ? widen(p.bias[o]) : 0.0f;
            p.out[r * p.out_stride + o] = round_bf16(lanes[0] + bias);
        }
    }
}

#ifdef HAS_VNNI

// words: for each place in registers, the number of its word of four codes, counted over all groups
// in order. places: the inverse.
template <class Type>
struct WordOrder {
    static constexpr int NUM_WORDS = ggml::Sixteen<Type>::NUM_WORDS;
    std::uint8_t words[SUMS * NUM_WORDS], places[SUMS * NUM_WORDS];

    constexpr WordOrder() : words(), places() {
        for (int lane = 0; lane < SUMS; ++lane)
            for (int number = 0; number < NUM_WORDS; ++number) {
                const ggml::Word word = ggml::Sixteen<Type>::word(number, lane);
                const int place = number * static_cast<int>(SUMS) + lane;
                words[place] = static_cast<std::uint8_t>(word.group * NUM_WORDS + word.number);
                places[words[place]] = static_cast<std::uint8_t>(place);
            }
    }
};

struct alignas(64) Lanes {
    std::int32_t of[SUMS];
};

template <class Type>
constexpr Lanes groups_of_lanes() {
    Lanes groups{};
    for (int lane = 0; lane < SUMS; ++lane) groups.of[lane] = ggml::Sixteen<Type>::group(lane);
    return groups;
}

template <class Type>
constexpr Lanes lanes_of_groups() {
    Lanes lanes{};
    for (int lane = 0; lane < SUMS; ++lane) lanes.of[ggml::Sixteen<Type>::group(lane)] = lane;
    return lanes;
}

// Brings the values of lanes into the order of their groups.
template <class Type>
VNNI INLINED __m512 in_order(__m512 lanes) {
    static constexpr Lanes LANES = lanes_of_groups<Type>();
    if constexpr (ggml::Sixteen<Type>::group(1) == 1) return lanes;
    return _mm512_permutexvar_ps(_mm512_load_si512(LANES.of), lanes);
}

// Rounds sixteen groups. Missing groups are 0; at most eight groups are written twice, for the last
// groups of two rows of weights that share a register.
template <class Type>
VNNI INLINED void round_sixteen(const bf16* x, long length, RoundedGroups<Type>& out) {
    static constexpr WordOrder<Type> ORDER;
    static constexpr Lanes GROUPS = groups_of_lanes<Type>();
    constexpr long SIZE = NUMBERS<Type>, OF_ROW = ROW_GROUP<Type>;
    bf16 last[SIZE];
    if (length < SIZE) {
        std::memset(last, 0, sizeof last);
        std::memcpy(last, x, length * sizeof(bf16));
        if (length <= SIZE / 2) std::memcpy(last + SIZE / 2, x, length * sizeof(bf16));
        x = last;
    }
    alignas(64) std::int8_t codes[SIZE];
    const __m512 steps = round_groups<OF_ROW, SIZE / OF_ROW>(x, codes);
    constexpr long AT_ONCE = SIZE < 512 ? SIZE : 512;
    for (long first = 0; first < SIZE; first += AT_ONCE)
        put_in_order<AT_ONCE / 64>(codes + first, ORDER.words + first / 4, out.codes + first);
    const __m512i row_groups = _mm512_srli_epi32(
        _mm512_load_si512(GROUPS.of), Type::GROUP < OF_ROW);  // two may share a step
    _mm512_store_ps(out.steps, _mm512_permutexvar_ps(row_groups, steps));
    ggml::Sixteen<Type> ones;
    for (auto& each : ones.of) each = ggml::bytes_of(1);
    const __m512i sums = ones.dots(out.codes, _mm512_setzero_si512());
    _mm512_store_ps(out.sums, _mm512_cvtepi32_ps(sums));
    _mm512_store_si512(
        out.starts, _mm512_mullo_epi32(sums, _mm512_set1_epi32(-ggml::Sixteen<Type>::ZERO)));
}

// Rounds a row to codes in the order of `Sixteen`.
template <class Type>
VNNI void round_row(const bf16* x, long num_k, Line* out) {
    auto* to = reinterpret_cast<RoundedGroups<Type>*>(out);
    for (; num_k > 0; x += NUMBERS<Type>, num_k -= NUMBERS<Type>)
        round_sixteen<Type>(x, num_k, *to++);
}

#endif

}  // namespace lowtide
