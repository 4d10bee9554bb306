// Receipts of a pass: the compiled twin of `PlainAccount`. Sums are added by token and pair, as in
// numpy.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "decisions/buddies.hpp"

namespace {

// A token has few experts, so a full scan avoids branches.
bool is_among(const std::int64_t* experts, long k, std::int64_t expert) {
    bool found = false;
    for (long place = 0; place < k; ++place) found |= experts[place] == expert;
    return found;
}

// Returns true if ids are known and ascend for each token, and weights are finite.
bool is_runnable(
    const std::int64_t* run, const float* weights, long num_tokens, long k, long num_experts
) {
    bool is_so = true;
    for (long first = 0; first < num_tokens * k; first += k)
        for (long pair = first; pair < first + k; ++pair) {
            is_so &= (pair == first) | (run[std::max(first, pair - 1)] < run[pair]);
            is_so &= (0 <= run[pair]) & (run[pair] < num_experts);
            is_so &= std::isfinite(weights[pair]);
        }
    return is_so;
}

}

extern "C" {

// Adds a layer's router weights. left [num_owners]: mass that each may still move. Returns whether
// there is a limit.
long lowtide_route(
    const Account* account, const float* weights, long num_tokens, long k, double* left
) {
    std::fill(left, left + account->num_owners, 0.0);
    for (long pair = 0; pair < num_tokens * k; ++pair)
        left[account->owner[pair / k]] += weights[pair];
    for (long one = 0; one < account->num_owners; ++one) {
        account->routed[one] += left[one];
        left[one] = std::max(0.0, account->share * account->routed[one] - account->moved[one]);
    }
    return std::isfinite(account->share);
}

// Counts replaced pairs of a layer [num_tokens, k]. Returns 0, counting nothing, if the
// substituted routing is invalid.
long lowtide_count_moved(
    const Account* account, long layer, const std::int64_t* asked, const float* asked_weights,
    const std::int64_t* run, const float* run_weights, long num_tokens, long k, long num_experts
) {
    if (!is_runnable(run, run_weights, num_tokens, k, num_experts)) return 0;
    const std::int64_t* owner = account->owner;
    std::uint8_t* is_affected = account->is_affected;
    std::int64_t* pairs = account->pairs + layer * account->num_owners;
    std::vector<double> masses(account->num_owners, 0.0);
    for (long token = 0; token < num_tokens; ++token) {
        const std::int64_t* others = run + token * k;
        bool is_moved = false;
        for (long pair = token * k; pair < token * k + k; ++pair) {
            if (is_among(others, k, asked[pair])) continue;
            masses[owner[token]] += asked_weights[pair];
            ++pairs[owner[token]];
            is_moved = true;
        }
        account->tokens[owner[token]] += is_moved && !is_affected[token];
        is_affected[token] |= is_moved;
    }
    for (long one = 0; one < account->num_owners; ++one) account->moved[one] += masses[one];
    return 1;
}

}
