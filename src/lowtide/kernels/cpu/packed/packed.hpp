// Matrices of packed weights. `PackedWeights` is a matrix in any of the stored types, and a number
// names the type. There are two families of types:
//
// - Blocks: adjacent weights of a row together with their scales. These are ggml's types
//   (formats/ggml/) and lowtide's own q8 and q4 (formats/quantised.py). Rows are padded to whole
//   blocks.
// - Sections, each at a multiple of 64 bytes: the codes of all rows of a matrix, then all scales,
//   then the zeros, if any. These are checkpoints rounded by other tools (formats/grouped_ints.py,
//   formats/fp8.py). bfloat16 is a single section of codes.

#pragma once

#include "dense/products.hpp"
#include "packed/block_types.hpp"

namespace lowtide {

constexpr long SECTION_ALIGNMENT = 64;

// Adjacent blocks of some rows, num_k weights of each row.
struct PackedRows {
    const std::uint8_t* stored;
    long row_bytes, num_rows, num_blocks, num_k;
};

// Unpacks to bfloat16; rows of `out` are `out_stride` elements apart.
using UnpackRows = void (*)(int variant, const PackedRows& rows, bf16* out, long out_stride);

// Multiplies with a type's own code. Returns false, and does nothing, if the variant has none for
// as many rows. With AVX512-BF16 weights go from the registers they are unpacked into to products
// of a few rows.
using MultiplyDirectly = bool (*)(int variant, const Product<bf16>& product, const PackedRows& rows);

struct BlockType {
    UnpackRows unpack;
    MultiplyDirectly multiply;
    long block_bytes, block_size;

    long num_blocks(long num_weights) const { return (num_weights + block_size - 1) / block_size; }
    long row_bytes(long num_k) const { return num_blocks(num_k) * block_bytes; }
};

// Returns the block type with a number of block_types.hpp. It has no functions before its file is
// loaded.
const BlockType& block_type(int number);
void set_block_type(int number, const BlockType& type);

// Registers a type; stands in the type's own file, after a template `block_type_of`.
#define BLOCK_TYPE(name, Type)                                                                     \
    static_assert(Type::SIZE == lowtide::BLOCK_SHAPES[lowtide::BLOCK_##name].size);                \
    static_assert(Type::BYTES == lowtide::BLOCK_SHAPES[lowtide::BLOCK_##name].num_bytes);          \
    static const lowtide::Registered<lowtide::BlockType, lowtide::set_block_type> REGISTERED(      \
        lowtide::BLOCK_##name, lowtide::block_type_of<Type>());

enum class Form { PLAIN, INTS_OF_4, INTS_OF_8, FP8, BLOCKS };
enum class ScaleType { BF16, F16, F32 };

// The type that a `type_number` of packed.py encodes.
struct PackedType {
    static constexpr int SECTIONS = 1 << 16;  // a bit that is not set in numbers of block types

    Form form = Form::BLOCKS;
    const BlockType* blocks = nullptr;
    ScaleType scale = ScaleType::BF16;
    bool has_zeros = false;
    int log_group = 0;  // log2 of the weights of a row that share a scale; in FP8 also of the rows

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

// Adjacent weights of a row stored in sections; the first one begins a group.
struct Span {
    const std::uint8_t *codes, *scales, *zeros;  // zeros: null if the type has none
    long length;
};

// Unpacks to bfloat16. Each weight is rounded once, to the same bits in every variant.
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

    // Returns the same rows of the matrix in another slot, `num_bytes` away.
    PackedWeights moved(long num_bytes) const {
        PackedWeights other = *this;
        other.codes_ += num_bytes;
        if (scales_ != nullptr) other.scales_ += num_bytes;
        if (zeros_ != nullptr) other.zeros_ += num_bytes;
        return other;
    }

    // Returns a row's sections from `k` on, which begins a group.
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

    // Multiplies as `multiply` of products.hpp would with these weights rounded to bfloat16: the
    // same bits, except that sums with q8 and q4 have the order of quantised_products.hpp.
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
