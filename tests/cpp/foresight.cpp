// Guesses of a layer's demand: which are worth a read follows from how often their like were right.

#include "experts/foresight.hpp"

#include "driver.hpp"

namespace driver {
namespace {

using lowtide::BEFORE_MLP;
using lowtide::AFTER_MLP;
using lowtide::Foresight;
using lowtide::Known;

constexpr long K = 3, NUM_LAYERS = 4, NUM_PASSES = 200;

// Of one row, by id; by weight it is 7, 2, 4.
const std::int64_t EXPERTS[K] = {2, 4, 7};
const float WEIGHTS[K] = {0.3f, 0.2f, 0.5f};

std::vector<long> guess(Foresight& foresight, long layer, Known known) {
    return foresight.guess(layer, known, EXPERTS, WEIGHTS, 1, K, [](long) { return true; });
}

// What is worth a read after passes in which the layer asked for these alone.
std::vector<long> learned(Foresight& foresight, long layer, const std::set<long>& demanded) {
    for (long pass = 0; pass < NUM_PASSES; ++pass) {
        if (foresight.is_wanted(layer, AFTER_MLP, K)) guess(foresight, layer, AFTER_MLP);
        foresight.learn(layer, [&](long expert) { return demanded.count(expert) > 0; });
        foresight.end_pass();
    }
    const std::vector<long> worth = guess(foresight, layer, AFTER_MLP);
    foresight.end_pass();
    return worth;
}

long count_wanted(Foresight& foresight, long layer, Known known) {
    long num_wanted = 0;
    for (long pass = 0; pass < NUM_PASSES; ++pass) {
        num_wanted += foresight.is_wanted(layer, known, K);
        foresight.end_pass();
    }
    return num_wanted;
}

void check_places() {
    Foresight foresight(NUM_LAYERS);
    const std::vector<long> all = {7, 2, 4}, few = {7, 4}, none;
    expect(guess(foresight, 1, AFTER_MLP) == all, "all are tried, the best first");
    foresight.learn(1, [](long) { return false; });
    expect(guess(foresight, 1, AFTER_MLP) == all, "one wrong guess ends nothing");
    foresight.end_pass();
    expect(learned(foresight, 1, {7, 4}) == few, "a place that is wrong is left out");
    expect(learned(foresight, 1, {}) == none, "nothing is worth a read");
    const long num_wanted = count_wanted(foresight, 1, AFTER_MLP);
    expect(num_wanted > 0 && num_wanted < NUM_PASSES / 4, "guesses are watched", num_wanted);
    expect(count_wanted(foresight, 2, AFTER_MLP) == NUM_PASSES, "another layer's count alone");
    expect(count_wanted(foresight, 1, BEFORE_MLP) == NUM_PASSES, "and those that knew less");
    for (int i = 0; i < 2; ++i) learned(foresight, 1, {7, 2, 4});
    expect(learned(foresight, 1, {7, 2, 4}) == all, "what is right again is read again");
}

void check_rows() {
    Foresight foresight(NUM_LAYERS);
    const std::int64_t experts[] = {1, 5, 2, 5};
    const float weights[] = {0.9f, 0.1f, 0.2f, 0.8f};
    const auto is_absent = [](long expert) { return expert != 2; };
    const std::vector<long> found =
        foresight.guess(0, BEFORE_MLP, experts, weights, 2, 2, is_absent);
    expect(found == std::vector<long>({1, 5}), "rows' first places, each once, none that is here");
    bool is_asked = false;
    foresight.learn(3, [&](long) { return is_asked = true; });
    foresight.learn(0, [&](long) { return is_asked = true; });
    expect(!is_asked, "guesses of a layer that was passed over");
}

}  // namespace

void check_foresight() {
    check_places();
    check_rows();
}

}  // namespace driver
