// Rows of packed weights of any type, as products of int8 rows read them: block by block, or
// sixteen groups at a time.

#pragma once

#include "rounded/ggml_k_words.hpp"
#include "rounded/own_words.hpp"

namespace lowtide {

constexpr long SUMS = 16;  // partial sums of an output, and groups taken at a time

// Numbers of a row of x that share a step.
template <class Type>
constexpr long ROW_GROUP = Type::GROUP > 32 ? Type::GROUP : 32;

// True for q8 and q4, whose groups have a zero that is added; other types' offsets are subtracted.
template <class Type>
constexpr bool HAS_ZEROS = Type::GROUP == GROUP;

template <class Type>
constexpr long NUMBERS = SUMS * Type::GROUP;  // weights in sixteen groups

template <class Type>
constexpr long num_sixteens(long num_k) { return (num_k + NUMBERS<Type> - 1) / NUMBERS<Type>; }

// A row of ggml's blocks, and for q8 and q4 a specialisation.
template <class Type>
struct WeightRow {
    using Number = std::int8_t;
    static constexpr long SIXTEEN_BYTES = NUMBERS<Type> / Type::SIZE * Type::BYTES;

    const std::uint8_t* start;

    WeightRow(const std::uint8_t* start, long) : start(start) {}

    static long bytes(long num_k) { return num_k / Type::SIZE * Type::BYTES; }

    INLINED void block(long number, Number* numbers, float* scales, float* offsets) const {
        Type::numbers(start + number * Type::BYTES, numbers);
        Type::scales(start + number * Type::BYTES, scales, offsets);
    }

#ifdef HAS_VNNI

    using Groups = ggml::Sixteen<Type>;

    VNNI INLINED void load(long number, Groups& groups) const {
        const std::uint8_t* const b = start + number * SIXTEEN_BYTES;
        groups.load({b, b + SIXTEEN_BYTES / 2});
    }

    // Loads the last `left` groups of a row, fewer than sixteen. Bytes after them are loaded, too,
    // as far as they lie before `end`.
    VNNI INLINED void load_last(
        long number, long left, const std::uint8_t* end, Groups& groups
    ) const {
        alignas(64) std::uint8_t last[SIXTEEN_BYTES];
        const std::uint8_t* b = start + number * SIXTEEN_BYTES;
        if (end - b < SIXTEEN_BYTES) {
            std::memset(last, 0, SIXTEEN_BYTES);
            std::memcpy(last, b, left * SIXTEEN_BYTES / SUMS);
            b = last;
        }
        groups.load({b, b + SIXTEEN_BYTES / 2});
    }

    // Loads the last `left` groups of two rows, at most eight of each.
    VNNI INLINED static void load_last_of_two(
        const WeightRow& row, const WeightRow& next, long number, long left, Groups& groups
    ) {
        constexpr long HALF = SIXTEEN_BYTES / 2;
        const std::uint8_t* const first = row.start + number * SIXTEEN_BYTES;
        const std::uint8_t* const second = next.start + number * SIXTEEN_BYTES;
        if (left == SUMS / 2) return groups.load({first, second});
        alignas(64) std::uint8_t last[SIXTEEN_BYTES] = {};
        std::memcpy(last, first, left * SIXTEEN_BYTES / SUMS);
        std::memcpy(last + HALF, second, left * SIXTEEN_BYTES / SUMS);
        groups.load({last, last + HALF});
    }

#endif
};

// A row of q8 or q4: codes, then scales, then zeros.
template <int num_bits>
struct WeightRow<Own<num_bits>> {
    using Number = std::uint8_t;
    static constexpr long CODE_BYTES = Own<num_bits>::CODE_BYTES;
    static constexpr long SIXTEEN_BYTES = SUMS * (CODE_BYTES + 4);

    const std::uint8_t* start;
    const long num_groups;

    WeightRow(const std::uint8_t* start, long num_k)
        : start(start), num_groups((num_k + GROUP - 1) / GROUP) {}

    static long bytes(long num_k) { return (num_k + GROUP - 1) / GROUP * (CODE_BYTES + 4); }

    INLINED void block(long number, Number* numbers, float* scales, float* offsets) const {
        const std::uint8_t* const codes = start + number * CODE_BYTES;
        for (long i = 0; i < CODE_BYTES; ++i)
            if constexpr (num_bits == 4)
                numbers[i] = codes[i] & 15, numbers[i + GROUP / 2] = codes[i] >> 4;
            else
                numbers[i] = codes[i];
        scales[0] = QuantisedWeights::half_at(ends(), number);
        offsets[0] = -QuantisedWeights::half_at(ends(), num_groups + number);
    }

#ifdef HAS_VNNI

    using Groups = ggml::Sixteen<Own<num_bits>>;

    VNNI INLINED void load(long number, Groups& groups) const {
        load_some<true>(number, SUMS, groups);
    }

    VNNI INLINED void load_last(
        long number, long left, const std::uint8_t*, Groups& groups
    ) const {
        load_some<false>(number, left, groups);
    }

    VNNI INLINED static void load_last_of_two(
        const WeightRow& row, const WeightRow& next, long number, long left, Groups& groups
    ) {
        const long first = number * SUMS, at = first * CODE_BYTES;
        if (left == SUMS / 2) {
            groups.template load_half<0, true>(row.start + at, left);
            groups.template load_half<1, true>(next.start + at, left);
        } else {
            groups.template load_half<0, false>(row.start + at, left);
            groups.template load_half<1, false>(next.start + at, left);
        }
        groups.scale = ends_of_two(row, next, first, left);
        groups.offset = ends_of_two(row, next, row.num_groups + first, left);
    }

    // Stores scales and offsets of up to sixteen groups in order.
    VNNI INLINED void store_ends(long number, long left, float* scales, float* offsets) const {
        const auto mask = static_cast<__mmask16>(left >= SUMS ? 0xffff : (1u << left) - 1);
        _mm512_storeu_ps(scales, ends_at(number * SUMS, mask));
        _mm512_storeu_ps(offsets, minus(ends_at(num_groups + number * SUMS, mask)));
    }

   private:
    template <bool is_whole>
    VNNI INLINED void load_some(long number, long left, Groups& groups) const {
        const std::uint8_t* const codes = start + number * SUMS * CODE_BYTES;
        const auto mask = static_cast<__mmask16>(is_whole ? 0xffff : (1u << left) - 1);
        groups.template load_half<0, is_whole>(codes, left);
        groups.template load_half<1, is_whole>(codes + SUMS / 2 * CODE_BYTES, left - SUMS / 2);
        groups.scale = in_lanes(ends_at(number * SUMS, mask));
        groups.offset = in_lanes(ends_at(num_groups + number * SUMS, mask));
    }

    // Widens 16 scales or zeros from number `first` on; the row's zeros follow its scales.
    VNNI INLINED __m512 ends_at(long first, __mmask16 mask) const {
        return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, ends() + 2 * first));
    }

    VNNI INLINED static __m512 ends_of_two(
        const WeightRow& row, const WeightRow& next, long first, long left
    ) {
        const auto mask = static_cast<__mmask8>((1u << left) - 1);
        const __m128i lower = _mm_maskz_loadu_epi16(mask, row.ends() + 2 * first);
        const __m128i upper = _mm_maskz_loadu_epi16(mask, next.ends() + 2 * first);
        return in_lanes(
            _mm512_cvtph_ps(_mm256_inserti128_si256(_mm256_castsi128_si256(lower), upper, 1)));
    }

    VNNI INLINED static __m512 minus(__m512 values) {
        return _mm512_castsi512_ps(_mm512_xor_si512(
            _mm512_castps_si512(values), _mm512_set1_epi32(static_cast<int>(0x80000000))));
    }

    // Moves groups' values from their order to their lanes.
    VNNI INLINED static __m512 in_lanes(__m512 values) {
        if constexpr (num_bits == 8) return values;
        return _mm512_permutexvar_ps(
            _mm512_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15), values);
    }

#endif

   public:
    INLINED const std::uint8_t* ends() const { return start + num_groups * CODE_BYTES; }
};

}  // namespace lowtide
