// Who becomes resident, and in whose place: what policies/ranks.py says with numpy.

#include "experts/residency.hpp"

#include <algorithm>

namespace lowtide {

// `bump` of policies/ranks.py.
void LayerExperts::raise_ranks() {
    double* const rank = r_->rank + layer_ * r_->num_experts;
    if (r_->clock != nullptr) {
        for (const Demand& demand : demand_)
            rank[demand.expert] = static_cast<double>(++*r_->clock);
        return;
    }
    const auto worth = [this](long num_tokens) {
        return r_->worth == nullptr ? static_cast<double>(num_tokens)
                                    : r_->worth[std::min(num_tokens, r_->num_worth - 1)];
    };
    double total = 0;
    for (const Demand& demand : demand_) {
        rank[demand.expert] += r_->per_token * static_cast<double>(demand.num_rows) + r_->per_expert;
        total += worth(demand.num_rows);
    }
    if (r_->per_share == 0 || !(total > 0)) return;
    for (const Demand& demand : demand_)
        rank[demand.expert] += r_->per_share * worth(demand.num_rows) / total;
}

// `choose` of policies/ranks.py, and what follows from who is not demanded.
void LayerExperts::admit(std::vector<char>& is_admitted) {
    const long num_experts = r_->num_experts, room = r_->room[layer_];
    const double* const rank = r_->rank + layer_ * num_experts;
    std::vector<char> is_demanded(num_experts, 0), has_left(num_experts, 0);
    for (const Demand& demand : demand_) {
        is_demanded[demand.expert] = 1;
        r_->hits[layer_ * num_experts + demand.expert] += demand.num_rows;
    }
    raise_ranks();
    std::vector<long> entering, victims;
    long num_residents = 0;
    for (long expert = 0; expert < num_experts; ++expert) {
        if (table()[expert] >= 0)
            ++num_residents;
        else if (rank[expert] > 0 && (is_demanded[expert] || r_->includes_all))
            entering.push_back(expert);
    }
    const auto leave = [&](long expert) {
        has_left[expert] = 1;
        victims.push_back(expert);
    };
    for (; num_residents > room; --num_residents) leave(lowest(has_left));
    std::stable_sort(entering.begin(), entering.end(),
                     [&](long a, long b) { return rank[a] > rank[b]; });
    if (static_cast<long>(entering.size()) > r_->most) entering.resize(r_->most);
    long num_left_out = 0;
    for (long expert : entering) {
        if (num_residents < room) {
            ++num_residents;
        } else {
            const long victim = lowest(has_left);
            if (victim < 0 || !(rank[expert] > rank[victim])) break;
            leave(victim);
        }
        is_admitted[expert] = is_demanded[expert];
        num_left_out += !is_demanded[expert];
    }
    // Experts that are not demanded are not read: as many others stay.
    r_->num_left_out += num_left_out;
    std::sort(victims.begin(), victims.end());
    for (std::size_t i = num_left_out; i < victims.size(); ++i) {
        if (is_demanded[victims[i]]) leaving_after_use_.push_back(victims[i]);
        else evict(victims[i]);
    }
}

// The resident of lowest rank that has not left; -1: there is none.
long LayerExperts::lowest(const std::vector<char>& has_left) const {
    const double* const rank = r_->rank + layer_ * r_->num_experts;
    long found = -1;
    for (long expert = 0; expert < r_->num_experts; ++expert) {
        if (table()[expert] < 0 || has_left[expert]) continue;
        if (found < 0 || rank[expert] < rank[found] ||
            (rank[expert] == rank[found] && !r_->low_ids_leave))
            found = expert;
    }
    return found;
}

}  // namespace lowtide
