// Unpacks weights in 8 and 4 bits to bfloat16 by AVX-512 with bfloat16; each is rounded once.
//
// Execution ports bind, and vcvtne2ps2bf16 takes four times as much of them as a sum does. So
//
// - products take 128 elements at a time, two groups, in an order in which shifts and masks alone
//   unpack the codes (`element`); x is brought into that order once;
// - in 4 bits the 16 possible weights of each of the two groups are one table, rounded at once;
// - scales and zeros of 16 groups are widened at once and broadcast from memory, which takes no
//   port.

#pragma once

#include "packed/quantised.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(HAS_DOT_PRODUCTS)
#define AVX512BF16 \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512vbmi,avx512bf16,avx2,fma,f16c")))

namespace lowtide {

constexpr long STEP = 2 * GROUP;  // elements
constexpr long STEP_REGISTERS = 4, WORDS = 32;  // registers of a step, words of a register
constexpr long MOST_ENDS = 16;  // groups whose scales and zeros are widened at once

// Returns the element of a step that is word `word` of register `number`.
template <int num_bits>
constexpr long element(long number, long word) {
    const long part = word / 16, i = word % 16;
    if (num_bits == 4) return part * GROUP + number % 2 * 32 + 2 * i + number / 2;
    return number / 2 * GROUP + 4 * i + number % 2 * 2 + part;
}

// Returns the number of steps of a row of `num_k` elements.
inline long num_steps(long num_k) { return (num_k + STEP - 1) / STEP; }

AVX512BF16 INLINED __m512i as_integers(__m512bh pairs) {
    __m512i bits;
    std::memcpy(&bits, &pairs, sizeof bits);
    return bits;
}

AVX512BF16 INLINED __m512bh as_pairs(__m512i bits) {
    __m512bh pairs;
    std::memcpy(&pairs, &bits, sizeof pairs);
    return pairs;
}

AVX512BF16 INLINED __m512i two_rounded(__m512 lower, __m512 upper) {
    return as_integers(_mm512_cvtne2ps_pbh(upper, lower));
}

// Returns the mask of the next 32 elements that exist when `left` are left of the row.
INLINED __mmask32 words_left(long left) {
    return left >= WORDS ? ~0u : left <= 0 ? 0u : (1u << left) - 1;
}

// Brings a row of x into the order of `element`, padded with 0 to whole steps.
template <int num_bits>
AVX512BF16 inline void order_row(const bf16* x, long num_k, bf16* out) {
    // A register takes words from two of the row's registers: the same half of both groups (4
    // bits), or both halves of one group (8 bits).
    struct Order {
        std::uint16_t words[STEP_REGISTERS][WORDS];
        constexpr Order() : words() {
            for (long number = 0; number < STEP_REGISTERS; ++number)
                for (long word = 0; word < WORDS; ++word) {
                    const long from = element<num_bits>(number, word);
                    const bool is_of_second = num_bits == 4 ? from / GROUP : from / WORDS % 2;
                    words[number][word] =
                        static_cast<std::uint16_t>(from % WORDS + (is_of_second ? WORDS : 0));
                }
        }
    };
    static constexpr Order order;
    for (long k = 0; k < num_k; k += STEP) {
        __m512i own[STEP_REGISTERS];
        for (long i = 0; i < STEP_REGISTERS; ++i)
            own[i] = _mm512_maskz_loadu_epi16(
                words_left(num_k - k - i * WORDS), num_k > k + i * WORDS ? x + k + i * WORDS : x);
        for (long i = 0; i < STEP_REGISTERS; ++i) {
            const __m512i first = num_bits == 4 ? own[i % 2] : own[i / 2 * 2];
            const __m512i second = num_bits == 4 ? own[2 + i % 2] : own[i / 2 * 2 + 1];
            _mm512_storeu_si512(
                out + k + i * WORDS,
                _mm512_permutex2var_epi16(first, _mm512_loadu_si512(order.words[i]), second));
        }
    }
}

// Returns the mask of the next 16 groups that exist when `left` are left of the row.
INLINED __mmask16 groups_left(long left) {
    return static_cast<__mmask16>(left >= MOST_ENDS ? 0xffff : (1u << left) - 1);
}

// Scales and zeros of up to 16 groups of a row of weights. In 8 bits `scales[i]` is for codes that
// are shifted left by 8 i bits.
template <int num_bits>
struct alignas(64) Ends {
    static constexpr int SCALES = num_bits == 4 ? 1 : 4;
    float zeros[MOST_ENDS], scales[SCALES][MOST_ENDS];

    // Loads the scales, float16, from `halves` on, and the zeros `bytes_to_zeros` after them.
    // Groups outside `mask` get 0.
    AVX512BF16 INLINED void load(const std::uint8_t* halves, long bytes_to_zeros, __mmask16 mask) {
        __m512 scale = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, halves));
        _mm512_store_ps(
            zeros, _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, halves + bytes_to_zeros)));
        for (auto& each : scales) {
            _mm512_store_ps(each, scale);
            scale = _mm512_mul_ps(scale, _mm512_set1_ps(0x1p-8f));
        }
    }

    // Loads a row's groups from `first` on.
    AVX512BF16 INLINED void load(const QuantisedWeights& w, const std::uint8_t* row, long first) {
        const long num_groups = w.num_groups();
        load(row + num_groups * w.group_bytes() + 2 * first, 2 * num_groups,
             groups_left(num_groups - first));
    }
};

// A step's codes as they are stored.
template <int num_bits>
struct StepCodes {
    __m512i of[num_bits / 4];

    // has_both: the row has the step's second group, too; otherwise that group's codes are 0.
    template <bool has_both>
    AVX512BF16 INLINED static StepCodes load(const std::uint8_t* from) {
        if constexpr (num_bits == 4)
            return {{has_both ? _mm512_loadu_si512(from) : _mm512_maskz_loadu_epi32(0xff, from)}};
        else
            return {{_mm512_loadu_si512(from),
                     has_both ? _mm512_loadu_si512(from + GROUP) : _mm512_setzero_si512()}};
    }
};

constexpr int AND_OR = 0xea;  // vpternlogd: (a & b) | c

// Returns the possible weights in 4 bits: 16 of group `group`, then 16 of the next.
AVX512BF16 INLINED __m512i table_of(const Ends<4>& ends, long group) {
    const __m512 all = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const float *scale = ends.scales[0] + group, *zero = ends.zeros + group;
    return two_rounded(
        _mm512_fmadd_ps(all, _mm512_set1_ps(scale[0]), _mm512_set1_ps(zero[0])),
        _mm512_fmadd_ps(all, _mm512_set1_ps(scale[1]), _mm512_set1_ps(zero[1])));
}

// A step's weights, one register at a time, so that not all of them occupy registers at once.
// `group` is the index of its first group in `ends`.
template <int num_bits>
struct StepWeights;

template <>
struct StepWeights<4> {
    __m512i codes, table;

    AVX512BF16 INLINED static StepWeights begin(
        const StepCodes<4>& codes, const Ends<4>& ends, long group
    ) {
        return {codes.of[0], table_of(ends, group)};
    }

    // Shifts and look-ups of words: faster on AMD Zen 4 than those of `unpack_step` (docs/log).
    template <int number>
    AVX512BF16 INLINED __m512i at(const Ends<4>&, long) const {
        const __m512i second_words = _mm512_inserti64x4(
            _mm512_setzero_si512(), _mm256_set1_epi16(16), 1);
        const __m512i lowest = number == 0 ? codes : _mm512_srli_epi16(codes, 4 * number);
        return _mm512_permutexvar_epi16(
            _mm512_ternarylogic_epi32(lowest, _mm512_set1_epi16(15), second_words, AND_OR), table);
    }
};

template <>
struct StepWeights<8> {
    StepCodes<8> codes;

    AVX512BF16 INLINED static StepWeights begin(const StepCodes<8>& codes, const Ends<8>&, long) {
        return {codes};
    }

    template <int number>
    AVX512BF16 INLINED __m512i at(const Ends<8>& ends, long group) const {
        constexpr int second = number / 2, byte = number % 2 * 2;
        return two_rounded(every_fourth<second, byte>(ends, group + second),
                           every_fourth<second, byte + 1>(ends, group + second));
    }

    // Returns the weights of bytes i, i + 4, ... of the first or second group's codes.
    template <int second, int i>
    AVX512BF16 INLINED __m512 every_fourth(const Ends<8>& ends, long group) const {
        const __m512i byte = _mm512_set1_epi32(static_cast<int>(0xffu << 8 * i));
        const __m512i number = _mm512_and_si512(codes.of[second], byte);
        return _mm512_fmadd_ps(
            i == 3 ? _mm512_cvtepu32_ps(number) : _mm512_cvtepi32_ps(number),
            _mm512_set1_ps(ends.scales[i][group]), _mm512_set1_ps(ends.zeros[group]));
    }
};

// Unpacks all of a step's weights at once.
AVX512BF16 INLINED void unpack_step(
    const StepCodes<4>& codes, const Ends<4>& ends, long group, __m512i (&out)[STEP_REGISTERS]
) {
    const __m512i table = table_of(ends, group);
    // Words 0 to 15 of the table are the first group's, 16 to 31 the second's.
    const __m512i of_word = _mm512_set1_epi16(15);
    const __m512i second_words = _mm512_inserti64x4(
        _mm512_setzero_si512(), _mm256_set1_epi16(16), 1);
    out[0] = _mm512_permutexvar_epi16(
        _mm512_ternarylogic_epi32(codes.of[0], of_word, second_words, AND_OR), table);
    // vpermw takes two ports, so the other registers look up bytes: word n is bytes 2 n and 2 n +
    // 1.
    const __m512i of_byte = _mm512_set1_epi8(30);
    const __m512i second_bytes = _mm512_inserti64x4(
        _mm512_set1_epi16(0x0100), _mm256_set1_epi16(0x2120), 1);
    UNROLLED for (int i = 1; i < STEP_REGISTERS; ++i) {
        const long long first_bits = 4 * i - 1;  // the nibble of each of four words, twice
        const __m512i bits = _mm512_set1_epi64(
            first_bits * 0x0101010101010101 + 0x3030202010100000);
        const __m512i twice = _mm512_multishift_epi64_epi8(bits, codes.of[0]);
        out[i] = _mm512_permutexvar_epi8(
            _mm512_ternarylogic_epi32(twice, of_byte, second_bytes, AND_OR), table);
    }
}

AVX512BF16 INLINED void unpack_step(
    const StepCodes<8>& codes, const Ends<8>& ends, long group, __m512i (&out)[STEP_REGISTERS]
) {
    const StepWeights<8> weights = {codes};
    out[0] = weights.at<0>(ends, group), out[1] = weights.at<1>(ends, group);
    out[2] = weights.at<2>(ends, group), out[3] = weights.at<3>(ends, group);
}

// Unpacks a group in its own order: elements 0 to 31, then 32 to 63.
template <int num_bits>
AVX512BF16 INLINED void unpack_group(
    const std::uint8_t* codes, const Ends<4>& ends, long group, __m512i (&out)[2]
) {
    const __m512 scale = _mm512_set1_ps(ends.scales[0][group]);
    const __m512 zero = _mm512_set1_ps(ends.zeros[group]);
    if constexpr (num_bits == 4) {
        // Both halves of the table are the 16 possible weights, so bit 4 of an index has no effect.
        const __m512 all = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        const __m512 weights = _mm512_fmadd_ps(all, scale, zero);
        const __m512i table = two_rounded(weights, weights);
        const __m512i low = _mm512_cvtepu8_epi16(
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
        out[0] = _mm512_permutexvar_epi16(low, table);
        out[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(low, 4), table);
    } else {
        __m512 quarters[4];
        UNROLLED for (int i = 0; i < 4; ++i) {
            const __m128i some = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + 16 * i));
            const __m512 numbers = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(some));
            quarters[i] = _mm512_fmadd_ps(numbers, scale, zero);
        }
        out[0] = two_rounded(quarters[0], quarters[1]);
        out[1] = two_rounded(quarters[2], quarters[3]);
    }
}

// Unpacks weights [num_rows, num_k] to bfloat16; rows of `out` are `stride` elements apart.
template <int num_bits>
AVX512BF16 void unpack_rows(const QuantisedWeights& w, bf16* out, long stride, long num_rows) {
    for (long row = 0; row < num_rows; ++row) {
        const std::uint8_t* from = w.row(row);
        Ends<4> ends;
        for (long group = 0; group < w.num_groups(); ++group) {
            if (group % MOST_ENDS == 0) ends.load(w, from, group);
            __m512i weights[2];
            unpack_group<num_bits>(from + group * w.group_bytes(), ends, group % MOST_ENDS, weights);
            bf16* to = out + row * stride + group * GROUP;
            const long left = w.num_k - group * GROUP;
            _mm512_mask_storeu_epi16(to, words_left(left), weights[0]);
            _mm512_mask_storeu_epi16(to + WORDS, words_left(left - WORDS), weights[1]);
        }
    }
}

}  // namespace lowtide

#endif
