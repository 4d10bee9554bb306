// Gathers a field, above all the scale, that several ggml blocks have at the same offset.

#pragma once

#include "packed/ggml_types.hpp"

#if defined(__x86_64__)

#include <immintrin.h>

namespace lowtide {
namespace ggml {

// Tables for gathering the 16-bit word of each of eight blocks that contains the byte at `offset`.
// Double words are looked up in two registers at a time; both halves of the result are the same.
template <class Type, int offset>
struct alignas(64) WordsKept {
    static constexpr int BYTES = static_cast<int>(Type::BYTES), NUM_BYTES = 8 * BYTES;
    static constexpr int PAIRS = (7 * BYTES + offset + 2 + 127) / 128;
    static_assert(PAIRS <= 2, "blocks are short");

    std::int32_t places[2][16];
    std::uint16_t words[32];
    std::uint16_t of_second;  // a bit for each lane whose word is in the second pair

    static constexpr int start(int number) {
        return 64 * number + 64 <= NUM_BYTES ? 64 * number : NUM_BYTES - 64;
    }

    constexpr WordsKept() : places(), words(), of_second() {
        for (int lane = 0; lane < 16; ++lane) {
            const int byte = lane % 8 * BYTES + offset, place = byte / 4 * 4;
            const int pair = place >= 128;
            if (pair) of_second = static_cast<std::uint16_t>(of_second | 1 << lane);
            const bool is_lower = place + 4 <= start(2 * pair) + 64;
            places[pair][lane] = is_lower ? (place - start(2 * pair)) / 4
                                          : 16 + (place - start(2 * pair + 1)) / 4;
            words[lane] = static_cast<std::uint16_t>(2 * lane + byte % 4 / 2);
        }
    }
};

template <class Words, int pair>
AVX512 INLINED __m512i double_words_of_pair(const u8* b) {
    static constexpr Words KEPT;
    return _mm512_permutex2var_epi32(
        _mm512_loadu_si512(b + Words::start(2 * pair)), _mm512_load_si512(KEPT.places[pair]),
        _mm512_loadu_si512(b + Words::start(2 * pair + 1)));
}

template <class Words>
AVX512 INLINED __m512i double_words_of_half(const u8* b) {
    static constexpr Words KEPT;
    const __m512i found = double_words_of_pair<Words, 0>(b);
    if constexpr (Words::PAIRS == 1) return found;
    else return _mm512_mask_mov_epi32(found, KEPT.of_second, double_words_of_pair<Words, 1>(b));
}

// Returns the words at `offset` of eight blocks, twice.
template <class Type, int offset>
AVX512 INLINED __m256i words_of_eight(const u8* b) {
    using Words = WordsKept<Type, offset>;
    static constexpr Words KEPT;
    return _mm512_castsi512_si256(_mm512_permutexvar_epi16(
        _mm512_load_si512(KEPT.words), double_words_of_half<Words>(b)));
}

}  // namespace ggml
}  // namespace lowtide

#endif
