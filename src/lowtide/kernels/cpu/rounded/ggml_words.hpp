// Loads sixteen groups of a row of weights, in one of GGML's types, as vpdpbusd takes them: unsigned
// bytes, four to a word of 32 bits, in registers whose lanes are groups. `Sixteen<Type>` has:
//
//     NUM_WORDS           words of a group, and number of registers
//     ZERO                what was added to each number to make it unsigned
//     load(b)             loads the groups from blocks, which lie in two halves at `b`
//     of                  the registers of words
//     scale, offset       one of each group, in its lane
//     group(lane)         the group whose scale, and whose sum of `dots`, a lane has
//     word(number, lane)  the word and its group that register `number` has in a lane
//
// `unpack_four` brings words into their lanes: the group whose words were quarter q of register i is
// then lane 4 q + i of all four registers. A type may have a group's words in two quarters; their sums
// are added to each other at the end.

#pragma once

#include "packed/ggml_block_words.hpp"
#include "dense/vnni.hpp"

#ifdef HAS_VNNI

namespace lowtide {
namespace ggml {

struct Word {
    int group, number;
};

VNNI INLINED __m128i sixteen_bytes(const u8* from) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
}

VNNI INLINED __m256i half_register(const u8* from) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}

VNNI INLINED __m512i twice(const u8* from) {
    return _mm512_broadcast_i64x4(half_register(from));
}

VNNI INLINED __m512i bytes_of(int value) { return _mm512_set1_epi8(static_cast<char>(value)); }

// The low nibbles of bytes, and the high ones.
VNNI INLINED __m512i low_halves(__m512i bytes) { return _mm512_and_si512(bytes, bytes_of(15)); }

VNNI INLINED __m512i high_halves(__m512i bytes) { return low_halves(_mm512_srli_epi16(bytes, 4)); }

// (a & mask) | b
VNNI INLINED __m512i masked_or(__m512i a, __m512i mask, __m512i b) {
    return _mm512_ternarylogic_epi32(a, mask, b, 0xea);
}

// Where the blocks of sixteen groups begin: those of the first eight groups, and those of the others. A
// block that has all sixteen is at `first`.
struct Halves {
    const u8 *first, *second;

    template <class Type>
    VNNI INLINED const u8* block(int number) const {
        return number < 8 ? first + number * Type::BYTES : second + (number - 8) * Type::BYTES;
    }
};

// The two bytes that each of sixteen blocks has at `offset`. Whole registers are loaded and permuted:
// scalar loads and stores would be sixteen of each.
template <class Type, int offset>
VNNI INLINED __m256i words_of_blocks(const Halves& b) {
    using Words = WordsKept<Type, offset>;
    static constexpr Words KEPT;
    const __m512i both = _mm512_mask_mov_epi32(
        double_words_of_half<Words>(b.first), 0xff00, double_words_of_half<Words>(b.second));
    return _mm512_castsi512_si256(
        _mm512_permutexvar_epi16(_mm512_load_si512(KEPT.words), both));
}

template <class Type, int offset = 0>
VNNI INLINED __m512 halves_of_blocks(const Halves& b) {
    return _mm512_cvtph_ps(words_of_blocks<Type, offset>(b));
}

// In every quarter lanes 0 and 1 have the float16 at `first`, lanes 2 and 3 that at `second`.
VNNI INLINED __m512 halves_of_two(const u8* first, const u8* second) {
    const std::uint64_t low = number_at<std::uint16_t>(first) * 0x10001u;
    const std::uint64_t high = number_at<std::uint16_t>(second) * 0x10001u;
    return _mm512_cvtph_ps(_mm256_set1_epi64x(static_cast<long long>(high << 32 | low)));
}

VNNI INLINED __m512 half_everywhere(const u8* half) {
    return _mm512_cvtph_ps(_mm256_set1_epi16(number_at<short>(half)));
}

VNNI INLINED __m512 unsigned_floats(__m128i bytes) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes));
}

VNNI INLINED __m512 signed_floats(__m128i bytes) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
}

// Moves sixteen groups' numbers from their order to lanes: that of group 4 i + q to lane 4 q + i.
VNNI INLINED __m128i turned(__m128i bytes) {
    return _mm_shuffle_epi8(
        bytes, _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
}

// Groups of 32 weights, each with all of its words in one lane.
struct WholeGroups {
    static constexpr int NUM_WORDS = 8;
    __m512i of[NUM_WORDS];
    __m512 scale, offset;

    // starts: added to the sums, lane by lane.
    VNNI INLINED __m512i dots(const i8* x, __m512i starts) const {
        __m512i low = starts, high = _mm512_setzero_si512();
        UNROLLED for (int i = 0; i < 4; ++i) {
            low = _mm512_dpbusd_epi32(low, of[i], _mm512_load_si512(x + 64 * i));
            high = _mm512_dpbusd_epi32(high, of[4 + i], _mm512_load_si512(x + 64 * (4 + i)));
        }
        return _mm512_add_epi32(low, high);
    }
};

// Groups of 32 weights, each in lanes of two quarters: eight groups in the first four registers, eight
// in the others.
struct HalvedGroups {
    static constexpr int NUM_WORDS = 8;
    __m512i of[NUM_WORDS];
    __m512 scale, offset;

    VNNI INLINED __m512i dots(const i8* x, __m512i starts) const {
        __m512i low = _mm512_setzero_si512(), high = low;
        UNROLLED for (int i = 0; i < 4; ++i) {
            low = _mm512_dpbusd_epi32(low, of[i], _mm512_load_si512(x + 64 * i));
            high = _mm512_dpbusd_epi32(high, of[4 + i], _mm512_load_si512(x + 64 * (4 + i)));
        }
        return _mm512_add_epi32(quarters_added(low, high), starts);
    }
};

// Groups of 16 weights, each with all of its words in one lane.
struct SmallGroups {
    static constexpr int NUM_WORDS = 4;
    __m512i of[NUM_WORDS];
    __m512 scale, offset;

    VNNI INLINED __m512i dots(const i8* x, __m512i starts) const {
        __m512i low = starts, high = _mm512_setzero_si512();
        UNROLLED for (int i = 0; i < 2; ++i) {
            low = _mm512_dpbusd_epi32(low, of[i], _mm512_load_si512(x + 64 * i));
            high = _mm512_dpbusd_epi32(high, of[2 + i], _mm512_load_si512(x + 64 * (2 + i)));
        }
        return _mm512_add_epi32(low, high);
    }
};

// The values that four bits stand for, raised until none is negative.
struct Table {
    u8 bytes[16];
};

constexpr Table raised(const float (&values)[16], int zero) {
    Table table{};
    for (int i = 0; i < 16; ++i)
        table.bytes[i] = static_cast<u8>(static_cast<int>(values[i]) + zero);
    return table;
}

constexpr int IQ4_ZERO = 128, MXFP4_ZERO = 12;
constexpr Table IQ4_TABLE = raised(IQ4_VALUES, IQ4_ZERO);
constexpr Table MXFP4_TABLE = raised(MXFP4_VALUES, MXFP4_ZERO);

template <class Type>
struct Sixteen;

// Types whose blocks are groups of 32 numbers of four bits, in 16 bytes: first the low nibbles, then the
// high ones.
template <class Type>
struct Nibbles : WholeGroups {
    static constexpr int group(int lane) { return lane; }
    static constexpr Word word(int number, int lane) { return {lane, number}; }

    // Loads into the first four registers the sixteen bytes that each block has at `at`, a block in
    // each quarter.
    VNNI INLINED void load_bytes(const Halves& b, int at) {
        const auto bytes = [&](int block) VNNI INLINED_LAMBDA {
            return sixteen_bytes(b.template block<Type>(block) + at);
        };
        UNROLLED for (int i = 0; i < 4; ++i) {
            of[i] = _mm512_castsi128_si512(bytes(i));
            of[i] = _mm512_inserti32x4(of[i], bytes(4 + i), 1);
            of[i] = _mm512_inserti32x4(of[i], bytes(8 + i), 2);
            of[i] = _mm512_inserti32x4(of[i], bytes(12 + i), 3);
        }
    }

    VNNI INLINED void load_nibbles(const Halves& b, int at) {
        load_bytes(b, at);
        split();
    }

    // Splits the bytes of those four registers into words of low and of high nibbles.
    VNNI INLINED void split() {
        __m512i rows[4] = {of[0], of[1], of[2], of[3]};
        unpack_four(rows);
        UNROLLED for (int i = 0; i < 4; ++i) {
            of[i] = low_halves(rows[i]);
            of[4 + i] = high_halves(rows[i]);
        }
    }

    // Replaces numbers by the values that they stand for.
    VNNI INLINED void look_up(const Table& table) {
        const __m512i values = _mm512_broadcast_i32x4(sixteen_bytes(table.bytes));
        UNROLLED for (int i = 0; i < 8; ++i) of[i] = _mm512_shuffle_epi8(values, of[i]);
    }
};

// Types whose blocks have 32 fifth bits, at `at`, and the nibbles after them.
template <class Type>
struct FiveBits : Nibbles<Type> {
    template <int at>
    VNNI INLINED void load_numbers(const Halves& b) {
        this->load_nibbles(b, at + 4);
        const __m512i fifth = _mm512_or_si512(
            _mm512_cvtepu16_epi32(words_of_blocks<Type, at>(b)),
            _mm512_slli_epi32(_mm512_cvtepu16_epi32(words_of_blocks<Type, at + 2>(b)), 16));
        UNROLLED for (int i = 0; i < 8; ++i) {
            // The fifth bits of a word's four numbers are half a byte: that byte is copied to all
            // four, and each tests its own bit.
            const __m512i byte = _mm512_shuffle_epi8(
                fifth, _mm512_set4_epi32(0x0c0c0c0c + i / 2 * 0x01010101,
                                         0x08080808 + i / 2 * 0x01010101,
                                         0x04040404 + i / 2 * 0x01010101, i / 2 * 0x01010101));
            const __mmask64 is_set = _mm512_test_epi8_mask(
                byte, _mm512_set1_epi32(i % 2 ? static_cast<int>(0x80402010) : 0x08040201));
            __m512i& numbers = this->of[i];
            numbers = _mm512_mask_add_epi8(numbers, is_set, numbers, bytes_of(16));
        }
    }
};

template <class Type>
VNNI INLINED __m512 offsets_of_blocks(const Halves& b) {
    return _mm512_sub_ps(_mm512_set1_ps(-0.0f), halves_of_blocks<Type, 2>(b));
}

template <>
struct Sixteen<Q4_0> : Nibbles<Q4_0> {
    static constexpr int ZERO = 8;

    VNNI INLINED void load(const Halves& b) {
        scale = halves_of_blocks<Q4_0>(b);
        load_nibbles(b, 2);
    }
};

template <>
struct Sixteen<Q4_1> : Nibbles<Q4_1> {
    static constexpr int ZERO = 0;

    VNNI INLINED void load(const Halves& b) {
        scale = halves_of_blocks<Q4_1>(b);
        offset = offsets_of_blocks<Q4_1>(b);
        load_nibbles(b, 4);
    }
};

template <>
struct Sixteen<Q5_0> : FiveBits<Q5_0> {
    static constexpr int ZERO = 16;

    VNNI INLINED void load(const Halves& b) {
        scale = halves_of_blocks<Q5_0>(b);
        load_numbers<2>(b);
    }
};

template <>
struct Sixteen<Q5_1> : FiveBits<Q5_1> {
    static constexpr int ZERO = 0;

    VNNI INLINED void load(const Halves& b) {
        scale = halves_of_blocks<Q5_1>(b);
        offset = offsets_of_blocks<Q5_1>(b);
        load_numbers<4>(b);
    }
};

template <>
struct Sixteen<Iq4Nl> : Nibbles<Iq4Nl> {
    static constexpr int ZERO = IQ4_ZERO;

    VNNI INLINED void load(const Halves& b) {
        scale = halves_of_blocks<Iq4Nl>(b);
        load_nibbles(b, 2);
        look_up(IQ4_TABLE);
    }
};

// `mxfp4_scale` of sixteen blocks.
VNNI INLINED __m512 mxfp4_scales(__m512i e) {
    const __m512i usual = _mm512_slli_epi32(_mm512_sub_epi32(e, _mm512_set1_epi32(1)), 23);
    return _mm512_castsi512_ps(_mm512_mask_sllv_epi32(
        usual, _mm512_cmplt_epi32_mask(e, _mm512_set1_epi32(2)), _mm512_set1_epi32(0x00200000),
        e));
}

template <>
struct Sixteen<Mxfp4> : Nibbles<Mxfp4> {
    static constexpr int ZERO = MXFP4_ZERO;

    VNNI INLINED void load(const Halves& b) {
        // A block has 17 bytes, so every other one begins with the upper byte of a word.
        const __m512i words = _mm512_cvtepu16_epi32(words_of_blocks<Mxfp4, 0>(b));
        scale = mxfp4_scales(_mm512_and_si512(
            _mm512_mask_srli_epi32(words, 0xaaaa, words, 8), _mm512_set1_epi32(255)));
        load_nibbles(b, 1);
        look_up(MXFP4_TABLE);
    }
};

// A type on processors with AVX512-VBMI, which looks bytes up in one register by their lowest six bits,
// or in two by seven. A table of 16 bytes stands in a register four times, so bits above the lowest
// four need not be cleared.
//
// The instructions are inline assembly: a function compiled for VBMI could only be inlined into
// functions compiled for it, too.
template <class Type>
struct WithVbmi : Type {};

VNNI INLINED __m512i bytes_looked_up(__m512i numbers, __m512i table) {
    __m512i found;
    asm("vpermb %2, %1, %0" : "=v"(found) : "v"(numbers), "v"(table));
    return found;
}

// Looks `places` up in the 128 bytes at `from`; bytes whose bit in `lanes` is 0 become 0.
VNNI INLINED __m512i bytes_found(const u8* from, __m512i places, __mmask64 lanes) {
    __m512i found = _mm512_loadu_si512(from);
    asm("vpermt2b %2, %1, %0%{%3%}%{z%}"
        : "+v"(found)
        : "v"(places), "v"(_mm512_loadu_si512(from + 64)), "Yk"(lanes));
    return found;
}

template <>
struct Sixteen<WithVbmi<Mxfp4>> : Nibbles<Mxfp4> {
    static constexpr int ZERO = MXFP4_ZERO;

    VNNI INLINED void load(const Halves& b) {
        constexpr __mmask64 LOWER = 0x11111111, UPPER = LOWER << 32;
        const __m512i places = _mm512_setr_epi32(
            0, 17, 34, 51, 68, 85, 102, 119, 0, 17, 34, 51, 68, 85, 102, 119);
        scale = mxfp4_scales(_mm512_or_si512(
            bytes_found(b.first, places, LOWER), bytes_found(b.second, places, UPPER)));
        load_bytes(b, 1);
        __m512i rows[4] = {of[0], of[1], of[2], of[3]};
        unpack_four(rows);
        const __m512i values = _mm512_broadcast_i32x4(sixteen_bytes(MXFP4_TABLE.bytes));
        UNROLLED for (int i = 0; i < 4; ++i) {
            of[i] = bytes_looked_up(rows[i], values);
            of[4 + i] = bytes_looked_up(_mm512_srli_epi16(rows[i], 4), values);
        }
    }
};

template <>
struct Sixteen<Q8_0> : HalvedGroups {
    static constexpr int ZERO = 128;
    static constexpr int group(int lane) { return lane; }
    static constexpr Word word(int number, int lane) {
        return {number / 4 * 8 + lane % 4 + lane / 8 * 4, lane / 4 % 2 * 4 + number % 4};
    }

    VNNI INLINED void load(const Halves& b) {
        scale = halves_of_blocks<Q8_0>(b);
        UNROLLED for (int half = 0; half < 2; ++half) {
            __m512i rows[4];
            UNROLLED for (int i = 0; i < 4; ++i) {
                const u8* q = b.block<Q8_0>(8 * half + i) + 2;
                const __m512i both = _mm512_inserti64x4(
                    _mm512_castsi256_si512(half_register(q)),
                    half_register(q + 4 * Q8_0::BYTES), 1);
                rows[i] = _mm512_xor_si512(both, bytes_of(128));
            }
            unpack_four(rows);
            UNROLLED for (int i = 0; i < 4; ++i) of[4 * half + i] = rows[i];
        }
    }
};

}  // namespace ggml
}  // namespace lowtide

#endif
