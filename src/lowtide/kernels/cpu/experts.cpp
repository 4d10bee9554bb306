// Several experts of a few tokens each in one call, with the bits of one by one.
//
// The threads share every expert's weights: gates and ups first, then downs. All experts of a few
// tokens are summed here, too:
//
//     out[t] = sum over t's experts e, ascending, of weight[t, e] * expert_e(x[t])
//
// which is one multiplication and one addition in float32 for each expert.

#include "operators.hpp"
#include "pairs.hpp"
#include "products.hpp"
#include "team.hpp"

using namespace lowtide;

namespace {

constexpr long PIECE_BYTES = WORTH_BYTES / 2;  // of a matrix, as far as tiles stay whole

// Where the experts' weights are: those of slot 0, the others at multiples of `slot_bytes`.
struct Slots {
    const char *gate, *up, *down;
    long slot_bytes, hidden, width;
};

// A row for each pair of a token and an expert: parts [.., hidden], gate and up [.., width].
struct Scratch {
    bf16 *parts, *gate, *up;
};

long features_of_piece(long num_features, long num_k) {
    const long wanted = PIECE_BYTES / (num_k * static_cast<long>(sizeof(bf16)));
    return std::min(num_features, whole_tiles(wanted));
}

// The groups' work, in pieces: some output features of each.
struct Pieces {
    const Group* groups;
    long num_groups, num_features, length;

    long of_group() const { return (num_features + length - 1) / length; }
    long count() const { return num_groups * of_group(); }
    long group(long number) const { return number / of_group(); }
    long first(long number) const { return number % of_group() * length; }
    long size(long number) const { return std::min(length, num_features - first(number)); }
};

class Layer {
   public:
    Layer(int variant, int num_threads, const Slots& slots, const Scratch& scratch)
        : variant_(variant), num_threads_(num_threads), slots_(slots), scratch_(scratch) {}

    // The groups' rows of parts, from inputs to outputs.
    void run(const Group* groups, long num_groups) {
        const long hidden = slots_.hidden, width = slots_.width;
        const long num_bytes = num_groups * 3 * hidden * width * static_cast<long>(sizeof(bf16));
        if (num_bytes < WORTH_BYTES) num_threads_ = 1;
        inputs_ = new_inputs(2 * num_groups);
        gates_ = {groups, num_groups, width, features_of_piece(width, hidden)};
        downs_ = {groups, num_groups, hidden, features_of_piece(hidden, width)};
        together(num_threads_, gates_.count(), [this](long number) { run_gate(number); });
        together(num_threads_, downs_.count(), [this](long number) { run_down(number); });
    }

   private:
    // Some features of a gate and an up, and what is made of both.
    void run_gate(long number) const {
        const Group& group = gates_.groups[gates_.group(number)];
        const long hidden = slots_.hidden, width = slots_.width;
        const long first = gates_.first(number), size = gates_.size(number);
        bf16 *const gate = scratch_.gate + group.first * width + first;
        bf16 *const up = scratch_.up + group.first * width + first;
        Product<bf16> product = {
            scratch_.parts + group.first * hidden, hidden, weights(slots_.gate, gates_, number),
            nullptr, gate, width, group.num_rows, size, hidden,
        };
        product.inputs = inputs_ + gates_.group(number);
        product.next = weights(slots_.up, gates_, number);
        multiply(variant_, product);
        product.w = product.next, product.out = up;
        const long next = number + num_threads_;
        product.next = next < gates_.count() ? weights(slots_.gate, gates_, next)
                                             : weights(slots_.down, downs_, next - gates_.count());
        multiply(variant_, product);
        for (long row = 0; row < group.num_rows; ++row)
            silu_times(variant_, gate + row * width, up + row * width, size);
    }

    void run_down(long number) const {
        const Group& group = downs_.groups[downs_.group(number)];
        const long hidden = slots_.hidden, width = slots_.width;
        Product<bf16> product = {
            scratch_.gate + group.first * width, width, weights(slots_.down, downs_, number),
            nullptr, scratch_.parts + group.first * hidden + downs_.first(number), hidden,
            group.num_rows, downs_.size(number), width,
        };
        product.inputs = inputs_ + downs_.num_groups + downs_.group(number);
        product.next = weights(slots_.down, downs_, number + num_threads_);
        multiply(variant_, product);
    }

    // Where a piece's weights begin; null where there is no such piece.
    const bf16* weights(const char* of_slot_0, const Pieces& pieces, long number) const {
        if (number >= pieces.count()) return nullptr;
        const Group& group = pieces.groups[pieces.group(number)];
        const char* matrix = of_slot_0 + group.slot * slots_.slot_bytes;
        const long row_length = slots_.hidden * slots_.width / pieces.num_features;
        return reinterpret_cast<const bf16*>(matrix) + pieces.first(number) * row_length;
    }

    const int variant_;
    int num_threads_;
    const Slots slots_;
    const Scratch scratch_;
    std::uint64_t inputs_ = 0;
    Pieces gates_{}, downs_{};
};

}  // namespace

extern "C" {

// groups [num_groups, 3]: each expert's slot, first row and number of rows; no two share a row.
// gate_w, up_w, down_w: where slot 0 has them. parts [.., hidden], from inputs to outputs; scratch
// gate, up [.., width]. Rows of all are adjacent.
void lowtide_gated_mlps(
    int variant, int num_threads, const std::int64_t* groups, long num_groups, const char* gate_w,
    const char* up_w, const char* down_w, long slot_bytes, bf16* parts, bf16* gate, bf16* up,
    long hidden, long width
) {
    const Slots slots = {gate_w, up_w, down_w, slot_bytes, hidden, width};
    const auto* of_experts = reinterpret_cast<const Group*>(groups);
    Layer(variant, num_threads, slots, {parts, gate, up}).run(of_experts, num_groups);
}

// x [num_tokens, hidden]; experts [num_tokens, k], ascending for each token, and their weights;
// slots: one for each distinct expert, ascending by expert. gate_w, up_w, down_w: where slot 0 has
// them.
// Scratch, a row for each pair of a token and an expert: parts [.., hidden], gate and up
// [.., width]. out [num_tokens, hidden]. Rows of all are adjacent.
void lowtide_run_experts(
    int variant, int num_threads, const bf16* x, const std::int64_t* experts, const float* weights,
    const std::int64_t* slots, const char* gate_w, const char* up_w, const char* down_w,
    long slot_bytes, bf16* parts, bf16* gate, bf16* up, float* out, long num_tokens, long k,
    long hidden, long width
) {
    const long num_pairs = num_tokens * k;
    const SortedPairs sorted(x, experts, slots, parts, num_tokens, k, hidden);
    const Slots places = {gate_w, up_w, down_w, slot_bytes, hidden, width};
    const auto num_groups = static_cast<long>(sorted.groups.size());
    Layer(variant, num_threads, places, {parts, gate, up}).run(sorted.groups.data(), num_groups);

    const long* rows = sorted.row_of.data();
    vectorised(variant, [=]() INLINED_LAMBDA {
        std::fill(out, out + num_tokens * hidden, 0.0f);
        for (long pair = 0; pair < num_pairs; ++pair) {
            const bf16* part = parts + rows[pair] * hidden;
            float* sum = out + pair / k * hidden;
            for (long i = 0; i < hidden; ++i) sum[i] += weights[pair] * widen(part[i]);
        }
    });
}

}
