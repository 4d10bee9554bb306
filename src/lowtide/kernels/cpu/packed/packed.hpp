// Matrices of packed weights, as products take them: one type of matrix for all that they may be
// stored in, which one number says. Two families of types there are.
//
// Blocks: neighbouring weights of a row with their scales, row after row: ggml's types
// (formats/ggml/) and our own q8 and q4 (formats/quantised.py), whose rows are padded to whole
// blocks.
//
// Sections, each beginning at a multiple of 64 bytes: the codes of all rows of a matrix, all scales,
// and, if it has them, zeros: checkpoints that other tools rounded (formats/grouped_ints.py,
// formats/fp8.py). bfloat16 is a section of codes alone.

#pragma once

#include "dense/products.hpp"
#include "packed/block_types.hpp"

namespace lowtide {

constexpr long SECTION_ALIGNMENT = 64;

// Some blocks, one after the other, of some rows; num_k weights of each row.
struct PackedRows {
    const std::uint8_t* stored;
    long row_bytes, num_rows, num_blocks, num_k;
};

// To bfloat16; rows of `out` are `out_stride` numbers apart.
using UnpackRows = void (*)(int variant, const PackedRows& rows, bf16* out, long out_stride);

// The product by a type's own instructions, if the variant has some for so many rows: answers whether
// it has. With AVX512-BF16 few rows are multiplied with out of the registers that weights are
// unpacked into.
using MultiplyDirectly = bool (*)(int variant, const Product<bf16>& product, const PackedRows& rows);

struct BlockType {
    UnpackRows unpack;
    MultiplyDirectly multiply;
    long block_bytes, block_size;

    long num_blocks(long num_weights) const { return (num_weights + block_size - 1) / block_size; }
    long row_bytes(long num_k) const { return num_blocks(num_k) * block_bytes; }
};

// By its number (block_types.hpp): without functions before its file is loaded.
const BlockType& block_type(int number);
void set_block_type(int number, const BlockType& type);

// In a type's own file, which has a template `block_type_of`.
#define BLOCK_TYPE(name, Type)                                                                     \
    static_assert(Type::SIZE == lowtide::BLOCK_SHAPES[lowtide::BLOCK_##name].size);                \
    static_assert(Type::BYTES == lowtide::BLOCK_SHAPES[lowtide::BLOCK_##name].num_bytes);          \
    static const lowtide::Registered<lowtide::BlockType, lowtide::set_block_type> REGISTERED(      \
        lowtide::BLOCK_##name, lowtide::block_type_of<Type>());

enum class Form { PLAIN, INTS_OF_4, INTS_OF_8, FP8, BLOCKS };
enum class ScaleType { BF16, F16, F32 };

// What a `type_number` of packed.py encodes.
struct PackedType {
    static constexpr int SECTIONS = 1 << 16;  // a bit that numbers of blocks have not

    Form form = Form::BLOCKS;
    const BlockType* blocks = nullptr;
    ScaleType scale = ScaleType::BF16;
    bool has_zeros = false;
    int log_group = 0;  // of how many weights of a row share a scale; in FP8 as many rows, too

    explicit PackedType(int number) {
        if ((number & SECTIONS) == 0) {
            blocks = &block_type(number);
            return;
        }
        form = static_cast<Form>(number & 3), scale = static_cast<ScaleType>(number >> 2 & 3);
        has_zeros = number >> 4 & 1, log_group = (number & (SECTIONS - 1)) >> 5;
    }

    bool has_sections() const { return form != Form::PLAIN && form != Form::BLOCKS; }
    long group() const { return 1L << log_group; }
    long scale_bytes() const { return scale == ScaleType::F32 ? 4 : 2; }

    long code_bytes(long num_weights) const {
        if (form == Form::BLOCKS) return blocks->row_bytes(num_weights);
        if (form == Form::PLAIN) return num_weights * static_cast<long>(sizeof(bf16));
        return form == Form::INTS_OF_4 ? num_weights / 2 : num_weights;
    }
};

// Neighbouring weights of a row, the first of which begins a group, in sections.
struct Span {
    const std::uint8_t *codes, *scales, *zeros;  // zeros: null without
    long length;
};

// Each rounded once, in every variant to the same bits.
void unpack_span(int variant, const PackedType& type, const Span& span, bf16* out);

// Some rows of a matrix [.., num_k].
class PackedWeights {
   public:
    // All rows of the matrix at `start`.
    PackedWeights(int type, const void* start, long num_rows, long num_k)
        : type_(type), num_k_(num_k), num_groups_((num_k + type_.group() - 1) / type_.group()),
          codes_(static_cast<const std::uint8_t*>(start)) {
        if (!type_.has_sections()) return;
        const bool is_fp8 = type_.form == Form::FP8;
        const long num_scales =
            num_groups_ * (is_fp8 ? (num_rows + type_.group() - 1) / type_.group() : num_rows);
        scales_ = codes_ + aligned(num_rows * row_bytes());
        if (type_.has_zeros) zeros_ = scales_ + aligned(num_scales * type_.scale_bytes());
    }

    const PackedType& type() const { return type_; }
    long num_k() const { return num_k_; }
    long row_bytes() const { return type_.code_bytes(num_k_); }  // of codes
    long num_groups() const { return num_groups_; }  // of a row
    const std::uint8_t* start() const { return codes_ + first_ * row_bytes(); }

    PackedWeights from(long row) const {
        PackedWeights rest = *this;
        rest.first_ += row;
        return rest;
    }

    // The same of another slot.
    PackedWeights moved(long num_bytes) const {
        PackedWeights other = *this;
        other.codes_ += num_bytes;
        if (scales_ != nullptr) other.scales_ += num_bytes;
        if (zeros_ != nullptr) other.zeros_ += num_bytes;
        return other;
    }

    // A row's sections from `k` on, where a group begins.
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

    // See `multiply` of products.hpp: with the bits of these weights rounded to bfloat16 (of q8 and
    // q4 in the order of sums that quantised_products.hpp says).
    void multiply(int variant, const Product<bf16>& product) const;

   private:
    static long aligned(long size) {
        return (size + SECTION_ALIGNMENT - 1) / SECTION_ALIGNMENT * SECTION_ALIGNMENT;
    }

    PackedType type_;
    long num_k_, num_groups_;
    const std::uint8_t *codes_, *scales_ = nullptr, *zeros_ = nullptr;  // of row 0 of the matrix
    long first_ = 0;  // of these rows
};

}  // namespace lowtide
