// A gated delta-net with its projections: what each does of all rows is one product, and each
// sequence's rows go through the matrices together (delta.cpp).

#include "layer/mixers.hpp"
#include "layer/steps.hpp"

using namespace lowtide;

namespace {

// Widths of what a row has.
struct Widths {
    long key, value, channels, num_heads;  // num_heads: of values

    explicit Widths(const DeltaSpec& spec)
        : key(spec.key_heads * spec.key_width), value(spec.value_heads * spec.value_width),
          channels(spec.channels()), num_heads(spec.value_heads) {}
};

// Queries, keys and values to `projected`, and gates.
void project_heads(const Pass& p, const DeltaNet& d, const Widths& w, long hidden) {
    const DeltaSpec& spec = d.weights.spec;
    if (d.gates.num_outs > 0) {
        multiply(p, p.normed, hidden, d.mixed, p.projected, w.channels);
        multiply(p, p.normed, hidden, d.gates, p.gates, w.value);
        return;
    }
    const long values = w.value / spec.key_heads, length = 2 * (spec.key_width + values);
    const auto take = [&](long first, long width, bf16* out, long stride) {
        gather(p, p.product, spec.key_heads, length, first, width, out, stride);
    };
    multiply(p, p.normed, hidden, d.mixed, p.product, w.channels + w.value);
    take(0, spec.key_width, p.projected, w.channels);
    take(spec.key_width, spec.key_width, p.projected + w.key, w.channels);
    take(2 * spec.key_width, values, p.projected + 2 * w.key, w.channels);
    take(2 * spec.key_width + values, values, p.gates, w.value);
}

// Of each value head: all betas of a row, then all times.
void project_strengths(const Pass& p, const DeltaNet& d, const Widths& w, long hidden) {
    const long stride = 2 * w.num_heads;
    if (d.time.num_outs > 0) {
        multiply(p, p.normed, hidden, d.beta, p.strengths, stride);
        multiply(p, p.normed, hidden, d.time, p.strengths + w.num_heads, stride);
        return;
    }
    const long key_heads = d.weights.spec.key_heads, each = w.num_heads / key_heads;
    multiply(p, p.normed, hidden, d.beta, p.product, stride);
    for (long first : {0L, each})
        gather(p, p.product, key_heads, 2 * each, first, each,
               p.strengths + (first == 0 ? 0 : w.num_heads), stride);
}

void advance(const Pass& p, const DeltaNet& d, const Widths& w, const std::int64_t* sequence) {
    const long start = sequence[0], stride = 2 * w.num_heads;
    const bf16* const beta = p.strengths + start * stride;
    const DeltaRows rows = {
        p.projected + start * w.channels, w.channels, beta, stride, beta + w.num_heads, stride,
        reinterpret_cast<const bf16*>(sequence[2] + d.tail),
        reinterpret_cast<bf16*>(sequence[3] + d.tail),
        reinterpret_cast<const float*>(sequence[2] + d.matrices),
        reinterpret_cast<float*>(sequence[3] + d.matrices),
        p.attended + start * w.value, w.value, sequence[1] - start,
    };
    lowtide_delta_steps(p.variant, p.num_threads, &rows, &d.weights);
}

}  // namespace

extern "C" {

// parts: a DeltaNet.
void lowtide_mix_delta(const Pass* pass, const void* parts, long hidden) {
    const Pass& p = *pass;
    const auto& d = *static_cast<const DeltaNet*>(parts);
    const Widths w(d.weights.spec);
    normalise(p, d.norm, p.normed);
    project_heads(p, d, w, hidden);
    project_strengths(p, d, w, hidden);
    for (long i = 0; i < p.num_sequences; ++i) advance(p, d, w, p.sequences + 4 * i);
    normalise(p, d.head_norm, p.attended, w.value, p.attended, w.value, w.num_heads);
    lowtide_silu_weigh(p.variant, p.num_threads, p.attended, w.value, p.gates, w.value, p.num_rows,
                       w.value);
    multiply(p, p.attended, w.value, d.outward, p.update, hidden);
    add(p, p.update, hidden);
}

}
