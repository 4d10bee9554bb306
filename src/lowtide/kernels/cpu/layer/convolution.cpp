// A gated short convolution, whose state is what it saw of the last positions.

#include <algorithm>

#include "layer/mixers.hpp"
#include "layer/steps.hpp"

using namespace lowtide;

namespace {

// Rows of one sequence, each of which sees those before it, and these the state.
struct Rows {
    const bf16* gated;  // [.., hidden], of the first row
    const bf16* before;  // [num_taps - 1, hidden], the oldest first
    long num_taps, hidden;

    // What lies `distance` positions before a row.
    const bf16* back(long row, long distance) const {
        const long place = row - distance;
        return place < 0 ? before + (num_taps - 1 + place) * hidden : gated + place * hidden;
    }
};

// Gates times inputs of all rows.
void gate(const Pass& p, long hidden) {
    vectorised(p.variant, [=]() INLINED_LAMBDA {
        for (long row = 0; row < p.num_rows; ++row) {
            const bf16* gates = p.projected + row * 3 * hidden;
            const bf16* inputs = gates + 2 * hidden;
            bf16* out = p.attended + row * hidden;
            for (long i = 0; i < hidden; ++i) out[i] = round_bf16(widen(gates[i]) * widen(inputs[i]));
        }
    });
}

// One row, after its output gates: its own product is first in each sum, then those before it.
INLINED void convolve(const ShortConvolution& c, const Rows& rows, long row, const bf16* gates,
                      bf16* out) {
    constexpr long WIDTH = 64;
    for (long first = 0; first < rows.hidden; first += WIDTH) {
        const long count = std::min(WIDTH, rows.hidden - first);
        float sums[WIDTH];
        for (long distance = 0; distance < c.num_taps; ++distance) {
            const bf16* seen = rows.back(row, distance) + first;
            const bf16* tap = c.kernel + first * c.num_taps + c.num_taps - 1 - distance;
            for (long i = 0; i < count; ++i) {
                const float term = widen(seen[i]) * widen(tap[i * c.num_taps]);
                sums[i] = distance == 0 ? term : sums[i] + term;
            }
        }
        if (c.bias != nullptr)
            for (long i = 0; i < count; ++i) sums[i] += widen(c.bias[first + i]);
        for (long i = 0; i < count; ++i)
            out[first + i] = round_bf16(rounded(sums[i]) * widen(gates[first + i]));
    }
}

void run_sequence(const Pass& p, const ShortConvolution& c, const std::int64_t* sequence,
                  long hidden) {
    const long start = sequence[0], num_rows = sequence[1] - start, num_kept = c.num_taps - 1;
    const auto* before = reinterpret_cast<const bf16*>(sequence[2] + c.state);
    auto* after = reinterpret_cast<bf16*>(sequence[3] + c.state);
    const Rows rows = {p.attended + start * hidden, before, c.num_taps, hidden};
    vectorised(p.variant, [=, &c]() INLINED_LAMBDA {
        for (long row = 0; row < num_rows; ++row)
            convolve(c, rows, row, p.projected + ((start + row) * 3 + 1) * hidden,
                     p.normed + (start + row) * hidden);
    });
    for (long i = 0; i < num_kept; ++i)
        std::copy_n(rows.back(num_rows, num_kept - i), hidden, after + i * hidden);
}

}  // namespace

extern "C" {

// parts: a ShortConvolution.
void lowtide_mix_convolution(const Pass* pass, const void* parts, long hidden) {
    const Pass& p = *pass;
    const auto& c = *static_cast<const ShortConvolution*>(parts);
    normalise(p, c.norm, p.normed);
    multiply(p, p.normed, hidden, c.inward, p.projected, 3 * hidden);
    gate(p, hidden);
    for (long i = 0; i < p.num_sequences; ++i) run_sequence(p, c, p.sequences + 4 * i, hidden);
    multiply(p, p.normed, hidden, c.outward, p.update, hidden);
    add(p, p.update, hidden);
}

}
