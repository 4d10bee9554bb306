// Substitution in one layer, in one call: BuddyMoE's gates, its Algorithm 1 and the bound on mass,
// or the replacement of late experts; and the receipt of each request. The plain twin is
// policies/plain_buddies.py: sums are added in the same order, in double precision, so that both
// decide identically.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

#include "decisions/buddies.hpp"

namespace {

using Pairs = std::vector<long>;
constexpr double SLACK = 1e-12;  // of gates: see policies/plain_buddies.py
constexpr long NUM_QUEUES = 3, HOST_QUEUE = 3;

// Pointers may be null if the facts lack these arrays.
struct Layer {
    const Rules& rules;
    const std::int64_t* experts;  // [num_tokens, k], ascending for each token
    const float* weights;         // [num_tokens, k]
    const std::uint8_t* kinds;    // [num_tokens]
    long num_tokens, k;
    const std::uint8_t* is_here;  // [num_experts]: who may stand in
    const double* arriving_s;     // of the experts asked for, ascending; infinite: not on its way
    const double* compatible;     // [num_tokens, num_experts]: the rest of Psi
    const Account& account;
    const double* left;  // [num_owners] what each may have moved, null where nothing bounds that

    const std::int32_t* list(std::int64_t expert) const {
        return rules.lists + expert * rules.length;
    }
    // The buddy with the highest Psi of those that `is_free`, of equal ones the first listed; -1
    // if there is none.
    template <class IsFree>
    std::int64_t best_buddy(long token, std::int64_t expert, IsFree is_free) const {
        const std::int32_t* buddies = list(expert);
        const bool has_psi = rules.psi && compatible;
        std::int64_t best = -1;
        double best_psi = 0.0;
        for (long i = 0; i < rules.length && buddies[i] >= 0; ++i) {
            const std::int64_t buddy = buddies[i];
            if (!is_here[buddy] || !is_free(buddy)) continue;
            if (!has_psi) return buddy;
            const double psi = rules.psi[expert * rules.length + i] *
                               compatible[token * rules.num_experts + buddy];
            if (best < 0 || psi > best_psi) best = buddy, best_psi = psi;
        }
        return best;
    }
    std::int64_t owner(long token) const { return account.owner[token]; }
    long num_pairs() const { return num_tokens * k; }
};

// Demanded experts that are neither here nor arriving, and the number of demanded ones.
struct Absent {
    std::vector<std::uint8_t> is_it;
    long num = 0, num_asked = 0;

    explicit Absent(const Layer& layer) : is_it(layer.rules.num_experts, 0) {
        std::vector<std::uint8_t> is_asked(is_it.size(), 0);
        for (long pair = 0; pair < layer.num_pairs(); ++pair) is_asked[layer.experts[pair]] = 1;
        for (std::size_t expert = 0; expert < is_it.size(); ++expert) {
            if (!is_asked[expert]) continue;
            const bool is_coming = layer.arriving_s && !std::isinf(layer.arriving_s[num_asked]);
            ++num_asked;
            if (layer.is_here[expert] || is_coming) continue;
            is_it[expert] = 1;
            ++num;
        }
    }
};

std::vector<double> router_mass(const Layer& layer) {
    std::vector<double> mass(layer.rules.num_experts, 0.0);
    for (long pair = 0; pair < layer.num_pairs(); ++pair)
        mass[layer.experts[pair]] += layer.weights[pair];
    return mass;
}

// By rising mass; ids ascend, so a stable sort keeps ties by id.
void by_mass(Pairs& experts, const std::vector<double>& mass) {
    std::stable_sort(experts.begin(), experts.end(), [&](long a, long b) {
        return mass[a] < mass[b];
    });
}

double entropy_of(const float* weights, long k, double temperature) {
    const double most = *std::max_element(weights, weights + k);
    double sum = 0.0, entropy = 0.0;
    std::vector<double> p(k);
    for (long i = 0; i < k; ++i) {
        p[i] = weights[i] / most;
        if (temperature != 1.0) p[i] = std::pow(p[i], 1.0 / temperature);
        sum += p[i];
    }
    for (long i = 0; i < k; ++i)
        if (p[i] > 0) entropy -= p[i] / sum * std::log(p[i] / sum);
    return entropy / std::log(static_cast<double>(std::max(2L, k)));
}

double margin_of(const float* weights, long k) {
    if (k < 2) return 1.0;
    double best = -std::numeric_limits<double>::infinity(), second = best, sum = 0.0;
    for (long i = 0; i < k; ++i) {
        const double weight = weights[i];
        sum += weight;
        second = std::max(second, std::min(best, weight));
        best = std::max(best, weight);
    }
    return (best - second) / sum;
}

// Tokens that may have experts replaced.
std::vector<std::uint8_t> open_tokens(const Layer& layer, const Absent& absent) {
    const Rules& rules = layer.rules;
    std::vector<std::uint8_t> is_open(layer.num_tokens, 0);
    const double share = static_cast<double>(absent.num) / std::max(1L, absent.num_asked);
    if (!(share < rules.beta)) return is_open;
    for (long token = 0; token < layer.num_tokens; ++token) {
        const float* weights = layer.weights + token * layer.k;
        if (rules.exact_kinds >> layer.kinds[token] & 1) continue;
        const bool is_sure =
            rules.entropy >= 0 &&
            !(entropy_of(weights, layer.k, rules.temperature) > rules.entropy + SLACK);
        const bool leads =
            !std::isinf(rules.margin) && !(margin_of(weights, layer.k) < rules.margin - SLACK);
        is_open[token] = !is_sure && !leads;
    }
    return is_open;
}

// Sorts a token's places by falling weight; ids ascend, so a stable sort keeps ties by id.
void rank(const float* weights, Pairs& places) {
    for (long place = 0; place < static_cast<long>(places.size()); ++place) {
        long at = place;  // by insertion: stable, and takes no memory
        for (; at > 0 && weights[places[at - 1]] < weights[place]; --at)
            places[at] = places[at - 1];
        places[at] = place;
    }
}

// Algorithm 1. out [num_tokens, k]: the experts that run.
void find_buddies(
    const Layer& layer, const Absent& absent, const std::vector<std::uint8_t>& is_open,
    std::int64_t* out
) {
    Pairs places(layer.k);
    std::vector<std::int64_t> in_use(2 * layer.k);
    for (long token = 0; token < layer.num_tokens; ++token) {
        const long first = token * layer.k;
        const std::int64_t* own = layer.experts + first;
        if (!is_open[token] ||
            !std::any_of(own, own + layer.k, [&](auto expert) { return absent.is_it[expert]; }))
            continue;
        rank(layer.weights + first, places);
        std::copy(own, own + layer.k, in_use.begin());
        long num_in_use = layer.k, num_left = layer.rules.rho;
        for (long place : places) {
            if (!absent.is_it[own[place]] || num_left < 1) continue;
            const auto used = in_use.begin() + num_in_use;
            const std::int64_t buddy = layer.best_buddy(token, own[place], [&](auto expert) {
                return std::find(in_use.begin(), used, expert) == used;
            });
            if (buddy < 0) continue;
            out[first + place] = buddy;
            in_use[num_in_use++] = buddy;
            --num_left;
        }
    }
}

// Undoes replacements for which a request has no mass left: by token, within a token by rank.
void keep_within(const Layer& layer, std::int64_t* out) {
    if (!layer.left) return;
    std::vector<double> moved(layer.account.num_owners, 0.0);
    std::vector<double> left(layer.left, layer.left + moved.size());
    for (long pair = 0; pair < layer.num_pairs(); ++pair)
        if (out[pair] != layer.experts[pair])
            moved[layer.owner(pair / layer.k)] += layer.weights[pair];
    if (std::equal(moved.begin(), moved.end(), left.begin(), std::less_equal<>())) return;
    Pairs places(layer.k);
    for (long token = 0; token < layer.num_tokens; ++token) {
        rank(layer.weights + token * layer.k, places);
        for (long place : places) {
            const long pair = token * layer.k + place;
            if (out[pair] == layer.experts[pair]) continue;
            double& rest = left[layer.owner(token)];
            if (layer.weights[pair] <= rest) rest -= layer.weights[pair];
            else out[pair] = layer.experts[pair];
        }
    }
}

// Sorts each token's ids, and their weights with them; returns the number of replaced pairs.
long in_order(const Layer& layer, std::int64_t* out, float* out_weights) {
    long num_moved = 0;
    for (long first = 0; first < layer.num_pairs(); first += layer.k) {
        for (long place = 0; place < layer.k; ++place) {
            const std::int64_t expert = out[first + place];
            const float weight = layer.weights[first + place];
            num_moved += expert != layer.experts[first + place];
            long at = place;
            for (; at > 0 && out[first + at - 1] > expert; --at) {
                out[first + at] = out[first + at - 1];
                out_weights[first + at] = out_weights[first + at - 1];
            }
            out[first + at] = expert;
            out_weights[first + at] = weight;
        }
    }
    return num_moved;
}

// Late experts of one queue, by rising router mass, and the number that is too many.
struct Queue {
    Pairs experts;
    long num_late = 0;
};

std::vector<Queue> late_queues(const Layer& layer, const Absent& absent, const Queues& queues) {
    std::vector<Queue> found(NUM_QUEUES);
    for (long expert = 0; expert < layer.rules.num_experts; ++expert) {
        const long number = queues.queue_of ? queues.queue_of[expert] : 1;
        if (absent.is_it[expert] && number) found[number - 1].experts.push_back(expert);
    }
    const std::vector<double> mass = router_mass(layer);
    for (long number = 1; number <= NUM_QUEUES; ++number) {
        Queue& queue = found[number - 1];
        by_mass(queue.experts, mass);
        double end_s = 0.0;
        for (std::size_t n = 1; n <= queue.experts.size(); ++n) {
            // The host computes the expert with most mass first, as long as there is time.
            if (number == HOST_QUEUE) end_s += queues.host_s[queue.experts.end()[-n]];
            else end_s = queues.starts_s[number - 1] + n * queues.each_s[number - 1];
            queue.num_late += end_s > queues.deadline_s;
        }
    }
    return found;
}

// The mass left for a layer's tokens, and the replacements so far.
class Spending {
  public:
    Spending(const Layer& layer, const std::vector<std::uint8_t>& is_open, std::int64_t* out)
        : layer_(layer), out_(out), num_left_(layer.num_tokens),
          in_use_(layer.num_tokens * layer.rules.num_experts, 0),
          ends_(layer.rules.num_experts + 1, 0), asked_(layer.num_pairs()),
          buddies_(layer.num_pairs()) {
        for (long token = 0; token < layer.num_tokens; ++token)
            num_left_[token] = is_open[token] ? layer.rules.rho : 0;
        if (layer.left) {
            left_.assign(layer.left, layer.left + layer.account.num_owners);
            moved_.resize(left_.size());
        }
        for (long pair = 0; pair < layer.num_pairs(); ++pair) ++ends_[layer.experts[pair] + 1];
        std::partial_sum(ends_.begin(), ends_.end(), ends_.begin());
        for (long token = 0, pair = 0; token < layer.num_tokens; ++token)
            for (long place = 0; place < layer.k; ++place, ++pair) {
                const std::int64_t expert = layer.experts[pair];
                used(token, expert) = 1;
                asked_[ends_[expert]++] = {token, pair};
            }
    }

    // Replaces an expert for all of its tokens; returns false, changing nothing, if that fails.
    bool give_up(long expert) {
        const Asked* first = asked_.data() + (expert ? ends_[expert - 1] : 0);
        const Asked* last = asked_.data() + ends_[expert];
        std::fill(moved_.begin(), moved_.end(), 0.0);
        std::int64_t* chosen = buddies_.data();
        for (const Asked* it = first; it != last; ++it) {
            const std::int64_t buddy = num_left_[it->token] < 1 ? -1 : free_buddy(*it);
            if (buddy < 0) return false;
            *chosen++ = buddy;
            if (layer_.left) moved_[layer_.owner(it->token)] += layer_.weights[it->pair];
        }
        for (std::size_t i = 0; i < moved_.size(); ++i)
            if (left_[i] - moved_[i] < 0) return false;
        for (std::size_t i = 0; i < moved_.size(); ++i) left_[i] -= moved_[i];
        chosen = buddies_.data();
        for (const Asked* it = first; it != last; ++it) {
            used(it->token, out_[it->pair] = *chosen++) = 1;
            --num_left_[it->token];
        }
        return true;
    }

  private:
    struct Asked {
        long token, pair;
    };

    std::uint8_t& used(long token, std::int64_t expert) {
        return in_use_[token * layer_.rules.num_experts + expert];
    }
    std::int64_t free_buddy(const Asked& asked) {
        const std::uint8_t* in_use = &used(asked.token, 0);
        return layer_.best_buddy(asked.token, layer_.experts[asked.pair], [&](auto expert) {
            return !in_use[expert];
        });
    }

    const Layer& layer_;
    std::int64_t* out_;
    Pairs num_left_;
    std::vector<std::uint8_t> in_use_;
    Pairs ends_;                 // of each expert's pairs in `asked_`, in order of ids
    std::vector<Asked> asked_;
    std::vector<std::int64_t> buddies_;  // of the expert that is being given up
    std::vector<double> left_, moved_;
};

// Algorithm 1, within the mass that is left.
long replace_absent(const Layer& layer, std::int64_t* out, float* out_weights) {
    const Absent absent(layer);
    if (!absent.num) return 0;
    std::copy(layer.experts, layer.experts + layer.num_pairs(), out);
    find_buddies(layer, absent, open_tokens(layer, absent), out);
    keep_within(layer, out);
    return in_order(layer, out, out_weights);
}

// Replaces late experts, each for all of its tokens or none.
long give_up_late(
    const Layer& layer, const Queues& queues, std::int64_t* out, float* out_weights
) {
    const Absent absent(layer);
    if (!absent.num) return 0;
    const std::vector<Queue> found = late_queues(layer, absent, queues);
    if (std::none_of(found.begin(), found.end(), [](auto& queue) { return queue.num_late; }))
        return 0;
    const std::vector<std::uint8_t> open = open_tokens(layer, absent);
    if (std::none_of(open.begin(), open.end(), [](auto one) { return one; })) return 0;
    std::copy(layer.experts, layer.experts + layer.num_pairs(), out);
    Spending spending(layer, open, out);
    for (const Queue& queue : found) {
        long num_late = queue.num_late;
        for (long expert : queue.experts)
            if (num_late > 0) num_late -= spending.give_up(expert);
    }
    return in_order(layer, out, out_weights);
}

}

extern "C" {

// out, out_weights [num_tokens, k]: the substituted routing. Without `queues` all absent experts
// are replaced, else those that come too late. `compatible` [num_tokens, num_experts], or null,
// completes `Rules::psi`. The account limits and counts replacements. Returns the number of
// replaced pairs, negative if the input is invalid.
long lowtide_substitute(
    const Rules* rules, const std::int64_t* experts, const float* weights,
    const std::uint8_t* kinds, long num_tokens, long k, const std::uint8_t* is_here,
    const double* arriving_s, const double* compatible, const Account* account,
    const Queues* queues, std::int64_t* out, float* out_weights
) {
    std::vector<double> left(account->num_owners);
    const bool is_bounded = lowtide_route(account, weights, num_tokens, k, left.data());
    const Layer layer{*rules,     experts,    weights,  kinds,
                      num_tokens, k,          is_here,  arriving_s,
                      compatible, *account,   is_bounded ? left.data() : nullptr};
    const long num_moved = queues ? give_up_late(layer, *queues, out, out_weights)
                                  : replace_absent(layer, out, out_weights);
    if (!num_moved) return 0;
    const long is_counted = lowtide_count_moved(
        account, rules->layer, experts, weights, out, out_weights, num_tokens, k, rules->num_experts
    );
    return is_counted ? num_moved : -1;
}

}
