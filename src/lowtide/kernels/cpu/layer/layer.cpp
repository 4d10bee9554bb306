// Layers of a few rows in as few calls as there are places where Python must decide: all of a
// model's layers in one, whichever of their experts are resident (residency.hpp); or up to a
// router's choice, and after its experts.
//
//     x += mixer(norm(x))
//     x += sum of experts (norm(x)) + shared expert (norm(x))
//
// What a layer's mixer is, and what multiplies with a matrix or with experts, comes with them, as an
// address: layers of all kinds and formats are one call.

#include <vector>

#include "layer/steps.hpp"

using namespace lowtide;

namespace {

void add_to_rows(const Pass& p, const float* bias, const Experts& e) {
    auto* logits = static_cast<float*>(p.logits);
    for (long row = 0; row < p.num_rows; ++row)
        for (long i = 0; i < e.choice.num_experts; ++i) *logits++ += bias[i];
}

void route(const Pass& p, const Layer& layer, std::int64_t* experts, float* weights) {
    const Experts& e = layer.experts;
    const long hidden = layer.hidden, num_experts = e.choice.num_experts;
    if (e.is_float32) {
        for (long i = 0; i < p.num_rows * hidden; ++i) p.router_input[i] = widen(p.mlp_input[i]);
        lowtide_multiply_float32(p.variant, p.num_threads, p.router_input, hidden,
                                 static_cast<const float*>(e.router), static_cast<float*>(p.logits),
                                 num_experts, p.num_rows, num_experts, hidden);
        if (e.logit_bias != nullptr) add_to_rows(p, static_cast<const float*>(e.logit_bias), e);
    } else {
        multiply_plainly(p, p.mlp_input, hidden, e.router, e.logit_bias, num_experts,
                         static_cast<bf16*>(p.logits));
    }
    lowtide_choose_experts(p.variant, p.logits, static_cast<int>(e.is_float32), e.bias, &e.choice,
                           experts, weights, p.num_rows);
}

ExpertCall expert_call(const Pass& p, const Layer& layer) {
    const Experts& e = layer.experts;
    return {e.run, e.mlps, e.variant, p.num_threads, e.types, e.places, layer.hidden, e.width,
            p.num_rows, e.choice.num_chosen, p.mlp_input, p.parts, p.gate, p.up, p.routed};
}

void run_shared(const Pass& p, const Layer& layer) {
    const Shared& shared = layer.shared;
    if (shared.gate.num_outs == 0) return;
    const long hidden = layer.hidden, width = shared.gate.num_outs;
    multiply(p, p.mlp_input, hidden, shared.gate, p.shared_gate, width);
    multiply(p, p.mlp_input, hidden, shared.up, p.shared_up, width);
    lowtide_silu_times(p.variant, p.num_threads, p.shared_gate, p.shared_up, p.num_rows * width);
    multiply(p, p.shared_gate, width, shared.down, p.shared, hidden);
    if (shared.share == nullptr) return;
    multiply_plainly(p, p.mlp_input, hidden, shared.share, nullptr, 1, p.share);
    lowtide_weigh_rows(p.variant, p.shared, p.share, p.num_rows, hidden);
}

// What the experts gave is rounded before the shared one's output is added, and so is the sum.
void add_mlp(const Pass& p, const Layer& layer) {
    const bool has_shared = layer.shared.gate.num_outs > 0;
    if (layer.experts.router == nullptr) return add(p, p.shared, layer.hidden);
    const long length = p.num_rows * layer.hidden;
    const float* routed = p.routed;
    const bf16* shared = p.shared;
    bf16* x = p.x;
    vectorised(p.variant, [=]() INLINED_LAMBDA {
        for (long i = 0; i < length; ++i) {
            float update = rounded(routed[i]);
            if (has_shared) update = rounded(update + widen(shared[i]));
            x[i] = round_bf16(widen(x[i]) + update);
        }
    });
}

// Up to what the MLP begins with. mixes: unless the rows have been through the mixer.
void begin_layer(const Pass& p, const Layer& layer, bool mixes) {
    if (mixes && layer.mix != nullptr) layer.mix(&p, layer.mixer, layer.hidden);
    normalise(p, layer.mlp_norm, p.mlp_input);
}

// Layers on their way.
class LayersRun {
 public:
    // Goes on from where the last call ended; at the first layer after DONE.
    Status advance(const Turn* turns, long num_turns, bool mixes, Residency* residency) {
        for (; turn_ < num_turns; ++turn_, stage_ = NOT_BEGUN) {
            const Turn& turn = turns[turn_];
            const Turn* const next = turn_ + 1 < num_turns ? &turn + 1 : nullptr;
            const bool has_experts = turn.layer->experts.router != nullptr;
            if (stage_ == NOT_BEGUN) begin(turn, mixes, residency), stage_ = ROUTED;
            if (stage_ == ROUTED) {
                if (has_experts && residency->num_asked > 0) return READS;
                compute_present(turn, next, residency);
                stage_ = PRESENT_COMPUTED;
            }
            if (has_experts) {
                const Status status = experts_.advance();
                if (status != DONE) return status;
            }
            add_mlp(*turn.pass, *turn.layer);
        }
        const Status status = experts_.end_pass();
        if (status == DONE) turn_ = 0;
        return status;
    }

    void reset() { turn_ = 0, stage_ = NOT_BEGUN, experts_ = LayerExperts(); }

 private:
    enum Stage { NOT_BEGUN, ROUTED, PRESENT_COMPUTED };

    void begin(const Turn& turn, bool mixes, Residency* residency) {
        const Pass& p = *turn.pass;
        const Layer& layer = *turn.layer;
        begin_layer(p, layer, mixes);
        if (layer.experts.router == nullptr) return;
        chosen_.resize(p.num_rows * layer.experts.choice.num_chosen);
        weights_.resize(chosen_.size());
        route(p, layer, chosen_.data(), weights_.data());
        experts_.begin(*residency, turn.number, expert_call(p, layer), chosen_.data(),
                       weights_.data());
    }

    // Everything of the MLP that waits for no read, which the reads of absent experts go beside.
    void compute_present(const Turn& turn, const Turn* next, Residency* residency) {
        const bool has_experts = turn.layer->experts.router != nullptr;
        expect(turn, next, residency, BEFORE_MLP);
        if (has_experts) experts_.run_present();
        run_shared(*turn.pass, *turn.layer);
        expect(turn, next, residency, AFTER_MLP);
    }

    // Reads ahead what the next layer's router makes of the rows as they are, its attention and
    // what is absent here left out, which is most of what it will ask for.
    void expect(const Turn& turn, const Turn* next, Residency* residency, Known known) {
        if (next == nullptr || next->layer->experts.router == nullptr) return;
        const Pass& p = *turn.pass;
        const Experts& e = next->layer->experts;
        if (!experts_.foresees(*residency, next->number, known, e.choice.num_chosen)) return;
        const long length = p.num_rows * next->layer->hidden;
        rows_.assign(p.x, p.x + length);
        if (known == AFTER_MLP) add_present(turn);
        normed_.resize(length);
        logits_.resize(p.num_rows * e.choice.num_experts);
        input_.resize(e.is_float32 ? length : 0);
        expected_.resize(p.num_rows * e.choice.num_chosen);
        expected_weights_.resize(expected_.size());
        Pass own = p;
        own.x = rows_.data(), own.mlp_input = normed_.data();
        own.logits = logits_.data(), own.router_input = input_.data();
        normalise(own, next->layer->mlp_norm, own.mlp_input);
        route(own, *next->layer, expected_.data(), expected_weights_.data());
        experts_.expect(next->number, known, expected_.data(), expected_weights_.data(),
                        p.num_rows, e.choice.num_chosen);
    }

    // What there is of the MLP's output, to `rows_`.
    void add_present(const Turn& turn) {
        const Layer& layer = *turn.layer;
        const bool has_shared = layer.shared.gate.num_outs > 0;
        const float* routed = layer.experts.router == nullptr ? nullptr : experts_.sum_present();
        const bf16* shared = has_shared ? turn.pass->shared : nullptr;
        for (std::size_t i = 0; i < rows_.size(); ++i) {
            float x = widen(rows_[i]);
            if (routed != nullptr) x += routed[i];
            if (shared != nullptr) x += widen(shared[i]);
            rows_[i] = round_bf16(x);
        }
    }

    LayerExperts experts_;
    std::vector<std::int64_t> chosen_, expected_;
    std::vector<float> weights_, logits_, input_, expected_weights_;
    std::vector<bf16> rows_, normed_;
    long turn_ = 0;
    Stage stage_ = NOT_BEGUN;
};

}  // namespace

extern "C" {

// The mixer, unless the rows have been through it, and the router's choice for each of them: experts
// [num_rows, k], ascending, and their weights. What the experts are given is in mlp_input.
void lowtide_run_to_router(
    const Layer* layer, const Pass* pass, int mixes, std::int64_t* experts, float* weights
) {
    begin_layer(*pass, *layer, mixes != 0);
    if (layer->experts.router != nullptr) route(*pass, *layer, experts, weights);
}

// The rest, once the experts' sum is in `routed`.
void lowtide_run_from_experts(const Layer* layer, const Pass* pass) {
    run_shared(*pass, *layer);
    add_mlp(*pass, *layer);
}

LayersRun* lowtide_open_run() { return new LayersRun; }

void lowtide_close_run(LayersRun* run) { delete run; }

// After a failure: the next call begins with its first layer.
void lowtide_reset_run(LayersRun* run) { run->reset(); }

// Layers one after the other, with their mixers or after them; a `Status`. residency: null where
// no layer has experts.
int lowtide_run_layers(
    LayersRun* run, const Turn* turns, long num_turns, int mixes, Residency* residency
) {
    return run->advance(turns, num_turns, mixes != 0, residency);
}

}
