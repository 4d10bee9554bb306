// Matrices of checkpoints that other tools rounded, as products take them: integers in groups
// (formats/grouped_ints.py) and FP8 by blocks (formats/fp8.py). In memory a matrix is sections, each
// beginning at a multiple of 64 bytes: the codes of all rows, all scales, and, if it has them, zeros.

#pragma once

#include "products.hpp"

namespace lowtide {

constexpr long SECTION_ALIGNMENT = 64;

enum class Form { PLAIN, INTS_OF_4, INTS_OF_8, FP8 };  // PLAIN: bfloat16, without any sections
enum class ScaleType { BF16, F16, F32 };

// The type that a `type_number` of sectioned.py encodes, whose bits these are.
struct SectionedType {
    Form form;
    ScaleType scale;
    bool has_zeros;
    int log_group;  // of how many weights of a row share a scale; in FP8 as many rows, too

    explicit SectionedType(int number)
        : form(static_cast<Form>(number & 3)), scale(static_cast<ScaleType>(number >> 2 & 3)),
          has_zeros(number >> 4 & 1), log_group(number >> 5) {}

    long group() const { return 1L << log_group; }
    long scale_bytes() const { return scale == ScaleType::F32 ? 4 : 2; }

    long code_bytes(long num_weights) const {
        if (form == Form::PLAIN) return num_weights * static_cast<long>(sizeof(bf16));
        return form == Form::INTS_OF_4 ? num_weights / 2 : num_weights;
    }
};

// Neighbouring weights of a row, the first of which begins a group.
struct Span {
    const std::uint8_t *codes, *scales, *zeros;  // zeros: null without
    long length;
};

// Each rounded once, in every variant to the same bits; not of plain ones.
void unpack_span(int variant, const SectionedType& type, const Span& span, bf16* out);

// Some rows of a matrix [.., num_k].
class SectionedWeights {
   public:
    // All rows of the matrix at `start`.
    SectionedWeights(int type, const void* start, long num_rows, long num_k)
        : type_(type), num_k_(num_k), num_groups_((num_k + type_.group() - 1) / type_.group()),
          codes_(static_cast<const std::uint8_t*>(start)) {
        if (type_.form == Form::PLAIN) return;
        const bool is_fp8 = type_.form == Form::FP8;
        const long num_scales =
            num_groups_ * (is_fp8 ? (num_rows + type_.group() - 1) / type_.group() : num_rows);
        scales_ = codes_ + aligned(num_rows * row_bytes());
        if (type_.has_zeros) zeros_ = scales_ + aligned(num_scales * type_.scale_bytes());
    }

    const SectionedType& type() const { return type_; }
    long num_k() const { return num_k_; }
    long row_bytes() const { return type_.code_bytes(num_k_); }  // of codes
    long num_groups() const { return num_groups_; }  // of a row
    const std::uint8_t* start() const { return codes_ + first_ * row_bytes(); }

    SectionedWeights from(long row) const {
        SectionedWeights rest = *this;
        rest.first_ += row;
        return rest;
    }

    SectionedWeights moved(long num_bytes) const {
        SectionedWeights other = *this;
        other.codes_ += num_bytes;
        if (scales_ != nullptr) other.scales_ += num_bytes;
        if (zeros_ != nullptr) other.zeros_ += num_bytes;
        return other;
    }

    // From `k` on, where a group begins.
    Span span(long row, long k, long length) const {
        const long number = first_ + row;
        const long of_scales = type_.form == Form::FP8 ? number >> type_.log_group : number;
        const long group = of_scales * num_groups_ + (k >> type_.log_group);
        return {
            codes_ + number * row_bytes() + type_.code_bytes(k),
            scales_ + group * type_.scale_bytes(), zeros_ == nullptr ? nullptr : zeros_ + group,
            length,
        };
    }

    // See `multiply` of products.hpp: with the bits of these weights rounded to bfloat16.
    void multiply(int variant, const Product<bf16>& product) const;

   private:
    static long aligned(long size) {
        return (size + SECTION_ALIGNMENT - 1) / SECTION_ALIGNMENT * SECTION_ALIGNMENT;
    }

    SectionedType type_;
    long num_k_, num_groups_;
    const std::uint8_t *codes_, *scales_ = nullptr, *zeros_ = nullptr;  // of row 0 of the matrix
    long first_ = 0;  // of these rows
};

}  // namespace lowtide
