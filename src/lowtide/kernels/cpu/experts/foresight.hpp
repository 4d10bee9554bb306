// Guesses of what a coming layer will ask for, and which of them have been right of late.
//
// A row's guesses have places: first the expert that the next layer's router would give the most
// weight. Guesses are counted for each layer and place, and by what was known when they were made.
// Knows nothing of slots and reads.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

namespace lowtide {

// What a guess was made from: the rows as they came from the attention of the layer before, or with
// what had been computed of that layer's MLP.
enum Known : int { BEFORE_MLP, AFTER_MLP };

class Foresight {
 public:
    explicit Foresight(long num_layers) : counts_(num_layers) {}

    // False: none of a row's `k` guesses is worth a read, and it is not their turn to be watched.
    bool is_wanted(long layer, Known known, long k) const {
        if ((num_passes_ + layer) % WATCH_STRIDE == 0) return true;
        for (long place = 0; place < std::min(k, NUM_PLACES); ++place)
            if (is_worth(layer, known, place)) return true;
        return false;
    }

    // The router's choice for each row, experts and weights [num_rows, k], as guesses: those of
    // experts for which is_absent holds. Returns what is worth a read, the best first.
    template <class Predicate>
    std::vector<long> guess(
        long layer, Known known, const std::int64_t* experts, const float* weights, long num_rows,
        long k, const Predicate& is_absent
    ) {
        layer_ = layer;
        std::vector<long> worth;
        for (const Guess& found : by_place(known, experts, weights, num_rows, k)) {
            if (!is_absent(found.expert) || is_noted(found)) continue;
            guesses_.push_back(found);
            if (is_worth(layer, known, found.place)) worth.push_back(found.expert);
        }
        return worth;
    }

    // Counts which guesses were right, once a layer asks; another layer's are forgotten.
    template <class Predicate>
    void learn(long layer, const Predicate& is_demanded) {
        if (layer == layer_)
            for (const Guess& guess : guesses_) {
                Count& count = counts_[layer][guess.known][guess.place];
                const bool is_right = is_demanded(guess.expert);
                count.right = REMEMBERED * count.right + is_right;
                count.wrong = REMEMBERED * count.wrong + !is_right;
            }
        guesses_.clear();
    }

    void end_pass() { ++num_passes_, guesses_.clear(); }

 private:
    // Later places share the last.
    static constexpr long NUM_PLACES = 8;

    // Of the guesses of a place, the share that has to be right: what is asked for waits for the
    // pieces of a wrong one that are on their way, about as long as a right one saves.
    static constexpr double WORTH_SHARE = 0.5;

    // Of a count, after each guess.
    static constexpr double REMEMBERED = 0.98;

    // Guesses that are not worth a read are watched in one of this many passes.
    static constexpr long WATCH_STRIDE = 8;

    struct Guess {
        long expert, place;
        Known known;
    };

    struct Count {
        double right = 3, wrong = 1;  // so that the first wrong guess ends nothing
    };

    static std::vector<Guess> by_place(
        Known known, const std::int64_t* experts, const float* weights, long num_rows, long k
    ) {
        std::vector<Guess> found;
        std::vector<long> order(k);
        for (long row = 0; row < num_rows; ++row, experts += k, weights += k) {
            for (long i = 0; i < k; ++i) order[i] = i;
            std::stable_sort(order.begin(), order.end(),
                             [=](long a, long b) { return weights[a] > weights[b]; });
            for (long place = 0; place < k; ++place)
                found.push_back({experts[order[place]], std::min(place, NUM_PLACES - 1), known});
        }
        std::stable_sort(found.begin(), found.end(),
                         [](const Guess& a, const Guess& b) { return a.place < b.place; });
        return found;
    }

    bool is_noted(const Guess& guess) const {
        return std::any_of(guesses_.begin(), guesses_.end(), [&](const Guess& other) {
            return other.expert == guess.expert && other.known == guess.known;
        });
    }

    bool is_worth(long layer, Known known, long place) const {
        const Count& count = counts_[layer][known][place];
        return count.right >= WORTH_SHARE * (count.right + count.wrong);
    }

    std::vector<std::array<std::array<Count, NUM_PLACES>, 2>> counts_;
    std::vector<Guess> guesses_;  // of `layer_`
    long layer_ = 0, num_passes_ = 0;
};

}  // namespace lowtide
