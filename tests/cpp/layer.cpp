// Whole layers in one call and in several, whatever their matrices are stored in.

#include "driver.hpp"
#include "operators.hpp"
#include "quantised.hpp"

namespace driver {
namespace {

using Bytes = std::vector<std::uint8_t>;
using Pack = void(int, int, int, const void*, const float*, std::uint8_t*, long, long);

// As in layer.cpp.
struct Matrix {
    MultiplyFunction* multiply;
    int variant, type;
    const void* weight;
    const bf16* bias;
    long num_outs;
};
struct Attention {
    const bf16* norm;
    Matrix projections[3];
    long num_projections;
    const bf16 *query_norm, *key_norm;
    long query_norm_length, key_norm_length;
    Matrix output;
    bf16 *keys, *values;
    long head_stride, num_heads, num_key_heads, head_dim;
    float scale;
};
struct Experts {
    const void* router;
    long is_float32;
    const float* bias;
    lowtide::Choice choice;
    ExpertsFunction* run;
    int variant;
    std::int32_t types[3];
    const void *gate, *up, *down;
    long slot_bytes, width;
};
struct Shared {
    Matrix gate, up, down;
    const bf16* share;
};
struct Layer {
    Attention attention;
    const bf16* mlp_norm;
    Experts experts;
    Shared shared;
    long hidden;
    float eps;
};
struct Pass {
    int variant, num_threads;
    long num_rows;
    bf16* x;
    const bf16 *cos, *sin;
    long half;
    const std::int64_t* tokens;
    bf16 *normed, *qkv, *attended, *update;
    bf16* mlp_input;
    float* router_input;
    void* logits;
    bf16 *parts, *gate, *up;
    float* routed;
    bf16 *shared_gate, *shared_up, *shared, *share;
};
using ToRouter = void(const Layer*, const Pass*, int, std::int64_t*, float*);
using Chosen = void(const Layer*, const Pass*, const std::int64_t*, const std::int64_t*,
                    const float*);
using FromExperts = void(const Layer*, const Pass*);
using Whole = long(const Layer*, const Pass*, int, const std::int64_t*);

struct Turn {
    const Layer* layer;
    const Pass* pass;
    const std::int64_t* slot_of;
};
using Several = long(const Turn*, long);

// What multiplies with matrices, and how they are stored: num_bits 16 is bfloat16.
struct Kind {
    MultiplyFunction* multiply;
    ExpertsFunction* experts;
    Pack* pack;
    int variant, num_bits;

    long row_bytes(long num_k) const {
        return num_bits == 16 ? 2 * num_k
                              : lowtide::QuantisedWeights{nullptr, num_k, num_bits}.row_bytes();
    }

    Bytes stored(long num_outs, long num_k) const {
        const Floats weights = floats(num_outs * num_k);
        Bytes out(num_outs * row_bytes(num_k));
        if (num_bits == 16)
            for (long i = 0; i < num_outs * num_k; ++i) {
                const bf16 narrow = lowtide::round_bf16(weights[i]);
                std::memcpy(out.data() + 2 * i, &narrow, 2);
            }
        else
            pack(0, num_bits, 0, weights.data(), nullptr, out.data(), num_outs, num_k);
        return out;
    }
};

// Which of the parts that a layer may have it has.
struct Form {
    bool is_split, has_bias, has_norms, norms_all_heads, has_experts, is_float32, has_shared,
        has_share;
};
constexpr Form FORMS[] = {
    {false, false, false, false, false, false, true, false},  // dense
    {true, true, false, false, true, false, false, false},
    {false, false, true, false, true, true, true, false},
    {true, false, true, true, true, false, true, true},
};

// The sizes of a layer; odd ones but where rotation asks for halves.
struct Sizes {
    long hidden, num_heads, num_key_heads, head_dim, num_experts, k, width, shared_width;
};
constexpr Sizes SIZES[] = {{33, 3, 1, 6, 5, 2, 17, 9}, {70, 4, 2, 16, 1, 1, 24, 40}};

constexpr long CACHE_TOKENS = 11;

// Owns what a layer points to.
class OwnLayer {
   public:
    OwnLayer(const Kind& kind, const Sizes& sizes, const Form& form)
        : kind_(kind), sizes_(sizes), form_(form) {
        attend();
        layer.mlp_norm = plain(sizes.hidden);
        layer.hidden = sizes.hidden, layer.eps = 1e-6f;
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

    Layer layer{};
    Ids slot_of;

   private:
    const bf16* plain(long count) {
        numbers_.push_back(numbers(count));
        return numbers_.back().data();
    }

    Matrix matrix(long num_outs, long num_k) {
        stored_.push_back(kind_.stored(num_outs, num_k));
        const bf16* bias = form_.has_bias ? plain(num_outs) : nullptr;
        return {kind_.multiply, kind_.variant, kind_.num_bits, stored_.back().data(), bias,
                num_outs};
    }

    void attend() {
        const Sizes& s = sizes_;
        const long query = s.num_heads * s.head_dim, key = s.num_key_heads * s.head_dim;
        Attention& a = layer.attention;
        a.norm = plain(s.hidden);
        a.num_projections = form_.is_split ? 3 : 1;
        if (form_.is_split) {
            const long sizes_of[] = {query, key, key};
            for (long i = 0; i < 3; ++i) a.projections[i] = matrix(sizes_of[i], s.hidden);
        } else {
            a.projections[0] = matrix(query + 2 * key, s.hidden);
        }
        if (form_.has_norms) {
            a.query_norm_length = form_.norms_all_heads ? query : s.head_dim;
            a.key_norm_length = form_.norms_all_heads ? key : s.head_dim;
            a.query_norm = plain(a.query_norm_length), a.key_norm = plain(a.key_norm_length);
        }
        a.output = matrix(s.hidden, query);
        a.head_stride = CACHE_TOKENS * s.head_dim;
        keys_.resize(s.num_key_heads * a.head_stride), values_.resize(keys_.size());
        a.keys = keys_.data(), a.values = values_.data();
        a.num_heads = s.num_heads, a.num_key_heads = s.num_key_heads, a.head_dim = s.head_dim;
        a.scale = 0.3f;
    }

    // Slots in another order than experts.
    void add_experts() {
        const Sizes& s = sizes_;
        Experts& e = layer.experts;
        router_ = floats(s.num_experts * s.hidden), bias_ = floats(s.num_experts);
        e.is_float32 = form_.is_float32;
        e.router = form_.is_float32 ? static_cast<const void*>(router_.data())
                                    : plain(s.num_experts * s.hidden);
        e.bias = form_.has_share ? bias_.data() : nullptr;
        e.choice = {s.num_experts, s.k, 1, 1, 1, form_.is_float32, 1, 0, 1.5f};
        e.run = kind_.experts, e.variant = kind_.variant, e.width = s.width;
        std::fill_n(e.types, 3, kind_.num_bits);
        for (long slot = 0; slot < s.num_experts; ++slot)
            for (long part = 0; part < 3; ++part) {
                const Bytes one = part == 2 ? kind_.stored(s.hidden, s.width)
                                            : kind_.stored(s.width, s.hidden);
                experts_.insert(experts_.end(), one.begin(), one.end());
            }
        experts_.shrink_to_fit();
        const long inward = s.width * kind_.row_bytes(s.hidden);
        e.slot_bytes = 2 * inward + s.hidden * kind_.row_bytes(s.width);
        e.gate = experts_.data(), e.up = experts_.data() + inward;
        e.down = experts_.data() + 2 * inward;
        for (long expert = 0; expert < s.num_experts; ++expert)
            slot_of.push_back(s.num_experts - 1 - expert);
    }

    const Kind kind_;
    const Sizes sizes_;
    const Form form_;
    std::vector<Numbers> numbers_;
    std::vector<Bytes> stored_;
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
        const long size = s.num_heads * s.head_dim;
        const long width = size + 2 * s.num_key_heads * s.head_dim;
        for (long row = 0; row < num_rows; ++row) {
            const long first = row % 2 * 5, count = 1 + row / 2;
            tokens_.insert(tokens_.end(), {first, count});
        }
        pass = {variant, num_threads, num_rows, x_.data(), turns.data(), turns.data(),
                s.head_dim / 2, tokens_.data(), room(num_rows * s.hidden), room(num_rows * width),
                room(num_rows * size), room(num_rows * s.hidden), room(num_rows * s.hidden),
                nullptr, nullptr, room(pairs * s.hidden), room(pairs * s.width),
                room(pairs * s.width), nullptr, room(num_rows * s.shared_width),
                room(num_rows * s.shared_width), room(num_rows * s.hidden), room(num_rows)};
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
    Ids tokens_;
    std::vector<Numbers> rooms_;
    Floats router_input_, logits_, routed_;
};

// In one call as in several, by some threads as by one.
void run(const Library& few_rows, int variant, const Kind& kind, const Sizes& sizes,
         const Form& form, long num_rows) {
    auto* whole = few_rows.function<Whole>("lowtide_run_layer");
    auto* to_router = few_rows.function<ToRouter>("lowtide_run_to_router");
    auto* chosen = few_rows.function<Chosen>("lowtide_run_chosen");
    auto* from_experts = few_rows.function<FromExperts>("lowtide_run_from_experts");
    auto* several = few_rows.function<Several>("lowtide_run_layers");
    OwnLayer own(kind, sizes, form);
    const Numbers x = numbers(num_rows * sizes.hidden);
    const Numbers turns = numbers(num_rows * sizes.head_dim / 2);
    Numbers first;
    for (int num_threads : THREADS) {
        OwnPass at_once(sizes, variant, num_threads, x, turns);
        own.forget_keys();
        const long num_run = whole(&own.layer, &at_once.pass, 1, own.slot_of.data());
        const long most = form.has_experts ? std::min(num_rows * sizes.k, sizes.num_experts) : 0;
        expect(num_run <= most && (num_run > 0) == (most > 0), "how many experts were run", num_run,
               num_rows, sizes.num_experts);
        if (num_threads == 1) first = at_once.x();
        expect(at_once.x() == first, "bits of a layer by threads", variant, num_rows, num_threads);

        OwnPass apart(sizes, variant, num_threads, x, turns);
        Ids experts(num_rows * sizes.k);
        Floats weights(num_rows * sizes.k);
        own.forget_keys();
        to_router(&own.layer, &apart.pass, 1, experts.data(), weights.data());
        if (form.has_experts)
            chosen(&own.layer, &apart.pass, own.slot_of.data(), experts.data(), weights.data());
        from_experts(&own.layer, &apart.pass);
        expect(apart.x() == first, "bits of a layer in parts", variant, num_rows, num_threads);

        // The same layer twice, over the keys of the last time.
        const Turn turn = {&own.layer, &apart.pass, own.slot_of.data()};
        const Turn turns_of_two[] = {turn, turn};
        const long num_of_two = several(turns_of_two, 2);
        for (int time = 0; time < 2; ++time)
            whole(&own.layer, &at_once.pass, 1, own.slot_of.data());
        expect(apart.x() == at_once.x(), "bits of two layers", variant, num_rows, num_threads);
        expect((num_of_two > 0) == (most > 0), "how many of two ran", num_of_two, num_rows);
    }
    for (bf16 each : first)
        expect(std::isfinite(lowtide::widen(each)), "a layer's numbers", variant, num_rows);
}

}  // namespace

void check_layers(const Library& few_rows, const Library& quantised) {
    lend_team(few_rows, quantised);
    auto* pack = quantised.function<Pack>("lowtide_quantised_pack");
    const int best = few_rows.function<int()>("lowtide_best_variant")();
    const int best_quantised = quantised.function<int()>("lowtide_best_quantised")();
    const Kind of_few_bits = {
        quantised.function<MultiplyFunction>("lowtide_quantised_multiply"),
        quantised.function<ExpertsFunction>("lowtide_quantised_experts"), pack, best_quantised, 4,
    };
    for (int variant = 0; variant <= best; ++variant) {
        const Kind plain = {
            few_rows.function<MultiplyFunction>("lowtide_plain_multiply"),
            few_rows.function<ExpertsFunction>("lowtide_plain_experts"), pack, variant, 16,
        };
        for (const Kind& kind : {plain, of_few_bits})
            for (const Sizes& sizes : SIZES)
                for (const Form& form : FORMS)
                    for (long num_rows : {1, 2, 7})
                        run(few_rows, variant, kind, sizes, form, num_rows);
    }
}

}  // namespace driver
