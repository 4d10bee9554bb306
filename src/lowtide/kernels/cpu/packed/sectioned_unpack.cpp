// Unpacks grouped integers and blockwise FP8 to bfloat16 with a variant's instructions:
//
//     weight = scale * (code - zero)          in float32, without zeros half of the codes' range
//     weight = scale * number                 in float32, numbers in float8_e4m3fn
//
// Each weight is rounded once. No multiply and add are fused, so that all instruction sets give the
// same bits.

#include <algorithm>

#include "packed/ggml_types.hpp"
#include "packed/packed.hpp"
#include "packed/sectioned_vectors.hpp"

namespace lowtide {
namespace {

using ggml::from_bits;
using ggml::half_at;
using u8 = std::uint8_t;

INLINED float scale_at(ScaleType type, const u8* from) {
    if (type == ScaleType::F16) return half_at(from);
    std::uint32_t bits = 0;
    if (type == ScaleType::F32) std::memcpy(&bits, from, sizeof bits);
    else bits = static_cast<std::uint32_t>(from[0] | from[1] << 8) << 16;
    return from_bits(bits);
}

INLINED float number(int code) { return static_cast<float>(code); }

template <Form form>
INLINED void unpack_ints(const PackedType& type, const Span& span, bf16* out) {
    constexpr float HALF = form == Form::INTS_OF_4 ? 8 : 128;
    const long group = type.group();
    for (long i = 0; i < span.length >> type.log_group; ++i) {
        const float scale = scale_at(type.scale, span.scales + i * type.scale_bytes());
        const float zero = span.zeros == nullptr ? HALF : number(span.zeros[i]);
        const u8* codes = span.codes + type.code_bytes(i * group);
        bf16* to = out + i * group;
        if constexpr (form == Form::INTS_OF_4) {
            for (long k = 0; k < group / 2; ++k) {
                to[2 * k] = round_bf16(scale * (number(codes[k] & 15) - zero));
                to[2 * k + 1] = round_bf16(scale * (number(codes[k] >> 4) - zero));
            }
        } else {
            for (long k = 0; k < group; ++k) to[k] = round_bf16(scale * (number(codes[k]) - zero));
        }
    }
}

// float8_e4m3fn: four bits of exponent with bias 7, three of mantissa; all ones are NaN, and there
// is no infinity.
INLINED float fp8(std::uint32_t code) {
    const std::uint32_t sign = (code & 0x80) << 24, size = code & 0x7f;
    const float normal = from_bits((size << 20) + 0x3c000000);
    const float tiny = number(static_cast<int>(size)) * 0x1p-9f;
    std::uint32_t bits;
    const float found = size < 8 ? tiny : normal;
    std::memcpy(&bits, &found, sizeof bits);
    return from_bits(size == 0x7f ? 0x7fc00000 : sign | bits);
}

INLINED void unpack_fp8(float scale, const u8* codes, long length, bf16* out) {
    for (long k = 0; k < length; ++k) out[k] = round_bf16(scale * fp8(codes[k]));
}

template <Form form>
void ints(int variant, const PackedType& type, const Span& span, bf16* out) {
    vectorised(variant, [=]() INLINED_LAMBDA { unpack_ints<form>(type, span, out); });
}

void fp8_block(int variant, float scale, const u8* codes, long length, bf16* out) {
#if defined(HAS_DOT_PRODUCTS)
    if (variant >= WITH_AVX512_BF16 && sectioned::unpack_fp8(scale, codes, length, out)) return;
#endif
    vectorised(variant, [=]() INLINED_LAMBDA { unpack_fp8(scale, codes, length, out); });
}

void fp8_blocks(int variant, const PackedType& type, const Span& span, bf16* out) {
    const long group = type.group();
    const u8* scale = span.scales;
    for (long k = 0; k < span.length; k += group, scale += type.scale_bytes())
        fp8_block(variant, scale_at(type.scale, scale), span.codes + k,
                  std::min(group, span.length - k), out + k);
}

#if defined(HAS_DOT_PRODUCTS)

// Unpacks groups one by one in plain C++.
template <Form form>
void ints_by_vectors(int variant, const PackedType& type, const Span& span, bf16* out) {
    const long group = type.group(), count = span.length >> type.log_group;
    for (long i = 0; i < count; ++i) {
        const auto rest = [&](long length) {
            const auto* zeros = span.zeros == nullptr ? nullptr : span.zeros + i;
            return Span{span.codes + type.code_bytes(i * group),
                        span.scales + i * type.scale_bytes(), zeros, length};
        };
        i += sectioned::unpack_ints<form>(type, rest(span.length - i * group), out + i * group);
        if (i == count) return;
        ints<form>(variant, type, rest(group), out + i * group);
    }
}

#endif

}  // namespace

void unpack_span(int variant, const PackedType& type, const Span& span, bf16* out) {
    if (type.form == Form::FP8) return fp8_blocks(variant, type, span, out);
    const bool has_4 = type.form == Form::INTS_OF_4;
#if defined(HAS_DOT_PRODUCTS)
    if (variant >= WITH_AVX512_BF16)
        return has_4 ? ints_by_vectors<Form::INTS_OF_4>(variant, type, span, out)
                     : ints_by_vectors<Form::INTS_OF_8>(variant, type, span, out);
#endif
    return has_4 ? ints<Form::INTS_OF_4>(variant, type, span, out)
                 : ints<Form::INTS_OF_8>(variant, type, span, out);
}

}  // namespace lowtide
