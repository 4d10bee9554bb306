// What a substitution is told, and the parts of a decision that are calls of their own.

#pragma once

#include <cstdint>

extern "C" {

// What does not change from pass to pass.
struct Rules {
    const std::int32_t* lists;  // [num_experts, length]: buddies, best first, -1 behind the last
    std::int64_t num_experts, length, search_rank;
    std::int64_t layer;
    std::int64_t exact_kinds;  // bits: rows of these kinds run what their router chose
    double temperature, entropy, margin, beta;
};

// Where absent experts wait, and until when: see `Waits` in buddies.py.
struct Queues {
    const std::uint8_t* queue_of;  // [num_experts], or null where all wait in the first
    const double* host_s;          // [num_experts] of those in the third, or null
    double starts_s[2], each_s[2], deadline_s;
};

// What a pass's owners were given by the router, and what of that is not run.
struct Account {
    const std::int64_t* owner;  // [tokens]
    std::int64_t num_owners;
    double share;                // of moved over routed mass, at most; infinite: nothing bounds it
    double *routed, *moved;      // [num_owners]
    std::int64_t *pairs;         // [layers, num_owners]
    std::int64_t *tokens;        // [num_owners] affected in any layer
    std::uint8_t* is_affected;   // [tokens]
};

// In buddy_counts.cpp.
long lowtide_route(
    const Account* account, const float* weights, long num_tokens, long k, double* left
);
long lowtide_count_moved(
    const Account* account, long layer, const std::int64_t* asked, const float* asked_weights,
    const std::int64_t* run, const float* run_weights, long num_tokens, long k, long num_experts
);

// In buddies.cpp.
long lowtide_give_up_late(
    const Rules* rules, const std::int64_t* experts, const float* weights,
    const std::uint8_t* kinds, long num_tokens, long k, const std::uint8_t* is_here,
    const double* arriving_s, const std::int32_t* lists, const std::int64_t* owner,
    const double* left, long num_owners, long rho,
    const Account* account, const Queues* queues, std::int64_t* out, float* out_weights
);

// In balance.cpp.
void lowtide_balance(
    const std::int64_t* experts, const std::int64_t* num_tokens, const std::uint8_t* is_resident,
    const double* device_s, const double* host_s, const double* arriving_s, long num,
    double link_s, double fetch_s, std::int64_t* out, std::int64_t* ends_of
);

}
