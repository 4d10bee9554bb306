// Rows of bfloat16 numbers rounded to int8 by groups, as `round_rows` of kernels/int8_rows.py does:
//
//     step = largest / 127        code = x * (127 / largest), to the nearest, ties to even

#pragma once

#include <algorithm>
#include <cfloat>
#include <cstdint>
#include <cstring>
#include <vector>

#include "dense/ahead.hpp"
#include "experts/call_rows.hpp"
#include "team/team.hpp"
#include "dense/vnni.hpp"

extern "C" int lowtide_has_avx_vnni();  // of processor.cpp

namespace lowtide {

// Returns the bytes of a matrix that a thread takes at a time. One row is bound by reading, in order
// on processors without AMX (`LinesAhead`), and a stream needs a while to start: pieces for one row
// are long, as long as every thread has one.
inline long piece_bytes_of(
    int variant, long usual, long share, const Group* groups, long num_groups
) {
    const bool is_in_order =
        variant == INT8_VNNI && !has_amx()
        && std::all_of(groups, groups + num_groups, [](const Group& group) {
               return group.num_rows == 1;
           });
    return is_in_order ? std::clamp(share, usual, 2 * WORTH_BYTES) : usual;
}

// Rounds a group's first `length` numbers, takes the others for 0, and returns the step.
template <long group>
INLINED float round_group(const bf16* x, long length, std::int8_t* codes) {
    constexpr bf16 INFINITE = 0x7f80;  // greater bits are NaN
    constexpr float SHIFT = 12582912.0f;  // adding it rounds to an integer
    bf16 own[group] = {};
    if (length == group) std::memcpy(own, x, group * sizeof(bf16));
    else std::memcpy(own, x, length * sizeof(bf16));
    bf16 largest = 0;
    for (long i = 0; i < group; ++i) {
        const bf16 size = own[i] & 0x7fff;
        largest = size > largest ? size : largest;
    }
    const float inverse = 127.0f / widen(largest);
    if (largest >= INFINITE || inverse > FLT_MAX) {
        std::memset(codes, 0, group);
        return largest >= INFINITE ? NAN : 0.0f;
    }
    for (long i = 0; i < group; ++i) {
        const float code = (widen(own[i]) * inverse + SHIFT) - SHIFT;
        codes[i] = static_cast<std::int8_t>(static_cast<std::int32_t>(code));
    }
    return widen(largest) / 127.0f;
}

// 64 bytes of a rounded row, whose layout is that of a type's products.
struct alignas(64) Line {
    std::uint8_t bytes[64];
};

// Owns the rounded rows of a call's groups.
class RoundedRows {
   public:
    // Rounds all rows. round_row(x, lines) writes the `num_lines` lines of one.
    template <class RoundRow>
    void take(
        int num_threads, const GroupRows& rows, long num_lines, const RoundRow& round_row
    ) {
        constexpr long WORTH_NUMBERS = 1 << 15;  // fewer are rounded by one thread
        num_lines_ = num_lines;
        firsts_.clear();
        long num_rows = 0;
        for (long g = 0; g < rows.num_groups; num_rows += rows.groups[g++].num_rows)
            firsts_.push_back(num_rows);
        const auto needed = static_cast<std::size_t>(num_rows * num_lines);
        if (lines_.size() < needed) lines_.resize(needed);
        if (num_rows * rows.num_k < WORTH_NUMBERS) num_threads = 1;
        together(num_threads, num_rows, [&, this](long row) {
            const auto after = std::upper_bound(firsts_.begin(), firsts_.end(), row);
            const long group = after - firsts_.begin() - 1;
            const long from = rows.groups[group].first + row - firsts_[group];
            round_row(rows.x + from * rows.stride, lines_.data() + row * num_lines_);
        });
    }

    // Returns row `row` of a group.
    const Line* lines(long group, long row) const {
        return lines_.data() + (firsts_[group] + row) * num_lines_;
    }

    long num_lines() const { return num_lines_; }  // of a row

   private:
    std::vector<Line> lines_;
    std::vector<long> firsts_;  // by group: the number of its first row here
    long num_lines_ = 0;
};

#ifdef HAS_VNNI

// Rounds `count` whole groups, as `round_group` does one, and returns their steps.
template <long group, int count>
VNNI INLINED __m512 round_groups(const bf16* x, std::int8_t* codes) {
    const __m512i no_sign = _mm512_set1_epi16(0x7fff);
    alignas(64) std::uint16_t sizes[16] = {};
    for (int g = 0; g < count; ++g) {
        __m512i some = _mm512_and_si512(_mm512_loadu_si512(x + g * group), no_sign);
        for (long i = 32; i < group; i += 32)
            some = _mm512_max_epu16(
                some, _mm512_and_si512(_mm512_loadu_si512(x + g * group + i), no_sign));
        const __m256i half = _mm256_max_epu16(
            _mm512_castsi512_si256(some), _mm512_extracti64x4_epi64(some, 1));
        const __m128i eight = _mm_max_epu16(
            _mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
        // The only horizontal instruction finds the least of eight.
        const __m128i least = _mm_minpos_epu16(_mm_xor_si128(eight, _mm_set1_epi16(-1)));
        sizes[g] = static_cast<std::uint16_t>(~_mm_cvtsi128_si32(least));
    }
    const __m512i bits = _mm512_slli_epi32(
        _mm512_cvtepu16_epi32(_mm256_load_si256(reinterpret_cast<const __m256i*>(sizes))), 16);
    const __m512 largest = _mm512_castsi512_ps(bits), most = _mm512_set1_ps(127.0f);
    const __mmask16 is_number = _mm512_cmplt_epu32_mask(bits, _mm512_set1_epi32(0x7f800000));
    const __m512 inverse = _mm512_div_ps(most, largest);
    const __mmask16 is_rounded = _mm512_mask_cmp_ps_mask(
        is_number, inverse, _mm512_set1_ps(FLT_MAX), _CMP_LE_OQ);
    alignas(64) float inverses[16];
    _mm512_store_ps(inverses, inverse);
    for (int g = 0; g < count; ++g) {
        const auto mask = static_cast<__mmask16>(is_rounded >> g & 1 ? 0xffff : 0);
        const __m512 of_group = _mm512_set1_ps(inverses[g]);
        for (long i = g * group; i < (g + 1) * group; i += 16) {
            const __m512i words = _mm512_cvtepu16_epi32(
                _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i)));
            const __m512 wide = _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
            _mm_store_si128(
                reinterpret_cast<__m128i*>(codes + i),
                _mm512_cvtepi32_epi8(_mm512_maskz_cvt_roundps_epi32(
                    mask, _mm512_mul_ps(wide, of_group),
                    _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)));
        }
    }
    return _mm512_mask_mov_ps(
        _mm512_maskz_div_ps(is_rounded, largest, most),
        static_cast<__mmask16>(~is_number), _mm512_set1_ps(NAN));
}

// Reorders the words of `count` registers of codes. order: each output word's place among the
// inputs.
template <int count>
VNNI INLINED void put_in_order(
    const std::int8_t* codes, const std::uint8_t* order, std::int8_t* out
) {
    static_assert(count == 4 || count == 8, "of four or eight groups");
    __m512i own[count];
    UNROLLED for (int i = 0; i < count; ++i) own[i] = _mm512_load_si512(codes + 64 * i);
    UNROLLED for (int i = 0; i < count; ++i) {
        const __m512i from = _mm512_cvtepu8_epi32(
            _mm_loadu_si128(reinterpret_cast<const __m128i*>(order + 16 * i)));
        const __mmask16 upper = _mm512_test_epi32_mask(from, _mm512_set1_epi32(32));
        __m512i found = _mm512_mask_mov_epi32(
            _mm512_permutex2var_epi32(own[0], from, own[1]), upper,
            _mm512_permutex2var_epi32(own[2], from, own[3]));
        if constexpr (count == 8)
            found = _mm512_mask_mov_epi32(
                found, _mm512_test_epi32_mask(from, _mm512_set1_epi32(64)),
                _mm512_mask_mov_epi32(
                    _mm512_permutex2var_epi32(own[4], from, own[5]), upper,
                    _mm512_permutex2var_epi32(own[6], from, own[7])));
        _mm512_store_si512(out + 64 * i, found);
    }
}

#endif

}  // namespace lowtide
