// (token, expert) pairs sorted by expert, the first step of a call over a layer's experts.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "numbers.hpp"

namespace lowtide {

// The tokens of one expert: consecutive rows of the scratch. Shared with Python.
struct Group {
    std::int64_t slot, first, num_rows;
};

struct SortedPairs {
    std::vector<long> row_of;  // of each pair, token by token
    std::vector<Group> groups;  // of each distinct expert, ascending

    // x [num_tokens, hidden]; experts [num_tokens, k]; slots: one for each distinct expert. Copies
    // each pair's row of x into parts [num_tokens * k, hidden].
    SortedPairs(
        const bf16* x, const std::int64_t* experts, const std::int64_t* slots, bf16* parts,
        long num_tokens, long k, long hidden
    ) : row_of(num_tokens * k) {
        const long num_pairs = num_tokens * k;
        std::vector<long> order(num_pairs);
        for (long pair = 0; pair < num_pairs; ++pair) order[pair] = pair;
        std::stable_sort(order.begin(), order.end(), [&](long a, long b) {
            return experts[a] < experts[b];
        });
        for (long row = 0; row < num_pairs; ++row) {
            const long pair = order[row];
            row_of[pair] = row;
            std::memcpy(parts + row * hidden, x + pair / k * hidden, hidden * sizeof(bf16));
            if (row == 0 || experts[order[row - 1]] != experts[pair])
                groups.push_back({slots[groups.size()], row, 0});
            groups.back().num_rows += 1;
        }
    }
};

// out[t] = sum over t's experts, ascending, of weight * output, with one multiplication and one
// addition in float32 for each. parts: outputs, a row for each sorted pair.
inline void combine(
    int variant, const bf16* parts, const long* row_of, const float* weights, float* out,
    long num_tokens, long k, long hidden
) {
    vectorised(vectors_of(variant), [=]() INLINED_LAMBDA {
        std::fill(out, out + num_tokens * hidden, 0.0f);
        for (long pair = 0; pair < num_tokens * k; ++pair) {
            const bf16* part = parts + row_of[pair] * hidden;
            float* sum = out + pair / k * hidden;
            for (long i = 0; i < hidden; ++i) sum[i] += weights[pair] * widen(part[i]);
        }
    });
}

}  // namespace lowtide
