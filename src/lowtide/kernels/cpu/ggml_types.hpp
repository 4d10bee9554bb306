// Blocks of ggml's packed types to bfloat16: the float32 of formats/ggml/, bit for bit, rounded
// once. Layouts are described there. Nothing is fused, so that all instructions give the same bits.

#pragma once

#include "numbers.hpp"

namespace lowtide {
namespace ggml {

using u8 = std::uint8_t;

constexpr float IQ4_VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                  1,    13,   25,  38,  53,  69,  89,  113};
constexpr float MXFP4_VALUES[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

INLINED float from_bits(std::uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// float16, at any address, to float32: exact.
INLINED float half_at(const u8* p) {
    const std::uint32_t half = p[0] | static_cast<std::uint32_t>(p[1]) << 8;
    const std::uint32_t sign = (half & 0x8000) << 16, rest = half & 0x7fff;
    if (rest >= 0x7c00) return from_bits(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    if (rest >= 0x400) return from_bits(sign | (rest << 13) + 0x38000000);
    const float tiny = static_cast<float>(rest) * from_bits(0x33800000);  // 2^-24
    return sign ? -tiny : tiny;
}

// The low halves of 16 bytes, then the high ones.
INLINED int nibble(const u8* q, int i) { return i < 16 ? q[i] & 15 : q[i - 16] >> 4; }

struct Q4_0 {
    static constexpr long BYTES = 18, SIZE = 32;
    static INLINED void unpack(const u8* b, bf16* out) {
        const float d = half_at(b);
        for (int i = 0; i < 16; ++i) {
            out[i] = round_bf16(d * (static_cast<float>(b[2 + i] & 15) - 8));
            out[i + 16] = round_bf16(d * (static_cast<float>(b[2 + i] >> 4) - 8));
        }
    }
};

struct Q4_1 {
    static constexpr long BYTES = 20, SIZE = 32;
    static INLINED void unpack(const u8* b, bf16* out) {
        const float d = half_at(b), m = half_at(b + 2);
        for (int i = 0; i < 16; ++i) {
            out[i] = round_bf16(d * static_cast<float>(b[4 + i] & 15) + m);
            out[i + 16] = round_bf16(d * static_cast<float>(b[4 + i] >> 4) + m);
        }
    }
};

struct Q5_0 {
    static constexpr long BYTES = 22, SIZE = 32;
    static INLINED void unpack(const u8* b, bf16* out) {
        const float d = half_at(b);
        const std::uint32_t fifth =
            b[2] | b[3] << 8 | b[4] << 16 | static_cast<std::uint32_t>(b[5]) << 24;
        for (int i = 0; i < 16; ++i) {
            const int low = (b[6 + i] & 15) | (fifth >> i & 1) << 4;
            const int high = b[6 + i] >> 4 | (fifth >> (i + 16) & 1) << 4;
            out[i] = round_bf16(d * (static_cast<float>(low) - 16));
            out[i + 16] = round_bf16(d * (static_cast<float>(high) - 16));
        }
    }
};

struct Q8_0 {
    static constexpr long BYTES = 34, SIZE = 32;
    static INLINED void unpack(const u8* b, bf16* out) {
        const float d = half_at(b);
        for (int i = 0; i < 32; ++i) {
            out[i] = round_bf16(static_cast<float>(static_cast<std::int8_t>(b[2 + i])) * d);
        }
    }
};

struct Iq4Nl {
    static constexpr long BYTES = 18, SIZE = 32;
    static INLINED void unpack(const u8* b, bf16* out) {
        const float d = half_at(b);
        for (int i = 0; i < 32; ++i) out[i] = round_bf16(d * IQ4_VALUES[nibble(b + 2, i)]);
    }
};

// 2^(e - 128), of which the two least are below the normal numbers.
INLINED float mxfp4_scale(std::uint32_t e) {
    return from_bits(e < 2 ? 0x00200000u << e : (e - 1) << 23);
}

struct Mxfp4 {
    static constexpr long BYTES = 17, SIZE = 32;
    static INLINED void unpack(const u8* b, bf16* out) {
        const float d = mxfp4_scale(b[0]);
        for (int i = 0; i < 32; ++i) out[i] = round_bf16(d * MXFP4_VALUES[nibble(b + 1, i)]);
    }
};

struct Q2K {
    static constexpr long BYTES = 84, SIZE = 256;
    static INLINED void unpack(const u8* b, bf16* out) {
        const float d = half_at(b + 80), m = half_at(b + 82);
        for (int g = 0; g < 16; ++g) {
            const float scale = d * static_cast<float>(b[g] & 15);
            const float offset = m * static_cast<float>(b[g] >> 4);
            const u8* q = b + 16 + g / 8 * 32 + g % 2 * 16;
            const int shift = g % 8 / 2 * 2;
            for (int i = 0; i < 16; ++i) {
                out[g * 16 + i] =
                    round_bf16(scale * static_cast<float>(q[i] >> shift & 3) - offset);
            }
        }
    }
};

struct Q3K {
    static constexpr long BYTES = 110, SIZE = 256;
    static INLINED void unpack(const u8* b, bf16* out) {
        const float d = half_at(b + 108);
        const u8* s = b + 96;
        for (int g = 0; g < 16; ++g) {
            const int low = g < 8 ? s[g] & 15 : s[g - 8] >> 4;
            const int high = s[8 + g % 4] >> g / 4 * 2 & 3;
            const float scale = d * (static_cast<float>(low | high << 4) - 32);
            const u8 *q = b + 32 + g / 8 * 32 + g % 2 * 16, *h = b + g % 2 * 16;
            const int shift = g % 8 / 2 * 2, bit = g / 2;
            for (int i = 0; i < 16; ++i) {
                const int number = (q[i] >> shift & 3) | (h[i] >> bit & 1) << 2;
                out[g * 16 + i] = round_bf16(scale * (static_cast<float>(number) - 4));
            }
        }
    }
};

// The scale and the offset of group g, six bits each, of the 12 bytes that hold eight of both.
INLINED void six_bits(const u8* s, int g, int* scale, int* offset) {
    if (g < 4) {
        *scale = s[g] & 63;
        *offset = s[g + 4] & 63;
    } else {
        *scale = (s[g + 4] & 15) | s[g - 4] >> 6 << 4;
        *offset = s[g + 4] >> 4 | s[g] >> 6 << 4;
    }
}

struct Q4K {
    static constexpr long BYTES = 144, SIZE = 256;
    static INLINED void unpack(const u8* b, bf16* out) {
        const float d = half_at(b), m = half_at(b + 2);
        for (int g = 0; g < 8; ++g) {
            int scale, offset;
            six_bits(b + 4, g, &scale, &offset);
            const float ds = d * static_cast<float>(scale), mo = m * static_cast<float>(offset);
            const u8* q = b + 16 + g / 2 * 32;
            const int shift = g % 2 * 4;
            for (int i = 0; i < 32; ++i) {
                out[g * 32 + i] = round_bf16(ds * static_cast<float>(q[i] >> shift & 15) - mo);
            }
        }
    }
};

struct Q5K {
    static constexpr long BYTES = 176, SIZE = 256;
    static INLINED void unpack(const u8* b, bf16* out) {
        const float d = half_at(b), m = half_at(b + 2);
        for (int g = 0; g < 8; ++g) {
            int scale, offset;
            six_bits(b + 4, g, &scale, &offset);
            const float ds = d * static_cast<float>(scale), mo = m * static_cast<float>(offset);
            const u8 *h = b + 16, *q = b + 48 + g / 2 * 32;
            const int shift = g % 2 * 4;
            for (int i = 0; i < 32; ++i) {
                const int number = (q[i] >> shift & 15) | (h[i] >> g & 1) << 4;
                out[g * 32 + i] = round_bf16(ds * static_cast<float>(number) - mo);
            }
        }
    }
};

struct Q6K {
    static constexpr long BYTES = 210, SIZE = 256;
    static INLINED void unpack(const u8* b, bf16* out) {
        const float d = half_at(b + 208);
        for (int g = 0; g < 16; ++g) {
            const float scale = d * static_cast<float>(static_cast<std::int8_t>(b[192 + g]));
            // Of 128 weights: 64 bytes' low halves, then the high ones; two bits in four layers.
            const int half = g / 8, at = g % 8 * 16;
            const u8* q = b + half * 64 + at % 64;
            const u8* h = b + 128 + half * 32 + at % 32;
            const int shift = at / 64 * 4, layer = at / 32 * 2;
            for (int i = 0; i < 16; ++i) {
                const int number = (q[i] >> shift & 15) | (h[i] >> layer & 3) << 4;
                out[g * 16 + i] = round_bf16(scale * (static_cast<float>(number) - 32));
            }
        }
    }
};

// Of group g, six bits.
INLINED int iq4_xs_scale(const u8* b, int g) {
    const int low = b[4 + g / 2] >> g % 2 * 4 & 15, high = (b[2] | b[3] << 8) >> 2 * g & 3;
    return (low | high << 4) - 32;
}

struct Iq4Xs {
    static constexpr long BYTES = 136, SIZE = 256;
    static INLINED void unpack(const u8* b, bf16* out) {
        const float d = half_at(b);
        for (int g = 0; g < 8; ++g) {
            const float scale = d * static_cast<float>(iq4_xs_scale(b, g));
            const u8* q = b + 8 + g * 16;
            for (int i = 0; i < 32; ++i) {
                out[g * 32 + i] = round_bf16(scale * IQ4_VALUES[nibble(q, i)]);
            }
        }
    }
};

}  // namespace ggml
}  // namespace lowtide
