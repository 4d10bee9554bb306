// Products of a few int8 rows by VNNI. Partial sums of all rows stay in registers while a row of
// weights is read, and as many outputs as a register holds are completed at once.
//
// If at most 8 groups are left at the end of a row, those of two rows of weights share a register.

#pragma once

#include "rounded/int8_products.hpp"
#include "dense/lane_sums.hpp"

namespace lowtide {

#ifdef HAS_VNNI

constexpr long MOST_FEW_ROWS = 8;

// Returns the terms of sixteen groups of weights with a row of x.
template <class Type>
VNNI INLINED __m512 terms(const ggml::Sixteen<Type>& groups, const RoundedGroups<Type>& x) {
    const __m512i starts =
        ggml::Sixteen<Type>::ZERO ? _mm512_load_si512(x.starts) : _mm512_setzero_si512();
    const __m512i dots = groups.dots(x.codes, starts);
    __m512 term = _mm512_mul_ps(_mm512_cvtepi32_ps(dots), groups.scale);
    if (Type::HAS_OFFSETS) {
        const __m512 shift = _mm512_mul_ps(groups.offset, _mm512_load_ps(x.sums));
        term = HAS_ZEROS<Type> ? _mm512_add_ps(term, shift) : _mm512_sub_ps(term, shift);
    }
    return _mm512_mul_ps(term, _mm512_load_ps(x.steps));
}

// Multiplies up to `rows` rows of x with all rows of weights.
template <class Type, int rows>
class FewRoundedRows {
   public:
    explicit FewRoundedRows(const RoundedProduct& p)
        : p_(p), row_bytes_(WeightRow<Type>::bytes(p.num_k)),
          num_whole_(p.num_k / NUMBERS<Type>),
          num_left_((p.num_k + Type::GROUP - 1) / Type::GROUP - num_whole_ * SUMS),
          end_(p.w + p.num_outs * row_bytes_), ahead_(p.w, p.num_outs * row_bytes_, p.next) {
        // The last row stands in for missing ones, whose outputs are not stored.
        for (long r = 0; r < rows; ++r) x_[r] = p.row<Type>(std::min(r, p.num_rows - 1));
    }

    VNNI void run() {
        long first = 0;
        for (; first + OUTS <= p_.num_outs; first += OUTS) run_tile<OUTS>(first);
        for (; first < p_.num_outs; first += 2) {
            if (first + 2 <= p_.num_outs) run_tile<2>(first);
            else run_last(first);
        }
    }

   private:
    // The outputs of a tile fill a register.
    static constexpr int OUTS = rows <= 2 ? 16 / rows : rows <= 4 ? 4 : 2;

    template <int outs>
    VNNI INLINED void run_tile(long first) {
        __m512 pairs[outs / 2 * rows];
        for (int pair = 0; pair < outs / 2; ++pair) {
            __m512 sums[rows];
            sum_two(first + 2 * pair, sums);
            for (int r = 0; r < rows; ++r) pairs[r * (outs / 2) + pair] = sums[r];
        }
        store_outputs<rows, outs>(p_, 0, first, sums_of_lanes<4>(pairs), p_.num_rows);
    }

    VNNI NOT_INLINED void run_last(long out) {
        __m512 sums[rows];
        sum_whole(row(out), sums);
        if (num_left_ > 0) add_last(row(out), sums);
        UNROLLED for (int r = 0; r < rows; ++r) sums[r] = in_order<Type>(sums[r]);
        store_outputs<rows, 1>(p_, 0, out, sums_of_lanes(sums), p_.num_rows);
    }

    WeightRow<Type> row(long out) const { return {p_.w + out * row_bytes_, p_.num_k}; }

    // Computes eight partial sums of each of the weights' rows `out` and `out` + 1, side by side.
    VNNI NOT_INLINED void sum_two(long out, __m512 (&sums)[rows]) {
        const WeightRow<Type> first = row(out), second = row(out + 1);
        __m512 of[2][rows];
        sum_whole(first, of[0]);
        sum_whole(second, of[1]);
        ahead_.read_bytes<SECOND_CACHE>(
            num_left_ * WeightRow<Type>::SIXTEEN_BYTES / SUMS * 2);
        const bool are_together = num_left_ > 0 && num_left_ <= SUMS / 2;
        if (num_left_ > SUMS / 2) add_last(first, of[0]), add_last(second, of[1]);
        __m512 upper[rows];
        UNROLLED for (int r = 0; r < rows; ++r) {
            const Halved both = halved<8>(in_order<Type>(of[0][r]), in_order<Type>(of[1][r]));
            sums[r] = both.lower, upper[r] = both.upper;
        }
        if (are_together) add_last_of_two(first, second, sums);
        UNROLLED for (int r = 0; r < rows; ++r) sums[r] = _mm512_add_ps(sums[r], upper[r]);
    }

    VNNI INLINED void sum_whole(const WeightRow<Type>& row, __m512 (&sums)[rows]) {
        UNROLLED for (int r = 0; r < rows; ++r) sums[r] = _mm512_setzero_ps();
        for (long number = 0; number < num_whole_; ++number) {
            ahead_.read_bytes<SECOND_CACHE>(WeightRow<Type>::SIXTEEN_BYTES);
            ggml::Sixteen<Type> groups;
            row.load(number, groups);
            UNROLLED for (int r = 0; r < rows; ++r)
                sums[r] = _mm512_add_ps(sums[r], terms(groups, x_[r][number]));
        }
    }

    VNNI INLINED void add_last(const WeightRow<Type>& row, __m512 (&sums)[rows]) const {
        static constexpr Lanes GROUPS = groups_of_lanes<Type>();
        const __mmask16 own = _mm512_cmplt_epi32_mask(
            _mm512_load_si512(GROUPS.of), _mm512_set1_epi32(static_cast<int>(num_left_)));
        ggml::Sixteen<Type> groups;
        row.load_last(num_whole_, num_left_, end_, groups);
        UNROLLED for (int r = 0; r < rows; ++r)
            sums[r] = _mm512_mask_add_ps(sums[r], own, sums[r], terms(groups, x_[r][num_whole_]));
    }

    // Adds the last groups of two rows of weights to sums that are side by side.
    VNNI INLINED void add_last_of_two(
        const WeightRow<Type>& first, const WeightRow<Type>& second, __m512 (&sums)[rows]
    ) const {
        ggml::Sixteen<Type> groups;
        WeightRow<Type>::load_last_of_two(first, second, num_whole_, num_left_, groups);
        UNROLLED for (int r = 0; r < rows; ++r)
            sums[r] = _mm512_add_ps(sums[r], in_order<Type>(terms(groups, x_[r][num_whole_])));
    }

    const RoundedProduct& p_;
    const RoundedGroups<Type>* x_[rows];
    const long row_bytes_, num_whole_, num_left_;
    const std::uint8_t* const end_;
    LinesAhead ahead_;
};

// Multiplies up to `MOST_FEW_ROWS` rows.
template <class Type>
VNNI void multiply_few_rows(const RoundedProduct& p) {
    if (p.num_rows == 1) return FewRoundedRows<Type, 1>(p).run();
    if (p.num_rows == 2) return FewRoundedRows<Type, 2>(p).run();
    if (p.num_rows <= 4) return FewRoundedRows<Type, 4>(p).run();
    if (p.num_rows <= 6) return FewRoundedRows<Type, 6>(p).run();
    FewRoundedRows<Type, 8>(p).run();
}

// Multiplies any number of rows, in equal parts of at most `MOST_FEW_ROWS`.
template <class Type>
VNNI void multiply_by_few_rows(const RoundedProduct& p) {
    const long count = (p.num_rows + MOST_FEW_ROWS - 1) / MOST_FEW_ROWS;
    for (long i = 0; i < count; ++i) {
        const long first = i * p.num_rows / count, last = (i + 1) * p.num_rows / count;
        multiply_few_rows<Type>(p.rows(first, last - first));
    }
}

#endif

}  // namespace lowtide
