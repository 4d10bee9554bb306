// What a substitution is told, and the parts of a decision that are calls of their own.

#pragma once

#include <cstdint>

extern "C" {

// What does not change from pass to pass.
struct Rules {
    const std::int32_t* lists;  // [num_experts, length]: buddies, best first, -1 behind the last
    std::int64_t num_experts, length, search_rank;
    std::int64_t exact_kinds;  // bits: rows of these kinds run what their router chose
    double temperature, entropy, margin, beta;
};

// Where absent experts wait, and until when: see `Waits` in buddies.py.
struct Queues {
    const std::uint8_t* queue_of;  // [num_experts], or null where all wait in the first
    const double* host_s;          // [num_experts] of those in the third, or null
    double starts_s[2], each_s[2], deadline_s;
};

// In buddies.cpp.
long lowtide_give_up_late(
    const Rules* rules, const std::int64_t* experts, const float* weights,
    const std::uint8_t* kinds, long num_tokens, long k, const std::uint8_t* is_here,
    const double* arriving_s, const std::uint8_t* is_open, const std::int32_t* lists,
    const std::int64_t* owner, const double* left, long num_owners, long rho,
    const Queues* queues, std::int64_t* out, float* out_weights
);

// In balance.cpp.
void lowtide_balance(
    const std::int64_t* experts, const std::int64_t* num_tokens, const std::uint8_t* is_resident,
    const double* device_s, const double* host_s, const double* arriving_s, long num,
    double link_s, double fetch_s, std::int64_t* out, std::int64_t* ends_of
);

}
