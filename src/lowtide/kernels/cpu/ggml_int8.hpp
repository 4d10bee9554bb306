// Products of rows in codes of int8 with weights in ggml's packed types: kernels/int8_rows.py has the
// formula, and the order of its sums. Rows are rounded by groups of 32, whatever the weights' are.
//
//     out[r, o] = sum over groups of step * (scale * dot - offset * sum) (+ bias[o])
//
// dot is an integer, so however it is found the bits are the same:
//
// - plain: block by block. Compiled for every set of instructions.
// - VNNI: sixteen groups at a time, each in a lane of its own (ggml_words.hpp), unpacked once for
//   all rows; rows' codes are put into that order as they are rounded.

#pragma once

#include <vector>

#include "ahead.hpp"
#include "ggml_k_words.hpp"
#include "int8_rows.hpp"
#include "products.hpp"

namespace lowtide {
namespace ggml {

constexpr long SUMS = 16;  // partial sums of an output, and groups that are taken together
constexpr long ROW_GROUP = 32;
constexpr long MOST_CODES = SUMS * ROW_GROUP;

// Where a type has the words of sixteen groups, and how it shifts their numbers.
struct Order {
    long group_size;
    int zero;  // of numbers without a sign
    u8 groups[SUMS];  // by lane
    u8 words[MOST_CODES / 4];  // by place: of all groups' words one after the other
};

// Of codes as they follow one another.
template <class Type>
constexpr Order plain_order() {
    Order order{};
    order.group_size = Type::GROUP;
    for (int i = 0; i < SUMS; ++i) order.groups[i] = static_cast<u8>(i);
    for (int i = 0; i < MOST_CODES / 4; ++i) order.words[i] = static_cast<u8>(i);
    return order;
}

// Sixteen groups of a row, in some order.
struct alignas(64) RoundedGroups {
    i8 codes[MOST_CODES];
    std::int32_t starts[SUMS];  // minus the zero, times a group's codes
    float sums[SUMS], steps[SUMS];  // sums: of a group's codes
};

// Some rows. Owns what it is filled with.
class RoundedRows {
   public:
    void round(
        int variant, const Order& order, const bf16* x, long stride, long num_rows, long num_k
    ) {
        const long size = SUMS * order.group_size;
        num_blocks_ = (num_k + size - 1) / size;
        const auto needed = static_cast<std::size_t>(num_rows * num_blocks_);
        if (blocks_.size() < needed) blocks_.resize(needed);
        const long num_blocks = num_blocks_;
        RoundedGroups* const blocks = blocks_.data();
        vectorised(variant, [=, &order]() INLINED_LAMBDA {
            for (long row = 0; row < num_rows; ++row)
                for (long number = 0; number < num_blocks; ++number)
                    round_groups(order, x + row * stride + number * size, num_k - number * size,
                                 blocks[row * num_blocks + number]);
        });
    }

    // Of row `row`.
    const RoundedGroups* blocks(long row) const { return blocks_.data() + row * num_blocks_; }
    long num_blocks() const { return num_blocks_; }

   private:
    // length: what is left of the row; what is beyond it is nothing.
    static INLINED void round_groups(
        const Order& order, const bf16* x, long length, RoundedGroups& out
    ) {
        const long size = order.group_size;
        alignas(64) i8 codes[MOST_CODES] = {};
        float steps[SUMS] = {};
        std::int32_t sums[SUMS] = {};
        for (long first = 0; first < std::min(length, SUMS * size); first += ROW_GROUP) {
            const RoundedGroup group =
                round_group<ROW_GROUP>(x + first, ROW_GROUP, codes + first);
            const auto whole = static_cast<std::int32_t>(group.sum);
            if (size == ROW_GROUP) {
                steps[first / ROW_GROUP] = group.step, sums[first / ROW_GROUP] = whole;
                continue;
            }
            std::int32_t half = 0;
            for (long i = 0; i < ROW_GROUP / 2; ++i) half += codes[first + i];
            const long number = first / (ROW_GROUP / 2);
            steps[number] = steps[number + 1] = group.step;
            sums[number] = half, sums[number + 1] = whole - half;
        }
        for (long lane = 0; lane < SUMS; ++lane) {
            const u8 group = order.groups[lane];
            out.starts[lane] = -order.zero * sums[group];
            out.sums[lane] = static_cast<float>(sums[group]);
            out.steps[lane] = steps[group];
        }
        for (long word = 0; word < SUMS * size / 4; ++word)
            std::memcpy(out.codes + 4 * word, codes + 4 * order.words[word], 4);
    }

    std::vector<RoundedGroups> blocks_;
    long num_blocks_ = 0;
};

struct RoundedProduct {
    const RoundedRows* x;
    long row, num_rows;  // MOST_ROUNDED at most
    const u8* w;
    const bf16* bias;  // or null
    bf16* out;  // of row `row`
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
                    const RoundedGroups& x = p.x->blocks(p.row + r)[group / SUMS];
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

template <class Type>
constexpr Order lane_order() {
    using Groups = Sixteen<Type>;
    Order order{};
    order.group_size = Type::GROUP, order.zero = Groups::ZERO;
    for (int lane = 0; lane < SUMS; ++lane) {
        order.groups[lane] = static_cast<u8>(Groups::group(lane));
        for (int number = 0; number < Groups::NUM_WORDS; ++number) {
            const Word word = Groups::word(number, lane);
            order.words[number * SUMS + lane] =
                static_cast<u8>(word.group * Groups::NUM_WORDS + word.number);
        }
    }
    return order;
}

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

// Lanes of the first `num_groups` groups.
template <class Type>
VNNI INLINED __mmask16 lanes_before(long num_groups) {
    static constexpr Lanes GROUPS = groups_of_lanes<Type>();
    return _mm512_cmplt_epi32_mask(
        _mm512_load_si512(GROUPS.of), _mm512_set1_epi32(static_cast<int>(num_groups)));
}

// Adds what sixteen groups of a row of weights make with the block `number` of some rows; of those
// without a scale nothing, since rows have nothing for them.
template <class Type>
VNNI INLINED void add_groups(
    const RoundedProduct& p, const u8* b, long number, long num_rows, __mmask16 has_scale,
    __m512* sums
) {
    Sixteen<Type> groups;
    groups.load(b);
    groups.scale = _mm512_maskz_mov_ps(has_scale, groups.scale);
    if (Type::HAS_OFFSETS) groups.offset = _mm512_maskz_mov_ps(has_scale, groups.offset);
    const RoundedGroups* x = p.x->blocks(p.row) + number;
    for (long r = 0; r < num_rows; ++r, x += p.x->num_blocks()) {
        const __m512i dots = groups.dots(x->codes, _mm512_load_si512(x->starts));
        __m512 term = _mm512_mul_ps(_mm512_cvtepi32_ps(dots), groups.scale);
        if (Type::HAS_OFFSETS)
            term = _mm512_sub_ps(term, _mm512_mul_ps(groups.offset, _mm512_load_ps(x->sums)));
        sums[r] = _mm512_add_ps(sums[r], _mm512_mul_ps(term, _mm512_load_ps(x->steps)));
    }
}

// Groups are added in their own order.
template <class Type>
VNNI INLINED float sum_of_groups(__m512 lanes) {
    static constexpr Lanes LANES = lanes_of_groups<Type>();
    return sum_of_sixteen(_mm512_permutexvar_ps(_mm512_load_si512(LANES.of), lanes));
}

// The last groups of a row, fewer than sixteen, of which there are `left` bytes. What follows them is
// read, too, where there is as much as that.
template <class Type>
VNNI INLINED void add_last(
    const RoundedProduct& p, const u8* b, long left, long readable, long number, long num_rows,
    __m512* sums
) {
    constexpr long BYTES = SIXTEEN_BYTES<Type>;
    const __mmask16 lanes = lanes_before<Type>(left / Type::BYTES * (Type::SIZE / Type::GROUP));
    alignas(64) u8 last[BYTES];
    if (readable < BYTES) {
        std::memset(last, 0, BYTES);
        std::memcpy(last, b, left);
        b = last;
    }
    add_groups<Type>(p, b, number, num_rows, lanes, sums);
}

// A row of weights with `rows` rows, or with p.num_rows where that is 0.
template <class Type, int rows>
VNNI INLINED void multiply_one(const RoundedProduct& p, long row_bytes, long o) {
    constexpr long BYTES = SIXTEEN_BYTES<Type>;
    constexpr __mmask16 ALL = 0xffff;
    const long num_rows = rows ? rows : p.num_rows;
    const u8* const start = p.w + o * row_bytes;
    __m512 sums[rows ? rows : MOST_ROUNDED];
    for (long r = 0; r < num_rows; ++r) sums[r] = _mm512_setzero_ps();
    long done = 0, number = 0;
    for (; done + BYTES <= row_bytes; done += BYTES)
        add_groups<Type>(p, start + done, number++, num_rows, ALL, sums);
    if (done < row_bytes)
        add_last<Type>(p, start + done, row_bytes - done, (p.num_outs - o) * row_bytes - done,
                       number, num_rows, sums);
    for (long r = 0; r < num_rows; ++r) p.store(r, o, sum_of_groups<Type>(sums[r]));
}

template <class Type>
VNNI void multiply_dots(const RoundedProduct& p) {
    const long row_bytes = p.num_k / Type::SIZE * Type::BYTES;
    Ahead ahead(p.w, p.num_outs * row_bytes, p.next);
    long unread = 0;
    for (long o = 0; o < p.num_outs; ++o) {
        for (unread += row_bytes; unread >= 8 * LINE_BYTES; unread -= 8 * LINE_BYTES)
            ahead.read<8>();
        if (p.num_rows == 1) multiply_one<Type, 1>(p, row_bytes, o);
        else multiply_one<Type, 0>(p, row_bytes, o);
    }
}

#endif

}  // namespace ggml
}  // namespace lowtide
