// Layers of a few rows in as few calls as there are places where Python must decide: all of a
// model's layers in one, whichever of their experts are resident (residency.hpp); or up to a
// router's choice, and after its experts.
//
//     x += output(attention(norm(x)))
//     x += sum of experts (norm(x)) + shared expert (norm(x))
//
// The operators are those that Python calls one by one, in the same order, over buffers whose
// lives are the same: so are the bits. What multiplies with a matrix or with experts comes with
// them, as an address, whatever they are stored in.

#include <algorithm>
#include <vector>

#include "layer/layer.hpp"

using namespace lowtide;

namespace {

// out = x w^T + bias, rows of all adjacent but for out's stride.
void multiply(const Pass& p, const bf16* x, long num_k, const Matrix& w, bf16* out, long stride) {
    w.multiply(w.variant, p.num_threads, w.type, x, num_k, w.weight, w.bias, out, stride,
               p.num_rows, w.num_outs, num_k);
}

// The same of a matrix in bfloat16.
void multiply_plainly(const Pass& p, const bf16* x, long num_k, const void* w, long num_outs,
                      bf16* out) {
    const Matrix plain = {lowtide_plain_multiply, p.variant, 0, w, nullptr, num_outs};
    multiply(p, x, num_k, plain, out, num_outs);
}

void normalise(const Pass& p, const Layer& layer, const bf16* weight, bf16* out) {
    const long hidden = layer.hidden;
    lowtide_rms_norm(p.variant, p.num_threads, p.x, hidden, weight, layer.eps, out, hidden,
                     p.num_rows, 1, hidden);
}

// x += update
void add(const Pass& p, const bf16* update, long hidden) {
    const long length = p.num_rows * hidden;
    bf16* x = p.x;
    vectorised(p.variant, [=]() INLINED_LAMBDA {
        for (long i = 0; i < length; ++i) x[i] = round_bf16(widen(x[i]) + widen(update[i]));
    });
}

void store_rows(const Pass& p, const Attention& a, long width) {
    const long dim = a.head_dim;
    for (long row = 0; row < p.num_rows; ++row) {
        const std::int64_t* tokens = p.tokens + 2 * row;
        const long place = (tokens[0] + tokens[1] - 1) * dim;
        const bf16* key = p.qkv + row * width + a.num_heads * dim;
        const bf16* value = key + a.num_key_heads * dim;
        for (long head = 0; head < a.num_key_heads; ++head) {
            const long at = head * a.head_stride + place;
            std::copy_n(key + head * dim, dim, a.keys + at);
            std::copy_n(value + head * dim, dim, a.values + at);
        }
    }
}

// Queries and keys, in place. width: of a row of all that was projected.
void turn(const Pass& p, const Layer& layer, long width) {
    const Attention& a = layer.attention;
    const long query_size = a.num_heads * a.head_dim, key_size = a.num_key_heads * a.head_dim;
    if (a.query_norm != nullptr) {
        bf16* keys = p.qkv + query_size;
        lowtide_rms_norm(p.variant, p.num_threads, p.qkv, width, a.query_norm, layer.eps, p.qkv,
                         width, p.num_rows, query_size / a.query_norm_length, a.query_norm_length);
        lowtide_rms_norm(p.variant, p.num_threads, keys, width, a.key_norm, layer.eps, keys, width,
                         p.num_rows, key_size / a.key_norm_length, a.key_norm_length);
    }
    lowtide_rotate(p.variant, p.num_threads, p.qkv, width, p.cos, p.sin, p.num_rows,
                   a.num_heads + a.num_key_heads, a.head_dim, p.half);
}

void attend(const Pass& p, const Layer& layer) {
    const Attention& a = layer.attention;
    const long size = a.num_heads * a.head_dim, width = size + 2 * a.num_key_heads * a.head_dim;
    normalise(p, layer, a.norm, p.normed);
    bf16* out = p.qkv;
    for (long i = 0; i < a.num_projections; out += a.projections[i++].num_outs)
        multiply(p, p.normed, layer.hidden, a.projections[i], out, width);
    turn(p, layer, width);
    store_rows(p, a, width);
    for (long row = 0; row < p.num_rows; ++row) {
        const long first = p.tokens[2 * row] * a.head_dim;
        lowtide_attend(p.variant, p.num_threads, p.qkv + row * width, a.keys + first,
                       a.values + first, a.head_stride, p.attended + row * size, a.num_key_heads,
                       a.num_heads / a.num_key_heads, p.tokens[2 * row + 1], a.head_dim, a.scale);
    }
    multiply(p, p.attended, size, a.output, p.update, layer.hidden);
    add(p, p.update, layer.hidden);
}

void route(const Pass& p, const Layer& layer, std::int64_t* experts, float* weights) {
    const Experts& e = layer.experts;
    const long hidden = layer.hidden, num_experts = e.choice.num_experts;
    if (e.is_float32) {
        for (long i = 0; i < p.num_rows * hidden; ++i) p.router_input[i] = widen(p.mlp_input[i]);
        lowtide_multiply_float32(p.variant, p.num_threads, p.router_input, hidden,
                                 static_cast<const float*>(e.router), static_cast<float*>(p.logits),
                                 num_experts, p.num_rows, num_experts, hidden);
    } else {
        multiply_plainly(p, p.mlp_input, hidden, e.router, num_experts,
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
    const long hidden = layer.hidden, width = shared.gate.num_outs;
    multiply(p, p.mlp_input, hidden, shared.gate, p.shared_gate, width);
    multiply(p, p.mlp_input, hidden, shared.up, p.shared_up, width);
    lowtide_silu_times(p.variant, p.num_threads, p.shared_gate, p.shared_up, p.num_rows * width);
    multiply(p, p.shared_gate, width, shared.down, p.shared, hidden);
    if (shared.share == nullptr) return;
    multiply_plainly(p, p.mlp_input, hidden, shared.share, 1, p.share);
    lowtide_weigh_rows(p.variant, p.shared, p.share, p.num_rows, hidden);
}

// What the experts gave is rounded before the shared one's output is added, and so is the sum.
void add_mlp(const Pass& p, const Layer& layer) {
    const bool has_shared = layer.shared.gate.num_outs > 0;
    if (has_shared) run_shared(p, layer);
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

// Layers on their way: at the experts of `turn`, once these have begun.
class LayersRun {
 public:
    // Goes on from where the last call ended; at the first layer after DONE.
    Status advance(const Turn* turns, long num_turns, bool attends, Residency* residency) {
        for (; turn_ < num_turns; ++turn_, has_begun_ = false) {
            const Turn& turn = turns[turn_];
            if (!has_begun_) {
                begin(turn, attends, residency);
                const bool has_experts = turn.layer->experts.router != nullptr;
                if (has_experts && turn_ + 1 < num_turns) expect(*turn.pass, turns[turn_ + 1]);
                has_begun_ = true;
            }
            if (turn.layer->experts.router != nullptr) {
                const Status status = experts_.advance();
                if (status != DONE) return status;
            }
            add_mlp(*turn.pass, *turn.layer);
        }
        const Status status = experts_.end_pass();
        if (status == DONE) turn_ = 0;
        return status;
    }

    void reset() { turn_ = 0, has_begun_ = false, experts_ = LayerExperts(); }

 private:
    void begin(const Turn& turn, bool attends, Residency* residency) {
        const Pass& p = *turn.pass;
        const Layer& layer = *turn.layer;
        if (attends) attend(p, layer);
        normalise(p, layer, layer.mlp_norm, p.mlp_input);
        if (layer.experts.router == nullptr) return;
        chosen_.resize(p.num_rows * layer.experts.choice.num_chosen);
        weights_.resize(chosen_.size());
        route(p, layer, chosen_.data(), weights_.data());
        experts_.begin(*residency, turn.number, expert_call(p, layer), chosen_.data(),
                       weights_.data());
    }

    // Reads ahead what the next layer's router makes of this layer's features, which is most of
    // what it will ask for.
    void expect(const Pass& p, const Turn& next) {
        const Experts& e = next.layer->experts;
        if (e.router == nullptr || !experts_.can_read_ahead()) return;
        logits_.resize(p.num_rows * e.choice.num_experts);
        input_.resize(e.is_float32 ? p.num_rows * next.layer->hidden : 0);
        expected_.resize(p.num_rows * e.choice.num_chosen);
        expected_weights_.resize(expected_.size());
        Pass own = p;
        own.logits = logits_.data(), own.router_input = input_.data();
        route(own, *next.layer, expected_.data(), expected_weights_.data());
        experts_.read_ahead(next.number, expected_.data(), static_cast<long>(expected_.size()));
    }

    LayerExperts experts_;
    std::vector<std::int64_t> chosen_, expected_;
    std::vector<float> weights_, logits_, input_, expected_weights_;
    long turn_ = 0;
    bool has_begun_ = false;
};

}  // namespace

extern "C" {

// Attention, unless the rows have had it, and the router's choice for each of them: experts
// [num_rows, k], ascending, and their weights. What the experts are given is in mlp_input.
void lowtide_run_to_router(
    const Layer* layer, const Pass* pass, int attends, std::int64_t* experts, float* weights
) {
    if (attends) attend(*pass, *layer);
    normalise(*pass, *layer, layer->mlp_norm, pass->mlp_input);
    if (layer->experts.router != nullptr) route(*pass, *layer, experts, weights);
}

// The rest, once the experts' sum is in `routed`.
void lowtide_run_from_experts(const Layer* layer, const Pass* pass) { add_mlp(*pass, *layer); }

LayersRun* lowtide_open_run() { return new LayersRun; }

void lowtide_close_run(LayersRun* run) { delete run; }

// After a failure: the next call begins with its first layer.
void lowtide_reset_run(LayersRun* run) { run->reset(); }

// Layers one after the other, with their attention or behind it; a `Status`. residency: null where
// no layer has experts.
int lowtide_run_layers(
    LayersRun* run, const Turn* turns, long num_turns, int attends, Residency* residency
) {
    return run->advance(turns, num_turns, attends != 0, residency);
}

}
