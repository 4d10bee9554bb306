// A router: its product, where that is in float32, and the choice of experts by their logits.

#include <algorithm>
#include <limits>
#include <vector>

#include "operators.hpp"
#include "team/team.hpp"

using namespace lowtide;

namespace {

constexpr long LANES = 64;  // sums side by side, so that none waits for its last addition
constexpr long PIECE_OUTS = 16;

INLINED float dot(const float* x, const float* w, long length) {
    float lanes[LANES] = {};
    long i = 0;
    for (; i + LANES <= length; i += LANES)
        for (long lane = 0; lane < LANES; ++lane) lanes[lane] += x[i + lane] * w[i + lane];
    for (long lane = 0; i + lane < length; ++lane) lanes[lane] += x[i + lane] * w[i + lane];
    for (long half = LANES / 2; half > 0; half /= 2)
        for (long lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
    return lanes[0];
}

template <class Number>
float wide(Number value);
template <>
INLINED float wide(float value) { return value; }
template <>
INLINED float wide(bf16 value) { return widen(value); }

// A score as precise as logits are.
template <class Number>
float as_precise(float score);
template <>
INLINED float as_precise<float>(float score) { return score; }
template <>
INLINED float as_precise<bf16>(float score) { return rounded(score); }

template <class Number>
INLINED void to_sigmoids(const Number* logits, float* scores, long length) {
    for (long i = 0; i < length; ++i)
        scores[i] = as_precise<Number>(1.0f / (1.0f + exponential(-wide(logits[i]))));
}

template <class Number>
INLINED void to_softmax(const Number* logits, float* scores, long length) {
    constexpr long WIDTH = 16;
    float peak = -std::numeric_limits<float>::infinity(), lanes[WIDTH] = {};
    for (long i = 0; i < length; ++i) {
        scores[i] = wide(logits[i]);
        peak = scores[i] > peak ? scores[i] : peak;
    }
    for (long i = 0; i < length; ++i) scores[i] = exponential(scores[i] - peak);
    for (long i = 0; i < length; i += WIDTH)
        for (long lane = 0; lane < WIDTH && i + lane < length; ++lane)
            lanes[lane] += scores[i + lane];
    float total = 0;
    for (float lane : lanes) total += lane;
    for (long i = 0; i < length; ++i) scores[i] /= total;
}

// The `count` greatest of ranks, of equal ones the first; best [count], greatest first. NaN beats
// none, and whatever the ranks are, the places are different ones.
void find_best(const float* ranks, long length, long count, std::int64_t* best) {
    for (long i = 0; i < length; ++i) {
        long place = std::min(i, count);
        if (place == count && !(ranks[i] > ranks[best[count - 1]])) continue;
        if (place == count) --place;
        for (; place > 0 && ranks[i] > ranks[best[place - 1]]; --place)
            best[place] = best[place - 1];
        best[place] = i;
    }
}

// Sets ranks to -inf outside the best groups; a group's rank is the sum of its best one or two.
void limit_to_groups(const Choice& choice, float* ranks) {
    const long length = choice.num_experts / choice.num_groups;
    const long num_best = std::min(choice.num_group_best, length);
    std::vector<float> of_group(choice.num_groups);
    std::vector<std::int64_t> best(std::max(num_best, choice.num_groups_kept));
    for (long group = 0; group < choice.num_groups; ++group) {
        const float* own = ranks + group * length;
        find_best(own, length, num_best, best.data());
        for (long i = 0; i < num_best; ++i) of_group[group] += own[best[i]];
    }
    find_best(of_group.data(), choice.num_groups, choice.num_groups_kept, best.data());
    std::vector<bool> is_kept(choice.num_groups);
    for (long i = 0; i < choice.num_groups_kept; ++i) is_kept[best[i]] = true;
    for (long i = 0; i < choice.num_experts; ++i)
        if (!is_kept[i / length]) ranks[i] = -std::numeric_limits<float>::infinity();
}

// The softmax of the chosen scores alone, each rounded to what logits are.
void weigh_chosen(const Choice& choice, bool is_float32, const float* logits,
                  const std::int64_t* experts, float* weights) {
    const long count = choice.num_chosen;
    float peak = -std::numeric_limits<float>::infinity(), total = 0;
    for (long i = 0; i < count; ++i) peak = std::max(peak, logits[experts[i]]);
    for (long i = 0; i < count; ++i) total += weights[i] = exponential(logits[experts[i]] - peak);
    for (long i = 0; i < count; ++i) {
        weights[i] /= total;
        if (!is_float32) weights[i] = rounded(weights[i]);
        weights[i] *= choice.scaling_factor;
    }
}

void weigh(const Choice& choice, bool is_float32, const float* scores, const std::int64_t* experts,
           float* weights) {
    if (choice.of_chosen) return weigh_chosen(choice, is_float32, scores, experts, weights);
    float total = 0;
    for (long i = 0; i < choice.num_chosen; ++i) total += weights[i] = scores[experts[i]];
    const float divisor = total + choice.sum_epsilon;
    for (long i = 0; i < choice.num_chosen; ++i) {
        if (choice.normalise) weights[i] /= divisor;
        if (choice.rounds_weights && !is_float32) weights[i] = rounded(weights[i]);
        weights[i] *= choice.scaling_factor;
    }
}

template <class Number>
void choose(int variant, const Number* logits, const float* bias, const Choice& choice,
            float* scores, float* ranks, std::int64_t* experts, float* weights) {
    const long length = choice.num_experts;
    vectorised(variant, [=, &choice]() INLINED_LAMBDA {
        if (choice.of_chosen)
            for (long i = 0; i < length; ++i) scores[i] = wide(logits[i]);
        else if (choice.is_sigmoid) to_sigmoids(logits, scores, length);
        else to_softmax(logits, scores, length);
        for (long i = 0; i < length; ++i) ranks[i] = bias ? scores[i] + bias[i] : scores[i];
    });
    if (choice.num_groups > 1) limit_to_groups(choice, ranks);
    find_best(ranks, length, choice.num_chosen, experts);
    std::sort(experts, experts + choice.num_chosen);
    weigh(choice, sizeof(Number) == sizeof(float), scores, experts, weights);
}

}  // namespace

extern "C" {

// out[r, o] = sum over k of x[r, k] * w[o, k]; w [num_outs, num_k], rows adjacent. Strides are in
// elements. A row's bits depend only on the row and the weights.
void lowtide_multiply_float32(
    int variant, int num_threads, const float* x, long x_stride, const float* w, float* out,
    long out_stride, long num_rows, long num_outs, long num_k
) {
    const long num_bytes = num_outs * num_k * static_cast<long>(sizeof(float));
    const int num_useful = num_bytes < WORTH_BYTES ? 1 : num_threads;
    together(num_useful, (num_outs + PIECE_OUTS - 1) / PIECE_OUTS, [&](long number) {
        const long first = number * PIECE_OUTS, last = std::min(first + PIECE_OUTS, num_outs);
        vectorised(variant, [=]() INLINED_LAMBDA {
            for (long o = first; o < last; ++o)
                for (long row = 0; row < num_rows; ++row)
                    out[row * out_stride + o] = dot(x + row * x_stride, w + o * num_k, num_k);
        });
    });
}

// logits [num_rows, choice.num_experts], float32 or bfloat16, and bias [num_experts], which only
// ranks, or null. experts, weights [num_rows, choice.num_chosen]; experts ascend in each row.
void lowtide_choose_experts(
    int variant, const void* logits, int is_float32, const float* bias, const Choice* choice,
    std::int64_t* experts, float* weights, long num_rows
) {
    const long length = choice->num_experts, k = choice->num_chosen;
    std::vector<float> scores(length), ranks(length);
    for (long row = 0; row < num_rows; ++row, experts += k, weights += k) {
        const long first = row * length;
        if (is_float32)
            choose(variant, static_cast<const float*>(logits) + first, bias, *choice,
                   scores.data(), ranks.data(), experts, weights);
        else
            choose(variant, static_cast<const bf16*>(logits) + first, bias, *choice,
                   scores.data(), ranks.data(), experts, weights);
    }
}

}
