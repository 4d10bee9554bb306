// Products of a few rows in int8 by VNNI: partial sums of all of them in registers while a row of
// weights passes, and as many outputs as a register holds made at once.
//
// Where 8 groups or fewer are left of a row, those of two rows of weights are taken together.

#pragma once

#include "int8_products.hpp"
#include "lane_sums.hpp"

namespace lowtide {

#ifdef HAS_VNNI

constexpr int MOST_FEW_ROWS = 8;

// Up to 16 groups of weights, and what belongs to each.
template <int num_bits>
struct WeightBlock {
    Words<num_bits> words;
    __m512 scale, zero;
};

// Sixteen numbers, or the first eight of them twice.
template <bool is_same>
VNNI INLINED __m512 sixteen_at(const float* from) {
    if constexpr (!is_same) return _mm512_load_ps(from);
    return _mm512_castpd_ps(
        _mm512_broadcast_f64x4(_mm256_castps_pd(_mm256_load_ps(from))));
}

// Adds what a block of weights makes with `rows` rows of x. is_same: its halves are two rows' of
// weights, each with the first half of the rows' block.
template <int num_bits, int rows, bool is_same = false>
VNNI INLINED void add_terms(
    const WeightBlock<num_bits>& weights, const RoundedBlock* x, long num_blocks,
    __m512 (&sums)[rows]
) {
    UNROLLED for (int r = 0; r < rows; ++r, x += num_blocks) {
        const __m512 dots = _mm512_cvtepi32_ps(weights.words.template dots<is_same>(x->codes));
        const __m512 shift = _mm512_mul_ps(weights.zero, sixteen_at<is_same>(x->sums));
        const __m512 term = _mm512_add_ps(_mm512_mul_ps(dots, weights.scale), shift);
        sums[r] = _mm512_add_ps(sums[r], _mm512_mul_ps(term, sixteen_at<is_same>(x->steps)));
    }
}

// `rows` rows of x, from `first_row` on, with all rows of weights.
template <int num_bits, int rows>
class FewInt8Rows {
   public:
    FewInt8Rows(const Int8Product& p, long first_row)
        : p_(p), x_(p.x + first_row * p.num_blocks), first_row_(first_row),
          num_groups_(p.w.num_groups()), num_left_(num_groups_ % SUMS),
          ahead_(p.w.rows, p.num_outs * p.w.row_bytes(), p.next) {}

    // All but those that do not fill a tile; how many it were.
    VNNI long run() {
        long first = 0;
        for (; first + OUTS <= p_.num_outs; first += OUTS) {
            __m512 pairs[PAIRS * rows];
            for (int pair = 0; pair < PAIRS; ++pair) {
                __m512 sums[rows];
                sum_two(first + 2 * pair, sums);
                for (int r = 0; r < rows; ++r) pairs[r * PAIRS + pair] = sums[r];
            }
            store_outputs<rows, OUTS>(p_, first_row_, first, sums_of_lanes<4>(pairs));
        }
        return first;
    }

   private:
    // A register has the outputs of a tile.
    static constexpr int OUTS = rows <= 2 ? 16 / rows : rows <= 4 ? 4 : 2, PAIRS = OUTS / 2;
    static constexpr long GROUP_BYTES = GROUP * num_bits / 8;

    // Eight partial sums for each of the weights' rows `out` and out + 1, side by side.
    VNNI INLINED void sum_two(long out, __m512 (&sums)[rows]) {
        __m512 of[2][rows];
        UNROLLED for (int o = 0; o < 2; ++o) sum_blocks(p_.w.row(out + o), of[o]);
        __m512 upper[rows];
        UNROLLED for (int r = 0; r < rows; ++r) {
            const Halved both = halved<8>(of[0][r], of[1][r]);
            sums[r] = both.lower, upper[r] = both.upper;
        }
        if (is_left_together()) add_two(p_.w.row(out), p_.w.row(out + 1), sums);
        UNROLLED for (int r = 0; r < rows; ++r) sums[r] = _mm512_add_ps(sums[r], upper[r]);
    }

    bool is_left_together() const { return num_left_ > 0 && num_left_ <= SUMS / 2; }

    // All groups of a row of weights but those that are taken together with another row's.
    VNNI INLINED void sum_blocks(const std::uint8_t* codes, __m512 (&sums)[rows]) {
        UNROLLED for (int r = 0; r < rows; ++r) sums[r] = _mm512_setzero_ps();
        WeightBlock<num_bits> weights;
        long first = 0;
        for (; first + SUMS <= num_groups_; first += SUMS) {
            ahead_.read_bytes(SUMS * (GROUP_BYTES + 4));
            weights.words.template load<true>(codes + first * GROUP_BYTES, SUMS);
            weights.scale = ends_at(codes, first, 0xffff);
            weights.zero = ends_at(codes, num_groups_ + first, 0xffff);
            add_terms<num_bits, rows>(weights, x_ + first / SUMS, p_.num_blocks, sums);
        }
        ahead_.read_bytes(num_left_ * (GROUP_BYTES + 4));
        if (num_left_ <= SUMS / 2) return;
        const auto mask = static_cast<__mmask16>((1u << num_left_) - 1);
        weights.words.template load<false>(codes + first * GROUP_BYTES, num_left_);
        weights.scale = ends_at(codes, first, mask);
        weights.zero = ends_at(codes, num_groups_ + first, mask);
        add_terms<num_bits, rows>(weights, x_ + first / SUMS, p_.num_blocks, sums);
    }

    // The last groups of two rows of weights, whose sums are side by side.
    VNNI INLINED void add_two(
        const std::uint8_t* codes, const std::uint8_t* next, __m512 (&sums)[rows]
    ) const {
        const long first = num_groups_ - num_left_;
        WeightBlock<num_bits> weights;
        if (num_left_ == SUMS / 2) {
            weights.words.template load_half<0, true>(codes + first * GROUP_BYTES, num_left_);
            weights.words.template load_half<1, true>(next + first * GROUP_BYTES, num_left_);
        } else {
            weights.words.template load_half<0, false>(codes + first * GROUP_BYTES, num_left_);
            weights.words.template load_half<1, false>(next + first * GROUP_BYTES, num_left_);
        }
        weights.scale = ends_of_two(codes, next, first);
        weights.zero = ends_of_two(codes, next, num_groups_ + first);
        add_terms<num_bits, rows, true>(weights, x_ + first / SUMS, p_.num_blocks, sums);
    }

    // Scales, and behind them zeros, from number `first` on.
    VNNI INLINED __m512 ends_at(const std::uint8_t* codes, long first, __mmask16 mask) const {
        return halves_at(codes + num_groups_ * GROUP_BYTES + 2 * first, mask);
    }

    VNNI INLINED __m512 ends_of_two(
        const std::uint8_t* codes, const std::uint8_t* next, long first
    ) const {
        const auto mask = static_cast<__mmask8>((1u << num_left_) - 1);
        const long at = num_groups_ * GROUP_BYTES + 2 * first;
        const __m128i lower = _mm_maskz_loadu_epi16(mask, codes + at);
        const __m128i upper = _mm_maskz_loadu_epi16(mask, next + at);
        return _mm512_cvtph_ps(_mm256_inserti128_si256(_mm256_castsi128_si256(lower), upper, 1));
    }

    const Int8Product& p_;
    const RoundedBlock* const x_;
    const long first_row_, num_groups_, num_left_;
    Ahead ahead_;
};

// So many rows of x from `first` on, `rows` at most.
template <int num_bits, int rows = MOST_FEW_ROWS>
VNNI long multiply_some_int8(const Int8Product& p, long first, long num_rows) {
    if constexpr (rows > 1)
        if (num_rows < rows) return multiply_some_int8<num_bits, rows - 1>(p, first, num_rows);
    return FewInt8Rows<num_bits, rows>(p, first).run();
}

// Whether this is faster than `multiply_dots`: of one row, or of more than a tile has, only if rows
// of weights are taken together.
inline bool are_few_int8(const Int8Product& p) {
    const long num_left = p.w.num_groups() % SUMS;
    const bool is_left_together = num_left > 0 && num_left <= SUMS / 2;
    return is_left_together || (p.num_rows > 1 && p.num_rows <= MOST_FEW_ROWS);
}

// Up to 16 rows of x: by eights or fewer, as many each.
template <int num_bits>
VNNI void multiply_few_int8(const Int8Product& p) {
    const long count = (p.num_rows + MOST_FEW_ROWS - 1) / MOST_FEW_ROWS;
    long done = p.num_outs;
    for (long i = 0; i < count; ++i) {
        const long first = i * p.num_rows / count, last = (i + 1) * p.num_rows / count;
        done = std::min(done, multiply_some_int8<num_bits>(p, first, last - first));
    }
    for (; done < p.num_outs; ++done) multiply_dots_of<num_bits, 0>(p, done);
}

#endif

}  // namespace lowtide
