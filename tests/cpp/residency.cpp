// Layers of whose experts some are absent, read by threads of the library's own or by others: the
// bits are those of everything resident, and who is admitted follows from ranks.

#include <map>
#include <thread>

#include "checkpoint.hpp"
#include "layers.hpp"
#include "unruly_reads.hpp"

namespace driver {
namespace {

using lowtide::FAILED;
using lowtide::READS;
using lowtide::STUCK;
using lowtide::WAITS;

constexpr Sizes SIZES_HERE = {33, 3, 1, 6, 11, 3, 17, 9};
constexpr long NUM_LAYERS = 4, NUM_EXPERTS = SIZES_HERE.num_experts;  // layers with experts
constexpr long NUM_ALL = NUM_LAYERS * NUM_EXPERTS;
constexpr std::int64_t RETIRED_SLOT = -3;  // of slots.py: neither free nor anybody's

// Layers with experts, and one without before them and between. What the second will ask for is
// hard to expect, and the third's choice is its bias's.
struct Model {
    explicit Model(const Kind& kind) : variant(kind.type == PLAIN ? kind.variant : 0) {
        for (int form : {0, 3, 1, 3, 0, 2})
            layers.push_back(std::make_unique<OwnLayer>(kind, SIZES_HERE, FORMS[form]));
        for (const auto& layer : layers)
            for (long expert = 0; layer->layer.experts.router && expert < NUM_EXPERTS; ++expert)
                experts.push_back(layer->expert(expert));
    }

    void forget_keys() const {
        for (const auto& layer : layers) layer->forget_keys();
    }

    const int variant;
    std::vector<std::unique_ptr<OwnLayer>> layers;
    std::vector<Bytes> experts;  // of all layers
};

// What a pass is given, and what comes of it with everything resident.
struct Wanted {
    Wanted(const Library& kernels, const Model& model, long num_rows)
        : before(numbers(num_rows * SIZES_HERE.hidden)),
          turns(numbers(num_rows * SIZES_HERE.head_dim / 2)) {
        OwnPass pass(SIZES_HERE, model.variant, 1, before, turns);
        model.forget_keys();
        for (const auto& layer : model.layers) {
            const Ids of_layer = Parts(kernels).run(*layer, pass.pass);
            if (layer->layer.experts.router) chosen.push_back(of_layer);
        }
        x = pass.x();
    }

    Numbers before, turns, x;
    std::vector<Ids> chosen;  // of each layer with experts, for each row
};

// What a pass decides, by the words of policies/ranks.py.
struct Twin {
    Twin(const OwnResidency& own, const Checkpoint& checkpoint, const Wanted& wanted)
        : own(own), checkpoint(checkpoint), rank(own.rank), hits(own.hits), residents(NUM_LAYERS) {
        if (own.residency.clock != nullptr) clock = *own.residency.clock;
        for (long number = 0; number < NUM_ALL; ++number)
            if (own.table[number] >= 0) residents[number / NUM_EXPERTS].insert(number % NUM_EXPERTS);
        for (long layer = 0; layer < NUM_LAYERS; ++layer) decide(layer, wanted.chosen[layer]);
    }

    // Demanded experts gain rank.
    void gain(long layer, const std::map<long, long>& num_tokens) {
        const Residency& r = own.residency;
        const auto worth = [&](long count) {
            if (r.num_worth == 0) return double(count);
            return count < r.num_worth ? r.worth[count] : r.worth[r.num_worth - 1];
        };
        double total = 0;
        for (const auto& [expert, count] : num_tokens) total += worth(count);
        for (const auto& [expert, count] : num_tokens) {
            const long number = layer * NUM_EXPERTS + expert;
            if (r.clock != nullptr) rank[number] = double(++clock);
            else rank[number] += r.per_token * double(count) + r.per_expert;
            if (r.clock == nullptr && total > 0 && r.per_share > 0)
                rank[number] += r.per_share * worth(count) / total;
            hits[number] += count;
            if (residents[layer].count(expert)) {
                ++num_hits;
                continue;
            }
            ++num_misses;
            for (long i = checkpoint.first_range[number]; i < checkpoint.first_range[number + 1]; ++i)
                read_bytes += checkpoint.ranges[i].num_bytes;
        }
    }

    void decide(long layer, const Ids& chosen) {
        const Residency& r = own.residency;
        std::map<long, long> num_tokens;
        for (long expert : chosen) ++num_tokens[expert];
        gain(layer, num_tokens);

        // Who comes, highest rank first, and who leaves, lowest rank first.
        std::vector<std::pair<double, long>> coming, leaving;
        for (long expert = 0; expert < NUM_EXPERTS; ++expert) {
            const double own_rank = rank[layer * NUM_EXPERTS + expert];
            const bool may_come = num_tokens.count(expert) || r.includes_all;
            if (residents[layer].count(expert))
                leaving.push_back({own_rank, r.low_ids_leave ? expert : -expert});
            else if (may_come && (own_rank > 0 || r.is_forced))
                coming.push_back({-own_rank, expert});
        }
        std::sort(coming.begin(), coming.end());
        std::sort(leaving.begin(), leaving.end());
        if (long(coming.size()) > r.most) coming.resize(r.most);
        long num_inside = long(leaving.size());
        auto leaves = leaving.begin();
        std::set<long> gone, now;
        const auto leave = [&] { gone.insert(std::abs(leaves++->second)), --num_inside; };
        while (num_inside > r.room[layer]) leave();
        long num_others = 0;
        for (const auto& [minus_rank, expert] : coming) {
            if (num_inside == r.room[layer]) {
                if (leaves == leaving.end()) break;
                if (!r.is_forced && -minus_rank <= leaves->first) break;
                leave();
            }
            ++num_inside;
            if (num_tokens.count(expert)) now.insert(expert);
            else ++num_others;
        }
        // As many stay as nobody reads, those of lower ids.
        num_left_out += num_others;
        for (long expert : gone)
            if (--num_others < 0) residents[layer].erase(expert), ++num_evicted;
        num_admitted += long(now.size());
        residents[layer].insert(now.begin(), now.end());
    }

    void compare() const {
        const Residency& r = own.residency;
        std::vector<std::set<long>> found(NUM_LAYERS);
        for (long number = 0; number < NUM_ALL; ++number)
            if (own.table[number] >= 0) found[number / NUM_EXPERTS].insert(number % NUM_EXPERTS);
        expect(found == residents, "who is resident", r.most, r.includes_all, r.low_ids_leave);
        expect(own.rank == rank, "ranks");
        expect(own.hits == hits, "tokens of experts");
        expect(r.clock == nullptr || *r.clock == clock, "the last rank given");
        expect(r.num_hits == num_hits && r.num_misses == num_misses, "hits", r.num_hits, num_hits,
               r.num_misses - num_misses);
        expect(r.num_admitted == num_admitted, "admitted", r.num_admitted, num_admitted);
        expect(r.num_evicted == num_evicted, "evicted", r.num_evicted, num_evicted);
        expect(r.reader == nullptr || r.read_bytes >= read_bytes, "bytes read", r.read_bytes,
               read_bytes);
        expect(r.reader == nullptr || r.num_wasted > 0 || r.read_bytes == read_bytes,
               "bytes read in vain", r.read_bytes, read_bytes);
        expect(r.num_late <= r.num_ahead && r.num_ahead <= num_misses, "reads ahead", r.num_late,
               r.num_ahead, num_misses);
        const bool may_be_ahead = r.reader != nullptr && r.reads_ahead;
        expect(may_be_ahead || r.num_ahead + r.num_wasted == 0, "reads ahead of nothing");
        expect(r.num_left_out == num_left_out, "who is left out", r.num_left_out, num_left_out);
    }

    const OwnResidency& own;
    const Checkpoint& checkpoint;
    std::vector<double> rank;
    Ids hits;
    std::vector<std::set<long>> residents;
    long clock = 0, num_hits = 0, num_misses = 0, num_admitted = 0, num_left_out = 0;
    long num_evicted = 0, read_bytes = 0;
};

// Every slot is bound, free or taken, and once; how many are taken.
long count_taken(const OwnResidency& own) {
    const long num_slots = long(own.owner.size());
    std::vector<int> num_times(num_slots, 0);
    long num_taken = 0;
    for (long i = 0; i < own.state[1]; ++i) {
        const long slot = own.ring[(own.state[0] + i) % num_slots];
        ++num_times[slot];
        expect(own.owner[slot] == FREE_SLOT, "the owner of a free slot", slot, own.owner[slot]);
    }
    for (long number = 0; number < NUM_ALL; ++number) {
        const long slot = own.table[number];
        if (slot < 0) continue;
        ++num_times[slot];
        expect(own.owner[slot] == number, "the owner of a bound slot", slot, own.owner[slot]);
    }
    for (long slot = 0; slot < num_slots; ++slot) {
        const long owner = own.owner[slot];
        num_taken += owner == TAKEN_SLOT;
        expect(num_times[slot] == (owner != TAKEN_SLOT && owner != RETIRED_SLOT),
               "how often a slot is in the books", slot, num_times[slot], owner);
    }
    return num_taken;
}

// Counts of guesses, which a residency has beside it.
class OwnForesight {
   public:
    OwnForesight(const Library& kernels, long num_layers)
        : close_(kernels.function<void(lowtide::Foresight*)>("lowtide_close_foresight")),
          foresight(kernels.function<lowtide::Foresight*(long)>("lowtide_open_foresight")(num_layers)
          ) {}
    ~OwnForesight() { close_(foresight); }
    OwnForesight(const OwnForesight&) = delete;

   private:
    void (*close_)(lowtide::Foresight*);

   public:
    lowtide::Foresight* const foresight;
};

enum Reads { OF_LIBRARY, OF_OTHERS, OF_OTHERS_THAT_FAIL };

struct Case {
    Reads reads;
    int num_threads;
    long num_rows, num_spare;  // slots beside those of residents, 1 at least
};

// Seen in all cases.
long num_waits = 0, num_failed = 0, num_ahead = 0, num_wasted = 0;

// Residents, free slots and rules at random.
class Residents {
   public:
    Residents(const Library& kernels, const Model& model, const Case& given)
        : calls_(kernels), run_(kernels), model_(model), case_(given), checkpoint_(model.experts),
          own_(NUM_LAYERS, NUM_EXPERTS, random_owners()),
          foresight_(kernels, NUM_LAYERS),
          reader_(calls_, checkpoint_,
                  {long(own_.owner.size()), long(model.experts[0].size()), 4096, 2, false}) {
        Residency& r = own_.residency;
        r.readiness = reader_.readiness;
        r.foresight = foresight_.foresight;
        r.reader = given.reads == OF_LIBRARY ? reader_.reader : nullptr;
        r.wait_limit_s = given.reads == OF_LIBRARY && below(2) ? LONG_S : 0.0003;
        r.reads_ahead = below(2);
        if (below(2)) r.clock = &clock_;
        r.per_token = double(below(3)), r.per_expert = double(below(2));
        r.per_share = double(below(2)) * 0.7;
        if (below(2)) r.worth = worth_.data(), r.num_worth = long(worth_.size());
        const long most[] = {0, 1, 2, NUM_EXPERTS + 1};
        r.most = most[below(4)], r.includes_all = below(2), r.low_ids_leave = below(2);
        r.is_forced = below(2);
        for (long layer = 0; layer < NUM_LAYERS; ++layer) own_.room[layer] = rooms_[layer];
        for (double& rank : own_.rank) rank = double(below(6) - 1);
        for (std::size_t i = 0, number = 0; i < model.layers.size(); ++i) {
            const bool has_experts = model.layers[i]->layer.experts.router != nullptr;
            layers_.push_back(model.layers[i]->elsewhere(reader_.slots));
            numbers_.push_back(has_experts ? long(number++) : -1);
        }
        for (long slot = 0; slot < long(own_.owner.size()); ++slot)
            if (own_.owner[slot] >= 0) fill(own_.owner[slot], slot);
    }

    // Whose reads fail may end it: false.
    bool run_pass(const Wanted& wanted) {
        begin_pass();
        const Twin twin(own_, checkpoint_, wanted);
        OwnPass pass(SIZES_HERE, model_.variant, case_.num_threads, wanted.before, wanted.turns);
        model_.forget_keys();
        const bool is_done = go_on(turns_of(pass.pass));
        for (std::thread& thread : threads_) thread.join();
        threads_.clear();
        const long num_taken = count_taken(own_);
        if (!is_done) return false;
        expect(num_taken == 0, "slots taken after a pass", num_taken);
        expect(pass.x() == wanted.x, "bits with absent experts", case_.reads, case_.num_rows,
               case_.num_threads);
        twin.compare();
        num_ahead += own_.residency.num_ahead, num_wasted += own_.residency.num_wasted;
        return true;
    }

    // A pass with no slot that is free or will be.
    void run_stuck(const Wanted& wanted) {
        evict_all(RETIRED_SLOT);
        run_to(wanted, STUCK);
    }

    // A pass whose files have lost their bytes.
    void run_without_files(const Wanted& wanted) {
        evict_all(FREE_SLOT);
        for (long i = 0; i < Checkpoint::NUM_FILES; ++i)
            expect(truncate(checkpoint_.path(i).c_str(), 0) == 0, "a truncated file", i);
        own_.residency.wait_limit_s = LONG_S;
        run_to(wanted, FAILED);
        const Residency& r = own_.residency;
        expect(r.error == FILE_ENDED, "the error of a file without bytes", r.error);
        expect(own_.owner[r.slot] == TAKEN_SLOT && r.layer == 0 && own_.table[r.expert] < 0,
               "whose read failed", r.layer, r.expert, r.slot);
        expect(reader_.drain(LONG_S), "reads that have ended");
        own_.reclaim();
        expect(count_taken(own_) == 0, "slots taken by nobody");
    }

   private:
    // Some experts of each layer, in slots in no order, and at least `num_spare` that are free.
    // Layers have room for as many as there are, or for fewer or more.
    Ids random_owners() {
        Ids owners;
        long num_slots = case_.num_spare;
        for (long layer = 0; layer < NUM_LAYERS; ++layer) {
            const Ids residents = chosen_experts(1, below(NUM_EXPERTS + 1), NUM_EXPERTS);
            for (long expert : residents) owners.push_back(layer * NUM_EXPERTS + expert);
            const long num_residents = long(residents.size());
            rooms_[layer] = below(2) ? num_residents : below(NUM_EXPERTS + 1);
            num_slots += std::max(num_residents, rooms_[layer]);
        }
        owners.resize(std::max(num_slots, 1L), FREE_SLOT);
        std::shuffle(owners.begin(), owners.end(), generator());
        return owners;
    }

    std::vector<Turn> turns_of(const Pass& pass) const {
        std::vector<Turn> turns;
        for (std::size_t i = 0; i < layers_.size(); ++i)
            turns.push_back({&layers_[i], &pass, numbers_[i]});
        return turns;
    }

    // What was in free slots is not used.
    void begin_pass() {
        Residency& r = own_.residency;
        r.num_hits = r.num_misses = r.num_admitted = r.num_evicted = r.read_bytes = 0;
        r.num_ahead = r.num_late = r.num_wasted = r.num_left_out = 0;
        std::fill(own_.hits.begin(), own_.hits.end(), 0);
        for (long slot = 0; slot < long(own_.owner.size()); ++slot)
            if (own_.owner[slot] == FREE_SLOT) std::fill_n(place(slot), num_bytes(), UNTOUCHED);
    }

    bool go_on(const std::vector<Turn>& turns) {
        Residency& r = own_.residency;
        for (;;) {
            const int status = run_.advance(turns, &r);
            if (status == DONE) return true;
            if (status == READS) {
                start_reads();
            } else if (status == WAITS) {
                ++num_waits;
                expect(own_.owner[r.slot] == TAKEN_SLOT, "for whom a call waits", r.slot);
            } else if (status == FAILED) {
                ++num_failed;
                expect(r.error == EIO && own_.owner[r.slot] == TAKEN_SLOT &&
                           numbers_in_[r.slot] == r.layer * NUM_EXPERTS + r.expert,
                       "whose read failed", r.layer, r.expert, r.error);
                if (below(2)) return give_up();
                numbers_in_[r.slot] = r.layer * NUM_EXPERTS + r.expert;
                read(r.slot, calls_.begin(reader_.readiness, r.slot, 1), READY);
            } else {
                expect(false, "how a call ended", status);
                return give_up();
            }
        }
    }

    bool give_up() {
        for (std::thread& thread : threads_) thread.join();
        threads_.clear();
        run_.reset();
        own_.residency.num_asked = 0;
        own_.reclaim();
        return false;
    }

    // On threads that end in any order.
    void start_reads() {
        Residency& r = own_.residency;
        expect(r.num_asked > 0 && r.reader == nullptr, "reads that are asked for", r.num_asked);
        for (long i = 0; i < r.num_asked; ++i) {
            const long expert = r.asked[3 * i], slot = r.asked[3 * i + 1];
            expect(own_.owner[slot] == TAKEN_SLOT, "a slot to read into", slot, own_.owner[slot]);
            numbers_in_[slot] = r.layer * NUM_EXPERTS + expert;
            const bool fails = case_.reads == OF_OTHERS_THAT_FAIL && below(8) == 0;
            read(slot, std::uint32_t(r.asked[3 * i + 2]), fails ? EIO : READY);
        }
        r.num_asked = 0;
    }

    void read(long slot, std::uint32_t filling, int error) {
        const std::chrono::microseconds late(below(1500));
        const long number = numbers_in_[slot];
        threads_.emplace_back([=] {
            std::this_thread::sleep_for(late);
            if (error == READY) fill(number, slot);
            calls_.end_piece(reader_.readiness, slot, filling, error);
        });
    }

    // Slots have this owner instead.
    void evict_all(std::int64_t owner) {
        std::fill(own_.table.begin(), own_.table.end(), -1);
        std::fill(own_.owner.begin(), own_.owner.end(), owner);
        own_.reclaim();
    }

    // Twice: a call that cannot go on ends as before.
    void run_to(const Wanted& wanted, int status) {
        begin_pass();
        OwnPass pass(SIZES_HERE, model_.variant, case_.num_threads, wanted.before, wanted.turns);
        model_.forget_keys();
        const std::vector<Turn> turns = turns_of(pass.pass);
        for (int time = 0; time < 2; ++time) {
            const int found = run_.advance(turns, &own_.residency);
            expect(found == status, "how a call that cannot go on ends", found, status);
        }
        count_taken(own_);
        run_.reset();
    }

    long num_bytes() const { return long(model_.experts[0].size()); }
    std::uint8_t* place(long slot) { return reader_.slots.data() + slot * num_bytes(); }
    void fill(long number, long slot) {
        std::copy(model_.experts[number].begin(), model_.experts[number].end(), place(slot));
    }

    const ReaderCalls calls_;
    const Run run_;
    const Model& model_;
    const Case case_;
    const Checkpoint checkpoint_;
    long rooms_[NUM_LAYERS];
    OwnResidency own_;
    const OwnForesight foresight_;
    OwnReader reader_;
    std::int64_t clock_ = 7;
    const std::vector<double> worth_ = {0, 0.9, 1.3, 1.7};
    std::vector<Layer> layers_;
    Ids numbers_;  // of each layer
    std::map<long, long> numbers_in_;  // of what others read into slots
    std::vector<std::thread> threads_;
};

}  // namespace

void check_residency(const Library& kernels) {
    const int best = kernels.function<int()>("lowtide_best_variant")();
    std::vector<Kind> kinds = {few_bits_kind(kernels), plain_kind(kernels, 0)};
    if (best > 0) kinds.push_back(plain_kind(kernels, best));
    for (const Kind& kind : kinds) {
        const Model model(kind);
        for (long num_rows : {1, 2, 7}) {
            const Wanted wanted[] = {{kernels, model, num_rows}, {kernels, model, num_rows}};
            for (int num_threads : THREADS)
                for (Reads reads : {OF_LIBRARY, OF_OTHERS, OF_OTHERS_THAT_FAIL})
                    for (long num_spare : {1, 2, 30}) {
                        is_unruly = below(2);
                        Residents residents(kernels, model,
                                            {reads, num_threads, num_rows, num_spare});
                        for (int i = 0; i < 4; ++i) residents.run_pass(wanted[i % 2]);
                    }
        }
        is_unruly = false;
        const Wanted wanted(kernels, model, 2);
        Residents(kernels, model, {OF_LIBRARY, 2, 2, 3}).run_stuck(wanted);
        Residents(kernels, model, {OF_LIBRARY, 2, 2, 3}).run_without_files(wanted);
    }
    is_unruly = false;
    expect(num_waits > 0 && num_failed > 0, "waits and failures", num_waits, num_failed);
    expect(num_ahead > 0 && num_wasted > 0, "reads ahead", num_ahead, num_wasted);
}

}  // namespace driver
