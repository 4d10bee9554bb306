// Products of rows in codes of int8 with weights in ggml's packed types: kernels/int8_rows.py has the
// formula, and the order of its sums. Rows are rounded by groups of 32, whatever the weights' are.
//
//     out[r, o] = sum over groups of step * (scale * dot - offset * sum) (+ bias[o])
//
// dot is an integer, so however it is found the bits are the same:
//
// - plain: block by block. Compiled for every set of instructions.
// - VNNI: sixteen groups at a time, each in a lane of its own (ggml_words.hpp), unpacked once for
//   all rows; rows' codes are put into that order as they are rounded. What is left of two rows of
//   weights is often eight groups of each, and then taken together.

#pragma once

#include "ahead.hpp"
#include "ggml_k_words.hpp"
#include "int8_rows.hpp"

namespace lowtide {
namespace ggml {

constexpr long SUMS = ROW_GROUPS, ROW_GROUP = 32;
constexpr long MOST_CODES = SUMS * ROW_GROUP;

// Sixteen groups of a row, in some order.
struct alignas(64) RoundedGroups {
    i8 codes[MOST_CODES];
    std::int32_t starts[SUMS];  // minus the zero, times a group's codes
    float sums[SUMS], steps[SUMS];  // sums: of a group's codes
};

template <class Type>
constexpr long NUMBERS = SUMS * Type::GROUP;  // of a row, in so many groups

template <class Type>
constexpr long num_blocks(long num_k) { return (num_k + NUMBERS<Type> - 1) / NUMBERS<Type>; }

// A row, in its own order.
template <class Type>
INLINED void round_row_plainly(const bf16* x, long num_k, RoundedGroups* out) {
    constexpr long SIZE = Type::GROUP;
    for (long first = 0; first < num_k; first += ROW_GROUP) {
        RoundedGroups& block = out[first / NUMBERS<Type>];
        const long start = first % NUMBERS<Type>;
        const RoundedGroup group =
            round_group<ROW_GROUP>(x + first, ROW_GROUP, block.codes + start);
        for (long begin = start; begin < start + ROW_GROUP; begin += SIZE) {
            std::int32_t sum = 0;
            for (long i = 0; i < SIZE; ++i) sum += block.codes[begin + i];
            block.sums[begin / SIZE] = static_cast<float>(sum);
            block.steps[begin / SIZE] = group.step;
        }
    }
}

struct RoundedProduct {
    const RoundedGroups* x;
    long num_blocks;  // of a row
    long num_rows;  // MOST_ROUNDED at most
    const u8* w;
    const bf16* bias;  // or null
    bf16* out;
    long out_stride, num_outs, num_k;
    const void* next;  // see `Ahead`

    INLINED void store(long r, long o, float sum) const {
        out[r * out_stride + o] = round_bf16(sum + (bias ? widen(bias[o]) : 0.0f));
    }
};

template <class Type>
INLINED void multiply_plainly(const RoundedProduct& p) {
    constexpr long NUM_GROUPS = Type::SIZE / Type::GROUP;
    const long num_blocks = p.num_k / Type::SIZE;
    const u8* b = p.w;
    for (long o = 0; o < p.num_outs; ++o) {
        float sums[MOST_ROUNDED][SUMS] = {};
        for (long block = 0; block < num_blocks; ++block, b += Type::BYTES) {
            i8 numbers[Type::SIZE];
            float scales[NUM_GROUPS], offsets[NUM_GROUPS];
            Type::numbers(b, numbers);
            Type::scales(b, scales, offsets);
            for (long r = 0; r < p.num_rows; ++r)
                for (long g = 0; g < NUM_GROUPS; ++g) {
                    const long group = block * NUM_GROUPS + g, lane = group % SUMS;
                    const RoundedGroups& x = p.x[r * p.num_blocks + group / SUMS];
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
            p.store(r, o, lanes[0]);
        }
    }
}

#ifdef HAS_VNNI

// By place: which word of four codes, all groups' one after the other, lanes have.
template <class Type>
struct WordOrder {
    u8 words[MOST_CODES / 4];

    constexpr WordOrder() : words() {
        using Groups = Sixteen<Type>;
        for (int lane = 0; lane < SUMS; ++lane)
            for (int number = 0; number < Groups::NUM_WORDS; ++number) {
                const Word word = Groups::word(number, lane);
                words[number * SUMS + lane] =
                    static_cast<u8>(word.group * Groups::NUM_WORDS + word.number);
            }
    }
};

// Bytes of sixteen groups.
template <class Type>
constexpr long SIXTEEN_BYTES = SUMS * Type::GROUP / Type::SIZE * Type::BYTES;

struct alignas(64) Lanes {
    std::int32_t of[SUMS];
};

template <class Type>
constexpr Lanes groups_of_lanes() {
    Lanes groups{};
    for (int lane = 0; lane < SUMS; ++lane) groups.of[lane] = Sixteen<Type>::group(lane);
    return groups;
}

template <class Type>
constexpr Lanes lanes_of_groups() {
    Lanes lanes{};
    for (int lane = 0; lane < SUMS; ++lane) lanes.of[Sixteen<Type>::group(lane)] = lane;
    return lanes;
}

// For the lanes of the first eight groups, where those of the last eight are.
template <class Type>
constexpr Lanes lanes_behind() {
    Lanes lanes{};
    for (int lane = 0; lane < SUMS; ++lane)
        lanes.of[lane] = lanes_of_groups<Type>().of[Sixteen<Type>::group(lane) % 8 + 8];
    return lanes;
}

// Lanes of the first `num_groups` groups.
template <class Type>
VNNI INLINED __mmask16 lanes_before(long num_groups) {
    static constexpr Lanes GROUPS = groups_of_lanes<Type>();
    return _mm512_cmplt_epi32_mask(
        _mm512_load_si512(GROUPS.of), _mm512_set1_epi32(static_cast<int>(num_groups)));
}

// Rounds sixteen groups. Where there are fewer, the others are as if they were 0; only eight groups
// are there twice: the last of two rows of weights are taken together.
template <class Type>
VNNI INLINED void round_sixteen(const bf16* x, long length, RoundedGroups& out) {
    static constexpr WordOrder<Type> ORDER;
    static constexpr Lanes GROUPS = groups_of_lanes<Type>();
    constexpr long SIZE = NUMBERS<Type>;
    bf16 last[SIZE];
    if (length < SIZE) {
        std::memset(last, 0, sizeof last);
        std::memcpy(last, x, length * sizeof(bf16));
        if (length == SIZE / 2) std::memcpy(last + SIZE / 2, x, length * sizeof(bf16));
        x = last;
    }
    alignas(64) i8 codes[SIZE];
    const __m512 steps = round_groups<ROW_GROUP, SIZE / ROW_GROUP>(x, codes);
    put_in_order<SIZE / 64>(codes, ORDER.words, out.codes);
    const __m512i row_groups = _mm512_srli_epi32(
        _mm512_load_si512(GROUPS.of), Type::GROUP < ROW_GROUP);  // a group of the row may have two
    _mm512_store_ps(out.steps, _mm512_permutexvar_ps(row_groups, steps));
    Sixteen<Type> ones;
    for (auto& each : ones.of) each = bytes_of(1);
    const __m512i sums = ones.dots(out.codes, _mm512_setzero_si512());
    _mm512_store_ps(out.sums, _mm512_cvtepi32_ps(sums));
    _mm512_store_si512(
        out.starts, _mm512_mullo_epi32(sums, _mm512_set1_epi32(-Sixteen<Type>::ZERO)));
}

// As `round_row_plainly`, in the order of `Sixteen`.
template <class Type>
VNNI void round_row(const bf16* x, long num_k, RoundedGroups* out) {
    for (; num_k > 0; x += NUMBERS<Type>, num_k -= NUMBERS<Type>)
        round_sixteen<Type>(x, num_k, *out++);
}

// What sixteen groups of weights make with those of a row.
template <class Type>
VNNI INLINED __m512 terms(const Sixteen<Type>& groups, const RoundedGroups& x) {
    const __m512i dots = groups.dots(x.codes, _mm512_load_si512(x.starts));
    __m512 term = _mm512_mul_ps(_mm512_cvtepi32_ps(dots), groups.scale);
    if (Type::HAS_OFFSETS)
        term = _mm512_sub_ps(term, _mm512_mul_ps(groups.offset, _mm512_load_ps(x.sums)));
    return _mm512_mul_ps(term, _mm512_load_ps(x.steps));
}

// Adds the terms of groups at `b`, in two halves, with the block `number` of some rows.
template <class Type>
VNNI INLINED void add_groups(
    const RoundedProduct& p, const Halves& b, long number, long num_rows, __m512* sums
) {
    Sixteen<Type> groups;
    groups.load(b);
    const RoundedGroups* x = p.x + number;
    for (long r = 0; r < num_rows; ++r, x += p.num_blocks)
        sums[r] = _mm512_add_ps(sums[r], terms(groups, *x));
}

// The same of the last groups of a row, fewer than sixteen, of which there are `left` bytes. What
// follows them is read, too, where there is as much as that; it adds nothing.
template <class Type>
VNNI INLINED void add_last(
    const RoundedProduct& p, const u8* b, long left, long readable, long num_rows, __m512* sums
) {
    constexpr long BYTES = SIXTEEN_BYTES<Type>;
    const __mmask16 own = lanes_before<Type>(left / Type::BYTES * (Type::SIZE / Type::GROUP));
    alignas(64) u8 last[BYTES];
    if (readable < BYTES) {
        std::memset(last, 0, BYTES);
        std::memcpy(last, b, left);
        b = last;
    }
    Sixteen<Type> groups;
    groups.load({b, b + BYTES / 2});
    const RoundedGroups* x = p.x + p.num_blocks - 1;
    for (long r = 0; r < num_rows; ++r, x += p.num_blocks)
        sums[r] = _mm512_mask_add_ps(sums[r], own, sums[r], terms(groups, *x));
}

// The same of two rows of weights, eight groups of each.
template <class Type>
VNNI INLINED void add_last_of_two(
    const RoundedProduct& p, const Halves& b, long num_rows, __m512* first, __m512* second
) {
    static constexpr Lanes BEHIND = lanes_behind<Type>();
    const __mmask16 own = lanes_before<Type>(SUMS / 2);
    Sixteen<Type> groups;
    groups.load(b);
    const RoundedGroups* x = p.x + p.num_blocks - 1;
    for (long r = 0; r < num_rows; ++r, x += p.num_blocks) {
        const __m512 term = terms(groups, *x);
        first[r] = _mm512_mask_add_ps(first[r], own, first[r], term);
        second[r] = _mm512_mask_add_ps(
            second[r], own, second[r],
            _mm512_permutexvar_ps(_mm512_load_si512(BEHIND.of), term));
    }
}

// Groups are added in their own order.
template <class Type>
VNNI INLINED __m512 in_order(__m512 lanes) {
    static constexpr Lanes LANES = lanes_of_groups<Type>();
    return _mm512_permutexvar_ps(_mm512_load_si512(LANES.of), lanes);
}

// `outs` rows of weights, one or two, with `rows` rows, or with p.num_rows where that is 0.
template <class Type, int rows, int outs>
VNNI INLINED void multiply_some(const RoundedProduct& p, long row_bytes, long o) {
    constexpr long BYTES = SIXTEEN_BYTES<Type>;
    const long num_rows = rows ? rows : p.num_rows, left = row_bytes % BYTES;
    const u8* const start = p.w + o * row_bytes;
    __m512 lanes[outs][rows ? rows : MOST_ROUNDED];
    for (int i = 0; i < outs; ++i) {
        const u8* b = start + i * row_bytes;
        for (long r = 0; r < num_rows; ++r) lanes[i][r] = _mm512_setzero_ps();
        for (long number = 0; number < row_bytes / BYTES; ++number, b += BYTES)
            add_groups<Type>(p, {b, b + BYTES / 2}, number, num_rows, lanes[i]);
    }
    const u8* const last = start + row_bytes - left;
    if (outs == 2 && 2 * left == BYTES)
        add_last_of_two<Type>(p, {last, last + row_bytes}, num_rows, lanes[0], lanes[outs - 1]);
    else if (left > 0)
        for (int i = 0; i < outs; ++i)
            add_last<Type>(p, last + i * row_bytes, left, (p.num_outs - o - i) * row_bytes
                           - (row_bytes - left), num_rows, lanes[i]);
    for (long r = 0; r < num_rows; ++r) {
        float sums[2];
        sums_of_sixteen(
            in_order<Type>(lanes[0][r]), in_order<Type>(lanes[outs - 1][r]), sums);
        for (int i = 0; i < outs; ++i) p.store(r, o + i, sums[i]);
    }
}

// See `reads_in_order`.
template <class Type>
VNNI void multiply_in_order(const RoundedProduct& p) {
    const long row_bytes = p.num_k / Type::SIZE * Type::BYTES;
    long o = 0;
    for (; o + 2 <= p.num_outs; o += 2) multiply_some<Type, 1, 2>(p, row_bytes, o);
    if (o < p.num_outs) multiply_some<Type, 1, 1>(p, row_bytes, o);
}

template <class Type, int outs>
VNNI INLINED void multiply_some(
    const RoundedProduct& p, long row_bytes, long o, Ahead& ahead
) {
    ahead.read_bytes(outs * row_bytes);
    if (p.num_rows == 1) multiply_some<Type, 1, outs>(p, row_bytes, o);
    else multiply_some<Type, 0, outs>(p, row_bytes, o);
}

template <class Type>
VNNI void multiply_dots(const RoundedProduct& p) {
    const long row_bytes = p.num_k / Type::SIZE * Type::BYTES;
    Ahead ahead(p.w, p.num_outs * row_bytes, p.next);
    long o = 0;
    for (; o + 2 <= p.num_outs; o += 2) multiply_some<Type, 2>(p, row_bytes, o, ahead);
    if (o < p.num_outs) multiply_some<Type, 1>(p, row_bytes, o, ahead);
}

#endif

}  // namespace ggml
}  // namespace lowtide
