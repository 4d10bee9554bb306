// Inputs of a substitution, and the parts of a decision that are calls of their own.

#pragma once

#include <cstdint>

extern "C" {

// Constant over passes: `LayerRules` in buddies.py.
struct Rules {
    const std::int32_t* lists;  // [num_experts, length]: buddies, best first, -1 after the last
    std::int64_t num_experts, length, layer, rho;
    std::int64_t exact_kinds;  // bits: rows of these kinds run what their router chose
    double entropy, margin, beta, temperature;
    const double* psi;  // [num_experts, length]: constant part of each buddy's Psi, or null
};

// Queues of absent experts and the deadline: `Waits` in buddies.py.
struct Queues {
    const std::uint8_t* queue_of;  // [num_experts], or null where all wait in the first
    const double* host_s;          // [num_experts] of those in the third, or null
    double starts_s[2], each_s[2], deadline_s;
};

// Router mass of a pass's owners, and the part of it that was moved.
struct Account {
    const std::int64_t* owner;  // [tokens]
    std::int64_t num_owners;
    double share;                // of moved over routed mass, at most; infinite: nothing bounds it
    double *routed, *moved;      // [num_owners]
    std::int64_t *pairs;         // [layers, num_owners]
    std::int64_t *tokens;        // [num_owners] affected in any layer
    std::uint8_t* is_affected;   // [tokens]
};

// Defined in buddy_counts.cpp.
long lowtide_route(
    const Account* account, const float* weights, long num_tokens, long k, double* left
);
long lowtide_count_moved(
    const Account* account, long layer, const std::int64_t* asked, const float* asked_weights,
    const std::int64_t* run, const float* run_weights, long num_tokens, long k, long num_experts
);

}
