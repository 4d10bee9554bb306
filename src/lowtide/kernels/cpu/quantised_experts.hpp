// Several experts in 8 or 4 bits in one call, whatever multiplies: `Products` has
//
//     prepare(x, stride, first, num_rows, num_k, num_threads)   rows first to first + num_rows of x,
//                                                               which products follow of
//     multiply(RowsTimes)                                       some of these rows with weights
//     plain                                                     what vectors all else has

#pragma once

#include <utility>

#include "pairs.hpp"
#include "products.hpp"
#include "quantised.hpp"
#include "signatures.hpp"
#include "team.hpp"

namespace lowtide {

// Of a matrix, as it is stored, as far as tiles stay whole.
constexpr long QUANTISED_PIECE_BYTES = WORTH_BYTES / 2;

// Rows `row` to before row + num_rows of x with some rows of weights.
struct RowsTimes {
    const bf16* x;  // row 0
    long x_stride, row, num_rows;
    QuantisedWeights w;
    long num_outs;
    const bf16* bias;  // or null
    bf16* out;  // of row `row`
    long out_stride;
    const std::uint8_t* next;  // weights that this thread is likely to read after these, or null
};

inline long features_of_piece(const QuantisedWeights& w, long num_outs) {
    return std::min(num_outs, whole_tiles(QUANTISED_PIECE_BYTES / w.row_bytes()));
}

// Where the experts' weights are: those of slot 0, the others at multiples of `slot_bytes`. All are
// of as many bits.
struct QuantisedSlots {
    const void *gate, *up, *down;
    long slot_bytes, hidden, width;
    int num_bits;

    QuantisedWeights inward(const void* of_slot_0, const Group& group) const {
        return {at(of_slot_0, group), hidden, num_bits};
    }

    QuantisedWeights outward(const Group& group) const { return {at(down, group), width, num_bits}; }

    const std::uint8_t* at(const void* of_slot_0, const Group& group) const {
        return static_cast<const std::uint8_t*>(of_slot_0) + group.slot * slot_bytes;
    }
};

// A row for each pair of a token and an expert: parts [.., hidden], gate and up [.., width].
struct QuantisedScratch {
    bf16 *parts, *gate, *up;
};

// `out = x @ w.T + bias` for x [num_rows, w.num_k], in pieces of output features.
template <class Products>
void multiply_in_pieces(Products& products, RowsTimes p, int num_threads) {
    if (p.num_outs * p.w.row_bytes() < WORTH_BYTES) num_threads = 1;
    const long length = features_of_piece(p.w, p.num_outs);
    products.prepare(p.x, p.x_stride, p.row, p.num_rows, p.w.num_k, num_threads);
    together(num_threads, (p.num_outs + length - 1) / length, [&, p](long number) {
        const long first = number * length, after = (number + num_threads) * length;
        RowsTimes some = p;
        some.w = p.w.from(first), some.num_outs = std::min(length, p.num_outs - first);
        some.bias = p.bias ? p.bias + first : nullptr;
        some.out = p.out + first;
        some.next = after < p.num_outs ? p.w.row(after) : nullptr;
        products.multiply(some);
    });
}

// Gates and ups first, then downs: the groups' rows of parts, from inputs to outputs.
template <class Products>
void run_at_once(
    Products& products, int num_threads, const Group* groups, long num_groups,
    const QuantisedSlots& slots, const QuantisedScratch& scratch
) {
    const long hidden = slots.hidden, width = slots.width;
    const QuantisedWeights inward = slots.inward(slots.gate, groups[0]);
    const QuantisedWeights outward = slots.outward(groups[0]);
    if (num_groups * (2 * width * inward.row_bytes() + hidden * outward.row_bytes()) < WORTH_BYTES)
        num_threads = 1;

    for (long g = 0; g < num_groups; ++g)
        products.prepare(
            scratch.parts, hidden, groups[g].first, groups[g].num_rows, hidden, num_threads);
    const long wide = features_of_piece(inward, width), num_wide = (width + wide - 1) / wide;
    together(num_threads, num_groups * num_wide, [&](long number) {
        const Group& group = groups[number / num_wide];
        const long first = number % num_wide * wide, length = std::min(wide, width - first);
        const long start = group.first * width + first;
        const QuantisedWeights up = slots.inward(slots.up, group).from(first);
        const long after = number + num_threads;
        const std::uint8_t* next = after < num_groups * num_wide
            ? slots.inward(slots.gate, groups[after / num_wide]).row(after % num_wide * wide)
            : nullptr;
        RowsTimes gate = {
            scratch.parts, hidden, group.first, group.num_rows,
            slots.inward(slots.gate, group).from(first), length, nullptr, scratch.gate + start,
            width, up.rows,
        };
        products.multiply(gate);
        gate.w = up, gate.out = scratch.up + start, gate.next = next;
        products.multiply(gate);
        for (long row = 0; row < group.num_rows; ++row)
            silu_times(products.plain, scratch.gate + start + row * width,
                       scratch.up + start + row * width, length);
    });

    for (long g = 0; g < num_groups; ++g)
        products.prepare(
            scratch.gate, width, groups[g].first, groups[g].num_rows, width, num_threads);
    const long tall = features_of_piece(outward, hidden), num_tall = (hidden + tall - 1) / tall;
    together(num_threads, num_groups * num_tall, [&](long number) {
        const Group& group = groups[number / num_tall];
        const long first = number % num_tall * tall, length = std::min(tall, hidden - first);
        const long after = number + num_threads;
        const std::uint8_t* next = after < num_groups * num_tall
            ? slots.outward(groups[after / num_tall]).row(after % num_tall * tall)
            : nullptr;
        products.multiply({
            scratch.gate, width, group.first, group.num_rows, slots.outward(group).from(first),
            length, nullptr, scratch.parts + group.first * hidden + first, hidden, next,
        });
    });
}

// The same, for so many rows at a time that what is made of them stays small.
template <class Products>
void run_groups(
    Products& products, int num_threads, const Group* groups, long num_groups,
    const QuantisedSlots& slots, const QuantisedScratch& scratch
) {
    constexpr long MOST = 256;
    std::vector<Group> some;
    for (long begin = 0, end = 0; begin < num_groups; begin = end) {
        const long base = groups[begin].first;
        some.clear();
        for (end = begin; end < num_groups; ++end) {
            const Group& group = groups[end];
            const long last = group.first + group.num_rows - base;
            if (end > begin && (group.first < base || last > MOST)) break;
            some.push_back({group.slot, group.first - base, group.num_rows});
        }
        const QuantisedScratch rows = {
            scratch.parts + base * slots.hidden, scratch.gate + base * slots.width,
            scratch.up + base * slots.width,
        };
        run_at_once(products, num_threads, some.data(), end - begin, slots, rows);
    }
}

// All experts of a few tokens, and their sum: see `ExpertsFunction`.
template <class Products>
void run_tokens(
    Products& products, int num_threads, const bf16* x, const std::int64_t* experts,
    const float* weights, const std::int64_t* of_slots, const QuantisedSlots& slots,
    const QuantisedScratch& scratch, float* out, long num_tokens, long k
) {
    const long num_pairs = num_tokens * k, hidden = slots.hidden;
    const SortedPairs sorted(x, experts, of_slots, scratch.parts, num_tokens, k, hidden);
    const auto num_groups = static_cast<long>(sorted.groups.size());
    run_groups(products, num_threads, sorted.groups.data(), num_groups, slots, scratch);

    const long* rows = sorted.row_of.data();
    const bf16* parts = scratch.parts;
    vectorised(products.plain, [=]() INLINED_LAMBDA {
        std::fill(out, out + num_tokens * hidden, 0.0f);
        for (long pair = 0; pair < num_pairs; ++pair) {
            const bf16* part = parts + rows[pair] * hidden;
            float* sum = out + pair / k * hidden;
            for (long i = 0; i < hidden; ++i) sum[i] += weights[pair] * widen(part[i]);
        }
    });
}

}  // namespace lowtide
