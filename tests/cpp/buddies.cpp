// Substitution.

#include "driver.hpp"

namespace driver {
namespace {

// As in buddies.hpp.
struct Rules {
    const std::int32_t* lists;
    std::int64_t num_experts, length, search_rank, layer, exact_kinds;
    double temperature, entropy, margin, beta;
};
struct Queues {
    const std::uint8_t* queue_of;
    const double* host_s;
    double starts_s[2], each_s[2], deadline_s;
};
struct Account {
    const std::int64_t* owner;
    std::int64_t num_owners;
    double share;
    double *routed, *moved;
    std::int64_t *pairs, *tokens;
    std::uint8_t* is_affected;
};
using Replace = long(const Rules*, const std::int64_t*, const float*, const std::uint8_t*, long,
                     long, const std::uint8_t*, const double*,
                     const std::int32_t*, const std::int64_t*, const double*, long, long,
                     const Account*, long, std::int64_t*, float*);
using GiveUp = long(const Rules*, const std::int64_t*, const float*, const std::uint8_t*, long,
                    long, const std::uint8_t*, const double*,
                    const std::int32_t*, const std::int64_t*, const double*, long, long,
                    const Account*, const Queues*, std::int64_t*, float*);
using GiveUpBeside = long(
    const Rules*, const std::int64_t*, const float*, const std::uint8_t*, long, long,
    const std::uint8_t*, const double*, const std::int32_t*,
    const std::int64_t*, const double*, long, long, const Account*, const std::int64_t*,
    const std::int64_t*, const std::uint8_t*, const double*, const double*, const double*, long,
    double, double, double, double, const std::uint8_t*, std::int64_t*, float*);
using GiveUpAlone = long(
    const Rules*, const std::int64_t*, const float*, const std::uint8_t*, long, long,
    const std::uint8_t*, const double*, const std::int32_t*,
    const std::int64_t*, const double*, long, long, const Account*, const std::uint8_t*,
    const double*, long, double, std::int64_t*, float*);
using Route = long(const Account*, const float*, long, long, double*);
using Count = long(const Account*, long, const std::int64_t*, const float*, const std::int64_t*,
                   const float*, long, long, long);
using CountSaved = void(const std::int64_t*, const std::int64_t*, long, long, const double*, long,
                        const std::int64_t*, long, double*, std::int64_t*);

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
    auto* replace = library.function<Replace>("lowtide_replace_absent");
    auto* give_up = library.function<GiveUp>("lowtide_give_up_late");
    auto* beside = library.function<GiveUpBeside>("lowtide_give_up_late_beside");
    auto* alone = library.function<GiveUpAlone>("lowtide_give_up_late_alone");
    auto* route = library.function<Route>("lowtide_route");
    auto* count = library.function<Count>("lowtide_count_moved");
    auto* count_saved = library.function<CountSaved>("lowtide_count_saved");
    const auto [num_tokens, k, num_experts] = routed;
    const long num_pairs = num_tokens * k, length = 5, num_owners = 2;
    const Ids experts = chosen_experts(num_tokens, k, num_experts);
    Floats weights = floats(num_pairs);
    for (float& each : weights) each = std::abs(each) + 1e-3f;
    std::vector<std::uint8_t> kinds(num_tokens), is_here(num_experts);
    std::vector<std::uint8_t> queue_of(num_experts), is_affected(num_tokens);
    std::vector<std::uint8_t> is_at_host(num_experts);
    for (auto& each : kinds) each = std::uint8_t(below(3));
    for (auto* all : {&is_here, &is_at_host})
        for (auto& each : *all) each = std::uint8_t(below(2));
    for (auto& each : queue_of) each = std::uint8_t(below(4));
    const Ids asked = slots_of(experts);
    Ids tokens_of;
    std::vector<std::uint8_t> is_resident;
    for (auto expert : asked) {
        tokens_of.push_back(std::count(experts.begin(), experts.end(), expert));
        is_resident.push_back(is_here[expert]);
    }
    std::vector<double> arriving_s(asked.size()), host_s(num_experts, 1e-3);
    for (double& each : arriving_s) each = below(2) ? INFINITY : 1e-3;
    const std::vector<double> one_s(asked.size(), 1e-3), home_s(asked.size(), 4e-3);
    Ids owner(num_tokens);
    for (auto& each : owner) each = below(num_owners);
    const std::vector<double> left(num_owners, 0.2);
    const auto lists = buddy_lists(num_experts, length, num_experts);
    const auto own_lists = buddy_lists(num_pairs, length, num_experts);
    const bool gates = has & 1, has_bound = has & 8;
    const Rules rules = {lists.data(), num_experts, length, 4, 1, 2, 1.5, gates ? 0.4 : -1.0,
                         gates ? 0.3 : INFINITY, 2.0};
    const Queues queues = {has & 16 ? queue_of.data() : nullptr, host_s.data(), {0, 1e-3},
                           {1e-3, 2e-3}, 1.5e-3};
    const auto* arriving = has & 2 ? arriving_s.data() : nullptr;
    const auto* pairs_own = has & 32 ? own_lists.data() : nullptr;
    // Of the second of two layers; counted in the call that decides, or after it.
    std::vector<double> routed_mass(num_owners), moved_mass(num_owners);
    Ids pairs_moved(2 * num_owners), tokens_moved(num_owners);
    const Account book = {owner.data(), num_owners, 0.5, routed_mass.data(), moved_mass.data(),
                          pairs_moved.data(), tokens_moved.data(), is_affected.data()};
    for (long way : {0, 1, 2, 3}) {
        const auto* account = has & 3 ? &book : nullptr;
        std::fill(pairs_moved.begin(), pairs_moved.end(), 0);
        std::vector<double> may_move(num_owners);
        if (!account)
            expect(route(&book, weights.data(), num_tokens, k, may_move.data()) == 1, "a bound",
                   num_tokens, k, has);
        Ids out(num_pairs, -1);
        Floats out_weights(num_pairs, -1.0f);
        const auto* of = has_bound ? owner.data() : nullptr;
        const auto* bound = has_bound ? left.data() : nullptr;
        const long num_moved = way == 0
            ? replace(&rules, experts.data(), weights.data(), kinds.data(), num_tokens, k,
                      is_here.data(), arriving, pairs_own, of, bound,
                      has_bound ? num_owners : 0, 2, account, has & 64 ? 1 : 0, out.data(),
                      out_weights.data())
            : way == 1
            ? give_up(&rules, experts.data(), weights.data(), kinds.data(), num_tokens, k,
                      is_here.data(), arriving, pairs_own, of, bound,
                      has_bound ? num_owners : 0, 2, account, &queues, out.data(),
                      out_weights.data())
            : way == 2
            ? alone(&rules, experts.data(), weights.data(), kinds.data(), num_tokens, k,
                    is_here.data(), arriving, pairs_own, of, bound,
                    has_bound ? num_owners : 0, 2, account, is_resident.data(), one_s.data(),
                    long(asked.size()), 1e-3, out.data(), out_weights.data())
            : beside(&rules, experts.data(), weights.data(), kinds.data(), num_tokens, k,
                     is_here.data(), arriving, pairs_own, of, bound,
                     has_bound ? num_owners : 0, 2, account, asked.data(), tokens_of.data(),
                     is_resident.data(), one_s.data(), home_s.data(), one_s.data(),
                     long(asked.size()), 1e-3, has & 64 ? 2e-3 : INFINITY, 1e-3, 2e-3,
                     has & 16 ? is_at_host.data() : nullptr, out.data(), out_weights.data());
        if (num_moved == 0) continue;
        expect(is_ascending(out, k), "order of who runs", num_tokens, k, has);
        if (!account)
            expect(count(&book, 1, experts.data(), weights.data(), out.data(), out_weights.data(),
                         num_tokens, k, num_experts) == 1,
                   "what is run can be", num_tokens, k, has);
        const std::int64_t* pairs = pairs_moved.data() + num_owners;
        expect(pairs[0] + pairs[1] == num_moved, "pairs moved", num_tokens, k, has);
        std::vector<double> expert_bytes(num_experts), shares(num_owners);
        for (double& each : expert_bytes) each = below(2) ? 0.0 : 3.0;
        Ids in_vain(num_owners);
        count_saved(experts.data(), out.data(), num_tokens, k, expert_bytes.data(), num_experts,
                    owner.data(), num_owners, shares.data(), in_vain.data());
        const double in_all = std::accumulate(expert_bytes.begin(), expert_bytes.end(), 0.0);
        for (long one = 0; one < num_owners; ++one)
            expect(0 <= shares[one] && shares[one] <= in_all && in_vain[one] <= pairs[one],
                   "what was saved", one, num_tokens, has);
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

void check_buddies(const Library& buddies) {
    for (const Routed& routed : ROUTED)
        for (unsigned has = 0; has < 128; ++has)
            if (routed.num_tokens > 0) substitute(buddies, routed, has);
    for (long num : {1, 2, 7, 40})
        for (unsigned has = 0; has < 8; ++has) balance(buddies, num, has);
}

}  // namespace driver
