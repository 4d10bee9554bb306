// The late experts beside a device or without one, in one call: who would compute what if nobody
// were given up, whom that leaves waiting and for what, and who is given up.
// The plain twin is `waits_of` in policies/waits.py, before `give_up_late`.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "buddies.hpp"

namespace {

constexpr double SLACK = 1 + 1e-9;  // of a deadline: see policies/waits.py
constexpr std::uint8_t DISK = 1, LINK = 2, THREADS = 3;

}

extern "C" {

// As `lowtide_give_up_late`. asked [num_asked]: the experts in `experts`, ascending, each with its
// tokens, whether it is on the device, and its seconds there and at home; host_s: on the host once
// its bytes are there. link_s: until the link is free; fetch_s: of one expert among many, infinite
// where none can come; each_s [2]: of one read and of one copy. is_at_host [num_experts]: whose
// bytes are in host memory, null where all are.
long lowtide_give_up_late_beside(
    const Rules* rules, const std::int64_t* experts, const float* weights,
    const std::uint8_t* kinds, long num_tokens, long k, const std::uint8_t* is_here,
    const double* arriving_s, const std::int32_t* lists, const std::int64_t* owner,
    const double* left, long num_owners, long rho,
    const Account* account, const std::int64_t* asked, const std::int64_t* tokens_of,
    const std::uint8_t* is_resident,
    const double* device_s, const double* at_home_s, const double* host_s, long num_asked,
    double link_s, double fetch_s, double read_s, double copy_s, const std::uint8_t* is_at_host,
    std::int64_t* out, float* out_weights
) {
    std::vector<std::int64_t> sides(num_asked);
    std::int64_t ends[2];
    lowtide_balance(
        asked, tokens_of, is_resident, device_s, at_home_s, arriving_s, num_asked, link_s, fetch_s,
        sides.data(), ends
    );
    std::vector<std::uint8_t> queue_of(rules->num_experts, 0);
    for (long i = ends[0]; i < num_asked; ++i) queue_of[sides[i]] = i < ends[1] ? LINK : THREADS;
    std::vector<double> thread_s(rules->num_experts, 0.0);
    double residents_s = 0.0;
    for (long place = 0, next = 0; place < num_asked; ++place) {
        thread_s[asked[place]] = host_s[place];
        if (next < ends[0] && sides[next] == asked[place]) {
            residents_s += device_s[place];
            ++next;
        }
    }
    for (long expert = 0; is_at_host && expert < rules->num_experts; ++expert)
        if (!is_at_host[expert]) queue_of[expert] = DISK;
    const Queues queues{
        queue_of.data(), thread_s.data(), {0.0, link_s}, {read_s, copy_s}, residents_s * SLACK
    };
    return lowtide_give_up_late(
        rules, experts, weights, kinds, num_tokens, k, is_here, arriving_s, lists, owner,
        left, num_owners, rho, account, &queues, out, out_weights
    );
}

// The same without a device: whoever is absent is read, in read_s each. resident_s [num_asked]: of
// the experts in `experts`, ascending.
long lowtide_give_up_late_alone(
    const Rules* rules, const std::int64_t* experts, const float* weights,
    const std::uint8_t* kinds, long num_tokens, long k, const std::uint8_t* is_here,
    const double* arriving_s, const std::int32_t* lists, const std::int64_t* owner,
    const double* left, long num_owners, long rho,
    const Account* account, const std::uint8_t* is_resident, const double* resident_s,
    long num_asked, double read_s, std::int64_t* out, float* out_weights
) {
    double residents_s = 0.0;
    for (long place = 0; place < num_asked; ++place)
        if (is_resident[place]) residents_s += resident_s[place];
    const Queues queues{nullptr, nullptr, {0.0, 0.0}, {read_s, 0.0}, residents_s * SLACK};
    return lowtide_give_up_late(
        rules, experts, weights, kinds, num_tokens, k, is_here, arriving_s, lists, owner,
        left, num_owners, rho, account, &queues, out, out_weights
    );
}

}
