// ggml's packed block types. formats/ggml/ describes their layouts and gives the same float32, bit
// for bit. No multiply and add are fused, so that all instruction sets give the same bits.
//
//     weight = scale * number (- offset)
//
// `numbers` writes a block's integers in the order of its weights; `scales` writes the scale, and
// the offset if the type has one, of each group of GROUP weights. Both serve unpacking, here, and
// the products in int8_products.hpp.

#pragma once

#include "numbers.hpp"

namespace lowtide {
namespace ggml {

using u8 = std::uint8_t;
using i8 = std::int8_t;

constexpr float IQ4_VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                  1,    13,   25,  38,  53,  69,  89,  113};
constexpr float MXFP4_VALUES[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// Reads a number at any address, aligned or not.
template <class Number>
INLINED Number number_at(const u8* from) {
    Number number;
    std::memcpy(&number, from, sizeof number);
    return number;
}

INLINED float from_bits(std::uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// Converts a float16 at any address to float32, exactly.
INLINED float half_at(const u8* p) {
    const std::uint32_t half = p[0] | static_cast<std::uint32_t>(p[1]) << 8;
    const std::uint32_t sign = (half & 0x8000) << 16, rest = half & 0x7fff;
    if (rest >= 0x7c00) return from_bits(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    if (rest >= 0x400) return from_bits(sign | (rest << 13) + 0x38000000);
    const float tiny = static_cast<float>(rest) * from_bits(0x33800000);  // 2^-24
    return sign ? -tiny : tiny;
}

// Returns number i of 32: the low halves of 16 bytes come first, then their high halves.
INLINED int nibble(const u8* q, int i) { return i < 16 ? q[i] & 15 : q[i - 16] >> 4; }

struct Q4_0 {
    static constexpr long BYTES = 18, SIZE = 32, GROUP = 32;
    static constexpr bool HAS_OFFSETS = false;

    static INLINED void numbers(const u8* b, i8* out) {
        for (int i = 0; i < 32; ++i) out[i] = static_cast<i8>(nibble(b + 2, i) - 8);
    }

    static INLINED void scales(const u8* b, float* scales, float*) { scales[0] = half_at(b); }
};

struct Q4_1 {
    static constexpr long BYTES = 20, SIZE = 32, GROUP = 32;
    static constexpr bool HAS_OFFSETS = true;

    static INLINED void numbers(const u8* b, i8* out) {
        for (int i = 0; i < 32; ++i) out[i] = static_cast<i8>(nibble(b + 4, i));
    }

    static INLINED void scales(const u8* b, float* scales, float* offsets) {
        scales[0] = half_at(b), offsets[0] = -half_at(b + 2);
    }
};

// Unpacks 32 numbers of five bits, less `zero`: their fifth bits, then 16 bytes of lower halves.
INLINED void five_bits(const u8* h, int zero, i8* out) {
    const std::uint32_t fifth =
        h[0] | h[1] << 8 | h[2] << 16 | static_cast<std::uint32_t>(h[3]) << 24;
    for (int i = 0; i < 32; ++i) {
        const auto bit = static_cast<int>(fifth >> i & 1);
        out[i] = static_cast<i8>((nibble(h + 4, i) | bit << 4) - zero);
    }
}

struct Q5_0 {
    static constexpr long BYTES = 22, SIZE = 32, GROUP = 32;
    static constexpr bool HAS_OFFSETS = false;

    static INLINED void numbers(const u8* b, i8* out) { five_bits(b + 2, 16, out); }

    static INLINED void scales(const u8* b, float* scales, float*) { scales[0] = half_at(b); }
};

struct Q5_1 {
    static constexpr long BYTES = 24, SIZE = 32, GROUP = 32;
    static constexpr bool HAS_OFFSETS = true;

    static INLINED void numbers(const u8* b, i8* out) { five_bits(b + 4, 0, out); }

    static INLINED void scales(const u8* b, float* scales, float* offsets) {
        Q4_1::scales(b, scales, offsets);
    }
};

struct Q8_0 {
    static constexpr long BYTES = 34, SIZE = 32, GROUP = 32;
    static constexpr bool HAS_OFFSETS = false;

    static INLINED void numbers(const u8* b, i8* out) { std::memcpy(out, b + 2, 32); }

    static INLINED void scales(const u8* b, float* scales, float*) { scales[0] = half_at(b); }
};

struct Iq4Nl {
    static constexpr long BYTES = 18, SIZE = 32, GROUP = 32;
    static constexpr bool HAS_OFFSETS = false;

    static INLINED void numbers(const u8* b, i8* out) {
        for (int i = 0; i < 32; ++i) out[i] = static_cast<i8>(IQ4_VALUES[nibble(b + 2, i)]);
    }

    static INLINED void scales(const u8* b, float* scales, float*) { scales[0] = half_at(b); }
};

// Returns the bits of 2^(e - 128), which is subnormal for e < 2.
constexpr std::uint32_t mxfp4_scale_bits(std::uint32_t e) {
    return e < 2 ? 0x00200000u << e : (e - 1) << 23;
}

INLINED float mxfp4_scale(std::uint32_t e) { return from_bits(mxfp4_scale_bits(e)); }

struct Mxfp4 {
    static constexpr long BYTES = 17, SIZE = 32, GROUP = 32;
    static constexpr bool HAS_OFFSETS = false;

    static INLINED void numbers(const u8* b, i8* out) {
        for (int i = 0; i < 32; ++i) out[i] = static_cast<i8>(MXFP4_VALUES[nibble(b + 1, i)]);
    }

    static INLINED void scales(const u8* b, float* scales, float*) {
        scales[0] = mxfp4_scale(b[0]);
    }
};

struct Q2K {
    static constexpr long BYTES = 84, SIZE = 256, GROUP = 16;
    static constexpr bool HAS_OFFSETS = true;

    static INLINED void numbers(const u8* b, i8* out) {
        for (int g = 0; g < 16; ++g) {
            const u8* q = b + 16 + g / 8 * 32 + g % 2 * 16;
            const int shift = g % 8 / 2 * 2;
            for (int i = 0; i < 16; ++i) out[g * 16 + i] = static_cast<i8>(q[i] >> shift & 3);
        }
    }

    static INLINED void scales(const u8* b, float* scales, float* offsets) {
        const float d = half_at(b + 80), m = half_at(b + 82);
        for (int g = 0; g < 16; ++g) {
            scales[g] = d * static_cast<float>(b[g] & 15);
            offsets[g] = m * static_cast<float>(b[g] >> 4);
        }
    }
};

struct Q3K {
    static constexpr long BYTES = 110, SIZE = 256, GROUP = 16;
    static constexpr bool HAS_OFFSETS = false;

    static INLINED void numbers(const u8* b, i8* out) {
        for (int g = 0; g < 16; ++g) {
            const u8 *q = b + 32 + g / 8 * 32 + g % 2 * 16, *h = b + g % 2 * 16;
            const int shift = g % 8 / 2 * 2, bit = g / 2;
            for (int i = 0; i < 16; ++i) {
                const int number = (q[i] >> shift & 3) | (h[i] >> bit & 1) << 2;
                out[g * 16 + i] = static_cast<i8>(number - 4);
            }
        }
    }

    static INLINED void scales(const u8* b, float* scales, float*) {
        const float d = half_at(b + 108);
        const u8* s = b + 96;
        for (int g = 0; g < 16; ++g) {
            const int low = g < 8 ? s[g] & 15 : s[g - 8] >> 4;
            const int high = s[8 + g % 4] >> g / 4 * 2 & 3;
            scales[g] = d * (static_cast<float>(low | high << 4) - 32);
        }
    }
};

// Unpacks the scale and the offset of group g, six bits each, from 12 bytes with eight of both.
INLINED void six_bits(const u8* s, int g, int* scale, int* offset) {
    if (g < 4) {
        *scale = s[g] & 63;
        *offset = s[g + 4] & 63;
    } else {
        *scale = (s[g + 4] & 15) | s[g - 4] >> 6 << 4;
        *offset = s[g + 4] >> 4 | s[g] >> 6 << 4;
    }
}

// Unpacks eight groups' scales and offsets, six bits each, times the block's float16 for either.
INLINED void scales_of_six_bits(const u8* b, float* scales, float* offsets) {
    const float d = half_at(b), m = half_at(b + 2);
    for (int g = 0; g < 8; ++g) {
        int scale, offset;
        six_bits(b + 4, g, &scale, &offset);
        scales[g] = d * static_cast<float>(scale), offsets[g] = m * static_cast<float>(offset);
    }
}

struct Q4K {
    static constexpr long BYTES = 144, SIZE = 256, GROUP = 32;
    static constexpr bool HAS_OFFSETS = true;

    static INLINED void numbers(const u8* b, i8* out) {
        for (int g = 0; g < 8; ++g) {
            const u8* q = b + 16 + g / 2 * 32;
            const int shift = g % 2 * 4;
            for (int i = 0; i < 32; ++i) out[g * 32 + i] = static_cast<i8>(q[i] >> shift & 15);
        }
    }

    static INLINED void scales(const u8* b, float* scales, float* offsets) {
        scales_of_six_bits(b, scales, offsets);
    }
};

struct Q5K {
    static constexpr long BYTES = 176, SIZE = 256, GROUP = 32;
    static constexpr bool HAS_OFFSETS = true;

    static INLINED void numbers(const u8* b, i8* out) {
        for (int g = 0; g < 8; ++g) {
            const u8 *h = b + 16, *q = b + 48 + g / 2 * 32;
            const int shift = g % 2 * 4;
            for (int i = 0; i < 32; ++i)
                out[g * 32 + i] = static_cast<i8>((q[i] >> shift & 15) | (h[i] >> g & 1) << 4);
        }
    }

    static INLINED void scales(const u8* b, float* scales, float* offsets) {
        scales_of_six_bits(b, scales, offsets);
    }
};

struct Q6K {
    static constexpr long BYTES = 210, SIZE = 256, GROUP = 16;
    static constexpr bool HAS_OFFSETS = false;

    static INLINED void numbers(const u8* b, i8* out) {
        for (int g = 0; g < 16; ++g) {
            // 128 weights have 64 bytes, low halves first, and 32 bytes of upper bits, two a
            // weight.
            const int half = g / 8, at = g % 8 * 16;
            const u8* q = b + half * 64 + at % 64;
            const u8* h = b + 128 + half * 32 + at % 32;
            const int shift = at / 64 * 4, layer = at / 32 * 2;
            for (int i = 0; i < 16; ++i) {
                const int number = (q[i] >> shift & 15) | (h[i] >> layer & 3) << 4;
                out[g * 16 + i] = static_cast<i8>(number - 32);
            }
        }
    }

    static INLINED void scales(const u8* b, float* scales, float*) {
        const float d = half_at(b + 208);
        for (int g = 0; g < 16; ++g)
            scales[g] = d * static_cast<float>(static_cast<i8>(b[192 + g]));
    }
};

// Unpacks the scale of group g, six bits less 32.
INLINED int iq4_xs_scale(const u8* b, int g) {
    const int low = b[4 + g / 2] >> g % 2 * 4 & 15, high = (b[2] | b[3] << 8) >> 2 * g & 3;
    return (low | high << 4) - 32;
}

struct Iq4Xs {
    static constexpr long BYTES = 136, SIZE = 256, GROUP = 32;
    static constexpr bool HAS_OFFSETS = false;

    static INLINED void numbers(const u8* b, i8* out) {
        for (int g = 0; g < 8; ++g)
            for (int i = 0; i < 32; ++i)
                out[g * 32 + i] = static_cast<i8>(IQ4_VALUES[nibble(b + 8 + g * 16, i)]);
    }

    static INLINED void scales(const u8* b, float* scales, float*) {
        const float d = half_at(b);
        for (int g = 0; g < 8; ++g) scales[g] = d * static_cast<float>(iq4_xs_scale(b, g));
    }
};

// Unpacks a block to bfloat16; each weight is rounded once.
template <class Type>
INLINED void unpack_block(const u8* b, bf16* out) {
    constexpr long NUM_GROUPS = Type::SIZE / Type::GROUP;
    i8 numbers[Type::SIZE];
    float scales[NUM_GROUPS], offsets[NUM_GROUPS];
    Type::numbers(b, numbers);
    Type::scales(b, scales, offsets);
    for (long g = 0; g < NUM_GROUPS; ++g)
        for (long i = g * Type::GROUP; i < (g + 1) * Type::GROUP; ++i) {
            const float weight = scales[g] * static_cast<float>(numbers[i]);
            out[i] = round_bf16(Type::HAS_OFFSETS ? weight - offsets[g] : weight);
        }
}

}  // namespace ggml
}  // namespace lowtide
