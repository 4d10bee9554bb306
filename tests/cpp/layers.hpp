// Layers with random weights, a pass through them and residents, each with all that it points to.

#pragma once

#include "driver.hpp"
#include "layer/mixers.hpp"
#include "packed/quantised.hpp"

namespace driver {

using lowtide::Angles;
using lowtide::DONE;
using lowtide::DeltaNet;
using lowtide::DeltaSpec;
using lowtide::ExpertCall;
using lowtide::Experts;
using lowtide::FREE_SLOT;
using lowtide::GroupedAttention;
using lowtide::LatentAttention;
using lowtide::Layer;
using lowtide::LayerExperts;
using lowtide::Matrix;
using lowtide::MixFunction;
using lowtide::Norm;
using lowtide::Pass;
using lowtide::Residency;
using lowtide::ShortConvolution;
using lowtide::TAKEN_SLOT;
using lowtide::Turn;
using Bytes = std::vector<std::uint8_t>;
using Pack = void(int, int, int, const void*, const float*, std::uint8_t*, long, long);

// What multiplies with matrices, and how they are stored: a type of packed.hpp.
struct Kind {
    MultiplyFunction* multiply;
    ExpertsFunction* experts;
    MlpsFunction* mlps;
    MixFunction *mix_grouped, *mix_latent, *mix_convolution, *mix_delta;
    Pack* pack;
    int variant, type;

    long row_bytes(long num_k) const {
        if (type == PLAIN) return 2 * num_k;
        return lowtide::QuantisedWeights{nullptr, num_k, num_bits_of(type)}.row_bytes();
    }

    Bytes stored(long num_outs, long num_k) const {
        const Floats weights = floats(num_outs * num_k);
        Bytes out(num_outs * row_bytes(num_k));
        if (type == PLAIN)
            for (long i = 0; i < num_outs * num_k; ++i) {
                const bf16 narrow = lowtide::round_bf16(weights[i]);
                std::memcpy(out.data() + 2 * i, &narrow, 2);
            }
        else
            pack(0, num_bits_of(type), 0, weights.data(), nullptr, out.data(), num_outs, num_k);
        return out;
    }
};

inline Kind plain_kind(const Library& kernels, int variant) {
    return {kernels.function<MultiplyFunction>("lowtide_plain_multiply"),
            kernels.function<ExpertsFunction>("lowtide_plain_experts"),
            kernels.function<MlpsFunction>("lowtide_plain_mlps"),
            kernels.function<MixFunction>("lowtide_mix_grouped"),
            kernels.function<MixFunction>("lowtide_mix_latent"),
            kernels.function<MixFunction>("lowtide_mix_convolution"),
            kernels.function<MixFunction>("lowtide_mix_delta"), nullptr, variant, PLAIN};
}

inline Kind few_bits_kind(const Library& kernels) {
    return {kernels.function<MultiplyFunction>("lowtide_packed_multiply"),
            kernels.function<ExpertsFunction>("lowtide_packed_experts"),
            kernels.function<MlpsFunction>("lowtide_packed_mlps"),
            kernels.function<MixFunction>("lowtide_mix_grouped"),
            kernels.function<MixFunction>("lowtide_mix_latent"),
            kernels.function<MixFunction>("lowtide_mix_convolution"),
            kernels.function<MixFunction>("lowtide_mix_delta"),
            kernels.function<Pack>("lowtide_quantised_pack"),
            kernels.function<int()>("lowtide_best_own")(), Q4};
}

// Which of the parts that a layer may have it has. window: of its attention, 0: all tokens.
struct Form {
    bool is_split, has_bias, has_norms, norms_all_heads, has_experts, is_float32, has_shared,
        has_share;
    bool is_latent = false, has_query_latent = false, has_sinks = false, has_wide_norms = false;
    long window = 0;
    bool is_convolution = false, has_gates = false, is_delta = false;
};
constexpr Form FORMS[] = {
    {false, false, false, false, false, false, true, false},  // dense
    {true, true, false, false, true, false, false, false},
    {false, false, true, false, true, true, true, false},
    {true, false, true, true, true, false, true, true},
    {true, true, false, false, true, false, false, false, false, false, true, true, 2},
    {false, false, true, false, true, true, false, false, false, false, true, false, 0},
    {false, false, false, false, false, false, true, false, true, false},
    {false, true, false, false, true, true, true, false, true, true, false, true},
    {false, false, false, false, true, false, false, false, false, false, false, false, 0, true},
    {false, true, false, false, false, false, true, false, false, false, false, true, 0, true},
    // Gated attention, and delta-nets whose products are apart and together.
    {true, true, true, false, true, false, true, true, false, false, false, true, 0, false, true},
    {true, true, false, false, true, true, true, false, false, false, false, true, 0, false, false,
     true},
    {false, false, false, false, false, false, true, false, false, false, false, false, 0, false,
     false, true},
};

// The sizes of a layer; odd ones but where rotation asks for halves.
struct Sizes {
    long hidden, num_heads, num_key_heads, head_dim, num_experts, k, width, shared_width;

    // Of latents.
    long rank() const { return 2 * head_dim + 1; }
    long value_dim() const { return head_dim + 3; }
    long latent_width() const { return rank() + head_dim; }
};
constexpr Sizes SIZES[] = {{33, 3, 1, 6, 5, 2, 17, 9}, {70, 4, 2, 16, 1, 1, 24, 40}};

constexpr long CACHE_TOKENS = 11;

// Of a convolution, and where in a sequence's states it begins, in bytes.
constexpr long NUM_TAPS = 3, STATE = 64;

// Of a delta-net, and where its matrices begin.
constexpr DeltaSpec DELTA = {2, 6, 5, 3, 4, 0};
constexpr long MATRICES = STATE + 64 * ((DELTA.kernel - 1) * DELTA.channels() / 32 + 1);

// The states of a sequence, in numbers.
constexpr long state_size(long hidden) {
    const long matrices = DELTA.value_heads * DELTA.key_width * DELTA.value_width;
    return std::max(STATE / 2 + (NUM_TAPS - 1) * hidden, MATRICES / 2 + 2 * matrices);
}

// Owns what a layer points to.
class OwnLayer {
   public:
    OwnLayer(const Kind& kind, const Sizes& sizes, const Form& form)
        : kind_(kind), sizes_(sizes), form_(form) {
        if (form.is_convolution) convolve();
        else if (form.is_delta) remember();
        else if (form.is_latent) attend_latents();
        else attend();
        layer.mlp_norm = norm(sizes.hidden);
        layer.hidden = sizes.hidden;
        if (form.has_experts) add_experts();
        if (!form.has_shared) return;
        layer.shared.gate = matrix(sizes.shared_width, sizes.hidden);
        layer.shared.up = matrix(sizes.shared_width, sizes.hidden);
        layer.shared.down = matrix(sizes.hidden, sizes.shared_width);
        if (form.has_share) layer.shared.share = plain(sizes.hidden);
    }

    OwnLayer(const OwnLayer&) = delete;

    void forget_keys() {
        std::fill(keys_.begin(), keys_.end(), lowtide::round_bf16(0.5f));
        std::fill(values_.begin(), values_.end(), lowtide::round_bf16(0.25f));
    }

    // As it is in a slot.
    Bytes expert(long number) const {
        const long num_bytes = layer.experts.places.slot_bytes;
        const auto start = experts_.begin() + slot_of[number] * num_bytes;
        return Bytes(start, start + num_bytes);
    }

    // Its experts in other slots than its own.
    Layer elsewhere(const Bytes& slots) const {
        Layer other = layer;
        const auto move = [&](const void* place) {
            return slots.data() + (static_cast<const std::uint8_t*>(place) - experts_.data());
        };
        ExpertPlaces& places = other.experts.places;
        for (const void** place : {&places.gate, &places.up, &places.down, &places.gate_bias,
                                   &places.up_bias, &places.down_bias})
            if (*place != nullptr) *place = move(*place);
        return other;
    }

    Layer layer{};
    GroupedAttention grouped{};
    LatentAttention latent{};
    ShortConvolution convolution{};
    DeltaNet delta{};
    Ids slot_of;  // of each expert, in its own slots

   private:
    Norm norm(long length) {
        if (!form_.has_wide_norms) return {plain(length), 0, length, 1e-6f};
        wide_.push_back(floats(length));
        return {wide_.back().data(), 1, length, 1e-6f};
    }

    const bf16* plain(long count) {
        numbers_.push_back(numbers(count));
        return numbers_.back().data();
    }

    Matrix matrix(long num_outs, long num_k) {
        stored_.push_back(kind_.stored(num_outs, num_k));
        const bf16* bias = form_.has_bias ? plain(num_outs) : nullptr;
        return {kind_.multiply, kind_.variant, kind_.type, stored_.back().data(), bias,
                num_outs};
    }

    void attend() {
        const Sizes& s = sizes_;
        const long query = s.num_heads * s.head_dim, key = s.num_key_heads * s.head_dim;
        GroupedAttention& a = grouped;
        layer.mix = kind_.mix_grouped, layer.mixer = &a;
        a.norm = norm(s.hidden);
        a.num_projections = form_.is_split ? 3 : 1;
        if (form_.is_split) {
            const long sizes_of[] = {form_.has_gates ? 2 * query : query, key, key};
            for (long i = 0; i < 3; ++i) a.projections[i] = matrix(sizes_of[i], s.hidden);
        } else {
            a.projections[0] = matrix(query + 2 * key, s.hidden);
        }
        if (form_.has_norms) {
            a.query_norm = norm(form_.norms_all_heads ? query : s.head_dim);
            a.key_norm = norm(form_.norms_all_heads ? key : s.head_dim);
        }
        a.output = matrix(s.hidden, query);
        a.head_stride = CACHE_TOKENS * s.head_dim;
        keys_.resize(s.num_key_heads * a.head_stride), values_.resize(keys_.size());
        a.keys = keys_.data(), a.values = values_.data();
        a.num_heads = s.num_heads, a.num_key_heads = s.num_key_heads, a.head_dim = s.head_dim;
        a.scale = 0.3f, a.window = form_.window, a.group = form_.window > 0;
        a.has_gates = form_.has_gates;
        if (form_.has_sinks) {
            wide_.push_back(floats(s.num_heads));
            a.sinks = wide_.back().data();
        }
    }

    void attend_latents() {
        const Sizes& s = sizes_;
        const long query = s.num_heads * 2 * s.head_dim;  // as many fixed numbers as rotating ones
        LatentAttention& a = latent;
        layer.mix = kind_.mix_latent, layer.mixer = &a;
        a.norm = norm(s.hidden);
        const long query_rank = s.head_dim + 1;
        if (form_.has_query_latent) {
            a.query_down = matrix(query_rank, s.hidden), a.query_norm = norm(query_rank);
            a.query = matrix(query, query_rank);
        } else {
            a.query = matrix(query, s.hidden);
        }
        a.latent_down = matrix(s.latent_width(), s.hidden), a.latent_norm = norm(s.rank());
        a.expansion = plain(s.num_heads * (s.head_dim + s.value_dim()) * s.rank());
        a.output = matrix(s.hidden, s.num_heads * s.value_dim());
        keys_.resize(CACHE_TOKENS * s.latent_width());
        a.cache = keys_.data();
        a.num_heads = s.num_heads, a.fixed_dim = a.rotary_dim = s.head_dim;
        a.rank = s.rank(), a.value_dim = s.value_dim(), a.angles = 1, a.scale = 0.3f;
    }

    void convolve() {
        ShortConvolution& c = convolution;
        layer.mix = kind_.mix_convolution, layer.mixer = &c;
        c.norm = norm(sizes_.hidden);
        c.inward = matrix(3 * sizes_.hidden, sizes_.hidden);
        c.kernel = plain(sizes_.hidden * NUM_TAPS);
        c.bias = form_.has_bias ? plain(sizes_.hidden) : nullptr;
        c.num_taps = NUM_TAPS;
        c.outward = matrix(sizes_.hidden, sizes_.hidden);
        c.state = STATE;
    }

    // Products are apart in a form that `is_split`.
    void remember() {
        DeltaNet& d = delta;
        layer.mix = kind_.mix_delta, layer.mixer = &d;
        const long value = DELTA.value_heads * DELTA.value_width, heads = DELTA.value_heads;
        const long hidden = sizes_.hidden, channels = DELTA.channels();
        d.norm = norm(hidden);
        d.mixed = matrix(form_.is_split ? channels : channels + value, hidden);
        d.beta = matrix(form_.is_split ? heads : 2 * heads, hidden);
        if (form_.is_split) d.gates = matrix(value, hidden), d.time = matrix(heads, hidden);
        wide_.push_back(floats(channels * DELTA.kernel));
        const float* const conv = wide_.back().data();
        wide_.push_back(floats(heads));
        for (float& each : wide_.back()) each = -std::abs(each);
        const float* const decay = wide_.back().data();
        wide_.push_back(floats(heads));
        d.weights = {DELTA, conv, decay, wide_.back().data()};
        d.head_norm = norm(DELTA.value_width);
        d.outward = matrix(hidden, value);
        d.tail = STATE, d.matrices = MATRICES;
    }

    void append(const Bytes& part) { experts_.insert(experts_.end(), part.begin(), part.end()); }

    // Slots in another order than experts.
    void add_experts() {
        const Sizes& s = sizes_;
        Experts& e = layer.experts;
        router_ = floats(s.num_experts * s.hidden), bias_ = floats(s.num_experts);
        e.is_float32 = form_.is_float32;
        e.router = form_.is_float32 ? static_cast<const void*>(router_.data())
                                    : plain(s.num_experts * s.hidden);
        e.bias = form_.has_share ? bias_.data() : nullptr;
        if (form_.has_sinks)
            e.logit_bias = form_.is_float32 ? static_cast<const void*>(bias_.data())
                                            : plain(s.num_experts);
        e.choice = {s.num_experts, s.k, 1, 1, 1, form_.is_float32, 1, 0, 1.5f, 1e-20f,
                    form_.has_sinks};
        e.run = kind_.experts, e.mlps = kind_.mlps, e.variant = kind_.variant, e.width = s.width;
        std::fill_n(e.types, 3, kind_.type);
        const long inward = s.width * kind_.row_bytes(s.hidden);
        const long end = 2 * inward + s.hidden * kind_.row_bytes(s.width);
        const long biases = end + end % 2, width_bytes = 2 * s.width;
        const long slot_bytes = biases + 2 * width_bytes + 2 * s.hidden;  // of all forms
        for (long slot = 0; slot < s.num_experts; ++slot) {
            for (long part = 0; part < 3; ++part)
                append(part == 2 ? kind_.stored(s.hidden, s.width) : kind_.stored(s.width, s.hidden));
            experts_.resize(slot * slot_bytes + biases);
            const Numbers of_parts = numbers(2 * s.width + s.hidden);
            append(Bytes(reinterpret_cast<const std::uint8_t*>(of_parts.data()),
                         reinterpret_cast<const std::uint8_t*>(of_parts.data() + of_parts.size())));
        }
        experts_.shrink_to_fit();
        const std::uint8_t* const start = experts_.data();
        e.places = {start, start + inward, start + 2 * inward, slot_bytes};
        if (form_.has_bias) {
            e.places.gate_bias = start + biases, e.places.up_bias = start + biases + width_bytes;
            e.places.down_bias = start + biases + 2 * width_bytes;
        }
        for (long expert = 0; expert < s.num_experts; ++expert)
            slot_of.push_back(s.num_experts - 1 - expert);
    }

    const Kind kind_;
    const Sizes sizes_;
    const Form form_;
    std::vector<Numbers> numbers_;
    std::vector<Bytes> stored_;
    std::vector<Floats> wide_;
    Numbers keys_, values_;
    Floats router_, bias_;
    Bytes experts_;
};

// Owns what a pass points to, its rows at the ends of two sequences of a cache.
class OwnPass {
   public:
    OwnPass(const Sizes& s, int variant, int num_threads, const Numbers& x, const Numbers& turns)
        : x_(x) {
        const long num_rows = long(x.size()) / s.hidden, pairs = num_rows * s.k;
        const long size = std::max({s.num_heads * std::max(s.head_dim, s.rank()), s.hidden,
                                    DELTA.value_heads * DELTA.value_width});
        const long heads = s.num_heads * 2 * s.head_dim + 2 * s.num_key_heads * s.head_dim;
        const long value = DELTA.value_heads * DELTA.value_width;
        const long width = std::max({heads, 3 * s.hidden, DELTA.channels()});
        const long product = std::max(2 * size, DELTA.channels() + value);
        for (long group = 0; group < 2; ++group)  // layers without a window, and those with one
            for (long row = 0; row < num_rows; ++row) {
                const long first = row % 2 * 5, count = 1 + row / 2;
                tokens_.insert(tokens_.end(), {first, count});
            }
        // The rows of each are adjacent: a fifth of them, and the others.
        const long bounds[] = {0, num_rows / 5, num_rows}, state = state_size(s.hidden);
        states_.resize(4 * state, lowtide::round_bf16(0.75f));
        for (long i = 0; i < 2; ++i) {
            if (bounds[i] == bounds[i + 1]) continue;
            const auto address = [&](long half) {
                return reinterpret_cast<std::int64_t>(states_.data() + (2 * i + half) * state);
            };
            sequences_.insert(sequences_.end(),
                              {bounds[i], bounds[i + 1], address(0), address(1)});
        }
        for (bf16 each : turns) wide_turns_.push_back(lowtide::widen(each));
        angles_[0] = {turns.data(), turns.data(), s.head_dim / 2, 0};
        angles_[1] = {wide_turns_.data(), wide_turns_.data(), s.head_dim / 2, 1};
        const long latent = num_rows * s.latent_width();
        pass = {variant, num_threads, num_rows, x_.data(), angles_, tokens_.data(),
                sequences_.data(), long(sequences_.size()) / 4,
                room(num_rows * s.hidden), room(num_rows * width), room(num_rows * size),
                room(num_rows * s.hidden), room(num_rows * (s.head_dim + 1)), room(latent),
                room(s.num_heads * latent), room(num_rows * s.num_heads * s.value_dim()),
                room(num_rows * product), room(num_rows * value),
                room(num_rows * 2 * DELTA.value_heads),
                room(num_rows * s.hidden), nullptr, nullptr, room(pairs * s.hidden),
                room(pairs * s.width), room(pairs * s.width), nullptr,
                room(num_rows * s.shared_width), room(num_rows * s.shared_width),
                room(num_rows * s.hidden), room(num_rows)};
        router_input_.resize(num_rows * s.hidden), logits_.resize(num_rows * s.num_experts);
        routed_.resize(num_rows * s.hidden);
        pass.router_input = router_input_.data(), pass.logits = logits_.data();
        pass.routed = routed_.data();
    }

    OwnPass(const OwnPass&) = delete;

    const Numbers& x() const { return x_; }

    Pass pass;

   private:
    bf16* room(long count) {
        rooms_.push_back(Numbers(count));
        return rooms_.back().data();
    }

    Numbers x_;
    Ids tokens_, sequences_;
    Numbers states_;
    std::vector<Numbers> rooms_;
    Angles angles_[2];
    Floats wide_turns_, router_input_, logits_, routed_;
};

// Owns what a residency points to: slots without owners are free, and nobody is to be admitted.
class OwnResidency {
   public:
    // owners: of each slot, layer * num_experts + expert or FREE_SLOT.
    OwnResidency(long num_layers, long num_experts, const Ids& owners)
        : table(num_layers * num_experts, -1),
          owner(owners),
          ring(owners.size()),
          state(2),
          room(num_layers),
          hits(table.size()),
          asked(3 * num_experts),
          rank(table.size()) {
        for (std::size_t slot = 0; slot < owners.size(); ++slot)
            if (owners[slot] != FREE_SLOT) table[owners[slot]] = long(slot);
        for (long layer = 0; layer < num_layers; ++layer)
            room[layer] = num_residents(layer, num_experts);
        reclaim();
        Residency& r = residency;
        r.table = table.data(), r.owner = owner.data();
        r.free = ring.data(), r.free_state = state.data();
        r.num_experts = num_experts, r.num_slots = long(owners.size());
        r.rank = rank.data(), r.room = room.data(), r.hits = hits.data();
        r.asked = asked.data();
    }

    OwnResidency(const OwnResidency&) = delete;

    long num_residents(long layer, long num_experts) const {
        const auto first = table.begin() + layer * num_experts;
        return std::count_if(first, first + num_experts, [](long slot) { return slot >= 0; });
    }

    // Frees taken slots: nobody uses them any more.
    void reclaim() {
        state = {0, 0};
        for (std::size_t slot = 0; slot < owner.size(); ++slot) {
            if (owner[slot] == TAKEN_SLOT) owner[slot] = FREE_SLOT;
            if (owner[slot] == FREE_SLOT) ring[state[1]++] = long(slot);
        }
    }

    Residency residency{};
    Ids table, owner, ring, state, room, hits, asked;
    std::vector<double> rank;
};

// A call over layers, which goes on where it ended.
class Run {
   public:
    explicit Run(const Library& kernels)
        : advance_(kernels.function<int(void*, const Turn*, long, int, Residency*)>(
              "lowtide_run_layers")),
          reset_(kernels.function<void(void*)>("lowtide_reset_run")),
          close_(kernels.function<void(void*)>("lowtide_close_run")),
          run_(kernels.function<void*()>("lowtide_open_run")()) {}
    ~Run() { close_(run_); }
    Run(const Run&) = delete;

    // With attention.
    int advance(const std::vector<Turn>& turns, Residency* residency) const {
        return advance_(run_, turns.data(), long(turns.size()), 1, residency);
    }

    void reset() const { reset_(run_); }

   private:
    int (*advance_)(void*, const Turn*, long, int, Residency*);
    void (*reset_)(void*);
    void (*close_)(void*);
    void* run_;
};

// A layer in parts, as where Python computes its experts in between.
class Parts {
   public:
    explicit Parts(const Library& kernels)
        : to_router_(kernels.function<void(const Layer*, const Pass*, int, std::int64_t*, float*)>(
              "lowtide_run_to_router")),
          from_experts_(kernels.function<void(const Layer*, const Pass*)>(
              "lowtide_run_from_experts")),
          open_(kernels.function<LayerExperts*()>("lowtide_open_experts")),
          close_(kernels.function<void(LayerExperts*)>("lowtide_close_experts")),
          begin_(kernels.function<Begin>("lowtide_begin_experts")),
          advance_(kernels.function<int(LayerExperts*)>("lowtide_advance_experts")) {}

    // The experts of each row. residency: in which all of them are, or null.
    Ids run(const OwnLayer& own, const Pass& pass, Residency* residency = nullptr) const {
        const Experts& e = own.layer.experts;
        const long hidden = own.layer.hidden, num_chosen = e.choice.num_chosen;
        Ids experts(pass.num_rows * num_chosen), slots;
        Floats weights(experts.size());
        to_router_(&own.layer, &pass, 1, experts.data(), weights.data());
        for (long expert : distinct(experts)) slots.push_back(own.slot_of[expert]);
        if (residency != nullptr)
            run_residents(own.layer, pass, *residency, experts, weights);
        else if (e.router != nullptr)
            e.run(e.variant, pass.num_threads, e.types, pass.mlp_input, experts.data(),
                  weights.data(), slots.data(), &e.places, pass.parts, pass.gate, pass.up,
                  pass.routed, pass.num_rows, num_chosen, hidden, e.width);
        from_experts_(&own.layer, &pass);
        return experts;
    }

   private:
    using Begin = void(LayerExperts*, Residency*, long, const ExpertCall*, const std::int64_t*,
                       const float*);

    void run_residents(const Layer& layer, const Pass& pass, Residency& residency,
                       const Ids& experts, const Floats& weights) const {
        const Experts& e = layer.experts;
        const ExpertCall call = {
            e.run, e.mlps, e.variant, pass.num_threads, e.types, e.places, layer.hidden, e.width,
            pass.num_rows, e.choice.num_chosen, pass.mlp_input, pass.parts, pass.gate, pass.up,
            pass.routed,
        };
        LayerExperts* const run = open_();
        begin_(run, &residency, 0, &call, experts.data(), weights.data());
        expect(advance_(run) == DONE, "experts that are there", pass.num_rows);
        close_(run);
    }

    void (*to_router_)(const Layer*, const Pass*, int, std::int64_t*, float*);
    void (*from_experts_)(const Layer*, const Pass*);
    LayerExperts* (*open_)();
    void (*close_)(LayerExperts*);
    Begin* begin_;
    int (*advance_)(LayerExperts*);
};

}  // namespace driver
