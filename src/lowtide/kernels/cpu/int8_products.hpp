// Products of rows in codes of int8 with weights in 8 or 4 bits: kernels/int8_rows.py has the
// formula, and the order of its sums.
//
//     out[r, o] = sum over groups of step * (scale * dot + zero * sum) (+ bias[o])
//
// dot is an integer, so however it is found the bits are the same:
//
// - plain: group by group. Compiled for every set of instructions.
// - VNNI: 16 groups at a time. Their words of four codes are brought into such an order that each
//   group has lanes of its own, once for all rows; vpdpbusd then adds four products to a lane.

#pragma once

#include "ahead.hpp"
#include "int8_rows.hpp"
#include "lane_sums.hpp"
#include "quantised.hpp"

namespace lowtide {

constexpr long SUMS = ROW_GROUPS, BLOCK = SUMS * GROUP;

// Sixteen groups of a row.
struct alignas(64) RoundedBlock {
    std::int8_t codes[BLOCK];
    float steps[SUMS], sums[SUMS];  // sums: of a group's codes
};

inline long num_blocks(long num_k) { return (num_k + BLOCK - 1) / BLOCK; }

// A row's groups, padded to whole blocks, their codes in their own order.
INLINED void round_row_plainly(const bf16* x, long num_k, RoundedBlock* out) {
    for (long group = 0; group < num_blocks(num_k) * SUMS; ++group) {
        const long start = group * GROUP, length = std::clamp(num_k - start, 0L, GROUP);
        RoundedBlock& block = out[group / SUMS];
        const long lane = group % SUMS;
        const RoundedGroup rounded = round_group<GROUP>(
            x + (length ? start : 0), length, block.codes + lane * GROUP);
        block.steps[lane] = rounded.step, block.sums[lane] = rounded.sum;
    }
}

struct Int8Product {
    const RoundedBlock* x;
    long num_blocks;  // of a row
    long num_rows;  // MOST_ROUNDED at most
    QuantisedWeights w;
    const bf16* bias;  // or null
    bf16* out;
    long out_stride, num_outs;
    const void* next;  // see `Ahead`
};

INLINED void store_int8_sum(const Int8Product& p, long row, long out, float sum) {
    p.out[row * p.out_stride + out] = round_bf16(sum + (p.bias ? widen(p.bias[out]) : 0.0f));
}

template <int num_bits>
INLINED void multiply_int8_plainly(const Int8Product& p) {
    const long num_groups = p.w.num_groups();
    for (long out = 0; out < p.num_outs; ++out) {
        const std::uint8_t* row = p.w.row(out);
        float sums[MOST_ROUNDED][SUMS] = {};
        for (long group = 0; group < num_groups; ++group) {
            const std::uint8_t* codes = row + group * p.w.group_bytes();
            const float scale = p.w.scale(row, group), zero = p.w.zero(row, group);
            std::int16_t weights[GROUP];
            for (long i = 0; i < p.w.group_bytes(); ++i)
                if constexpr (num_bits == 4)
                    weights[i] = codes[i] & 15, weights[i + GROUP / 2] = codes[i] >> 4;
                else
                    weights[i] = codes[i];
            const long lane = group % SUMS;
            for (long r = 0; r < p.num_rows; ++r) {
                const RoundedBlock& block = p.x[r * p.num_blocks + group / SUMS];
                const std::int8_t* x = block.codes + lane * GROUP;
                std::int32_t dot = 0;
                for (long i = 0; i < GROUP; ++i)
                    dot += static_cast<std::int32_t>(x[i]) * static_cast<std::int32_t>(weights[i]);
                const float term = static_cast<float>(dot) * scale + zero * block.sums[lane];
                sums[r][lane] += term * block.steps[lane];
            }
        }
        for (long r = 0; r < p.num_rows; ++r) {
            float* lanes = sums[r];
            for (long half = SUMS / 2; half > 0; half /= 2)
                for (long i = 0; i < half; ++i) lanes[i] += lanes[half + i];
            store_int8_sum(p, r, out, lanes[0]);
        }
    }
}

#ifdef HAS_VNNI

// A block of codes, four to a word: register `number` has in its quarter `q`, lane `i`
//
//     4 bits: group 8 (number / 8) + 2 i + q / 2, word 8 (number % 8 / 4) + 4 (q % 2) + number % 4
//     8 bits: group 4 (number / 4) + i,           word 4 q + number % 4
//
// of 16 groups with 16 words each.
template <int num_bits>
struct Words;

// For each place in half a block, which word it is.
template <int num_bits>
struct HalfOrder {
    std::uint8_t words[BLOCK / 8];

    constexpr HalfOrder() : words() {
        for (long place = 0; place < BLOCK / 8; ++place) {
            const long number = place / 16, quarter = place % 16 / 4, i = place % 4;
            const long group = num_bits == 4 ? 2 * i + quarter / 2 : number / 4 * 4 + i;
            const long word = num_bits == 4 ? number / 4 * 8 + quarter % 2 * 4 + number % 4
                                            : quarter * 4 + number % 4;
            words[place] = static_cast<std::uint8_t>(group * (GROUP / 4) + word);
        }
    }
};

template <bool is_whole>
VNNI INLINED __m512i words_at(const std::uint8_t* from, __mmask16 mask) {
    return is_whole ? _mm512_loadu_si512(from) : _mm512_maskz_loadu_epi32(mask, from);
}

template <>
struct Words<4> {
    __m512i of[16];

    // num_groups: at most 16, which `is_whole` says that there are; those beyond it are 0.
    template <bool is_whole>
    VNNI INLINED void load(const std::uint8_t* codes, long num_groups) {
        load_half<0, is_whole>(codes, num_groups);
        load_half<1, is_whole>(codes + 8 * 32, num_groups - 8);
    }

    template <int half, bool is_whole>
    VNNI INLINED void load_half(const std::uint8_t* codes, long num_groups) {
        const __m512i low = _mm512_set1_epi8(15);
        __m512i rows[4];
        UNROLLED for (int i = 0; i < 4; ++i) {
            const auto mask = static_cast<__mmask16>(
                (2 * i < num_groups ? 0xff : 0) | (2 * i + 1 < num_groups ? 0xff00 : 0));
            rows[i] = words_at<is_whole>(codes + 2 * i * 32, mask);
        }
        unpack_four(rows);
        UNROLLED for (int i = 0; i < 4; ++i) {
            of[8 * half + i] = _mm512_and_si512(rows[i], low);
            of[8 * half + 4 + i] = _mm512_and_si512(_mm512_srli_epi16(rows[i], 4), low);
        }
    }

    // The sums of each group. is_same: both halves with the first half of a block.
    template <bool is_same = false>
    VNNI INLINED __m512i dots(const std::int8_t* x) const {
        __m512i sums[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
        UNROLLED for (int i = 0; i < 8; ++i)
            UNROLLED for (int half = 0; half < 2; ++half)
                sums[half] = _mm512_dpbusd_epi32(
                    sums[half], of[8 * half + i],
                    _mm512_load_si512(x + 64 * (is_same ? i : 8 * half + i)));
        const __m512i in_order = _mm512_setr_epi32(
            0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
        return _mm512_permutexvar_epi32(in_order, quarters_added(sums[0], sums[1]));
    }
};

template <>
struct Words<8> {
    __m512i of[16];

    template <bool is_whole>
    VNNI INLINED void load(const std::uint8_t* codes, long num_groups) {
        load_half<0, is_whole>(codes, num_groups);
        load_half<1, is_whole>(codes + 8 * 64, num_groups - 8);
    }

    template <int half, bool is_whole>
    VNNI INLINED void load_half(const std::uint8_t* codes, long num_groups) {
        UNROLLED for (int four = 0; four < 2; ++four) {
            __m512i rows[4];
            UNROLLED for (int i = 0; i < 4; ++i) {
                const long group = 4 * four + i;
                const auto mask = static_cast<__mmask16>(group < num_groups ? 0xffff : 0);
                rows[i] = words_at<is_whole>(codes + group * 64, mask);
            }
            unpack_four(rows);
            UNROLLED for (int i = 0; i < 4; ++i) of[8 * half + 4 * four + i] = rows[i];
        }
    }

    template <bool is_same = false>
    VNNI INLINED __m512i dots(const std::int8_t* x) const {
        __m512i sums[4];
        UNROLLED for (int four = 0; four < 4; ++four) sums[four] = _mm512_setzero_si512();
        UNROLLED for (int i = 0; i < 4; ++i)
            UNROLLED for (int four = 0; four < 4; ++four)
                sums[four] = _mm512_dpbusd_epi32(
                    sums[four], of[4 * four + i],
                    _mm512_load_si512(x + 64 * (4 * (is_same ? four % 2 : four) + i)));
        return quarters_added(
            quarters_added(sums[0], sums[1]), quarters_added(sums[2], sums[3]));
    }
};

// As `round_row_plainly`, codes in the order of `Words`.
template <int num_bits>
VNNI void round_row(const bf16* x, long num_k, RoundedBlock* out) {
    static constexpr HalfOrder<num_bits> ORDER;
    Words<num_bits> ones;
    for (auto& each : ones.of) each = _mm512_set1_epi8(1);
    for (; num_k > 0; x += BLOCK, num_k -= BLOCK, ++out) {
        bf16 last[BLOCK];
        if (num_k < BLOCK) {
            std::memset(last, 0, sizeof last);
            std::memcpy(last, x, num_k * sizeof(bf16));
            x = last;
        }
        alignas(64) std::int8_t codes[BLOCK];
        _mm512_store_ps(out->steps, round_groups<GROUP, SUMS>(x, codes));
        for (long half = 0; half < BLOCK; half += BLOCK / 2)
            put_in_order<8>(codes + half, ORDER.words, out->codes + half);
        _mm512_store_ps(out->sums, _mm512_cvtepi32_ps(ones.dots(out->codes)));
    }
}

VNNI INLINED __m512 halves_at(const std::uint8_t* from, __mmask16 mask) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, from));
}

// Adds what up to 16 groups of a row of weights, from `first` on, make with `rows` rows.
template <int num_bits, bool is_whole>
VNNI INLINED void add_block(
    const Int8Product& p, const std::uint8_t* codes, const std::uint8_t* scales, long first,
    long num_rows, __m512* sums
) {
    const long num_groups = p.w.num_groups(), left = num_groups - first;
    const auto mask = static_cast<__mmask16>(is_whole ? 0xffff : (1u << left) - 1);
    Words<num_bits> words;
    words.template load<is_whole>(codes + first * (GROUP * num_bits / 8), left);
    const __m512 scale = halves_at(scales + 2 * first, mask);
    const __m512 zero = halves_at(scales + 2 * (num_groups + first), mask);
    const RoundedBlock* block = p.x + first / SUMS;
    for (long r = 0; r < num_rows; ++r, block += p.num_blocks) {
        const __m512 dots = _mm512_cvtepi32_ps(words.dots(block->codes));
        const __m512 shift = _mm512_mul_ps(zero, _mm512_load_ps(block->sums));
        const __m512 term = _mm512_add_ps(_mm512_mul_ps(dots, scale), shift);
        sums[r] = _mm512_add_ps(sums[r], _mm512_mul_ps(term, _mm512_load_ps(block->steps)));
    }
}

// A row of weights with `rows` rows, or with p.num_rows where that is 0.
template <int num_bits, int rows>
VNNI INLINED void multiply_dots_of(const Int8Product& p, long out) {
    const long num_rows = rows ? rows : p.num_rows, num_groups = p.w.num_groups();
    const std::uint8_t* codes = p.w.row(out);
    const std::uint8_t* scales = codes + num_groups * (GROUP * num_bits / 8);
    __m512 sums[rows ? rows : MOST_ROUNDED];
    for (long r = 0; r < num_rows; ++r) sums[r] = _mm512_setzero_ps();
    long first = 0;
    for (; first + SUMS <= num_groups; first += SUMS)
        add_block<num_bits, true>(p, codes, scales, first, num_rows, sums);
    if (first < num_groups)
        add_block<num_bits, false>(p, codes, scales, first, num_rows, sums);
    for (long r = 0; r < num_rows; ++r) store_int8_sum(p, r, out, sum_of_sixteen(sums[r]));
}

// One row with `outs` rows of weights, one after the other, whose sums end together.
template <int num_bits, int outs>
VNNI INLINED void multiply_one_row(const Int8Product& p, long out) {
    const long num_groups = p.w.num_groups();
    __m512 sums[outs];
    UNROLLED for (int o = 0; o < outs; ++o) {
        const std::uint8_t* codes = p.w.row(out + o);
        const std::uint8_t* scales = codes + num_groups * (GROUP * num_bits / 8);
        sums[o] = _mm512_setzero_ps();
        long first = 0;
        for (; first + SUMS <= num_groups; first += SUMS)
            add_block<num_bits, true>(p, codes, scales, first, 1, sums + o);
        if (first < num_groups) add_block<num_bits, false>(p, codes, scales, first, 1, sums + o);
    }
    store_sums<1, outs>(p, 0, out, sums);
}

// See `reads_in_order`.
template <int num_bits>
VNNI void multiply_in_order(const Int8Product& p) {
    constexpr int OUTS = 8;
    long out = 0;
    for (; out + OUTS <= p.num_outs; out += OUTS) multiply_one_row<num_bits, OUTS>(p, out);
    for (; out < p.num_outs; ++out) multiply_one_row<num_bits, 1>(p, out);
}

template <int num_bits>
VNNI void multiply_dots(const Int8Product& p) {
    Ahead ahead(p.w.rows, p.num_outs * p.w.row_bytes(), p.next);
    for (long out = 0; out < p.num_outs; ++out) {
        ahead.read_bytes(p.w.row_bytes());
        if (p.num_rows == 1) multiply_dots_of<num_bits, 1>(p, out);
        else multiply_dots_of<num_bits, 0>(p, out);
    }
}

#endif

template <int num_bits>
void multiply_int8(int variant, const Int8Product& p) {
#ifdef HAS_VNNI
    if (reads_in_order(variant, p.num_rows)) return multiply_in_order<num_bits>(p);
    if (variant >= INT8_VNNI) return multiply_dots<num_bits>(p);
#endif
    vectorised(variant, [&p]() INLINED_LAMBDA { multiply_int8_plainly<num_bits>(p); });
}

}  // namespace lowtide
