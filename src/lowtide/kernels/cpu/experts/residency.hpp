// Residency of experts while layers run, and the experts of a layer of which some are absent.
//
// A layer's demand is counted, and absent experts are admitted in place of residents with lower
// ranks (the twin of `admit` in policies/ranks.py). Their reads begin; present experts are
// computed meanwhile, the others as they arrive, and all are summed by ascending id.

#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "experts/foresight.hpp"
#include "experts/pairs.hpp"
#include "team/reader.hpp"
#include "signatures.hpp"

namespace lowtide {

// Owners of slots without a resident.
constexpr std::int64_t FREE_SLOT = -1, TAKEN_SLOT = -2;

// Shared with Python, whose ledger and placement own the arrays.
struct Residency {
    std::int64_t* table;  // [num_layers, num_experts]: each expert's slot, less than 0: none
    std::int64_t* owner;  // [num_slots]: layer * num_experts + expert, or FREE_SLOT and so on
    std::int64_t *free, *free_state;  // a ring of free slots; its first, and how many
    long num_experts, num_slots;
    double* rank;  // [num_layers, num_experts], which demand changes by what follows
    double per_token, per_expert, per_share;
    const double* worth;  // [num_worth] of so many tokens, the last for more; null: their number
    long num_worth;
    std::int64_t* clock;  // or null: the last rank given, where a demanded expert's is a new one
    const std::int64_t* room;  // [num_layers]
    long most, includes_all, low_ids_leave, is_forced;
    std::int64_t* hits;  // [num_layers, num_experts]: tokens in this pass
    std::int64_t* asked;  // [num_experts, 3]: an expert, its slot and the filling, for Python
    std::shared_ptr<Readiness>* readiness;
    Reader* reader;  // null: Python reads
    double wait_limit_s;  // of one call
    long reads_ahead;  // whether to read what the next layer is expected to ask for
    Foresight* foresight;  // null: nothing is read ahead
    // Counters of outcomes, never reset.
    long num_hits, num_misses, num_admitted, num_left_out, num_evicted, read_bytes;
    long num_ahead, num_late, num_wasted;  // reads ahead: used, of these not there in time; not used
    long num_begun_ahead;  // all of them
    long num_rows, num_here_rows, num_absent_rows;  // pairs of row and expert; by residency
    long num_read, given_up_bytes;  // experts read to be used; bytes of reads that were given up
    double wait_s;
    // In this pass:
    long num_asked;
    // In the present layer:
    long layer, expert, slot, error;
};

// How a call over layers ended. After all but DONE the same call continues.
enum Status : int {
    DONE,
    WAITS,  // for longer than a call may
    READS,  // once what is `asked` is being read
    FAILED,  // the read of `expert` into `slot`, with `error`
    STUCK,  // an expert waits for a slot and none is on its way to be free
};

// Operators for a layer's experts, as `Experts` in layer.hpp, and their scratch. Shared with
// Python, which knows the router.
struct ExpertCall {
    ExpertsFunction* run;
    MlpsFunction* mlps;
    int variant, num_threads;
    const std::int32_t* types;
    ExpertPlaces places;
    long hidden, width, num_rows, num_chosen;
    const bf16* x;
    bf16 *parts, *gate, *up;
    float* out;
};

class LayerExperts {
 public:
    // experts, weights [num_rows, num_chosen], experts ascending in each row; must stay valid.
    // Absent experts' reads begin.
    void begin(
        Residency& residency, long layer, const ExpertCall& call, const std::int64_t* experts,
        const float* weights
    );

    // Continues up to the sum.
    Status advance();

    // Computes the experts that need no read, unless they have been.
    void run_present();

    // The sum as far as experts have been computed, in the memory of the sum.
    const float* sum_present();

    // False: nothing of a coming layer can be read now, or guesses are not wanted.
    bool foresees(Residency& residency, long layer, Known known, long k);

    // A coming layer's demand as its router guesses it, experts and weights [num_rows, k]. Begins
    // to read the absent experts that are worth it, and gives up reads that an earlier guess began
    // and this one does not confirm.
    void expect(
        long layer, Known known, const std::int64_t* experts, const float* weights, long num_rows,
        long k
    );

    // Ends the pass after the last layer; WAITS while a dropped read runs.
    Status end_pass();

 private:
    struct Demand {
        long expert, num_rows;
    };

    struct Arrival {
        long expert, slot;
        Group group;
        bool is_admitted;
    };

    struct Ahead {
        long layer, expert, slot;
    };

    void claim(Arrival arrival);
    void drop(const Ahead& ahead);
    void drop_ahead();
    Status await_dropped();
    void start_read(long layer, long expert, long slot);
    void reap_dropped();
    long take_slot();

    void raise_ranks();
    void admit(std::vector<char>& is_admitted);
    long lowest(const std::vector<char>& has_left) const;
    void evict(long expert);
    void free_slot(long slot);
    void run(const std::vector<Group>& groups) const;
    void start_reads();
    Status take_arrivals();
    int wait(long slot);
    void settle(const Arrival& arrival);
    void sum();

    std::int64_t* table() const { return r_->table + layer_ * r_->num_experts; }

    Residency* r_ = nullptr;
    long layer_ = 0;
    ExpertCall call_{};
    const std::int64_t* experts_ = nullptr;
    const float* weights_ = nullptr;
    std::vector<std::int64_t> slots_;  // of each distinct expert
    std::vector<Demand> demand_;  // of each distinct expert, ascending
    std::vector<long> row_of_;
    std::vector<Group> present_;
    std::vector<long> leaving_after_use_;
    std::deque<Arrival> waiting_, pending_;
    std::vector<Ahead> ahead_;
    std::deque<Ahead> dropped_;  // were given up and are not over
    bool is_present_run_ = false, is_summed_ = false;
};

}  // namespace lowtide
