#include "experts/residency.hpp"

#include <algorithm>
#include <chrono>

#include "team/team.hpp"

namespace lowtide {

void LayerExperts::begin(
    Residency& residency, long layer, const ExpertCall& call, const std::int64_t* experts,
    const float* weights, bool may_go_ahead
) {
    r_ = &residency, layer_ = layer, call_ = call, weights_ = weights;
    may_go_ahead_ = may_go_ahead && r_->rows_ahead && r_->reader != nullptr;
    is_present_run_ = false, num_summed_ = 0;
    present_.clear(), leaving_after_use_.clear(), waiting_.clear(), pending_.clear();

    const long num_pairs = call.num_rows * call.num_chosen;
    std::vector<std::int64_t> distinct(experts, experts + num_pairs);
    std::sort(distinct.begin(), distinct.end());
    demand_.clear();
    for (std::int64_t expert : distinct) {
        if (demand_.empty() || demand_.back().expert != expert) demand_.push_back({expert, 0});
        ++demand_.back().num_rows;
    }

    std::vector<char> is_admitted(r_->num_experts, 0);
    std::vector<std::int64_t> slots;
    long num_absent = 0;
    for (const Demand& demand : demand_) {
        slots.push_back(table()[demand.expert]);
        num_absent += slots.back() < 0;
    }
    admit(is_admitted);  // who leaves may be computed yet
    reap_dropped();
    r_->num_hits += static_cast<long>(demand_.size()) - num_absent;
    r_->num_misses += num_absent;
    if (num_absent == 0) {
        call.run(call.variant, call.num_threads, call.types, call.x, experts, weights, slots.data(),
                 &call.places, call.parts, call.gate, call.up, call.out, call.num_rows,
                 call.num_chosen, call.hidden, call.width);
        for (long expert : leaving_after_use_) evict(expert);
        is_present_run_ = true, num_summed_ = call.num_rows;
        drop_ahead();
        return;
    }
    SortedPairs sorted(call.x, experts, slots.data(), call.parts, call.num_rows, call.num_chosen,
                       call.hidden);
    row_of_ = std::move(sorted.row_of);
    divide(sorted.groups, experts, is_admitted);
    drop_ahead();
    start_reads();
}

// The demand into those that are present and those that are claimed; where rows may go ahead, the
// first rows' first.
void LayerExperts::divide(
    const std::vector<Group>& groups, const std::int64_t* experts,
    const std::vector<char>& is_admitted
) {
    std::vector<long> first_row(r_->num_experts);
    for (long pair = call_.num_rows * call_.num_chosen; pair-- > 0;)
        first_row[experts[pair]] = pair / call_.num_chosen;
    std::vector<Arrival> absent;
    for (std::size_t i = 0; i < demand_.size(); ++i) {
        const long expert = demand_[i].expert;
        if (groups[i].slot >= 0) present_.push_back(groups[i]);
        else absent.push_back({expert, -1, groups[i], is_admitted[expert] != 0, first_row[expert]});
    }
    if (may_go_ahead_)
        std::stable_sort(absent.begin(), absent.end(), [](const Arrival& a, const Arrival& b) {
            return a.first_row < b.first_row;
        });
    for (const Arrival& arrival : absent) claim(arrival);
}

// An absent expert of this layer, which may be on its way already.
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
    if (num_summed_ == call_.num_rows) return DONE;
    if (r_->num_asked > 0) return READS;
    if (!is_present_run_) run_present();
    while (!waiting_.empty() || !pending_.empty()) {
        start_reads();
        if (r_->num_asked > 0) return READS;
        if (can_go_ahead()) return ROWS;
        if (pending_.empty() && dropped_.empty()) return STUCK;
        const Status status = pending_.empty() ? await_dropped() : take_arrivals();
        if (status != DONE) return status;
    }
    sum(call_.num_rows);
    return DONE;
}

// Every free slot is for an expert that waits for one.
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
}

bool LayerExperts::can_read_ahead() const {
    // Rows that go ahead know what others only expect.
    return r_->reads_ahead && !may_go_ahead_ && r_->reader != nullptr && waiting_.empty() &&
           r_->free_state[1] > 0;
}

void LayerExperts::read_ahead(long layer, const std::int64_t* experts, long count) {
    for (long i = 0; i < count; ++i) {
        const long expert = experts[i];
        if (r_->table[layer * r_->num_experts + expert] >= 0 || is_ahead(expert)) continue;
        if (r_->free_state[1] == 0) return;
        const long slot = take_slot();
        start_read(layer, expert, slot);
        ahead_.push_back({layer, expert, slot});
    }
}

// Whether it is read ahead already, for the one layer that is read ahead of.
bool LayerExperts::is_ahead(long expert) const {
    return std::any_of(ahead_.begin(), ahead_.end(),
                       [=](const Ahead& ahead) { return ahead.expert == expert; });
}

// Gives up what no layer has claimed.
void LayerExperts::drop_ahead() {
    for (const Ahead& ahead : ahead_) {
        if (ahead.layer < 0) continue;  // claimed
        ++r_->num_wasted;
        r_->read_bytes -= r_->reader->cancel(ahead.slot);
        dropped_.push_back(ahead);
    }
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
    r_ = nullptr;  // the next pass may be told another
    return DONE;
}

// Until the slot that was given up first is free.
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
    if (!present_.empty()) run(present_);
    for (long expert : leaving_after_use_) evict(expert);
    is_present_run_ = true;
}

void LayerExperts::run(const std::vector<Group>& groups) const {
    const ExpertCall& c = call_;
    c.mlps(c.variant, c.num_threads, c.types,
           reinterpret_cast<const std::int64_t*>(groups.data()), static_cast<long>(groups.size()),
           &c.places, c.parts, c.gate, c.up, c.hidden, c.width);
}

// Computes those that are there, or waits for the one that has been on its way for longest.
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

// What became of the slot within a call's limit.
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

// Whether half of the rows have all of their experts as the last ones of the others are read, and
// there is a slot for more.
bool LayerExperts::can_go_ahead() const {
    return may_go_ahead_ && num_summed_ == 0 && waiting_.empty() && r_->free_state[1] > 0 &&
           2 * num_complete() >= call_.num_rows;
}

// Rows, from the first on, for which no expert is on its way.
long LayerExperts::num_complete() const {
    long count = call_.num_rows;
    for (const Arrival& arrival : pending_) count = std::min(count, arrival.first_row);
    return count;
}

long LayerExperts::sum_complete() {
    sum(num_complete());
    r_->num_rows_ahead += num_summed_;
    return num_summed_;
}

// The rows up to `stop` that are not summed yet.
void LayerExperts::sum(long stop) {
    const ExpertCall& c = call_;
    const long first = num_summed_ * c.num_chosen;
    combine(c.variant, c.parts, row_of_.data() + first, weights_ + first,
            c.out + num_summed_ * c.hidden, stop - num_summed_, c.num_chosen, c.hidden);
    num_summed_ = stop;
}

}  // namespace lowtide

extern "C" {

lowtide::LayerExperts* lowtide_open_experts() { return new lowtide::LayerExperts; }

void lowtide_close_experts(lowtide::LayerExperts* run) { delete run; }

// A layer's experts, for rows that were routed elsewhere: experts, weights [num_rows, num_chosen],
// experts ascending in each row. What was begun before and has not ended is forgotten.
void lowtide_begin_experts(
    lowtide::LayerExperts* run, lowtide::Residency* residency, long layer,
    const lowtide::ExpertCall* call, const std::int64_t* experts, const float* weights
) {
    run->begin(*residency, layer, *call, experts, weights);
}

// On to the sum; a `Status`.
int lowtide_advance_experts(lowtide::LayerExperts* run) { return run->advance(); }

}
