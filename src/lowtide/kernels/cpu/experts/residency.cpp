#include "experts/residency.hpp"

#include <algorithm>
#include <chrono>

#include "team/team.hpp"

namespace lowtide {

void LayerExperts::begin(
    Residency& residency, long layer, const ExpertCall& call, const std::int64_t* experts,
    const float* weights
) {
    r_ = &residency, layer_ = layer, call_ = call, experts_ = experts, weights_ = weights;
    is_present_run_ = is_summed_ = false;
    present_.clear(), leaving_after_use_.clear(), waiting_.clear(), pending_.clear();

    const long num_pairs = call.num_rows * call.num_chosen;
    std::vector<std::int64_t> distinct(experts, experts + num_pairs);
    std::sort(distinct.begin(), distinct.end());
    demand_.clear();
    for (std::int64_t expert : distinct) {
        if (demand_.empty() || demand_.back().expert != expert) demand_.push_back({expert, 0});
        ++demand_.back().num_rows;
    }

    if (r_->foresight != nullptr)
        r_->foresight->learn(layer_, [&](long expert) {
            return std::any_of(demand_.begin(), demand_.end(),
                               [=](const Demand& demand) { return demand.expert == expert; });
        });

    std::vector<char> is_admitted(r_->num_experts, 0);
    slots_.clear();
    long num_absent = 0;
    for (const Demand& demand : demand_) {
        slots_.push_back(table()[demand.expert]);
        num_absent += slots_.back() < 0;
        (slots_.back() < 0 ? r_->num_absent_rows : r_->num_here_rows) += demand.num_rows;
    }
    r_->num_rows += num_pairs;
    admit(is_admitted);  // who leaves may be computed yet
    reap_dropped();
    r_->num_hits += static_cast<long>(demand_.size()) - num_absent;
    r_->num_misses += num_absent;
    if (num_absent == 0) return drop_ahead();
    SortedPairs sorted(call.x, experts, slots_.data(), call.parts, call.num_rows, call.num_chosen,
                       call.hidden);
    row_of_ = std::move(sorted.row_of);
    for (std::size_t i = 0; i < demand_.size(); ++i) {
        const long expert = demand_[i].expert;
        if (slots_[i] >= 0) present_.push_back(sorted.groups[i]);
        else claim({expert, -1, sorted.groups[i], is_admitted[expert] != 0});
    }
    drop_ahead();
    start_reads();
}

// Claims an absent expert of this layer, whose read may already run.
void LayerExperts::claim(Arrival arrival) {
    for (Ahead& ahead : ahead_) {
        if (ahead.layer != layer_ || ahead.expert != arrival.expert) continue;
        arrival.slot = arrival.group.slot = ahead.slot;
        ahead.layer = -1;
        ++r_->num_ahead;
        r_->num_late += (*r_->readiness)->state(arrival.slot) == PENDING;
        pending_.push_back(arrival);
        return;
    }
    waiting_.push_back(arrival);
}

// Twin of `bump` in policies/ranks.py.
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

// Twin of `choose` in policies/ranks.py, and its consequences for experts that are not demanded.
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
        else if ((rank[expert] > 0 || r_->is_forced) && (is_demanded[expert] || r_->includes_all))
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
            if (victim < 0 || !(r_->is_forced || rank[expert] > rank[victim])) break;
            leave(victim);
        }
        is_admitted[expert] = is_demanded[expert];
        num_left_out += !is_demanded[expert];
    }
    // Experts that are not demanded are not read, so the residents they outrank stay.
    r_->num_left_out += num_left_out;
    std::sort(victims.begin(), victims.end());
    for (std::size_t i = num_left_out; i < victims.size(); ++i) {
        if (is_demanded[victims[i]]) leaving_after_use_.push_back(victims[i]);
        else evict(victims[i]);
    }
}

// The resident of lowest rank that has not left; -1 if there is none.
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

void LayerExperts::evict(long expert) {
    std::int64_t& slot = table()[expert];
    free_slot(slot);
    slot = -1;
    ++r_->num_evicted;
}

void LayerExperts::free_slot(long slot) {
    r_->owner[slot] = FREE_SLOT;
    r_->free[(r_->free_state[0] + r_->free_state[1]++) % r_->num_slots] = slot;
}

Status LayerExperts::advance() {
    if (is_summed_) return DONE;
    if (r_->num_asked > 0) return READS;
    run_present();
    if (is_summed_) return DONE;
    while (!waiting_.empty() || !pending_.empty()) {
        start_reads();
        if (r_->num_asked > 0) return READS;
        if (pending_.empty() && dropped_.empty()) return STUCK;
        const Status status = pending_.empty() ? await_dropped() : take_arrivals();
        if (status != DONE) return status;
    }
    sum();
    return DONE;
}

// Gives every free slot to a waiting expert.
void LayerExperts::start_reads() {
    reap_dropped();
    for (; !waiting_.empty() && r_->free_state[1] > 0; waiting_.pop_front()) {
        Arrival& arrival = waiting_.front();
        arrival.slot = arrival.group.slot = take_slot();
        if (r_->reader != nullptr) {
            start_read(layer_, arrival.expert, arrival.slot);
        } else {
            std::int64_t* const asked = r_->asked + 3 * r_->num_asked++;
            asked[0] = arrival.expert, asked[1] = arrival.slot;
            asked[2] = (*r_->readiness)->begin(arrival.slot, 1);
            r_->layer = layer_;
        }
        pending_.push_back(arrival);
    }
}

long LayerExperts::take_slot() {
    const long slot = r_->free[r_->free_state[0]];
    r_->free_state[0] = (r_->free_state[0] + 1) % r_->num_slots;
    --r_->free_state[1];
    r_->owner[slot] = TAKEN_SLOT;
    return slot;
}

void LayerExperts::start_read(long layer, long expert, long slot) {
    const long number = layer * r_->num_experts + expert;
    r_->reader->start(number, slot);
    r_->read_bytes += r_->reader->num_bytes(number);
    ++r_->num_read;
}

bool LayerExperts::foresees(Residency& residency, long layer, Known known, long k) {
    r_ = &residency;
    return r_->reads_ahead && r_->reader != nullptr && waiting_.empty() &&
           r_->foresight->is_wanted(layer, known, k);
}

void LayerExperts::expect(
    long layer, Known known, const std::int64_t* experts, const float* weights, long num_rows, long k
) {
    const std::int64_t* const slots = r_->table + layer * r_->num_experts;
    std::vector<long> wanted = r_->foresight->guess(
        layer, known, experts, weights, num_rows, k, [=](long expert) { return slots[expert] < 0; });
    std::vector<Ahead> begun;
    for (const Ahead& ahead : ahead_) {
        const auto found = std::find(wanted.begin(), wanted.end(), ahead.expert);
        if (ahead.layer == layer && found == wanted.end()) {
            drop(ahead);
            continue;
        }
        begun.push_back(ahead);
        if (ahead.layer == layer) wanted.erase(found);
    }
    ahead_.swap(begun);
    reap_dropped();
    for (long expert : wanted) {
        if (r_->free_state[1] == 0) return;
        const long slot = take_slot();
        start_read(layer, expert, slot);
        ++r_->num_begun_ahead;
        ahead_.push_back({layer, expert, slot});
    }
}

// Gives up a read ahead.
void LayerExperts::drop(const Ahead& ahead) {
    ++r_->num_wasted;
    --r_->num_read;
    const long unread_bytes = r_->reader->cancel(ahead.slot);
    const long number = ahead.layer * r_->num_experts + ahead.expert;
    r_->read_bytes -= unread_bytes;
    r_->given_up_bytes += r_->reader->num_bytes(number) - unread_bytes;
    dropped_.push_back(ahead);
}

// Drops reads ahead that no layer has claimed.
void LayerExperts::drop_ahead() {
    for (const Ahead& ahead : ahead_)
        if (ahead.layer >= 0) drop(ahead);
    ahead_.clear();
    reap_dropped();
}

Status LayerExperts::end_pass() {
    if (r_ == nullptr) return DONE;  // no layer had experts
    drop_ahead();
    while (!dropped_.empty()) {
        const Status status = await_dropped();
        if (status != DONE) return status;
    }
    if (r_->foresight != nullptr) r_->foresight->end_pass();
    r_ = nullptr;  // the next pass may be told another
    return DONE;
}

// Waits until the slot dropped first is free.
Status LayerExperts::await_dropped() {
    const Ahead& first = dropped_.front();
    if (wait(first.slot) == PENDING) {
        r_->layer = first.layer, r_->expert = first.expert, r_->slot = first.slot;
        return WAITS;
    }
    reap_dropped();
    return DONE;
}

void LayerExperts::reap_dropped() {
    std::deque<Ahead> left;
    for (const Ahead& ahead : dropped_)
        if ((*r_->readiness)->state(ahead.slot) == PENDING) left.push_back(ahead);
        else free_slot(ahead.slot);
    dropped_.swap(left);
}

void LayerExperts::run_present() {
    if (is_present_run_) return;
    is_present_run_ = true;
    if (waiting_.empty() && pending_.empty()) {
        const ExpertCall& c = call_;
        c.run(c.variant, c.num_threads, c.types, c.x, experts_, weights_, slots_.data(), &c.places,
              c.parts, c.gate, c.up, c.out, c.num_rows, c.num_chosen, c.hidden, c.width);
        is_summed_ = true;
    } else if (!present_.empty()) {
        run(present_);
    }
    for (long expert : leaving_after_use_) evict(expert);
}

const float* LayerExperts::sum_present() {
    if (is_summed_) return call_.out;
    std::vector<float> weights(weights_, weights_ + row_of_.size());
    std::vector<char> is_absent(row_of_.size(), 0);
    const auto note = [&](const Arrival& arrival) {
        std::fill_n(is_absent.begin() + arrival.group.first, arrival.group.num_rows, 1);
    };
    std::for_each(waiting_.begin(), waiting_.end(), note);
    std::for_each(pending_.begin(), pending_.end(), note);
    for (std::size_t pair = 0; pair < weights.size(); ++pair)
        if (is_absent[row_of_[pair]]) weights[pair] = 0;
    const ExpertCall& c = call_;
    combine(c.variant, c.parts, row_of_.data(), weights.data(), c.out, c.num_rows, c.num_chosen,
            c.hidden);
    return c.out;
}

void LayerExperts::run(const std::vector<Group>& groups) const {
    const ExpertCall& c = call_;
    c.mlps(c.variant, c.num_threads, c.types,
           reinterpret_cast<const std::int64_t*>(groups.data()), static_cast<long>(groups.size()),
           &c.places, c.parts, c.gate, c.up, c.hidden, c.width);
}

// Computes the experts that have arrived, or waits for the one whose read began first.
Status LayerExperts::take_arrivals() {
    const Readiness& readiness = **r_->readiness;
    wait(pending_.front().slot);
    std::vector<Group> groups;
    std::deque<Arrival> left;
    std::vector<Arrival> arrived;
    for (const Arrival& arrival : pending_) {
        const int state = readiness.state(arrival.slot);
        if (state == PENDING) {
            left.push_back(arrival);
        } else if (state == READY) {
            arrived.push_back(arrival);
            groups.push_back(arrival.group);
        } else {
            r_->layer = layer_, r_->expert = arrival.expert, r_->slot = arrival.slot;
            r_->error = state;
            return FAILED;
        }
    }
    if (arrived.empty()) {
        r_->layer = layer_, r_->expert = pending_.front().expert, r_->slot = pending_.front().slot;
        return WAITS;
    }
    run(groups);
    pending_.swap(left);
    for (const Arrival& arrival : arrived) settle(arrival);
    return DONE;
}

// Waits for a slot within a call's time limit; returns its state.
int LayerExperts::wait(long slot) {
    const int state = (*r_->readiness)->state(slot);
    if (state != PENDING) return state;
    const auto start = std::chrono::steady_clock::now();
    rest_together();
    const int later = (*r_->readiness)->wait(slot, r_->wait_limit_s);
    const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - start;
    r_->wait_s += waited.count();
    return later;
}

void LayerExperts::settle(const Arrival& arrival) {
    if (!arrival.is_admitted) return free_slot(arrival.slot);
    r_->owner[arrival.slot] = layer_ * r_->num_experts + arrival.expert;
    table()[arrival.expert] = arrival.slot;
    ++r_->num_admitted;
}

void LayerExperts::sum() {
    const ExpertCall& c = call_;
    combine(c.variant, c.parts, row_of_.data(), weights_, c.out, c.num_rows, c.num_chosen, c.hidden);
    is_summed_ = true;
}

}  // namespace lowtide

extern "C" {

lowtide::Foresight* lowtide_open_foresight(long num_layers) {
    return new lowtide::Foresight(num_layers);
}

void lowtide_close_foresight(lowtide::Foresight* foresight) { delete foresight; }

lowtide::LayerExperts* lowtide_open_experts() { return new lowtide::LayerExperts; }

void lowtide_close_experts(lowtide::LayerExperts* run) { delete run; }

// Begins a layer's experts for rows that were routed elsewhere: experts, weights [num_rows,
// num_chosen], experts ascending in each row. An earlier, unfinished call is forgotten.
void lowtide_begin_experts(
    lowtide::LayerExperts* run, lowtide::Residency* residency, long layer,
    const lowtide::ExpertCall* call, const std::int64_t* experts, const float* weights
) {
    run->begin(*residency, layer, *call, experts, weights);
}

// Continues up to the sum; returns a `Status`.
int lowtide_advance_experts(lowtide::LayerExperts* run) { return run->advance(); }

}
