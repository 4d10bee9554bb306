// Substitution.

#include "decisions/buddies.hpp"
#include "driver.hpp"

namespace driver {
namespace {

using Substitute = long(const Rules*, const std::int64_t*, const float*, const std::uint8_t*, long,
                        long, const std::uint8_t*, const double*, const double*, const Account*,
                        const Queues*, std::int64_t*, float*);
using Balance = void(const std::int64_t*, const std::int64_t*, const std::uint8_t*, const double*,
                     const double*, const double*, long, double, double, std::int64_t*,
                     std::int64_t*);

bool is_ascending(const Ids& ids, long k) {
    for (std::size_t i = 0; i < ids.size(); ++i)
        if (long(i) % k != 0 && ids[i - 1] >= ids[i]) return false;
    return true;
}

// Of every expert: some others, best first.
std::vector<std::int32_t> buddy_lists(long num_lists, long length, long num_experts) {
    std::vector<std::int32_t> out;
    for (long i = 0; i < num_lists * length; ++i)
        out.push_back(below(8) == 0 ? -1 : std::int32_t(below(num_experts)));
    return out;
}

// has: bits; which of the facts that may be lacking there are.
void substitute(const Library& library, const Routed& routed, unsigned has) {
    auto* substitute = library.function<Substitute>("lowtide_substitute");
    auto* route = library.function<decltype(lowtide_route)>("lowtide_route");
    auto* count = library.function<decltype(lowtide_count_moved)>("lowtide_count_moved");
    const auto [num_tokens, k, num_experts] = routed;
    const long num_pairs = num_tokens * k, length = 5, num_owners = 2;
    const Ids experts = chosen_experts(num_tokens, k, num_experts);
    Floats weights = floats(num_pairs);
    for (float& each : weights) each = std::abs(each) + 1e-3f;
    std::vector<std::uint8_t> kinds(num_tokens), is_here(num_experts), queue_of(num_experts);
    std::vector<std::uint8_t> is_affected(num_tokens);
    for (auto& each : kinds) each = std::uint8_t(below(3));
    for (auto& each : is_here) each = std::uint8_t(below(2));
    for (auto& each : queue_of) each = std::uint8_t(below(4));
    std::vector<double> arriving_s(slots_of(experts).size()), host_s(num_experts, 1e-3);
    for (double& each : arriving_s) each = below(2) ? INFINITY : 1e-3;
    Ids owner(num_tokens);
    for (auto& each : owner) each = below(num_owners);
    const auto lists = buddy_lists(num_experts, length, num_experts);
    const bool gates = has & 1;
    std::vector<double> psi(lists.size()), compatible(num_tokens * num_experts);
    for (double& each : psi) each = 0.1 * below(5);
    for (double& each : compatible) each = 1.0 + 0.5 * below(3);
    const bool has_psi = has & 2;
    const Rules rules = {lists.data(), num_experts, length, 1, 2, 2, gates ? 0.4 : -1.0,
                         gates ? 0.3 : INFINITY, 2.0, gates ? 0.8 : 1.0,
                         has_psi ? psi.data() : nullptr};
    const Queues queues = {has & 8 ? queue_of.data() : nullptr, host_s.data(), {0, 1e-3},
                           {1e-3, 2e-3}, 1.5e-3};
    for (const Queues* waits : {static_cast<const Queues*>(nullptr), &queues}) {
        // Of the second of two layers.
        std::vector<double> routed_mass(num_owners), moved_mass(num_owners);
        Ids pairs_moved(2 * num_owners), tokens_moved(num_owners);
        const Account book = {owner.data(), num_owners, has & 4 ? 0.5 : INFINITY,
                              routed_mass.data(), moved_mass.data(), pairs_moved.data(),
                              tokens_moved.data(), is_affected.data()};
        Ids out(num_pairs, -1);
        Floats out_weights(num_pairs, -1.0f);
        const long num_moved = substitute(
            &rules, experts.data(), weights.data(), kinds.data(), num_tokens, k, is_here.data(),
            has & 2 ? arriving_s.data() : nullptr, has_psi ? compatible.data() : nullptr, &book,
            waits, out.data(), out_weights.data());
        const std::int64_t* pairs = pairs_moved.data() + num_owners;
        expect(pairs[0] + pairs[1] == num_moved, "pairs moved", num_tokens, k, has);
        std::vector<double> left(num_owners);
        expect(route(&book, weights.data(), num_tokens, k, left.data()) == bool(has & 4), "a bound",
               num_tokens, k, has);
        if (!num_moved) continue;
        expect(is_ascending(out, k), "order of who runs", num_tokens, k, has);
        expect(count(&book, 0, experts.data(), weights.data(), out.data(), out_weights.data(),
                     num_tokens, k, num_experts) == 1,
               "what is run can be", num_tokens, k, has);
    }
}

// Every expert is given to one side, and only who is resident runs without a fetch.
void balance(const Library& library, long num, unsigned has) {
    auto* balance = library.function<Balance>("lowtide_balance");
    Ids experts(num), num_tokens(num), out(num, -1), ends(2);
    std::iota(experts.begin(), experts.end(), 3);
    std::vector<std::uint8_t> is_resident(num);
    std::vector<double> device_s(num), host_s(num), arriving_s(num);
    for (long place = 0; place < num; ++place) {
        num_tokens[place] = 1 + below(4);
        is_resident[place] = std::uint8_t(below(2));
        device_s[place] = 1e-3 * below(3);
        host_s[place] = 1e-3 * below(5);
        arriving_s[place] = below(2) ? INFINITY : 1e-3 * below(3);
    }
    balance(experts.data(), num_tokens.data(), is_resident.data(), device_s.data(), host_s.data(),
            has & 1 ? arriving_s.data() : nullptr, num, has & 2 ? 2e-3 : 0.0,
            has & 4 ? 1e-3 : INFINITY, out.data(), ends.data());
    expect(0 <= ends[0] && ends[0] <= ends[1] && ends[1] <= num, "ends of the parts", num, has, 0);
    for (long place = 0; place < ends[1]; ++place)
        expect(is_resident[out[place] - 3] == (place < ends[0]), "who is fetched", num, place, has);
    std::sort(out.begin(), out.end());
    expect(out == experts, "every expert once", num, has, 0);
}

}  // namespace

void check_buddies(const Library& kernels) {
    for (const Routed& routed : ROUTED)
        for (unsigned has = 0; has < 16; ++has)
            if (routed.num_tokens > 0) substitute(kernels, routed, has);
    for (long num : {1, 2, 7, 40})
        for (unsigned has = 0; has < 8; ++has) balance(kernels, num, has);
}

}  // namespace driver
