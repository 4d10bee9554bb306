// The operators of signatures.hpp for one kind of weights, with rows rounded or not
// (call_rows.hpp).
//
// `Weights`: see expert_layer.hpp; also `Weights(type, stored, num_outs, num_k)`, where the type
// is a number of the kind's own.

#pragma once

#include "experts/expert_layer.hpp"
#include "signatures.hpp"

namespace lowtide {

// Multiplies any number of rows. `p` has neither weights nor inputs of its own.
template <class Weights, class Rows>
void multiply_in_pieces(int variant, int num_threads, const Weights& weights, Product<bf16> p) {
    constexpr long PIECE_BYTES = WORTH_BYTES / 4;  // of a matrix, as far as tiles stay whole
    const long num_bytes = p.num_outs * weights.row_bytes();
    if (num_bytes < WORTH_BYTES) num_threads = 1;
    Rows rows(variant);
    const Group all = {0, 0, p.num_rows};
    const long piece_bytes = rows.piece_bytes(PIECE_BYTES, num_bytes / num_threads, &all, 1);
    const long length =
        even_pieces(p.num_outs, whole_tiles(piece_bytes / weights.row_bytes()));
    for (long left = p.num_rows; left > 0; left -= p.num_rows) {
        p.num_rows = std::min(left, Rows::MOST_ROWS);
        const Group group = {0, 0, p.num_rows};
        rows.take(num_threads, {p.x, p.x_stride, p.num_k, &group, 1}, {weights});
        together(num_threads, (p.num_outs + length - 1) / length, [&](long number) {
            const long first = number * length, next = first + num_threads * length;
            Product<bf16> some = p;
            some.out += first, some.num_outs = std::min(length, p.num_outs - first);
            if (p.bias != nullptr) some.bias += first;
            if (next < p.num_outs) some.next = weights.from(next).start();
            rows.multiply(weights.from(first), some, 0);
        });
        p.x += p.num_rows * p.x_stride, p.out += p.num_rows * p.out_stride;
    }
}

template <class Weights>
ExpertSlots<Weights> slots_of(
    const std::int32_t* types, const ExpertPlaces& places, long hidden, long width
) {
    return {Weights(types[0], places.gate, width, hidden),
            Weights(types[1], places.up, width, hidden),
            Weights(types[2], places.down, hidden, width), places, hidden, width};
}

}  // namespace lowtide

// lowtide_KIND_mlps and lowtide_KIND_experts
#define EXPERT_OPERATORS(kind, Weights, Rows)                                                      \
    extern "C" void lowtide_##kind##_mlps(                                                         \
        int variant, int num_threads, const std::int32_t* types, const std::int64_t* groups,       \
        long num_groups, const lowtide::ExpertPlaces* places, lowtide::bf16* parts,                \
        lowtide::bf16* gate, lowtide::bf16* up, long hidden, long width                            \
    ) {                                                                                            \
        lowtide::ExpertLayer<Weights, Rows>(                                                       \
            variant, num_threads,                                                                  \
            lowtide::slots_of<Weights>(types, *places, hidden, width), {parts, gate, up}           \
        ).run(reinterpret_cast<const lowtide::Group*>(groups), num_groups);                        \
    }                                                                                              \
    extern "C" void lowtide_##kind##_experts(                                                      \
        int variant, int num_threads, const std::int32_t* types, const lowtide::bf16* x,           \
        const std::int64_t* experts, const float* weights, const std::int64_t* slots,              \
        const lowtide::ExpertPlaces* places, lowtide::bf16* parts, lowtide::bf16* gate,         \
        lowtide::bf16* up, float* out, long num_tokens, long k, long hidden, long width            \
    ) {                                                                                            \
        lowtide::run_experts<Weights, Rows>(                                                       \
            variant, num_threads, x, experts, weights, slots,                                      \
            lowtide::slots_of<Weights>(types, *places, hidden, width), {parts, gate, up}, out,     \
            num_tokens, k);                                                                        \
    }

// Those and lowtide_KIND_multiply.
#define WEIGHT_OPERATORS(kind, Weights, Rows)                                                      \
    EXPERT_OPERATORS(kind, Weights, Rows)                                                          \
    extern "C" void lowtide_##kind##_multiply(                                                     \
        int variant, int num_threads, int type, const lowtide::bf16* x, long x_stride,             \
        const void* w, const lowtide::bf16* bias, lowtide::bf16* out, long out_stride,             \
        long num_rows, long num_outs, long num_k                                                   \
    ) {                                                                                            \
        lowtide::multiply_in_pieces<Weights, Rows>(                                                \
            variant, num_threads, Weights(type, w, num_outs, num_k),                               \
            {x, x_stride, nullptr, bias, out, out_stride, num_rows, num_outs, num_k});             \
    }
