// Integers in groups and FP8 by blocks.

#include <cstring>

#include "driver.hpp"
#include "packed/packed.hpp"

// The driver asks for no blocks by itself: the library has them.
const lowtide::BlockType& lowtide::block_type(int) { std::abort(); }

namespace driver {
namespace {

using Bytes = std::vector<std::uint8_t>;
using Unpack = void(int, int, const void*, long, long, const std::int64_t*, long, long, bf16*);
struct Shape {
    long num_outs, num_k;
};

// As packed.py makes them.
int type_number(int form, int scale, int has_zeros, int log_group) {
    return 1 << 16 | form | scale << 2 | has_zeros << 4 | log_group << 5;
}

struct Matrix {
    int type;
    Shape shape;
    Bytes content;

    // Any codes and zeros, hardly any NaN; of the scales some are no usual numbers.
    Matrix(int type, const Shape& shape)
        : type(type), shape(shape), content(num_bytes(lowtide::PackedType(type), shape)) {
        for (auto& each : content) each = std::uint8_t(below(256));
        const lowtide::PackedType of(type);
        const lowtide::PackedWeights all(type, content.data(), shape.num_outs, shape.num_k);
        const lowtide::Span first = all.span(0, 0, shape.num_k);
        const long start = first.scales - content.data();
        const long stop = of.has_zeros ? first.zeros - content.data() : long(content.size());
        if (of.form == lowtide::Form::FP8)
            for (long at = 0; at < start; ++at)
                if (below(500) != 0) content[at] %= 127;
        for (long at = start; at + of.scale_bytes() <= stop; at += of.scale_bytes())
            if (below(64) != 0) std::memset(&content[at], 0x3c, of.scale_bytes());
    }

    // Without what aligns the end.
    static long num_bytes(const lowtide::PackedType& of, const Shape& shape) {
        const auto aligned = [](long size) { return (size + 63) / 64 * 64; };
        const long group = of.group(), num_groups = (shape.num_k + group - 1) / group;
        const bool is_fp8 = of.form == lowtide::Form::FP8;
        const long rows = is_fp8 ? (shape.num_outs + group - 1) / group : shape.num_outs;
        const long scale_bytes = rows * num_groups * of.scale_bytes();
        return aligned(shape.num_outs * of.code_bytes(shape.num_k)) +
               (of.has_zeros ? aligned(scale_bytes) + rows * num_groups : scale_bytes);
    }
};

bool is_same(const Numbers& left, const Numbers& right) {
    const auto same = [](bf16 a, bf16 b) {
        return a == b || (std::isnan(lowtide::widen(a)) && std::isnan(lowtide::widen(b)));
    };
    return std::equal(left.begin(), left.end(), right.begin(), right.end(), same);
}

// By every variant, of rows one after the other and by number.
void unpack_all(const Library& library, const Matrix& matrix, int best) {
    auto* unpack = library.function<Unpack>("lowtide_packed_unpack");
    const auto [num_outs, num_k] = matrix.shape;
    const Ids numbers = {num_outs - 1, 0, num_outs / 2};
    Numbers first;
    for (int variant = 0; variant <= best; ++variant) {
        Numbers out(num_outs * num_k), some(long(numbers.size()) * num_k);
        unpack(variant, matrix.type, matrix.content.data(), num_outs, num_k, nullptr, 0, num_outs,
               out.data());
        if (variant == 0) first = out;
        expect(is_same(out, first), "bits of kept weights", variant, matrix.type, num_k);
        unpack(variant, matrix.type, matrix.content.data(), num_outs, num_k, numbers.data(), 0,
               long(numbers.size()), some.data());
        for (std::size_t i = 0; i < numbers.size(); ++i) {
            const auto row = out.begin() + numbers[i] * num_k;
            expect(is_same(Numbers(row, row + num_k),
                           Numbers(some.begin() + long(i) * num_k, some.begin() + long(i + 1) * num_k)),
                   "a row by its number", variant, matrix.type, numbers[i]);
        }
    }
}

// By some threads as by one.
void multiply(const Library& library, const Matrix& matrix, int variant, long num_rows) {
    auto* call = library.function<MultiplyFunction>("lowtide_packed_multiply");
    const auto [num_outs, num_k] = matrix.shape;
    const Numbers x = numbers(num_rows * num_k), bias = numbers(num_outs);
    Numbers by_one;
    for (int num_threads : THREADS) {
        Numbers out(num_rows * num_outs, 7);
        call(variant, num_threads, matrix.type, x.data(), num_k, matrix.content.data(), bias.data(),
             out.data(), num_outs, num_rows, num_outs, num_k);
        if (num_threads == 1) by_one = out;
        expect(is_same(out, by_one), "bits of a kept product", variant, matrix.type, num_rows);
    }
}

// By some threads as by one; each expert's gate, up and down one behind the other.
void run(const Library& library, int variant, int type, const Routed& routed) {
    const long hidden = 256, width = 128;
    const auto [num_tokens, k, num_experts] = routed;
    const Matrix inward(type, {width, hidden}), outward(type, {hidden, width});
    const auto aligned = [](std::size_t size) { return (long(size) + 63) / 64 * 64; };
    const long gate_bytes = aligned(inward.content.size());
    const long slot_bytes = 2 * gate_bytes + aligned(outward.content.size());
    Bytes all(num_experts * slot_bytes);
    for (long expert = 0; expert < num_experts; ++expert) {
        std::uint8_t* const slot = all.data() + expert * slot_bytes;
        std::copy(inward.content.begin(), inward.content.end(), slot);
        std::copy(inward.content.begin(), inward.content.end(), slot + gate_bytes);
        std::copy(outward.content.begin(), outward.content.end(), slot + 2 * gate_bytes);
    }
    const ExpertPlaces places = {all.data(), all.data() + gate_bytes, all.data() + 2 * gate_bytes,
                                 slot_bytes};
    const std::int32_t types[] = {type, type, type};
    const Numbers x = numbers(num_tokens * hidden);
    const Floats weights = floats(num_tokens * k);
    const Ids experts = chosen_experts(num_tokens, k, num_experts), slots = slots_of(experts);
    const long num_pairs = num_tokens * k;
    auto* whole = library.function<ExpertsFunction>("lowtide_packed_experts");
    auto* groups = library.function<MlpsFunction>("lowtide_packed_mlps");
    Numbers by_one;
    for (int num_threads : THREADS) {
        Numbers parts(num_pairs * hidden), gate(num_pairs * width), up(num_pairs * width);
        Floats out(num_tokens * hidden, 3.0f);
        whole(variant, num_threads, types, x.data(), experts.data(), weights.data(), slots.data(),
              &places, parts.data(), gate.data(), up.data(), out.data(), num_tokens, k, hidden,
              width);
        if (num_threads == 1) by_one = parts;
        expect(is_same(parts, by_one), "bits of kept experts", variant, type, num_tokens);
        const Ids of_groups = num_pairs == 0 ? Ids{} : Ids{slots[0], 0, num_pairs};
        groups(variant, num_threads, types, of_groups.data(), long(of_groups.size()) / 3,
               &places, parts.data(), gate.data(), up.data(), hidden, width);
    }
}

void check(const Library& library, int type, const Shape& shape) {
    const int best = library.function<int()>("lowtide_best_variant")();
    auto* max_rows = library.function<long(int)>("lowtide_max_rows");
    const Matrix matrix(type, shape);
    unpack_all(library, matrix, best);
    for (int variant = 0; variant <= best; ++variant)
        for (long num_rows : {0L, 1L, 5L, max_rows(variant)})
            multiply(library, matrix, variant, num_rows);
}

}  // namespace

void check_sections(const Library& kernels) {
    const long alignment = kernels.function<long()>("lowtide_section_alignment")();
    expect(alignment == lowtide::SECTION_ALIGNMENT, "where sections begin", alignment);
    const int best = kernels.function<int()>("lowtide_best_variant")();
    for (int type : {type_number(1, 1, 1, 7), type_number(2, 0, 0, 5), type_number(3, 2, 0, 7)})
        for (const Routed& routed : ROUTED)
            for (int variant = 0; variant <= best; ++variant) run(kernels, variant, type, routed);
    for (int form : {1, 2})
        for (int scale : {0, 1, 2})
            for (int has_zeros : {0, 1})
                for (int log_group : {5, 7})
                    check(kernels, type_number(form, scale, has_zeros, log_group), {37, 640});
    for (int scale : {0, 2})
        for (const Shape& shape : {Shape{1, 1}, Shape{37, 200}, Shape{300, 384}})
            check(kernels, type_number(3, scale, 0, 7), shape);
}

}  // namespace driver
